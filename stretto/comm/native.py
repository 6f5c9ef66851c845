"""Collectives of torch.distributed's own backends, NCCL above all: asynchronous on the device's communication stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.comm.messages import Handle
from stretto.comm.transport import Pending

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class _Then:
    """A collective, then something to do on the waiting stream once it is there."""

    def __init__(self, work: Handle | None, then: object = None) -> None:
        self.work, self.then = work, then

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()  # NCCL: the current stream waits, the host does not
        if callable(self.then):
            self.then()
        self.work = self.then = None

    def result(self) -> None:
        self.wait()


class Native:
    """A Transport over torch.distributed. A communicator for each (ranks, channel), made when first used, in the same order on all ranks.

    Two channels of one group may be under way at once: NCCL orders the collectives of one communicator, not of two.
    """

    name = "nccl"

    def __init__(self, rank: int, device: torch.device, timeout: float) -> None:
        self.rank, self.device, self.timeout = rank, device, timeout
        self._groups: dict[tuple[tuple[int, ...], int], dist.ProcessGroup] = {}

    def all_reduce(self, x: Tensor, ranks: Sequence[int], channel: int, op: str = "sum") -> Pending:
        return _Then(dist.all_reduce(x, _OPS[op], group=self._group(ranks, channel), async_op=True))

    def reduce_scatter(
        self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int, into: Tensor, accumulate: bool, op: str = "sum"
    ) -> Pending:
        group, index = self._group(ranks, channel), list(ranks).index(self.rank)
        own = x[bounds[index] : bounds[index + 1]]
        if _even(bounds):  # in place: NCCL allows the result to be the caller's own slice of the input
            work = dist.reduce_scatter_single(own, x, _OPS[op], group=group, async_op=True)
        else:
            work = dist.reduce_scatter(own, [x[a:b] for a, b in pairwise(bounds)], _OPS[op], group=group, async_op=True)
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

    def send(self, x: Tensor, to: int, channel: int) -> Pending:
        return self._message(dist.isend, x, self.rank, to, to, channel)

    def receive(self, x: Tensor, source: int, channel: int) -> Pending:
        return self._message(dist.irecv, x, source, self.rank, source, channel)

    def own(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor:
        return torch.zeros(elements, dtype=dtype, device=self.device)

    def common(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor | None:
        return None

    def close(self) -> None:
        """The groups end with torch's own."""

    def _message(self, how: Callable[..., Any], x: Tensor, source: int, to: int, peer: int, channel: int) -> Pending:
        """A communicator for each direction: on one, two ranks that both send first would wait for each other."""
        low, high = sorted((source, to))
        both = [self._group((low, high), channel + turn) for turn in (0, 1)]  # both at once, so that both ranks make them in one order
        (work,) = dist.batch_isend_irecv([dist.P2POp(how, x, peer, group=both[source > to])])
        return _Then(work)

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
