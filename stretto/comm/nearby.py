"""Nearby: shared memory among ranks of one machine, messages between machines.

A group of one machine's ranks goes through shared memory. A group that has equally many ranks on each of several machines goes the
hierarchical way (schedule/algorithms.py): inside, across, inside again, so that each byte leaves a machine once, not once a rank.
All other groups go by messages.

[Note: a thread for what goes three ways] A later stage must begin when the stage before it is done, even if nobody waits: two ranks
that wait for two such collectives in different orders would otherwise wait for each other. So the stages of a channel's collectives
are run by a thread of its own, in the order in which they were issued, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
from torch import Tensor

from stretto.comm.combine import check
from stretto.comm.messages import Lane, Messages
from stretto.comm.messages import Work as FarWork
from stretto.comm.shm import SharedMemory
from stretto.comm.shm import Work as NearWork

Work = NearWork | FarWork


@dataclass(frozen=True)
class Spread:
    """A group on several machines. rows: its ranks, machine by machine, equally many on each; mine is number `place` of row `row`."""

    rows: tuple[tuple[int, ...], ...]
    row: int
    place: int

    @property
    def inside(self) -> tuple[int, ...]:
        """The ranks on my machine."""
        return self.rows[self.row]

    @property
    def across(self) -> tuple[int, ...]:
        """The ranks at my place, one a machine."""
        return tuple(row[self.place] for row in self.rows)

    def stretches(self, bounds: Sequence[int]) -> list[list[int]]:
        """Of each row the bounds of its members' slices."""
        width = len(self.inside)
        return [list(bounds[start : start + width + 1]) for start in range(0, width * len(self.rows), width)]


