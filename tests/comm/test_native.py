"""The transport over torch's own backends, with gloo in NCCL's place: same calls, same names of communicators."""

from __future__ import annotations

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store

from stretto.comm.native import Native
from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.job import Job
from stretto.models import library


class Uneven:
    """gloo, with parts of different sizes in an all-gather as NCCL takes them: it too makes broadcasts of them."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any:
        work = None
        for root, part in enumerate(outputs[0]):
            if root == self.group.rank():
                part.copy_(inputs[0])
            options = dist.BroadcastOptions()
            options.rootRank = root
            work = self.group.broadcast([part], options)
            work.wait()
        return work


def gloo(store: Store, index: int, size: int, timeout: timedelta) -> Any:
    return Uneven(dist.ProcessGroupGloo(store, index, size, timeout))


def over_gloo(rank: int, ranks: int, store: Store) -> Native:
    return Native(rank, torch.device("cpu"), 20.0, store, gloo)


def test_collectives_give_what_the_formula_says():
    bounds = [0, 4, 8, 12]  # uneven ones are for NCCL alone: gloo does not take them
    total = bounds[-1]

    def rank(world):
        ranks, carrier = range(3), world.transport
        mine = torch.arange(total, dtype=torch.float64) + 100 * world.rank
        start, stop = bounds[world.rank : world.rank + 2]

        summed = mine.clone()
        carrier.all_reduce(summed, ranks, 0).wait()
        parts = torch.full((total,), -1.0, dtype=torch.float64)
        parts[start:stop] = mine[start:stop]
        carrier.all_gather(parts, bounds, ranks, 0).wait()
        copied = mine.clone()
        carrier.broadcast(copied, ranks, 2, 0).wait()
        return summed, parts, copied

    base = torch.arange(total, dtype=torch.float64)
    gathered = torch.cat([base[a:b] + 100 * rank for rank, (a, b) in enumerate(pairwise(bounds))])
    for summed, parts, copied in run_threads(rank, 3, transport=over_gloo):
        assert torch.equal(summed, 3 * base + 300) and torch.equal(parts, gathered) and torch.equal(copied, base + 200)


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_reduce_scatter_leaves_each_rank_its_slice_of_the_sum(accumulate):
    bounds = [0, 4, 8, 12]

    def rank(world):
        mine, into = torch.arange(12.0) + world.rank, torch.full((4,), 7.0)
        world.transport.reduce_scatter(mine, bounds, range(3), 0, into, accumulate).wait()
        return into

    for index, into in enumerate(run_threads(rank, 3, transport=over_gloo)):
        assert torch.equal(into, 3 * torch.arange(12.0)[4 * index : 4 * index + 4] + 3 + 7 * accumulate)


def test_ranks_that_have_made_different_numbers_of_communicators_still_meet():
    """Named after how many a process has made, the third here would be one name for rank 1 and another for rank 2."""

    def rank(world):
        ring = []
        for low in range(3):
            if world.rank in (low, low + 1):
                x = torch.full((3,), float(world.rank))
                if world.rank == low:
                    world.transport.send(x, low + 1, 0).wait()
                else:
                    world.transport.receive(x, low, 0).wait()
                ring.append(x[0].item())
        both = torch.ones(1)
        world.transport.all_reduce(both, (1, 2), 4).wait() if world.rank in (1, 2) else None
        return ring, both.item()

    assert run_threads(rank, 4, transport=over_gloo) == [([0.0], 1.0), ([0.0, 1.0], 2.0), ([1.0, 2.0], 2.0), ([2.0], 1.0)]


def test_two_ranks_that_both_send_first_do_not_wait_for_each_other():
    def rank(world):
        mine, theirs = torch.full((1 << 20,), float(world.rank)), torch.empty(1 << 20)
        sent = world.transport.send(mine, 1 - world.rank, 0)
        world.transport.receive(theirs, 1 - world.rank, 0).wait()
        sent.wait()
        return theirs.unique().tolist()

    assert run_threads(rank, 2, transport=over_gloo) == [[1.0], [0.0]]


@pytest.mark.parametrize("mesh", ["pp=3", "dp=2 tp=2", "dp=3"])
def test_the_engine_takes_the_step_of_one_process(mesh):
    sizes = {"blocks": 3, "hidden": 16, "heads": 2, "ffn": 24, "vocab": 11}
    usual = {"precision": "fp64", "batch.size": 6, "batch.micro_size": 1, "clip": 1.0, "zero": 2 if "dp" in mesh else 0}
    ids = torch.randint(11, (6, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}

    def losses(ranks, mesh, **over):
        def rank(world):
            with Engine(library.load("tiny", overrides=sizes), Job.load(mesh=mesh, **usual), world) as engine:
                return [engine.step(batch).loss for _ in range(3)]

        return run_threads(rank, ranks, **over)

    (alone,) = losses(1, "dp=1")
    for found in losses(4 if "tp" in mesh else 3, mesh, transport=over_gloo):
        assert found == pytest.approx(alone, rel=1e-12)
