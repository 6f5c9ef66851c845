"""Group: the ranks that differ from mine only along some axes, their collectives, and the Ledger of every call."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.comm.transport import Pending, World
from stretto.layout.mesh import AXES, Mesh

#: Who issues collectives in an order of their own. Within a lane all ranks of a group issue the same calls in the same order.
LANES = ("reduce", "gather", "vote", "replicas", "user", "tensor")


class Entry(NamedTuple):
    """One kind of call. elements: of the whole buffer that was reduced or gathered."""

    collective: str
    axes: tuple[str, ...]
    elements: int
    dtype: str
    reason: str


@dataclass
class Ledger:
    """Every collective this rank issued: how often each, in the order of the first time."""

    times: dict[Entry, int] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        self.times[entry] = self.times.get(entry, 0) + 1

    def take(self) -> Ledger:
        """What was written since the last take."""
        taken, self.times = Ledger(self.times), {}
        return taken

    def __iter__(self) -> Iterator[tuple[Entry, int]]:
        return iter(self.times.items())

    def __len__(self) -> int:
        return sum(self.times.values())

    def bytes_sent(self, mesh: Mesh) -> int:
        """Payload bytes a rank sends for these calls by bandwidth-optimal collectives: a reduce-scatter or all-gather of S
        bytes over n ranks sends (n-1)/n S, an all-reduce twice that (REFERENCE A2)."""
        total = 0.0
        for entry, times in self:
            n = mesh.extent(*entry.axes)
            size = entry.elements * getattr(torch, entry.dtype).itemsize
            total += times * size * (n - 1) / n * (2 if entry.collective == "all_reduce" else 1)
        return round(total)


class Group:
    """Ranks of a mesh that differ from this one only along `axes`. Each call is written to the ledger, then done by the transport."""

    def __init__(self, world: World, mesh: Mesh, axes: Sequence[str], ledger: Ledger) -> None:
        self.world, self.mesh, self.axes, self.ledger = world, mesh, tuple(axes), ledger
        self.ranks = mesh.group(world.rank, *axes)
        self.index = mesh.index(world.rank, *axes)
        self.size = len(self.ranks)
        self._number = sum(_number(axis) for axis in axes)

    def all_reduce(self, x: Tensor, *, reason: str, op: str = "sum", lane: str = "reduce") -> Pending:
        """Everybody's x added (op="sum") or the largest (op="max"), in place, the same bits on all ranks. x: flat."""
        self._write("all_reduce", x, reason)
        return self.world.transport.all_reduce(x, self.ranks, self._channel(lane), op)

    def reduce_scatter(
        self, x: Tensor, bounds: Sequence[int], *, reason: str, into: Tensor, accumulate: bool = False, lane: str = "reduce"
    ) -> Pending:
        """Everybody's x added; this rank's slice [bounds[i], bounds[i+1]) of the sum is written (or added) to `into`. x: flat."""
        self._write("reduce_scatter", x, reason)
        return self.world.transport.reduce_scatter(x, bounds, self.ranks, self._channel(lane), into, accumulate)

    def all_gather(self, x: Tensor, bounds: Sequence[int], *, reason: str, lane: str = "gather") -> Pending:
        """Each rank's slice [bounds[i], bounds[i+1]) of x on all ranks, in place: mine must be there. x: flat."""
        self._write("all_gather", x, reason)
        return self.world.transport.all_gather(x, bounds, self.ranks, self._channel(lane))

    def broadcast(self, x: Tensor, source: int, *, reason: str, lane: str = "user") -> Pending:
        """x of the group's member number `source`, in place on every member. x: flat."""
        self._write("broadcast", x, reason)
        return self.world.transport.broadcast(x, self.ranks, self.ranks[source], self._channel(lane))

    def own(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Zeros of this rank that collectives of this group read where they lie, if the transport can. Collective."""
        return self._private(elements, dtype) if self.size == 1 else self.world.transport.own(elements, dtype, self.ranks)

    def common(self, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Zeros that all ranks of this group share, so that to write a slice is to gather it; None where they cannot. Collective."""
        return self._private(elements, dtype) if self.size == 1 else self.world.transport.common(elements, dtype, self.ranks)

    def _private(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(elements, dtype=dtype, device=self.world.device)

    def objects(self, value: Any, *, reason: str) -> list[Any]:
        """Every member's picklable value, in group order. For rare, small things: reports, plans, agreement."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(self.world.device)
        sizes = torch.zeros(self.size, dtype=torch.float64, device=self.world.device)
        sizes[self.index] = len(data)
        self.all_reduce(sizes, reason=reason, lane="user").wait()
        bounds = [0]
        for size in sizes.tolist():
            bounds.append(bounds[-1] + int(size))
        joined = torch.empty(bounds[-1], dtype=torch.uint8, device=self.world.device)
        joined[bounds[self.index] : bounds[self.index + 1]] = data
        self.all_gather(joined, bounds, reason=reason, lane="user").wait()
        joined = joined.cpu()
        return [pickle.loads(joined[a:b].numpy().tobytes()) for a, b in pairwise(bounds)]

    def _write(self, collective: str, x: Tensor, reason: str) -> None:
        self.ledger.add(Entry(collective, self.axes, x.numel(), str(x.dtype).removeprefix("torch."), reason))

    def _channel(self, lane: str) -> int:
        return (self._number * len(LANES) + LANES.index(lane)) * 2


def _number(axis: str) -> int:
    """A number for each axis such that no two sets of axes have the same sum: 'tp%4' (see Mesh) beside 'tp'."""
    name, _, neighbours = axis.partition("%")
    return (1 << AXES.index(name)) + (int(neighbours or 0) << len(AXES))
