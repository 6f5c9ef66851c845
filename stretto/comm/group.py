"""Group: the ranks that differ from mine only along some axes, their collectives, and the Ledger of every call."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.comm.memory import Pages, zeros
from stretto.comm.messages import Work
from stretto.comm.program import Member, run
from stretto.comm.transport import Pending, World
from stretto.errors import JobError
from stretto.layout.mesh import AXES, Mesh
from stretto.schedule.algorithms import program
from stretto.schedule.collective import Program

#: Who issues collectives in an order of their own. Within a lane all ranks of a group issue the same calls in the same order.
LANES = ("reduce", "gather", "vote", "replicas", "user", "tensor", "stages", "program")


class Entry(NamedTuple):
    """One kind of call. elements: of the whole buffer that was reduced or gathered."""

    collective: str
    axes: tuple[str, ...]
    elements: int
    dtype: str
    reason: str


def width(dtype: str) -> int:
    """Bytes of an element, by the name of its dtype as the ledger has it."""
    return int(getattr(torch, dtype).itemsize)


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
        bytes over n ranks sends (n-1)/n S, an all-reduce twice that (REFERENCE A2); a message is sent once."""
        total = 0.0
        for entry, times in self:
            n = mesh.extent(*entry.axes)
            size = entry.elements * width(entry.dtype)
            share = 1.0 if entry.collective == "send" else (n - 1) / n
            total += times * size * share * (2 if entry.collective == "all_reduce" else 1)
        return round(total)


