"""Ranks of several machines: near ones meet in shared memory, far ones by messages, and every group goes one way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import Store

from stretto.comm import machine as machine_module
from stretto.comm.machine import Machine
from stretto.comm.messages import Messages
from stretto.comm.nearby import Nearby
from stretto.comm.shm import SharedMemory
from stretto.comm.threads import Office, ThreadMail, run_threads
from stretto.comm.transport import World
from stretto.engine.engine import Engine
from stretto.job import Job
from stretto.models import library


@pytest.fixture
def two_machines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """run(fn, ranks): on threads, the first half on one machine and the second on another."""
    office, here = Office(), threading.local()
    monkeypatch.setattr(machine_module, "_place", lambda: here.machine)

    def run(fn: Callable[[World], Any], ranks: int) -> list[Any]:
        def transport(rank: int, size: int, store: Store) -> Nearby:
            here.machine = f"machine {rank * 2 // size}"
            return Nearby(SharedMemory(Machine.meet(rank, size, store), 30.0), Messages(ThreadMail(office, rank), rank))

        return run_threads(fn, ranks, office=office, transport=transport)

    return run


Run = Callable[[Callable[[World], Any], int], list[Any]]


def test_groups_inside_a_machine_and_across_machines_add_up_what_their_ranks_have(two_machines: Run) -> None:
    groups = {"inside": [(0, 1), (2, 3)], "across": [(0, 2), (1, 3)], "all": [(0, 1, 2, 3)]}

    def rank(world: World) -> dict[str, tuple[int, list[float]]]:
        found = {}
        for channel, (name, parts) in enumerate(groups.items()):
            ranks = next(part for part in parts if world.rank in part)
            x = world.transport.own(5, torch.float64, ranks)
            x.fill_(10.0**world.rank)
            world.transport.all_reduce(x, ranks, 2 * channel).wait()
            found[name] = (ranks, x.tolist())
        return found

    for found in two_machines(rank, 4):
        for ranks, values in found.values():
            assert values == [sum(10.0**member for member in ranks)] * 5


def test_only_what_leaves_the_machine_is_a_message(two_machines: Run) -> None:
    def rank(world: World) -> tuple[bool, bool, list[bool]]:
        over = world.transport
        assert isinstance(over, Nearby)
        inside, across = ((0, 1), (0, 2)) if world.rank == 0 else ((2 * (world.rank // 2), 2 * (world.rank // 2) + 1), (0, 2))
        common = over.common(4, torch.float32, inside)
        far = over.common(4, torch.float32, across) if world.rank in across else None
        ways = [over._among(ranks) is over.near for ranks in ((world.rank,), inside, across, range(4))]
        return common is not None, far is None, ways

    assert two_machines(rank, 4) == [(True, True, [True, True, False, False])] * 4


def test_messages_between_machines_and_inside_arrive(two_machines: Run) -> None:
    def rank(world: World) -> list[float]:
        sent = [world.transport.send(torch.full((3,), float(world.rank)), to, 0) for to in range(4) if to != world.rank]
        got = []
        for source in (s for s in range(4) if s != world.rank):
            x = torch.empty(3)
            world.transport.receive(x, source, 0).wait()
            got.append(x[0].item())
        for work in sent:
            work.wait()
        return got

    assert two_machines(rank, 4) == [[float(source) for source in range(4) if source != rank] for rank in range(4)]


@pytest.mark.parametrize(
    ("mesh", "zero"), [("dp=4", 2), ("dp=2 dp_replicate=2", 3), ("pp=2 dp=2", 1), ("dp=2 tp=2", 3)], ids=lambda value: str(value)
)
def test_the_engine_takes_the_step_of_one_process(two_machines: Run, mesh: str, zero: int) -> None:
    sizes = {"blocks": 2, "hidden": 16, "heads": 2, "ffn": 24, "vocab": 11}
    usual = {"precision": "fp64", "batch.size": 8, "batch.micro_size": 2, "clip": 1.0}
    ids = torch.randint(11, (8, 8), generator=torch.Generator().manual_seed(0))

    def losses(mesh: str, zero: int) -> Callable[[World], list[float]]:
        def rank(world: World) -> list[float]:
            with Engine(library.load("tiny", overrides=sizes), Job.load(mesh=mesh, zero=zero, **usual), world) as engine:
                return [engine.step({"input_ids": ids, "labels": ids}).loss for _ in range(3)]

        return rank

    (alone,) = run_threads(losses("dp=1", 0), 1)
    for found in two_machines(losses(mesh, zero), 4):
        assert found == pytest.approx(alone, rel=1e-12)
