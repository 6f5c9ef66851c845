"""Collectives out of messages, between ranks that are threads: right, the same bits on every rank, and no byte too many."""

from __future__ import annotations

import functools
import gc
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stretto.comm.messages import CHUNK, SMALL, WINDOW
from stretto.comm.threads import Office, run_threads
from stretto.comm.transport import World
from stretto.errors import Mismatch, PeerLost

KINDS = ("all_reduce", "small", "reduce_scatter", "all_gather", "broadcast")
BIG = 1_000_003
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)


@dataclass
class Jitter(Office):
    """Every message takes a time of its own."""

    chance: random.Random = field(default_factory=random.Random)

    def put(self, key: tuple[int, int, int], x: Tensor) -> None:
        self.delay = self.chance.random() * 3e-3
        super().put(key, x)


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Of many magnitudes, so that the order of additions shows in the bits."""
    generator = torch.Generator().manual_seed(1000 * rank + size % 997)
    if not dtype.is_floating_point:
        return torch.randint(-(2**40), 2**40, (size,), generator=generator, dtype=dtype)
    exponents = torch.randint(-3, 3, (size,), generator=generator)
    return (torch.randn(size, generator=generator) * 10.0**exponents).to(dtype)


def in_rank_order(parts: Sequence[Tensor], op: Callable[[Tensor, Tensor], Tensor] = torch.add) -> Tensor:
    return functools.reduce(op, parts)


def even(size: int, n: int) -> list[int]:
    return [size * i // n for i in range(n + 1)]


def cases(n: int) -> list[tuple[int, torch.dtype]]:
    """Sizes on both sides of everything that changes the road, and the large one in a dtype each number of ranks."""
    small = [(size, dtype) for size in sorted({0, 1, max(n - 1, 0), n, SMALL, SMALL + 1}) for dtype in DTYPES]
    return [*small, (BIG, DTYPES[n % len(DTYPES)])]


@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize(("name", "op"), [("sum", torch.add), ("max", torch.maximum), ("min", torch.minimum)])
def test_all_reduce_combines_in_rank_order_on_every_rank(n: int, name: str, op: Callable[[Tensor, Tensor], Tensor]) -> None:
    inputs = [[values(rank, *case) for rank in range(n)] for case in cases(n) if name == "sum" or n == 2 or case[0] != BIG]

    def rank(world: World) -> list[Tensor]:
        mine = [parts[world.rank].clone() for parts in inputs]
        for work in [world.transport.all_reduce(x, range(n), 0, name) for x in mine]:  # all under way at once
            work.wait()
        return mine

    for results in run_threads(rank, n):
        for parts, result in zip(inputs, results, strict=True):
            assert torch.equal(result, in_rank_order(parts, op))


@pytest.mark.parametrize("n", range(1, 6))
def test_reduce_scatter_then_all_gather_is_the_sum_everywhere(n: int) -> None:
    inputs = [[values(rank, *case) for rank in range(n)] for case in cases(n)]

    def rank(world: World) -> list[Tensor]:
        results = []
        for parts in inputs:
            x = parts[world.rank].clone()
            bounds = even(len(x), n)
            own = slice(bounds[world.rank], bounds[world.rank + 1])
            into = torch.empty_like(x[own])
            world.transport.reduce_scatter(x, bounds, range(n), 0, into, False).wait()
            assert torch.equal(x, parts[world.rank])  # nothing but `into` is written
            x[own] = into
            world.transport.all_gather(x, bounds, range(n), 2).wait()
            results.append(x)
        return results

    for results in run_threads(rank, n):
        for parts, result in zip(inputs, results, strict=True):
            assert torch.equal(result, in_rank_order(parts))


@st.composite
def uneven(draw: st.DrawFn) -> list[int]:
    """Bounds of 1 to 5 parts, some of them perhaps empty."""
    n, size = draw(st.integers(1, 5)), draw(st.integers(0, 40))
    return [0, *sorted(draw(st.lists(st.integers(0, size), min_size=n - 1, max_size=n - 1))), size]


@settings(max_examples=30, deadline=None)
@given(uneven(), st.sampled_from(DTYPES), st.booleans())
def test_parts_may_have_any_size(bounds: list[int], dtype: torch.dtype, accumulate: bool) -> None:
    n, size = len(bounds) - 1, bounds[-1]
    inputs = [values(rank, size, dtype) for rank in range(n)]
    total = in_rank_order(inputs)

    def rank(world: World) -> None:
        low, high = bounds[world.rank], bounds[world.rank + 1]
        x = inputs[world.rank].clone()
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

    run_threads(rank, n)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK + 1])
@pytest.mark.parametrize("source", range(3))
def test_broadcast_gives_the_source_to_all(size: int, source: int) -> None:
    def rank(world: World) -> Tensor:
        x = values(world.rank, size, torch.bfloat16)
        world.transport.broadcast(x, range(3), source, 0).wait()
        return x

    assert all(torch.equal(x, values(source, size, torch.bfloat16)) for x in run_threads(rank, 3))


@pytest.mark.parametrize("size", [0, 1, CHUNK + 1])
def test_messages_arrive_in_the_order_sent_and_apart_from_collectives(size: int) -> None:
    """A ring of three: each rank sends on two channels, has a collective under way on one of them, and receives in another order."""

    def rank(world: World) -> None:
        to, source = (world.rank + 1) % 3, (world.rank - 1) % 3
        works = [world.transport.send(values(10 * world.rank + i, size, torch.float32), to, i % 2 * 2) for i in range(4)]
        total = torch.full((size,), float(world.rank))
        works.append(world.transport.all_reduce(total, range(3), 2))
        for i in (1, 3, 0, 2):
            x = torch.zeros(size)
            world.transport.receive(x, source, i % 2 * 2).wait()
            assert torch.equal(x, values(10 * source + i, size, torch.float32))
        for work in works:
            work.wait()
        assert torch.equal(total, torch.full((size,), 3.0))

    run_threads(rank, 3)


@pytest.mark.parametrize("size", [3, SMALL + 1])
def test_an_average_is_the_sum_over_the_number_of_ranks(size: int) -> None:
    def rank(world: World) -> None:
        x, bounds = values(world.rank, size, torch.float32), even(size, 3)
        own = slice(bounds[world.rank], bounds[world.rank + 1])
        into = torch.ones_like(x[own])
        world.transport.reduce_scatter(x, bounds, range(3), 0, into, True, "avg").wait()
        world.transport.all_reduce(x, range(3), 0, "avg").wait()
        assert torch.equal(x, in_rank_order([values(rank, size, torch.float32) for rank in range(3)]) / 3)
        assert torch.equal(into, 1 + x[own])

    run_threads(rank, 3)
    with pytest.raises(ValueError, match="use sum"):
        World.alone("cpu").transport.all_reduce(torch.ones(2, dtype=torch.int32), (0,), 0, "avg")


def test_messages_alone_give_memory_that_is_like_any_other() -> None:
    transport = World.alone("cpu").transport
    assert transport.own(3, torch.bfloat16, (0,)).tolist() == [0, 0, 0]
    assert transport.common(3, torch.bfloat16, (0,)) is None


@pytest.mark.parametrize("n", range(2, 6))
def test_sums_have_the_same_bits_on_all_ranks_and_in_all_runs_whatever_the_delays(n: int) -> None:
    sizes = (5, 30_011)

    def rank(world: World) -> list[Tensor]:
        mine = [values(world.rank, size, torch.float32) for size in sizes for _ in range(3)]
        into = torch.zeros(7)
        works = [world.transport.all_reduce(x, range(n), 0) for x in mine]
        wide = values(world.rank, 7 * n, torch.float32)
        works += [world.transport.reduce_scatter(wide, even(7 * n, n), range(n), 2, into, True) for _ in range(2)]
        for work in works:
            work.wait()
        gathered = torch.zeros(7 * n)
        gathered[7 * world.rank : 7 * world.rank + 7] = into
        world.transport.all_gather(gathered, even(7 * n, n), range(n), 4).wait()
        return [*mine, gathered]

    runs = [run_threads(rank, n, office=Jitter(chance=random.Random(seed))) for seed in range(3)]
    for results in (results for run in runs for results in run):
        assert all(torch.equal(a, b) for a, b in zip(results, runs[0][0], strict=True))
    for size, result in zip((size for size in sizes for _ in range(3)), runs[0][0][:-1], strict=True):
        assert torch.equal(result, in_rank_order([values(rank, size, torch.float32) for rank in range(n)]))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_rank_sends_the_bytes_of_a_ring(n: int, dtype: torch.dtype) -> None:
    size = n * (SMALL + 8)
    bytes_ = size * dtype.itemsize

    def sent(issue: Callable[[World, Tensor], None]) -> set[int]:
        office = Office()
        run_threads(lambda world: issue(world, values(world.rank, size, dtype)), n, office=office)
        return {office.bytes_sent[rank] for rank in range(n)}

    bounds = even(size, n)
    part = bytes_ // n
    assert sent(lambda w, x: w.transport.all_reduce(x, range(n), 0).wait()) == {2 * (n - 1) * part}  # 2 (n-1)/n S, REFERENCE A2
    assert sent(lambda w, x: w.transport.all_gather(x, bounds, range(n), 0).wait()) == {(n - 1) * part}
    assert sent(lambda w, x: w.transport.reduce_scatter(x, bounds, range(n), 0, x[bounds[w.rank] : bounds[w.rank + 1]], False).wait()) == {
        (n - 1) * part
    }


def test_a_small_all_reduce_takes_one_round() -> None:
    office = Office()
    run_threads(lambda world: world.transport.all_reduce(torch.ones(SMALL // 4), range(4), 0).wait(), 4, office=office)
    assert office.messages == 4 * 3
    assert office.bytes_sent == dict.fromkeys(range(4), 3 * SMALL)


def test_what_a_rank_holds_for_arriving_chunks_does_not_grow_with_the_buffer() -> None:
    size = 2 * CHUNK * (WINDOW + 3)  # more chunks a part than may be under way
    results = run_threads(lambda world: _reduced(world, torch.full((size,), world.rank + 1.0, dtype=torch.bfloat16)), 2)
    assert all(bool((x == 3).all()) for x in results)


def _reduced(world: World, x: Tensor) -> Tensor:
    world.transport.all_reduce(x, range(world.size), 0).wait()
    return x


@pytest.mark.parametrize("seed", range(3))
def test_two_channels_issued_in_different_orders_do_not_mix(seed: int) -> None:
    n, size = 3, SMALL + 3
    totals = {channel: in_rank_order([values(rank + 10 * channel, size, torch.float32) for rank in range(n)]) for channel in (0, 2, 4)}

    def rank(world: World) -> None:
        order = random.Random(seed * n + world.rank).sample([0, 2, 4] * 2, 6)
        works, buffers = [], []
        for channel in order:
            buffers.append((channel, values(world.rank + 10 * channel, size, torch.float32)))
            works.append(world.transport.all_reduce(buffers[-1][1], range(n), channel))
            time.sleep(1e-3 * world.rank)
        for work in reversed(works):
            work.wait()
        assert all(torch.equal(x, totals[channel]) for channel, x in buffers)

    run_threads(rank, n, office=Jitter(chance=random.Random(seed)))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(KINDS), min_size=2, max_size=6), st.integers(0, 9))
def test_collectives_of_all_kinds_may_be_under_way_on_one_channel(kinds: list[str], seed: int) -> None:
    n, size = 3, SMALL + 9
    bounds = even(size, n)

    def rank(world: World) -> list[Tensor]:
        results, works = [], []
        for i, kind in enumerate(kinds):
            x = values(world.rank + 10 * i, 5 if kind == "small" else size, torch.float32)
            own = x[bounds[world.rank] : bounds[world.rank + 1]]
            if kind == "reduce_scatter":
                results.append(torch.zeros_like(own))
                works.append(world.transport.reduce_scatter(x, bounds, range(n), 0, results[-1], False))
                continue
            results.append(x)
            if kind == "all_gather":
                works.append(world.transport.all_gather(x, bounds, range(n), 0))
            elif kind == "broadcast":
                works.append(world.transport.broadcast(x, range(n), 1, 0))
            else:
                works.append(world.transport.all_reduce(x, range(n), 0))
        for work in works:
            work.wait()
        return results

    for world_rank, results in enumerate(run_threads(rank, n, office=Jitter(chance=random.Random(seed)))):
        for i, (kind, result) in enumerate(zip(kinds, results, strict=True)):
            parts = [values(rank + 10 * i, 5 if kind == "small" else size, torch.float32) for rank in range(n)]
            cut = [slice(a, b) for a, b in pairwise(bounds)]
            expected = {
                "reduce_scatter": lambda: in_rank_order(parts)[cut[world_rank]],  # noqa: B023
                "all_gather": lambda: torch.cat([part[c] for part, c in zip(parts, cut, strict=True)]),  # noqa: B023
                "broadcast": lambda: parts[1],  # noqa: B023
            }
            assert torch.equal(result, expected.get(kind, lambda: in_rank_order(parts))())  # noqa: B023


@pytest.mark.parametrize("size", [3, SMALL + 1])
def test_a_rank_that_fails_frees_the_others_and_its_own_error_is_raised(size: int) -> None:
    seen: list[BaseException] = []

    def rank(world: World) -> None:
        if world.rank == 1:
            raise ValueError("boom")
        try:
            world.transport.all_reduce(torch.ones(size), range(3), 0).wait()
        except BaseException as error:
            seen.append(error)
            raise

    with pytest.raises(ValueError, match="boom"):
        run_threads(rank, 3)
    assert [type(error) for error in seen] == [PeerLost, PeerLost]


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
def test_a_peer_that_stays_silent_is_lost_after_the_patience(collective: str) -> None:
    def rank(world: World) -> None:
        if world.rank == 0:
            return
        x, bounds = torch.ones(4), [0, 2, 4]
        issue = {
            "all_reduce": lambda: world.transport.all_reduce(x, (0, 1), 0),
            "reduce_scatter": lambda: world.transport.reduce_scatter(x, bounds, (0, 1), 0, x[2:], False),
            "all_gather": lambda: world.transport.all_gather(x, bounds, (0, 1), 0),
            "broadcast": lambda: world.transport.broadcast(x, (0, 1), 0, 0),
        }
        issue[collective]().wait()

    with pytest.raises(PeerLost, match="rank 0 sent nothing to rank 1"):
        run_threads(rank, 2, office=Office(patience=0.02))


def test_in_a_closed_office_nothing_arrives_any_more() -> None:
    def rank(world: World) -> None:
        if world.rank == 0:
            world.transport.broadcast(torch.ones(2), (0, 1), 1, 0).wait()

    office = Office()
    office.close()
    with pytest.raises(PeerLost, match="rank 1 sent nothing to rank 0"):
        run_threads(rank, 2, office=office)


def test_ranks_that_ask_for_other_sizes_are_told_so() -> None:
    with pytest.raises(Mismatch, match=r"sent \(\d,\) torch.float32, .* expected \(\d,\) torch.float32"):
        run_threads(lambda world: _reduced(world, torch.ones(3 + world.rank)), 2)


def test_one_rank_alone_sends_nothing() -> None:
    office = Office()
    x = run_threads(lambda world: _reduced(world, torch.arange(5.0)), 1, office=office)[0]
    assert torch.equal(x, torch.arange(5.0))
    assert office.messages == 0


def test_delayed_messages_arrive_no_earlier() -> None:
    start = time.monotonic()
    run_threads(lambda world: _reduced(world, torch.ones(2)), 2, delay=0.05)
    assert time.monotonic() - start >= 0.05


def test_no_thread_outlives_the_ranks_it_served() -> None:
    def lanes() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "stretto-lane"}

    before = lanes()
    run_threads(lambda world: [world.transport.all_reduce(torch.ones(4), range(3), channel).wait() for channel in (0, 2)], 3)
    gc.collect()
    deadline = time.monotonic() + 5
    while lanes() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lanes() - before == set()