class Nearby:
    """A Transport. near: among the ranks of my machine; far: among all ranks.

    Ranks agree on the way of a group without asking: it depends only on which machine each rank is on, which all know. Over several
    machines sums are taken inside each machine in the group's order, then in the order of machines: the same bits on every rank and in
    every run, though not those of one machine.
    """

    name = "shm inside machines, gloo between"

    def __init__(self, near: SharedMemory, far: Messages) -> None:
        self.near, self.far, self.here = near, far, frozenset(near.machine.ranks)
        self.rank = near.rank
        self._machine = {rank: number for number, ranks in enumerate(near.machine.machines) for rank in ranks}
        self._spreads: dict[tuple[int, ...], Spread | None] = {}
        self._lanes: dict[int, Lane] = {}

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, ranks: Sequence[int], channel: int, op: str = "sum") -> Work:
        spread = self._spread(ranks)
        if spread is None:
            return self._among(ranks).all_reduce(x, ranks, channel, op)
        check(x, op)

        def three() -> None:
            width, inner = len(spread.inside), _inner(channel)
            bounds = [x.numel() * i // width for i in range(width + 1)]
            mine = x[bounds[spread.place] : bounds[spread.place + 1]]
            self.near.reduce_scatter(x, bounds, spread.inside, inner, mine, False, _partly(op)).wait()
            self.far.all_reduce(mine, spread.across, channel, _partly(op)).wait()
            if op == "avg":
                mine.div_(len(ranks))
            self.near.all_gather(x, bounds, spread.inside, inner).wait()

        return self._later(channel, three)

    def reduce_scatter(
        self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int, into: Tensor, accumulate: bool, op: str = "sum"
    ) -> Work:
        spread = self._spread(ranks)
        if spread is None:
            return self._among(ranks).reduce_scatter(x, bounds, ranks, channel, into, accumulate, op)
        check(x, op)

        def two() -> None:
            stretches, inner = spread.stretches(bounds), _inner(channel)
            kept = _bounds([cuts[spread.place + 1] - cuts[spread.place] for cuts in stretches])
            sums = x.new_empty(kept[-1])
            for cuts, (low, high) in zip(stretches, pairwise(kept), strict=True):
                part, local = x[cuts[0] : cuts[-1]], [cut - cuts[0] for cut in cuts]
                self.near.reduce_scatter(part, local, spread.inside, inner, sums[low:high], False, _partly(op)).wait()
            whole = torch.empty_like(into) if op == "avg" and accumulate else into
            self.far.reduce_scatter(sums, kept, spread.across, channel, whole, accumulate and whole is into, _partly(op)).wait()
            if op == "avg":
                whole.div_(len(ranks))
            if whole is not into:
                into.add_(whole)

        return self._later(channel, two)

    def all_gather(self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int) -> Work:
        spread = self._spread(ranks)
        if spread is None:
            return self._among(ranks).all_gather(x, bounds, ranks, channel)

        def two() -> None:
            stretches, inner = spread.stretches(bounds), _inner(channel)
            slices = [x[cuts[spread.place] : cuts[spread.place + 1]] for cuts in stretches]
            kept = _bounds([len(part) for part in slices])
            joined = x.new_empty(kept[-1])
            joined[kept[spread.row] : kept[spread.row + 1]] = slices[spread.row]
            self.far.all_gather(joined, kept, spread.across, channel).wait()
            for row, (low, high) in enumerate(pairwise(kept)):
                if row != spread.row:
                    slices[row].copy_(joined[low:high])
            for cuts in stretches:
                part, local = x[cuts[0] : cuts[-1]], [cut - cuts[0] for cut in cuts]
                self.near.all_gather(part, local, spread.inside, inner).wait()

        return self._later(channel, two)

    def broadcast(self, x: Tensor, ranks: Sequence[int], source: int, channel: int) -> Work:
        spread = self._spread(ranks)
        if spread is None:
            return self._among(ranks).broadcast(x, ranks, source, channel)
        place = next(row.index(source) for row in spread.rows if source in row)

        def two() -> None:
            if place == spread.place:
                self.far.broadcast(x, spread.across, source, channel).wait()
            self.near.broadcast(x, spread.inside, spread.inside[place], _inner(channel)).wait()

        return self._later(channel, two)

    def barrier(self, ranks: Sequence[int], channel: int) -> Work:
        """Until all ranks of the group have come here."""
        if self.here.issuperset(ranks):
            return self.near.barrier(ranks, channel)
        return self.all_reduce(torch.zeros(1, dtype=torch.uint8), ranks, channel)

    def send(self, x: Tensor, to: int, channel: int) -> Work:
        return self._among((to,)).send(x, to, channel)

    def receive(self, x: Tensor, source: int, channel: int) -> Work:
        return self._among((source,)).receive(x, source, channel)

    # -- memory, and the end -----------------------------------------------------------------------------------------

    def own(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor:
        """The group's ranks on my machine can read it."""
        spread = self._spread(ranks)
        return self._among(ranks).own(elements, dtype, ranks) if spread is None else self.near.own(elements, dtype, spread.inside)

    def common(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor | None:
        return self._among(ranks).common(elements, dtype, ranks)

    def close(self) -> None:
        """Leave the far ranks, then the near ones, who see at once if I am gone."""
        self._lanes.clear()
        self.far.close()
        self.near.close()

    def _among(self, ranks: Sequence[int]) -> SharedMemory | Messages:
        """One machine's ranks may meet in shared memory; all others of the group must know that they do not."""
        return self.near if self.here.issuperset(ranks) else self.far

    def _spread(self, ranks: Sequence[int]) -> Spread | None:
        """How a group lies that goes the hierarchical way; None: it does not."""
        key = tuple(ranks)
        if key not in self._spreads:
            rows = tuple(tuple(row) for _, row in groupby(key, self._machine.__getitem__))
            machines = {self._machine[rank] for rank in key}
            regular = len(machines) == len(rows) > 1 and len({len(row) for row in rows}) == 1 and len(rows[0]) > 1
            row = next((i for i, row in enumerate(rows) if self.rank in row), 0)
            self._spreads[key] = Spread(rows, row, rows[row].index(self.rank)) if regular else None
        return self._spreads[key]

    def _later(self, channel: int, stages: Callable[[], None]) -> FarWork:
        """See [Note: a thread for what goes three ways]."""
        work = FarWork()
        if channel not in self._lanes:
            self._lanes[channel] = Lane()
        self._lanes[channel].put(stages, work)
        return work


def _inner(channel: int) -> int:
    """The channel of the stages inside a machine: none that a caller names, since groups of these ranks may have one of that number."""
    return -1 - channel


def _partly(op: str) -> str:
    """What is done in stages: an average is a sum until the last one."""
    return "sum" if op == "avg" else op


def _bounds(sizes: Sequence[int]) -> list[int]:
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return bounds