class Group:
    """Ranks of a mesh that differ from this one only along `axes`. Each call is written to the ledger, then done.

    By the transport in its own way; or, with `algorithm`, by hops: a name of schedule/algorithms.py, or a Program of one's own.
    Then it is done when the call returns. Collectives that transports do not have are always done so.
    """

    def __init__(self, world: World, mesh: Mesh, axes: Sequence[str], ledger: Ledger) -> None:
        self.world, self.mesh, self.axes, self.ledger = world, mesh, tuple(axes), ledger
        self.ranks = mesh.group(world.rank, *axes)
        self.index = mesh.index(world.rank, *axes)
        self.size = len(self.ranks)
        self._number = sum(_number(axis) for axis in axes)

    def all_reduce(
        self, x: Tensor, *, reason: str, op: str = "sum", lane: str = "reduce", algorithm: str | Program | None = None
    ) -> Pending:
        """Everybody's x combined (op: sum, avg, max, min), in place, the same bits on all ranks. x: flat."""
        self._write("all_reduce", x, reason)
        if algorithm:
            return self._by_hops("all_reduce", algorithm, [x.numel()], x, x, op=op)
        return self.world.transport.all_reduce(x, self.ranks, self._channel(lane), op)

    def reduce_scatter(
        self,
        x: Tensor,
        bounds: Sequence[int],
        *,
        reason: str,
        into: Tensor,
        accumulate: bool = False,
        lane: str = "reduce",
        algorithm: str | Program | None = None,
    ) -> Pending:
        """Everybody's x added; this rank's slice [bounds[i], bounds[i+1]) of the sum is written (or added) to `into`. x: flat."""
        self._write("reduce_scatter", x, reason)
        if algorithm:
            mine = torch.empty_like(into) if accumulate else into
            work = self._by_hops("reduce_scatter", algorithm, _lengths(bounds), x, mine)
            if accumulate:
                into.add_(mine)
            return work
        return self.world.transport.reduce_scatter(x, bounds, self.ranks, self._channel(lane), into, accumulate)

    def all_gather(
        self, x: Tensor, bounds: Sequence[int], *, reason: str, lane: str = "gather", algorithm: str | Program | None = None
    ) -> Pending:
        """Each rank's slice [bounds[i], bounds[i+1]) of x on all ranks, in place: mine must be there. x: flat."""
        self._write("all_gather", x, reason)
        if algorithm:
            return self._by_hops("all_gather", algorithm, _lengths(bounds), x[self._slice(bounds)], x)
        return self.world.transport.all_gather(x, bounds, self.ranks, self._channel(lane))

    def broadcast(self, x: Tensor, source: int, *, reason: str, lane: str = "user", algorithm: str | Program | None = None) -> Pending:
        """x of the group's member number `source`, in place on every member. x: flat."""
        self._write("broadcast", x, reason)
        if algorithm:
            return self._by_hops("broadcast", algorithm, [x.numel()], x if self.index == source else x[:0], x, root=source)
        return self.world.transport.broadcast(x, self.ranks, self.ranks[source], self._channel(lane))

    def reduce(self, x: Tensor, root: int, *, reason: str, op: str = "sum", algorithm: str | Program = "bruck") -> Pending:
        """Everybody's x combined (op: sum, avg, max, min), in place on member `root`; the x of others stays as it was. x: flat."""
        self._write("reduce", x, reason)
        return self._by_hops("reduce", algorithm, [x.numel()], x, x if self.index == root else x[:0], op=op, root=root)

    def gather(self, x: Tensor, bounds: Sequence[int], root: int, *, reason: str, algorithm: str | Program = "bruck") -> Pending:
        """Each rank's slice [bounds[i], bounds[i+1]) of x on member `root`, in place; the x of others stays as it was. x: flat."""
        self._write("gather", x, reason)
        taken = x if self.index == root else x[:0]
        return self._by_hops("gather", algorithm, _lengths(bounds), x[self._slice(bounds)], taken, root=root)

    def scatter(
        self, x: Tensor, bounds: Sequence[int], root: int, *, reason: str, into: Tensor, algorithm: str | Program = "bruck"
    ) -> Pending:
        """Slice [bounds[i], bounds[i+1]) of the x of member `root` is written to `into` on member i. x: flat, any on the others."""
        self._write("scatter", x, reason)
        return self._by_hops("scatter", algorithm, _lengths(bounds), x if self.index == root else x[:0], into, root=root)

    def all_to_all(
        self, x: Tensor, counts: Sequence[Sequence[int]], *, reason: str, into: Tensor, algorithm: str | Program = "direct"
    ) -> Pending:
        """counts[i][j] elements go from member i to member j: x holds mine for 0, 1, 2 ..., `into` gets theirs from 0, 1, 2 ...

        x, into: flat. counts: the same on all ranks.
        """
        self._write("all_to_all", x, reason)
        return self._by_hops("all_to_all", algorithm, [count for row in counts for count in row], x, into)

    def barrier(self, *, reason: str, algorithm: str | Program = "bruck") -> Pending:
        """Done when every member has called it."""
        x = torch.zeros(self.size, dtype=torch.uint8, device=self.world.device)
        self._write("barrier", x, reason)
        return self._by_hops("barrier", algorithm, [1] * self.size, x[self.index : self.index + 1], x)

    def own(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Zeros of this rank that collectives of this group read where they lie, if the transport can. Collective."""
        return self._private(elements, dtype) if self.size == 1 else self.world.transport.own(elements, dtype, self.ranks)

    def common(self, elements: int, dtype: torch.dtype) -> Pages | None:
        """Zeros that all ranks of this group share, so that to write a slice is to gather it; None where they cannot. Collective."""
        found = self._private(elements, dtype) if self.size == 1 else self.world.transport.common(elements, dtype, self.ranks)
        return None if found is None else Pages(found)

    def _private(self, elements: int, dtype: torch.dtype) -> Tensor:
        return zeros(elements, dtype, self.world.device)

    def send(self, x: Tensor, to: int, *, reason: str, lane: str = "stages") -> Pending:
        """x to the group's member number `to`, which must `receive`; messages of one pair and lane arrive in order. x: flat, and not
        to be written before wait()."""
        self._write("send", x, reason)
        return self.world.transport.send(x, self.ranks[to], self._channel(lane))

    def receive(self, x: Tensor, source: int, *, lane: str = "stages") -> Pending:
        """The next message of the group's member number `source`, into x. x: flat. Only the sender writes it to the ledger."""
        return self.world.transport.receive(x, self.ranks[source], self._channel(lane))

    def objects(self, value: Any, *, reason: str) -> list[Any]:
        """Every member's picklable value, in group order. For rare, small things: reports, plans, agreement."""
        if self.world.answers is not None:
            return self.world.answers(self.ranks, value, reason)
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

    def _by_hops(
        self,
        collective: str,
        algorithm: str | Program,
        parts: Sequence[int],
        brings: Tensor,
        takes: Tensor,
        *,
        op: str = "sum",
        root: int = 0,
    ) -> Pending:
        """Run it here and now; see comm/program.py for what the arguments are."""
        one = program(collective, algorithm, self.size, root=root) if isinstance(algorithm, str) else algorithm
        if (one.collective, one.ranks, one.root) != (collective, self.size, root):
            raise JobError(
                f"{one} (root {one.root}) is not {collective} over the {self.size} ranks of this group (root {root}); make it so"
            )
        work = Work()
        run(one, parts, brings, takes, Member(self.world.transport, self.ranks, self.index, self._channel("program")), op)
        work.finish()
        return work

    def _slice(self, bounds: Sequence[int]) -> slice:
        return slice(bounds[self.index], bounds[self.index + 1])

    def _write(self, collective: str, x: Tensor, reason: str) -> None:
        self.ledger.add(Entry(collective, self.axes, x.numel(), str(x.dtype).removeprefix("torch."), reason))

    def _channel(self, lane: str) -> int:
        return (self._number * len(LANES) + LANES.index(lane)) * 2


def _number(axis: str) -> int:
    """A number for each axis such that no two sets of axes have the same sum: 'tp%4' (see Mesh) beside 'tp'."""
    name, _, neighbours = axis.partition("%")
    return (1 << AXES.index(name)) + (int(neighbours or 0) << len(AXES))


def _lengths(bounds: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(bounds)]
