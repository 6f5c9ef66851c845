"""Collectives in shared memory, between ranks that are threads: right, and the same bits on every rank, whatever the timing.

tests/comm/test_shm_processes.py has what only processes can show.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import Store

from stretto.comm import shm
from stretto.comm.execute import library
from stretto.comm.line import SLOTS, Line
from stretto.comm.machine import Machine
from stretto.comm.pieces import SMALL
from stretto.comm.shm import SharedMemory
from stretto.comm.threads import run_threads
from stretto.comm.transport import World
from stretto.errors import Mismatch, PeerLost

BIG = 1_000_003
SLOT = 4096  # bytes: small, so that small tensors too take many pieces
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8)
OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


#: How the steps of a recipe are carried out; compiled where there is a compiler, see the last test here.
WAYS = [False] if library() is None else [False, True]


@pytest.fixture(params=WAYS, ids=lambda compiled: "compiled" if compiled else "python", autouse=True)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(sys.modules[__name__], "COMPILED", request.param)
    return bool(request.param)


COMPILED = False


def meet(rank: int, ranks: int, store: Store, timeout: float = 30.0, slot: int = SLOT) -> SharedMemory:
    return SharedMemory(Machine.meet(rank, ranks, store, COMPILED), timeout, slot)


def run(fn: Callable[[World], Any], ranks: int, **options: Any) -> list[Any]:
    return run_threads(fn, ranks, transport=functools.partial(meet, **options))


def over(world: World) -> SharedMemory:
    assert isinstance(world.transport, SharedMemory)
    return world.transport


@pytest.fixture
def jitter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Every activity of every rank takes a time of its own, drawn from the seed that this is called with; compiled, every call."""
    tick, issue = Line.tick, SharedMemory._issue

    def shake(seed: int) -> None:
        chance = random.Random(seed)

        def sleep() -> None:
            if chance.random() < 0.3:
                time.sleep(chance.random() * 2e-3)

        def late(line: Line) -> None:
            sleep()
            tick(line)

        def late_call(self: SharedMemory, *asked: Any) -> Any:
            sleep()
            return issue(self, *asked)

        monkeypatch.setattr(Line, "tick", late)
        monkeypatch.setattr(SharedMemory, "_issue", late_call)

    yield shake


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Of many magnitudes, so that the order of additions shows in the bits."""
    generator = torch.Generator().manual_seed(1000 * rank + size % 997)
    if not dtype.is_floating_point:
        return torch.randint(0, 50, (size,), generator=generator).to(dtype)
    exponents = torch.randint(-3, 3, (size,), generator=generator)
    return (torch.randn(size, generator=generator) * 10.0**exponents).to(dtype)


def in_order(parts: Sequence[Tensor], op: str = "sum") -> Tensor:
    return functools.reduce(OPERATIONS[op], parts)


def even(size: int, n: int) -> list[int]:
    return [size * i // n for i in range(n + 1)]


def sizes(n: int) -> list[int]:
    return sorted({0, 1, max(n - 1, 0), n, SLOT // 4 + 1, SMALL // 4 + 1})


def in_memory(world: World, x: Tensor, where: str) -> Tensor:
    """x, or a copy of it in memory that peers can read."""
    if where == "private":
        return x.clone()
    own = world.transport.own(x.numel() + 5, x.dtype, range(world.size))[3 : 3 + x.numel()]
    own.copy_(x)
    return own


@pytest.mark.parametrize("where", ["private", "own"])
@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("op", OPERATIONS)
def test_all_reduce_combines_in_rank_order_on_every_rank(n: int, op: str, where: str) -> None:
    cases = [(size, DTYPES[(n + i) % len(DTYPES)]) for i, size in enumerate(sizes(n))] + [(7, dtype) for dtype in DTYPES]
    inputs = [[values(rank, *case) for rank in range(n)] for case in cases]

    def rank(world: World) -> list[Tensor]:
        mine = [in_memory(world, parts[world.rank], where) for parts in inputs]
        for work in [world.transport.all_reduce(x, range(n), 0, op) for x in mine]:  # all under way at once
            work.wait()
        return mine

    for results in run(rank, n):
        for parts, result in zip(inputs, results, strict=True):
            assert torch.equal(result, in_order(parts, op))


@pytest.mark.parametrize("where", ["private", "own"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_large_sum_is_that_of_float64(n: int, where: str) -> None:
    inputs = [values(rank, BIG, torch.float64) for rank in range(n)]

    def rank(world: World) -> Tensor:
        x = in_memory(world, inputs[world.rank], where)
        world.transport.all_reduce(x, range(n), 0).wait()
        return x.clone()

    for result in run(rank, n, slot=1 << 18):
        assert torch.equal(result, in_order(inputs))
        assert torch.allclose(result, torch.stack(inputs).sum(0), rtol=1e-13)


@pytest.mark.parametrize("where", ["private", "own"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_an_average_is_the_sum_over_the_number_of_ranks(dtype: torch.dtype, where: str) -> None:
    n, size = 3, 2 * SLOT // dtype.itemsize + 7
    inputs = [values(rank, size, dtype) for rank in range(n)]

    def rank(world: World) -> None:
        x = in_memory(world, inputs[world.rank], where)
        bounds = even(size, n)
        into = torch.empty(bounds[world.rank + 1] - bounds[world.rank], dtype=dtype)
        world.transport.reduce_scatter(x, bounds, range(n), 0, into, False, "avg").wait()
        world.transport.all_reduce(x, range(n), 0, "avg").wait()
        assert torch.equal(x, in_order(inputs) / n)
        assert torch.equal(into, x[bounds[world.rank] : bounds[world.rank + 1]])

    run(rank, n)


def test_whole_numbers_have_no_average_and_unknown_operations_are_refused() -> None:
    transport = run(lambda world: world.transport, 1)[0]
    with pytest.raises(ValueError, match="use sum"):
        transport.all_reduce(torch.ones(2, dtype=torch.int64), (0,), 0, "avg")
    with pytest.raises(ValueError, match="use one of sum, avg, max, min"):
        transport.all_reduce(torch.ones(2), (0,), 0, "concatenate")


@pytest.mark.parametrize("where", ["private", "own"])
@pytest.mark.parametrize("n", range(1, 6))
def test_reduce_scatter_then_all_gather_is_the_sum_everywhere(n: int, where: str) -> None:
    inputs = [[values(rank, size, DTYPES[(n + i) % len(DTYPES)]) for rank in range(n)] for i, size in enumerate([*sizes(n), 10_007])]

    def rank(world: World) -> list[Tensor]:
        results = []
        for parts in inputs:
            x = in_memory(world, parts[world.rank], where)
            bounds = even(len(x), n)
            own = slice(bounds[world.rank], bounds[world.rank + 1])
            into = torch.empty_like(x[own])
            world.transport.reduce_scatter(x, bounds, range(n), 0, into, False).wait()
            assert torch.equal(x, parts[world.rank])  # nothing but `into` is written
            x[own] = into
            world.transport.all_gather(x, bounds, range(n), 2).wait()
            results.append(x)
        return results

    for results in run(rank, n):
        for parts, result in zip(inputs, results, strict=True):
            assert torch.equal(result, in_order(parts))


@st.composite
def uneven(draw: st.DrawFn) -> list[int]:
    """Bounds of 1 to 5 parts, some of them perhaps empty."""
    n, size = draw(st.integers(1, 5)), draw(st.integers(0, 40))
    return [0, *sorted(draw(st.lists(st.integers(0, size), min_size=n - 1, max_size=n - 1))), size]


@settings(max_examples=25, deadline=None)
@given(uneven(), st.sampled_from(DTYPES), st.booleans(), st.sampled_from(["private", "own"]))
def test_parts_may_have_any_size(bounds: list[int], dtype: torch.dtype, accumulate: bool, where: str) -> None:
    n, size = len(bounds) - 1, bounds[-1]
    inputs = [values(rank, size, dtype) for rank in range(n)]
    total = in_order(inputs)

    def rank(world: World) -> None:
        low, high = bounds[world.rank], bounds[world.rank + 1]
        x = in_memory(world, inputs[world.rank], where)
        before = values(9, high - low, dtype)
        into = before.clone()
        world.transport.reduce_scatter(x, bounds, range(n), 0, into, accumulate).wait()
        assert torch.equal(into, before + total[low:high] if accumulate else total[low:high])
        world.transport.reduce_scatter(x, bounds, range(n), 0, x[low:high], False).wait()  # in place
        assert torch.equal(x[low:high], total[low:high])
        assert torch.equal(x[:low], inputs[world.rank][:low])
        assert torch.equal(x[high:], inputs[world.rank][high:])
        world.transport.all_gather(x, bounds, range(n), 0).wait()
        assert torch.equal(x, total)

    run(rank, n)


@pytest.mark.parametrize("where", ["private", "own"])
@pytest.mark.parametrize("size", [0, 1, SLOT // 2 - 1, SLOTS * SLOT])
@pytest.mark.parametrize("source", range(3))
def test_broadcast_gives_the_source_to_all(size: int, source: int, where: str) -> None:
    def rank(world: World) -> Tensor:
        x = in_memory(world, values(world.rank, size, torch.bfloat16), where)
        world.transport.broadcast(x, range(3), source, 0).wait()
        return x.clone()

    assert all(torch.equal(x, values(source, size, torch.bfloat16)) for x in run(rank, 3))


@pytest.mark.parametrize("size", [0, 1, 1000, SLOT // 4, 2 * SLOTS * SLOT // 4 + 1])
def test_messages_arrive_in_the_order_sent_and_by_channel(size: int) -> None:
    """A ring of three: each rank first sends on two channels, more than the slots hold, and receives in another order."""

    def rank(world: World) -> None:
        to, source = (world.rank + 1) % 3, (world.rank - 1) % 3
        works = [world.transport.send(values(10 * world.rank + i, size, torch.float32), to, i % 2 * 2) for i in range(6)]
        for i in (1, 3, 5, 0, 2, 4):
            x = torch.zeros(size)
            world.transport.receive(x, source, i % 2 * 2).wait()
            assert torch.equal(x, values(10 * source + i, size, torch.float32))
        for work in works:
            work.wait()

    run(rank, 3)


def test_what_lies_in_common_memory_is_gathered_by_writing_it() -> None:
    n, bounds = 3, [0, 2, 2, 7]

    def rank(world: World) -> None:
        x = world.transport.common(10, torch.float32, range(n))
        assert x is not None
        assert x.tolist() == [0.0] * 10
        part = x[2:9]
        world.transport.barrier(range(n), 0).wait()  # type: ignore[attr-defined]
        part[bounds[world.rank] : bounds[world.rank + 1]] = world.rank + 1.0
        world.transport.all_gather(part, bounds, range(n), 0).wait()
        assert part.tolist() == [1, 1, 3, 3, 3, 3, 3]
        world.transport.barrier(range(n), 0).wait()  # type: ignore[attr-defined]
        if world.rank == 1:
            part.fill_(5)
        world.transport.broadcast(part, range(n), 1, 0).wait()
        assert part.tolist() == [5.0] * 7
        with pytest.raises(ValueError, match="no parts to add"):
            world.transport.all_reduce(part, range(n), 0)
        with pytest.raises(ValueError, match="no parts to add"):
            world.transport.reduce_scatter(part, bounds, range(n), 0, part[bounds[world.rank] : bounds[world.rank + 1]], False)

    run(rank, n)


def test_a_part_of_the_ranks_may_use_the_memory_of_all() -> None:
    def rank(world: World) -> list[float]:
        x = world.transport.own(4, torch.float64, range(3))
        x.fill_(10.0**world.rank)
        if world.rank != 1:
            world.transport.all_reduce(x, (0, 2), 0).wait()
        return x.tolist()

    assert run(rank, 3) == [[101.0] * 4, [10.0] * 4, [101.0] * 4]


def test_memory_ends_with_its_last_tensor_and_its_addresses_are_forgotten() -> None:
    def mapped() -> int:
        with open("/proc/self/maps", encoding="utf-8") as lines:
            return sum("memfd:stretto" in line for line in lines)

    def rank(world: World) -> None:
        world.transport.barrier((0, 1), 0).wait()  # type: ignore[attr-defined]
        x, y = world.transport.own(1000, torch.float32, (0, 1)), world.transport.common(1000, torch.float32, (0, 1))
        assert y is not None
        last = x[5:7]
        last.fill_(1)
        del x, y
        world.transport.all_reduce(last, (0, 1), 0).wait()
        assert len(over(world)._areas) == 1
        assert last.tolist() == [2, 2]
        del last
        assert over(world)._areas == {}

    descriptors, maps = len(os.listdir("/proc/self/fd")), mapped()
    run(rank, 2)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert mapped() == maps


@pytest.mark.parametrize("n", [2, 3, 4])
def test_sums_have_the_same_bits_on_all_ranks_and_in_all_runs_whatever_the_delays(n: int, jitter: Callable[[int], None]) -> None:
    many = (5, SMALL // 4 + 11, SLOT + 3)

    def rank(world: World) -> list[Tensor]:
        mine = [values(world.rank, size, torch.float32) for size in many for _ in range(2)]
        shared = [in_memory(world, values(world.rank, size, torch.float32), "own") for size in many]
        into = torch.zeros(7)
        works = [world.transport.all_reduce(x, range(n), 0) for x in mine + shared]
        wide = values(world.rank, 7 * n, torch.float32)
        works += [world.transport.reduce_scatter(wide, even(7 * n, n), range(n), 2, into, True) for _ in range(2)]
        for work in works:
            work.wait()
        gathered = torch.zeros(7 * n)
        gathered[7 * world.rank : 7 * world.rank + 7] = into
        world.transport.all_gather(gathered, even(7 * n, n), range(n), 4).wait()
        return [*mine, *(x.clone() for x in shared), gathered]

    expected = [in_order([values(rank, size, torch.float32) for rank in range(n)]) for size in many]
    for seed in range(3):
        jitter(seed)
        for results in run(rank, n):
            assert all(torch.equal(a, b) for a, b in zip(results[:-1], [*(x for x in expected for _ in range(2)), *expected], strict=True))
            assert torch.equal(results[-1], 2 * in_order([values(rank, 7 * n, torch.float32) for rank in range(n)]))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_channels_and_kinds_in_different_orders_on_different_ranks_neither_mix_nor_lock(data: st.DataObject) -> None:
    """[Note: serving while waiting]: each rank waits for its calls in an order of its own."""
    n, size, channels = 3, SLOT // 4 * 2 + 9, (0, 2, 4)
    kinds = ["private", "own", "gather", "send"]
    plan = {channel: data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4)) for channel in channels}
    orders = [data.draw(st.permutations([channel for channel in channels for _ in plan[channel]])) for _ in range(n)]
    waits = [data.draw(st.permutations(range(sum(map(len, plan.values()))))) for _ in range(n)]

    def rank(world: World) -> None:
        own = {
            channel: [in_memory(world, values(world.rank + channel, size, torch.float32), "own") for _ in plan[channel]]
            for channel in channels
        }
        done, works, checks = dict.fromkeys(channels, 0), [], []
        for channel in orders[world.rank]:
            at = done[channel]
            done[channel] += 1
            kind, mine, total = plan[channel][at], values(world.rank + channel, size, torch.float32), totals[channel]
            if kind == "gather":
                bounds = even(size, n)
                works.append([world.transport.all_gather(mine, bounds, range(n), channel)])
                every = [values(peer + channel, size, torch.float32) for peer in range(n)]
                checks.append((mine, torch.cat([x[a:b] for x, (a, b) in zip(every, pairwise(bounds), strict=True)])))
            elif kind == "send":
                got = torch.zeros(size)
                peers = (world.rank + 1) % n, (world.rank - 1) % n
                works.append([world.transport.send(mine, peers[0], channel), world.transport.receive(got, peers[1], channel)])
                checks.append((got, values(peers[1] + channel, size, torch.float32)))
            else:
                x = own[channel][at] if kind == "own" else mine
                works.append([world.transport.all_reduce(x, range(n), channel)])
                checks.append((x, total))
        for i in waits[world.rank]:
            for work in works[i]:
                work.wait()
        assert all(torch.equal(x, right) for x, right in checks)

    totals = {channel: in_order([values(rank + channel, size, torch.float32) for rank in range(n)]) for channel in channels}
    run(rank, n)


def test_a_result_is_there_before_peers_have_read_what_was_handed_in() -> None:
    """`result` returns while a peer still has to read x; `wait` returns only then."""
    issued, reads = threading.Event(), threading.Event()

    def rank(world: World) -> None:
        x = world.transport.own(2, torch.float32, (0, 1))
        x.fill_(world.rank + 1.0)
        into = torch.zeros(1)
        world.transport.barrier((0, 1), 0).wait()  # type: ignore[attr-defined]
        if world.rank == 0:
            issued.wait()
        work = world.transport.reduce_scatter(x, (0, 1, 2), (0, 1), 0, into, False)
        if world.rank == 1:  # rank 0 has not shown its x yet: I read it when I wait
            issued.set()
            time.sleep(0.05)
            reads.set()
        else:
            work.result()
            assert not reads.is_set()
        work.wait()
        assert reads.is_set()
        assert into.tolist() == [3.0]

    run(rank, 2)


def test_ranks_that_ask_for_other_things_are_told_so() -> None:
    def sizes_differ(world: World) -> None:
        world.transport.all_reduce(torch.ones(3 + world.rank), (0, 1), 0).wait()

    def kinds_differ(world: World) -> None:
        x = torch.ones(4)
        both = [lambda: world.transport.all_reduce(x, (0, 1), 0), lambda: world.transport.broadcast(x, (0, 1), 0, 0)]
        both[world.rank]().wait()

    def cuts_differ(world: World) -> None:
        world.transport.all_gather(torch.ones(4), (0, 1 + world.rank, 4), (0, 1), 0).wait()

    def messages_differ(world: World) -> None:
        x = torch.ones(4, dtype=(torch.float32, torch.int32)[world.rank])
        (world.transport.send(x, 1, 0) if world.rank == 0 else world.transport.receive(x, 0, 0)).wait()

    for fn, words in (
        (sizes_differ, r"rank \d asks for all_reduce of (3|4) float32, rank \d for all_reduce of (3|4) float32"),
        (kinds_differ, r"rank \d asks for (all_reduce|broadcast) of 4 float32, rank \d for (all_reduce|broadcast) of 4 float32"),
        (cuts_differ, r"ranks \d and \d ask for all_gather of 4 float32, but cut otherwise"),
        (messages_differ, r"rank 1 asks for send of 4 int32, rank 0 for send of 4 float32"),
    ):
        with pytest.raises(Mismatch, match=words):
            run(fn, 2)


def test_after_a_mismatch_a_channel_is_out_of_step_and_stays_refused() -> None:
    def rank(world: World) -> None:
        works = [world.transport.all_reduce(torch.ones(3 + world.rank), (0, 1), 0), world.transport.all_reduce(torch.ones(2), (0, 1), 0)]
        for work in works:
            with pytest.raises(Mismatch):
                work.wait()
        x = torch.ones(2)
        world.transport.all_reduce(x, (0, 1), 2).wait()
        assert x.tolist() == [2, 2]

    run(rank, 2)


@pytest.mark.parametrize("opened", [True, False])
def test_a_rank_that_does_not_come_is_named_after_the_timeout(opened: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "CHECK", 0.01)

    def rank(world: World) -> None:
        if opened:
            world.transport.barrier(range(3), 0).wait()  # type: ignore[attr-defined]
        if world.rank != 0:
            with pytest.raises(PeerLost, match=r"rank 0 did not come to all of ranks 0,1,2 on channel 0 within 0\.1 s"):
                world.transport.all_reduce(torch.ones(1), range(3), 0).wait()
        else:
            time.sleep(0.5)

    run(rank, 3, timeout=0.1)


def test_a_rank_that_leaves_frees_those_who_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "CHECK", 0.01)

    def rank(world: World) -> None:
        world.transport.barrier((0, 1), 0).wait()  # type: ignore[attr-defined]
        if world.rank == 1:
            raise ValueError("boom")
        with pytest.raises(PeerLost, match="rank 1 has left"):
            world.transport.all_reduce(torch.ones(1), (0, 1), 0).wait()

    with pytest.raises(ValueError, match="boom"):
        run(rank, 2)


def test_the_steps_are_compiled_wherever_there_is_a_compiler() -> None:
    assert shutil.which("cc") is None or library() is not None
