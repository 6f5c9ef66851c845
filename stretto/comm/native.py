"""Collectives of torch's own backends, NCCL above all: asynchronous on the device's communication stream.

Each (ranks, channel) has a communicator of its own. `dist.new_group` is no way to make one here: made by its own ranks alone, a group
is named after the number of groups that the process has, and ranks in the middle of a pipeline have more than those at its ends, so
they would wait for each other under different names. Here the name is the ranks and the channel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from stretto.comm.messages import Handle
from stretto.comm.transport import Pending

_OPS: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

#: (store, rank in the group, ranks in it, timeout) -> one of torch's backends, as ProcessGroupNCCL.
Maker = Callable[[Store, int, int, timedelta], Any]


def nccl(store: Store, index: int, size: int, timeout: timedelta) -> Any:
    """A communicator of NCCL. A collective that takes longer than `timeout` ends the process."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, index, size, options)


class _Then:
    """A collective, then something to do on the waiting stream once it is there. keep: what must live until then."""

    def __init__(self, work: Handle | None, then: object = None, keep: object = None) -> None:
        self.work, self.then, self.keep = work, then, keep

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()  # NCCL: the current stream waits, the host does not
        if callable(self.then):
            self.then()
        self.work = self.then = self.keep = None

    def result(self) -> None:
        self.wait()


class Native:
    """A Transport over one of torch's backends. Communicators are made when first used, by their own ranks alone.

    Two channels of one group may be under way at once: NCCL orders the collectives of one communicator, not of two.
    """

    name = "nccl"

    def __init__(self, rank: int, device: torch.device, timeout: float, store: Store, make: Maker = nccl) -> None:
        self.rank, self.device, self.timeout = rank, device, timedelta(seconds=timeout)
        self.store, self._make = store, make
        self._groups: dict[tuple[tuple[int, ...], int], Any] = {}

    def all_reduce(self, x: Tensor, ranks: Sequence[int], channel: int, op: str = "sum") -> Pending:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return _Then(self._group(ranks, channel).allreduce([x], options))

    def reduce_scatter(
        self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int, into: Tensor, accumulate: bool, op: str = "sum"
    ) -> Pending:
        group, index = self._group(ranks, channel), list(ranks).index(self.rank)
        own = x[bounds[index] : bounds[index + 1]]
        options = dist.ReduceScatterOptions()
        options.reduceOp = _OPS[op]
        if _even(bounds):  # in place: NCCL allows the result to be the caller's own slice of the input
            work = group._reduce_scatter_base(own, x, options)
        else:
            work = group.reduce_scatter([own], [[x[a:b] for a, b in pairwise(bounds)]], options)
        if accumulate:
            return _Then(work, lambda: into.add_(own))
        return _Then(work, None if into.data_ptr() == own.data_ptr() else lambda: into.copy_(own))

    def all_gather(self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int) -> Pending:
        group, index = self._group(ranks, channel), list(ranks).index(self.rank)
        own = x[bounds[index] : bounds[index + 1]]
        if _even(bounds):
            return _Then(group._allgather_base(x, own))
        return _Then(group.allgather([[x[a:b] for a, b in pairwise(bounds)]], [own.clone()]))

    def broadcast(self, x: Tensor, ranks: Sequence[int], source: int, channel: int) -> Pending:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = list(ranks).index(source), 0
        return _Then(self._group(ranks, channel).broadcast([x], options))

    def send(self, x: Tensor, to: int, channel: int) -> Pending:
        return _Then(self._way(self.rank, to, channel).send([x], int(to > self.rank), 0), keep=x)

    def receive(self, x: Tensor, source: int, channel: int) -> Pending:
        return _Then(self._way(source, self.rank, channel).recv([x], int(source > self.rank), 0))

    def own(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor:
        return torch.zeros(elements, dtype=dtype, device=self.device)

    def common(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor | None:
        return None

    def close(self) -> None:
        """End the communicators. Collective where the backend's own end is."""
        for group in self._groups.values():
            group.shutdown()
        self._groups.clear()

    def _way(self, source: int, to: int, channel: int) -> Any:
        """A communicator for each direction: on one, two ranks that both send first would wait for each other."""
        low, high = sorted((source, to))
        both = [self._group((low, high), channel + turn) for turn in (0, 1)]  # both at once, so that both ranks make them in one order
        return both[source > to]

    def _group(self, ranks: Sequence[int], channel: int) -> Any:
        key = (tuple(ranks), channel)
        if key not in self._groups:
            store = PrefixStore(f"native/{'-'.join(map(str, ranks))}/{channel}", self.store)
            self._groups[key] = self._make(store, list(ranks).index(self.rank), len(ranks), self.timeout)
        return self._groups[key]


def _even(bounds: Sequence[int]) -> bool:
    sizes = {b - a for a, b in pairwise(bounds)}
    return len(sizes) == 1
