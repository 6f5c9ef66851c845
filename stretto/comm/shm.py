"""SharedMemory: a transport between ranks of one machine, who read each other's memory. Also a torch.distributed backend.

    import stretto.comm.shm
    torch.distributed.init_process_group("stretto")

Whoever waits does the work: there are no threads. A collective is a recipe (comm/recipe.py) that goes as far as it can when it
is issued, and further whenever this rank issues or waits for anything. [Note: serving while waiting] A rank that waits for a
peer goes on with all its own recipes, because that peer may be waiting for one of them.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.comm import inplace, pieces
from stretto.comm.combine import check
from stretto.comm.execute import carrier
from stretto.comm.line import SLOT, SLOT_COMPILED, Line, Need, signature
from stretto.comm.machine import Machine, file_of, new_memory
from stretto.comm.recipe import Recipe, barrier
from stretto.errors import PeerLost

#: Looks at a peer's count before the core is offered to others, where every rank has a core of its own: some 10 microseconds.
LOOKS, LOOKS_COMPILED = 20, 400
TRIES = 3
#: Seconds of waiting after which a rank sleeps between looks, and for how long.
PATIENCE, NAP = 2e-3, 5e-5
#: Recipes that are kept for calls to come.
RECIPES = 4096
#: Seconds between looks at whether the peers waited for still live.
CHECK = 0.1


@dataclass(frozen=True)
class Area:
    """Memory of mine that the other ranks of a group can read. start, stop: addresses; copies: of every rank, uint8."""

    number: int
    start: int
    stop: int
    ranks: tuple[int, ...]
    copies: tuple[Tensor, ...]
    common: bool

    def place(self, x: Tensor) -> tuple[int, ...]:
        """Where in the area x lies: the same on all ranks, or they would read something else."""
        return self.number, x.data_ptr() - self.start, self.common


class Work:
    """A collective under way."""

    __slots__ = ("_into", "_kept", "_number", "_transport", "_x", "done", "error", "line", "recipe")

    def __init__(self, transport: SharedMemory, recipe: Recipe, x: Tensor, into: Tensor) -> None:
        self._transport, self.recipe, self._x, self._into = transport, recipe, x, into
        self.line, self._kept = recipe.line, recipe.kept
        self.done = False
        self.error: BaseException | None = None

    def result(self) -> None:
        """Until the result is there. x must not be written before `wait` has returned: peers may still read it."""
        if not self.done:
            self._transport.until(self)
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        """Until the result is there and x may be written again. Raises PeerLost if a peer is gone, Mismatch if it asked otherwise."""
        if not self.done:
            self._transport.until(self)
        if self.error is not None:
            raise self.error
        if self._kept:
            self._transport.until(self, read=True)
            if self.error is not None:
                raise self.error
            self._kept = False

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once. Whoever asks again and again does the work by asking."""
        with self._transport.lock:
            self._transport.progress()
            return self.has_come(self._kept)

    def has_come(self, read: bool) -> bool:
        """Whether it is done, and if `read`, peers have read what was handed in; or whether that will never be."""
        return (self.done and (not read or self.line.reached(self.need()))) or self.error is not None

    def need(self) -> Need:
        """Whom it waits for: to go on, or once it is done, until they have read."""
        return (self.line.others, self._number) if self.done else self.recipe.need()

    def advance(self, looks: int) -> None:
        """Go on as far as peers allow, looking `looks` times before giving up for now."""
        if self.recipe.go(self.recipe, self._x, self._into, looks):
            self.done, self._number = True, self.line.count
            self.line.settle()


