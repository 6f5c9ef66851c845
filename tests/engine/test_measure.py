"""Timing this machine: what is timed is right, ways take turns, and the slowest rank counts. Times themselves are not judged."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from stretto.comm.messages import Messages
from stretto.comm.threads import run_threads
from stretto.comm.transport import World
from stretto.engine import measure
from stretto.engine.measure import COLLECTIVES, Effort, Found, Watch
from stretto.errors import Mismatch

TINY = Effort(sizes=(64, 4096), shapes=((8, 16, 4), (16, 16, 16)), seconds=0.0, least=1, until=60.0)


def links_of(world: World, effort: Effort = TINY) -> list[Found]:
    return list(measure.links(Watch(world, effort), {"threads": world.transport}, late=print))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_collective_is_timed_at_every_size(ranks: int) -> None:
    sizes = {1: (), 2: (64, 4096), 3: (60, 4092)}[ranks]  # as near as equal parts allow
    expected = [("threads", ranks, name, size, True) for size in sizes for name in COLLECTIVES]
    for found in run_threads(links_of, ranks):
        assert [one[:5] for one in found] == expected
        assert all(one.seconds > 0 for one in found)


def test_all_ranks_find_the_same() -> None:
    first, *others = run_threads(links_of, 3)
    assert all(other == first for other in others)


class Wrong(Messages):
    """Adds one too much, somewhere."""

    def all_reduce(self, x: Tensor, *args, **more):
        work = super().all_reduce(x, *args, **more)
        work.wait()
        x[x.numel() // 2] += 1
        return work


def test_a_rate_of_wrong_results_is_refused() -> None:
    def rank(world: World) -> None:
        wrong = Wrong(world.transport.mail, world.rank)
        list(measure.links(Watch(world, TINY), {"wrong": wrong}, late=print))

    with pytest.raises(Mismatch, match="all_reduce of 16 numbers over wrong gave 3 to 4, not 3"):
        run_threads(rank, 2)


def test_what_there_is_no_time_for_is_said() -> None:
    def rank(world: World) -> list[tuple[str, int]]:
        said: list[tuple[str, int]] = []
        effort = replace(TINY, until=-1.0)
        assert list(measure.links(Watch(world, effort), {"threads": world.transport}, late=said.extend)) == []
        return said

    for said in run_threads(rank, 2):
        assert said == [(name, size) for size in TINY.sizes for name in COLLECTIVES]


def test_calls_take_turns_and_the_slowest_rank_counts() -> None:
    def rank(world: World) -> tuple[list[str], list[float]]:
        order: list[str] = []

        def call(name: str, seconds: float) -> None:
            order.append(name)
            time.sleep(seconds)

        effort = replace(TINY, least=2)
        slow = 0.05 if world.rank == 1 else 0.0
        return order, Watch(world, effort).times([lambda: call("a", 0.01), lambda: call("b", slow)])

    for order, (a, b) in run_threads(rank, 2):
        assert order == ["a", "a", "b", "b"] + ["a", "b"] * 2
        assert a >= 0.01 and b >= 0.05


def test_products_and_copies_of_every_kind_are_timed() -> None:
    def rank(world: World) -> tuple[list, list, float]:
        watch = Watch(world, TINY)
        return list(measure.products(watch)), list(measure.copies(watch)), measure.call_seconds(watch)

    for products, copies, call in run_threads(rank, 2):
        assert [row[:4] for row in products] == [(name, *shape) for shape in TINY.shapes for name in ("fp32", "bf16", "fp64")]
        assert [size for size, _ in copies] == list(measure.COPIES)
        assert call > 0 and all(row[-1] > 0 for row in products + copies)


def test_a_dtype_that_is_only_imitated_is_left_out_where_it_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LONGEST", 0.0)
    assert [row[1:4] for row in measure.products(Watch(World.alone("cpu"), TINY))] == []
    monkeypatch.setattr(measure, "LONGEST", 1e-9)
    assert [row[1:4] for row in measure.products(Watch(World.alone("cpu"), TINY))] == [TINY.shapes[0]] * 3


def test_the_device_is_known() -> None:
    facts = measure.device_facts(World.alone("cpu"))
    assert facts["kind"] == "cpu" and facts["name"] and facts["threads"] == torch.get_num_threads()
    assert int(facts["memory"]) > 2**28 and int(facts["cores"]) >= 1


def timed_in_a_process(world: World) -> list[tuple]:
    found = measure.links(Watch(world, replace(TINY, sizes=(4096,))), measure.carriers(world), late=print)
    return [one[:5] for one in found]


def test_between_processes_every_carrier_is_timed_and_memory_that_is_shared(pool) -> None:
    ways = [("gloo", True), ("messages", True), ("shm", True), ("shm", False)]
    expected = [(way, 4, name, 4096, private) for name in COLLECTIVES for way, private in ways[: 3 if name == "send" else 4]]
    assert pool.run(timed_in_a_process) == [expected] * 4
