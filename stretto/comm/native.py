"""Collectives of torch.distributed's own backends, NCCL above all: asynchronous on the device's communication stream."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor

from stretto.comm.transport import Pending

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class _Then:
    """A collective, then something to do on the waiting stream once it is there."""

    def __init__(self, work: Pending | None, then: object = None) -> None:
        self.work, self.then = work, then

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()  # NCCL: the current stream waits, the host does not
        if callable(self.then):
            self.then()
        self.work = self.then = None


class Native:
    """A Transport over torch.distributed. A communicator for each (ranks, channel), made when first used, in the same order on all ranks.

    Two channels of one group may be under way at once: NCCL orders the collectives of one communicator, not of two.
    """

    name = "nccl"

    def __init__(self, rank: int, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self._groups: dict[tuple[tuple[int, ...], int], dist.ProcessGroup] = {}

    def all_reduce(self, x: Tensor, ranks: Sequence[int], channel: int, op: str = "sum") -> Pending:
        return _Then(dist.all_reduce(x, _OPS[op], group=self._group(ranks, channel), async_op=True))

    def reduce_scatter(
        self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int, into: Tensor, accumulate: bool
    ) -> Pending:
        group, index = self._group(ranks, channel), list(ranks).index(self.rank)
        own = x[bounds[index] : bounds[index + 1]]
        if _even(bounds):  # in place: NCCL allows the result to be the caller's own slice of the input
            work = dist.reduce_scatter_single(own, x, group=group, async_op=True)
        else:
            work = dist.reduce_scatter(own, [x[a:b] for a, b in pairwise(bounds)], group=group, async_op=True)
        if accumulate:
            return _Then(work, lambda: into.add_(own))
        return _Then(work, None if into.data_ptr() == own.data_ptr() else lambda: into.copy_(own))

    def all_gather(self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int) -> Pending:
        group, index = self._group(ranks, channel), list(ranks).index(self.rank)
        own = x[bounds[index] : bounds[index + 1]]
        if _even(bounds):
            return _Then(dist.all_gather_single(x, own, group=group, async_op=True))
        return _Then(dist.all_gather([x[a:b] for a, b in pairwise(bounds)], own.clone(), group=group, async_op=True))

    def broadcast(self, x: Tensor, ranks: Sequence[int], source: int, channel: int) -> Pending:
        return _Then(dist.broadcast(x, source, group=self._group(ranks, channel), async_op=True))

    def _group(self, ranks: Sequence[int], channel: int) -> dist.ProcessGroup:
        key = (tuple(ranks), channel)
        if key not in self._groups:
            # only the ranks of the group take part in making it, so that start-up does not grow with the number of groups
            made = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout), use_local_synchronization=True)
            self._groups[key] = made
        return self._groups[key]


def _even(bounds: Sequence[int]) -> bool:
    sizes = {b - a for a, b in pairwise(bounds)}
    return len(sizes) == 1