class SharedMemory:
    """A Transport among the ranks of one machine. timeout: seconds that a rank may wait for another; slot: see Line."""

    name = "shm"

    def __init__(self, machine: Machine, timeout: float = 600.0, slot: int | None = None) -> None:
        self.machine, self.rank, self.timeout = machine, machine.rank, timeout
        self.slot = slot or (SLOT_COMPILED if machine.compiled else SLOT)
        self._looks = self._tries = 0  # in a step, and of all steps under way, before the core is offered to others
        if len(machine.ranks) <= machine.cores:
            self._looks = LOOKS_COMPILED if machine.compiled else LOOKS
            self._tries = TRIES
        self._lines: dict[tuple[str, tuple[int, ...], int], Line] = {}
        self._queues: dict[Line, deque[Work]] = {}  # of lines with work under way
        self._broken: dict[Line, BaseException] = {}
        self.lock = threading.RLock()
        self._recipes: dict[Hashable, Recipe] = {}
        self._areas: dict[int, Area] = {}  # by start
        self._starts: list[int] = []
        self._made: dict[tuple[int, ...], int] = {}
        self._nothing = torch.empty(0)
        self._left = False
        atexit.register(self._at_exit)  # a process that ends may not have said good-bye

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, ranks: Sequence[int], channel: int, op: str = "sum") -> Work:
        """Everybody's x combined (op: sum, avg, max, min), in place and bit for bit the same on all ranks. x: flat."""
        key = ("all_reduce", tuple(ranks), channel, x.numel(), x.dtype, self._shared(x), op)
        recipe = self._recipes.get(key)
        if recipe is None:
            check(x, op)
            line, area = self._line("all", key[1], channel), self._area(x, key[1])
            if area is None:
                recipe = pieces.all_reduce(line, x.numel(), x.dtype, op)
            else:
                recipe = inplace.all_reduce(line, x.numel(), self._peers(area, x, line, adds=True), x.dtype, op, area.place(x))
            self._keep(key, recipe)
        return self._issue(recipe, x, x)

    def reduce_scatter(
        self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int, into: Tensor, accumulate: bool, op: str = "sum"
    ) -> Work:
        """Everybody's x combined; my slice [bounds[i], bounds[i+1]) of it is written to, or added to, `into`.

        x: flat. `into` may be that slice of x itself. The other slices of x are left as they were.
        """
        cuts = tuple(bounds)
        key = ("reduce_scatter", tuple(ranks), channel, cuts, x.dtype, self._shared(x), op, accumulate)
        recipe = self._recipes.get(key)
        if recipe is None:
            check(x, op)
            line, area = self._line("all", key[1], channel), self._area(x, key[1])
            if area is None:
                recipe = pieces.reduce_scatter(line, cuts, x.dtype, accumulate, op)
            else:
                peers = self._peers(area, x, line, adds=True)
                recipe = inplace.reduce_scatter(line, cuts, peers, x.dtype, accumulate, op, area.place(x))
            self._keep(key, recipe)
        return self._issue(recipe, x, into)

    def all_gather(self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int) -> Work:
        """Everybody's slice [bounds[i], bounds[i+1]) of x, in place: mine is there already. x: flat."""
        cuts = tuple(bounds)
        key = ("all_gather", tuple(ranks), channel, cuts, x.dtype, self._shared(x))
        recipe = self._recipes.get(key)
        if recipe is None:
            line, area = self._line("all", key[1], channel), self._area(x, key[1])
            if area is None:
                recipe = pieces.all_gather(line, cuts, x.dtype)
            else:
                recipe = inplace.all_gather(line, cuts, self._peers(area, x, line), x.dtype, area.place(x))
            self._keep(key, recipe)
        return self._issue(recipe, x, x)

    def broadcast(self, x: Tensor, ranks: Sequence[int], source: int, channel: int) -> Work:
        """x of rank `source`, in place on every rank of the group. x: flat."""
        key = ("broadcast", tuple(ranks), channel, x.numel(), x.dtype, self._shared(x), source)
        recipe = self._recipes.get(key)
        if recipe is None:
            line, area = self._line("all", key[1], channel), self._area(x, key[1])
            first = line.ranks.index(source)
            if area is None:
                recipe = pieces.broadcast(line, x.numel(), x.dtype, first)
            else:
                recipe = inplace.broadcast(line, x.numel(), self._peers(area, x, line), x.dtype, first, area.place(x))
            self._keep(key, recipe)
        return self._issue(recipe, x, x)

    def send(self, x: Tensor, to: int, channel: int) -> Work:
        """x to rank `to`, which must `receive` on the same channel; messages of one pair and channel arrive in order. x: flat."""
        return self._message(x, (self.rank, to), channel)

    def receive(self, x: Tensor, source: int, channel: int) -> Work:
        """The next message of rank `source` on this channel, into x. x: flat."""
        return self._message(x, (source, self.rank), channel)

    def _message(self, x: Tensor, pair: tuple[int, int], channel: int) -> Work:
        key = ("message", pair, channel, x.numel(), x.dtype)
        recipe = self._recipes.get(key)
        if recipe is None:
            recipe = self._keep(key, pieces.broadcast(self._line("pair", pair, channel), x.numel(), x.dtype, 0, "send"))
        return self._issue(recipe, x, x)

    def barrier(self, ranks: Sequence[int], channel: int) -> Work:
        """Until all ranks of the group have come here."""
        key = ("barrier", tuple(ranks), channel)
        recipe = self._recipes.get(key)
        if recipe is None:
            line = self._line("all", key[1], channel)
            recipe = self._keep(key, barrier(line, line.others))
        return self._issue(recipe, self._nothing, self._nothing)

    def _keep(self, key: Hashable, recipe: Recipe) -> Recipe:
        """Keep a recipe for calls that are alike."""
        recipe.go = carrier(recipe, self.machine.compiled)
        if len(self._recipes) >= RECIPES:
            self._recipes.clear()
        self._recipes[key] = recipe
        return recipe

    # -- memory ------------------------------------------------------------------------------------------------------

    def own(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor:
        """Zeros of mine that the other ranks can read where they lie: collectives on them, or on one slice of all, copy nothing.

        Collective. The memory is free once no rank has a tensor over it.
        """
        return self._memory(elements, dtype, tuple(ranks), common=False)

    def common(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor | None:
        """Zeros that all these ranks share: one memory, so that whoever writes a slice has gathered it. Collective.

        Only the caller's protocol keeps ranks from writing what others still read.
        """
        return self._memory(elements, dtype, tuple(ranks), common=True)

    def _memory(self, elements: int, dtype: torch.dtype, ranks: tuple[int, ...], common: bool) -> Tensor:
        bytes_ = max(elements * dtype.itemsize, 1)
        index, makes = ranks.index(self.rank), not common or ranks[0] == self.rank
        mine, descriptor = new_memory(bytes_) if makes else (torch.empty(0, dtype=torch.uint8), -1)
        try:
            files = torch.zeros(2 * len(ranks), dtype=torch.int64)
            if makes:
                files[2 * index : 2 * index + 2] = torch.tensor(file_of(descriptor)[1:])
            self._meet(ranks, files, bytes_)
            owners = range(1) if common else range(len(ranks))
            copies = [
                mine if i == index else self.machine.peers_memory(ranks[i], files[2 * i : 2 * i + 2].tolist(), bytes_) for i in owners
            ]
            self._meet(ranks, files, bytes_)  # all have mapped it
        finally:
            if makes:
                os.close(descriptor)
        mine = copies[0 if common else index]
        start, number = mine.data_ptr(), self._made.get(ranks, 0)
        self._made[ranks] = number + 1
        peers = tuple(copy if copy is not mine else torch.empty(0) for copy in copies)  # mine must be able to end
        self._areas[start] = Area(number, start, start + bytes_, ranks, peers, common)
        self._starts = sorted(self._areas)
        weakref.finalize(mine.untyped_storage(), self._forget, start).atexit = False
        return mine[: elements * dtype.itemsize].view(dtype)

    def _meet(self, ranks: tuple[int, ...], files: Tensor, bytes_: int) -> None:
        """Exchange where memory is to be found."""
        recipe = pieces.all_gather(self._line("memory", ranks, 0), tuple(range(0, len(files) + 1, 2)), files.dtype)
        recipe.asked = signature("memory", bytes_, torch.uint8, ())
        recipe.go = carrier(recipe, self.machine.compiled)
        self._issue(recipe, files, files).wait()

    def _forget(self, start: int) -> None:
        with self.lock:
            self._starts = [other for other in self._starts if other != start]  # first: threads find areas by it
            self._areas.pop(start, None)
            self._recipes.clear()  # they hold memory of peers, and what lies at these addresses later is something else

    def _shared(self, x: Tensor) -> int:
        """x's address, if it lies in memory that peers can read; else 0."""
        return x.data_ptr() if self._starts and self._area_of(x) else 0

    def _area_of(self, x: Tensor) -> Area | None:
        """The area in which x lies. Threads may ask while others make areas, or let go of others than x's."""
        starts, address = self._starts, x.data_ptr()
        at = bisect_right(starts, address) - 1
        area = self._areas.get(starts[at]) if at >= 0 else None
        return area if area is not None and address < area.stop else None

    def _area(self, x: Tensor, ranks: Sequence[int]) -> Area | None:
        """The area in which x lies, if all `ranks` can read it. To a rank alone all its memory is such an area."""
        if len(ranks) == 1:
            return Area(0, x.data_ptr(), x.data_ptr() + 1, (self.rank,), (torch.empty(0),), False)
        area = self._area_of(x)
        return area if area is not None and set(ranks) <= set(area.ranks) else None

    def _peers(self, area: Area, x: Tensor, line: Line, adds: bool = False) -> list[Tensor]:
        """x of every other rank of the line, and something empty at my place; nothing at all if there is one x for all."""
        if area.common:
            if adds:
                raise ValueError("all ranks have one memory here: there are no parts to add")
            return []
        low = x.data_ptr() - area.start
        high = low + x.numel() * x.dtype.itemsize
        peers = (area.copies[area.ranks.index(rank)] for rank in line.ranks)
        return [copy[low:high].view(x.dtype) if len(copy) else copy for copy in peers]

    # -- recipes under way --------------------------------------------------------------------------------------------

    def _line(self, kind: str, ranks: Sequence[int], channel: int) -> Line:
        key = (kind, tuple(ranks), channel)
        line = self._lines.get(key)
        if line is None:
            members = ",".join(map(str, key[1]))
            line = self._lines[key] = Line(self.machine, key[1], f"{kind} of ranks {members} on channel {channel}", self.slot)
        return line

    def _issue(self, recipe: Recipe, x: Tensor, into: Tensor) -> Work:
        """Begin as soon as the line's earlier works are done; with it everything else under way goes on."""
        work = Work(self, recipe, x, into)
        with self.lock:
            if self._queues:
                self.progress()
            queue = self._queues.get(work.line)
            if queue:
                queue.append(work)
            elif not self._advance(work, 0):
                self._queues[work.line] = deque((work,))
        return work

    def progress(self, looks: int = 0) -> bool:
        """Go on with every recipe as far as its peers allow; whether anything was done. looks: at each count that is waited for."""
        moved = False
        for line, queue in list(self._queues.items()):
            before = line.count
            while queue and self._advance(queue[0], looks):
                queue.popleft()
                moved = True
            if not queue:
                del self._queues[line]
            moved |= line.count != before
        return moved

    def _advance(self, work: Work, looks: int) -> bool:
        """Go on with the work whose turn it is on its line; whether it has come to its end."""
        line = work.line
        try:
            if self._broken and line in self._broken:
                raise self._broken[line]
            if line.memory is None and not line.open():
                return False
            work.advance(looks)
        except Exception as error:  # handed to whoever waits; what comes after it on this line would be out of step
            self._broken[line] = work.error = error
            work.done = True
        return work.done

    def until(self, work: Work, read: bool = False) -> None:
        """Wait until the work is done, and if `read`, until peers have read what was handed in. Meanwhile everything under way
        goes on ([Note: serving while waiting])."""
        line = work.line
        tries, idle_since, count, stuck_since, checked = 0, 0.0, -1, 0.0, 0.0
        while True:
            with self.lock:
                moved = bool(self._queues) and self.progress(self._looks if len(self._queues) == 1 else 0)
                if work.has_come(read):
                    return
            tries = 0 if moved else tries + 1
            if tries <= self._tries:
                continue
            now = time.monotonic()
            if tries == self._tries + 1:
                idle_since = now
            if line.count != count:
                count, stuck_since, checked = line.count, now, now
            if now > checked + CHECK:
                checked = now
                self._look_around(work, now - stuck_since)
            if now > idle_since + PATIENCE:
                time.sleep(NAP)
            else:
                os.sched_yield()

    def _look_around(self, work: Work, waited: float) -> None:
        """Give the work up if it waits for somebody who is gone, or for too long."""
        with self.lock:
            line = work.line
            late = line.behind(work.need() if work.done else self._queues[line][0].need())
            if any(line.has_left(rank) or self.machine.gone(rank) for rank in late):
                lost = [rank for rank in line.ranks if self.machine.gone(rank) and not line.has_left(rank)]
                if lost:  # a rank that has left had lost another before: of all, name one that went without a word
                    return self._give_up(work, f"rank {lost[0]} is gone: its process {self.machine.pids[lost[0]]} has ended")
                return self._give_up(work, f"rank {late[0]} has left, and rank {self.rank} still waits for it")
            if late and waited > self.timeout:
                self._give_up(work, f"rank {', '.join(map(str, late))} did not come to {line.name} within {self.timeout:g} s")

    def _give_up(self, work: Work, why: str) -> None:
        work.error = self._broken[work.line] = PeerLost(why)
        self.progress()

    def close(self, patience: float | None = None) -> None:
        """Leave: whoever still waits for this rank is told. What it has sent to ranks that have not looked yet would be lost with
        its memory, so it stays until they have, or have left themselves; at most `patience` seconds (default: the timeout)."""
        atexit.unregister(self._at_exit)
        if self._left:
            return
        self._left = True
        limit = time.monotonic() + (self.timeout if patience is None else patience)
        for line in self._lines.values():
            line.leave()
        self.machine.leave()
        while time.monotonic() < limit and not all(
            all(self.machine.left(rank) for rank in line.awaited()) for line in self._lines.values()
        ):
            time.sleep(1e-3)
        for line in self._lines.values():
            line.close()
        self.machine.close()

    def _at_exit(self) -> None:
        self.close(patience=1.0)


def _group(options: Any, _: object) -> dist.ProcessGroup:
    """What torch calls for a group of ranks with this backend. options: torch's DistributedBackendOptions."""
    from stretto.comm import backend

    ranks = options.global_ranks_in_group or range(options.group_size)
    return backend.make(options.store, options.group_rank, options.group_size, options.timeout, options.group_id, ranks)


dist.Backend.register_backend("stretto", _group, extended_api=True, devices=["cpu"])
