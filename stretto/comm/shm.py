"""SharedMemory: a transport between ranks of one machine, who read each other's memory. Also a torch.distributed backend.

    import stretto.comm.shm
    torch.distributed.init_process_group("stretto")

Whoever waits does the work: there are no threads. A collective is a program (comm/pieces.py) that goes as far as it can when it
is issued, and further whenever this rank issues or waits for anything. [Note: serving while waiting] A rank that waits for a
peer goes on with all its own programs, because that peer may be waiting for one of them.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stretto.comm import pieces
from stretto.comm.combine import OPERATIONS, check
from stretto.comm.line import SLOT, Line, Need, signature
from stretto.comm.machine import Machine, file_of, new_memory
from stretto.errors import PeerLost

#: Looks at a peer's count before the core is offered to others, where every rank has a core of its own.
LOOKS = 20
#: Seconds of waiting after which a rank sleeps between looks, and for how long.
PATIENCE, NAP = 2e-3, 5e-5
#: Operations as numbers.
CODES = {op: code for code, op in enumerate(OPERATIONS)}
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


class Work:
    """A collective under way. asked: its signature; make: begins its program; kept: peers may read x beyond its end."""

    __slots__ = ("_kept", "_transport", "asked", "done", "error", "line", "make", "need", "program")

    def __init__(self, transport: SharedMemory, line: Line, asked: int, make: Callable[[], pieces.Program], kept: bool) -> None:
        self._transport, self.line, self.asked, self.make, self._kept = transport, line, asked, make, kept
        self.program: pieces.Program | None = None
        self.need: Need = ((), 0)
        self.done = False
        self.error: BaseException | None = None

    def result(self) -> None:
        """Until the result is there. x must not be written before `wait` has returned: peers may still read it."""
        if not self.done:
            self._transport.until(self, lambda: self.done)
        if self.error is not None:
            raise self.error

    def wait(self) -> None:
        """Until the result is there and x may be written again. Raises PeerLost if a peer is gone, Mismatch if it asked otherwise."""
        self.result()
        if self._kept:
            self._transport.until(self, lambda: self.line.reached(self.need))
            if self.error is not None:
                raise self.error
            self._kept = False

    def advance(self) -> None:
        """Go on as far as peers allow; then `done` is True or `need` says what is waited for."""
        if self.program is None:
            self.line.begin(self.asked)
            self.program = self.make()
        try:
            while self.line.reached(self.need):
                self.need = next(self.program)
        except StopIteration:
            self.done, self.program = True, None
            self.need = (self.line.others, self.line.count)
            self.line.settle()


class SharedMemory:
    """A Transport among the ranks of one machine. timeout: seconds that a rank may wait for another; slot: see Line."""

    name = "shm"

    def __init__(self, machine: Machine, timeout: float = 600.0, slot: int = SLOT) -> None:
        self.machine, self.rank, self.timeout, self.slot = machine, machine.rank, timeout, slot
        self._looks = LOOKS if len(machine.ranks) <= machine.cores else 0
        self._lines: dict[tuple[str, tuple[int, ...], int], Line] = {}
        self._queues: dict[Line, deque[Work]] = {}  # of lines with work under way
        self._broken: dict[Line, BaseException] = {}
        self._lock = threading.RLock()
        self._areas: dict[int, Area] = {}  # by start
        self._starts: list[int] = []
        self._made: dict[tuple[int, ...], int] = {}
        self._left = False
        atexit.register(self._at_exit)  # a program that ends may not have said good-bye

    # -- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, ranks: Sequence[int], channel: int, op: str = "sum") -> Work:
        """Everybody's x combined (op: sum, avg, max, min), in place and bit for bit the same on all ranks. x: flat."""
        check(x, op)
        line, area = self._line("all", ranks, channel), self._area(x, ranks)
        asked = signature("all_reduce", x.numel(), x.dtype, (*self._place(area, x), CODES[op]))
        if area is None:
            return self._issue(line, asked, lambda: pieces.through_all_reduce(line, x, op))
        if area.common and line.size > 1:
            raise ValueError("all ranks have one memory here: there are no parts to add")
        return self._issue(line, asked, lambda: pieces.shared_all_reduce(line, self._copies(area, x, line), op))

    def reduce_scatter(
        self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int, into: Tensor, accumulate: bool, op: str = "sum"
    ) -> Work:
        """Everybody's x combined; my slice [bounds[i], bounds[i+1]) of it is written to, or added to, `into`.

        x: flat. `into` may be that slice of x itself. The other slices of x are left as they were.
        """
        check(x, op)
        line, area = self._line("all", ranks, channel), self._area(x, ranks)
        asked = signature("reduce_scatter", x.numel(), x.dtype, (*bounds, *self._place(area, x), CODES[op]))
        if area is None:
            return self._issue(line, asked, lambda: pieces.through_reduce_scatter(line, x, bounds, into, accumulate, op))
        if area.common and line.size > 1:
            raise ValueError("all ranks have one memory here: there are no parts to add")
        mine = slice(bounds[line.index], bounds[line.index + 1])
        parts = [copy[mine] for copy in self._copies(area, x, line)]
        return self._issue(line, asked, lambda: pieces.shared_reduce_scatter(line, parts, into, accumulate, op), kept=True)

    def all_gather(self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int) -> Work:
        """Everybody's slice [bounds[i], bounds[i+1]) of x, in place: mine is there already. x: flat."""
        line, area = self._line("all", ranks, channel), self._area(x, ranks)
        asked = signature("all_gather", x.numel(), x.dtype, (*bounds, *self._place(area, x)))
        if area is None:
            return self._issue(line, asked, lambda: pieces.through_all_gather(line, x, bounds))
        if area.common:
            return self._issue(line, asked, lambda: pieces.one_memory(line, line.others))
        return self._issue(line, asked, lambda: pieces.shared_all_gather(line, self._copies(area, x, line), bounds), kept=True)

    def broadcast(self, x: Tensor, ranks: Sequence[int], source: int, channel: int) -> Work:
        """x of rank `source`, in place on every rank of the group. x: flat."""
        line, area = self._line("all", ranks, channel), self._area(x, ranks)
        first = line.ranks.index(source)
        asked = signature("broadcast", x.numel(), x.dtype, (source, *self._place(area, x)))
        if area is None:
            return self._issue(line, asked, lambda: pieces.through_broadcast(line, x, first))
        if area.common:
            return self._issue(line, asked, lambda: pieces.one_memory(line, () if source == self.rank else (first,)))
        return self._issue(line, asked, lambda: pieces.shared_broadcast(line, self._copies(area, x, line), first), kept=True)

    def send(self, x: Tensor, to: int, channel: int) -> Work:
        """x to rank `to`, which must `receive` on the same channel; messages of one pair and channel arrive in order. x: flat."""
        line = self._line("pair", (self.rank, to), channel)
        return self._issue(line, signature("send", x.numel(), x.dtype, ()), lambda: pieces.through_broadcast(line, x, 0))

    def receive(self, x: Tensor, source: int, channel: int) -> Work:
        """The next message of rank `source` on this channel, into x. x: flat."""
        line = self._line("pair", (source, self.rank), channel)
        return self._issue(line, signature("send", x.numel(), x.dtype, ()), lambda: pieces.through_broadcast(line, x, 0))

    def barrier(self, ranks: Sequence[int], channel: int) -> Work:
        """Until all ranks of the group have come here."""
        line = self._line("all", ranks, channel)
        return self._issue(line, signature("barrier", 0, torch.uint8, ()), lambda: pieces.one_memory(line, line.others))

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
        line = self._line("memory", ranks, 0)
        asked = signature("memory", bytes_, torch.uint8, ())
        bounds = range(0, len(files) + 1, 2)
        self._issue(line, asked, lambda: pieces.through_all_gather(line, files, bounds)).wait()

    def _forget(self, start: int) -> None:
        with self._lock:
            self._areas.pop(start, None)
            self._starts = sorted(self._areas)

    def _area(self, x: Tensor, ranks: Sequence[int]) -> Area | None:
        """The area in which x lies, if all `ranks` can read it. To a rank alone all its memory is such an area."""
        if len(ranks) == 1:
            return Area(0, x.data_ptr(), x.data_ptr() + 1, (self.rank,), (), False)
        if not self._starts:
            return None
        address = x.data_ptr()
        at = bisect_right(self._starts, address) - 1
        area = self._areas[self._starts[at]] if at >= 0 else None
        return area if area is not None and address < area.stop and set(ranks) <= set(area.ranks) else None

    def _place(self, area: Area | None, x: Tensor) -> tuple[int, ...]:
        """Where in shared memory x lies: the same on all ranks, or they would read something else."""
        return (-1,) if area is None else (area.number, x.data_ptr() - area.start, area.common)

    def _copies(self, area: Area, x: Tensor, line: Line) -> list[Tensor]:
        """x of every rank of the line."""
        low = x.data_ptr() - area.start
        high = low + x.numel() * x.dtype.itemsize
        return [x if rank == self.rank else area.copies[area.ranks.index(rank)][low:high].view(x.dtype) for rank in line.ranks]

    # -- programs under way --------------------------------------------------------------------------------------------

    def _line(self, kind: str, ranks: Sequence[int], channel: int) -> Line:
        key = (kind, tuple(ranks), channel)
        line = self._lines.get(key)
        if line is None:
            members = ",".join(map(str, key[1]))
            line = self._lines[key] = Line(self.machine, key[1], f"{kind} of ranks {members} on channel {channel}", self.slot)
        return line

    def _issue(self, line: Line, asked: int, make: Callable[[], pieces.Program], kept: bool = False) -> Work:
        """Begin as soon as the line's earlier works are done; with it everything else under way goes on."""
        work = Work(self, line, asked, make, kept)
        with self._lock:
            if self._queues:
                self._progress()
            if line in self._queues:
                self._queues[line].append(work)
            elif not self._advance(line, queue := deque((work,))):
                self._queues[line] = queue
        return work

    def _progress(self) -> bool:
        """Go on with every program as far as its peers allow; whether anything was done."""
        moved = False
        for line, queue in list(self._queues.items()):
            before = line.count
            if self._advance(line, queue):
                del self._queues[line]
                moved = True
            moved |= line.count != before
        return moved

    def _advance(self, line: Line, queue: deque[Work]) -> bool:
        """Go on with the works of a line, in their order; whether none is left."""
        while queue:
            work = queue[0]
            try:
                if line in self._broken:
                    raise self._broken[line]
                if not line.open():
                    return False
                work.advance()
                if not work.done:
                    return False
            except Exception as error:  # handed to whoever waits; what comes after it on this line would be out of step
                self._broken[line] = work.error = error
                work.done, work.program = True, None
            queue.popleft()
        return True

    def until(self, work: Work, there: Callable[[], bool]) -> None:
        """Wait, and go on with everything under way meanwhile ([Note: serving while waiting])."""
        looks, idle_since, count, stuck_since, checked = 0, 0.0, -1, 0.0, 0.0
        while True:
            with self._lock:
                moved = bool(self._queues) and self._progress()
                if there() or work.error is not None:
                    return
            looks = 0 if moved else looks + 1
            if looks <= self._looks:
                continue
            now = time.monotonic()
            if looks == self._looks + 1:
                idle_since = now
            if work.line.count != count:
                count, stuck_since, checked = work.line.count, now, now
            if now > checked + CHECK:
                checked = now
                self._look_around(work, now - stuck_since)
            if now > idle_since + PATIENCE:
                time.sleep(NAP)
            else:
                os.sched_yield()

    def _look_around(self, work: Work, waited: float) -> None:
        """Give the work up if it waits for somebody who is gone, or for too long."""
        with self._lock:
            line = work.line
            late = line.behind(work.need if work.done else self._queues[line][0].need)
            if any(line.has_left(rank) or self.machine.gone(rank) for rank in late):
                lost = [rank for rank in line.ranks if self.machine.gone(rank) and not line.has_left(rank)]
                if lost:  # a rank that has left had lost another before: of all, name one that went without a word
                    return self._give_up(work, f"rank {lost[0]} is gone: its process {self.machine.pids[lost[0]]} has ended")
                return self._give_up(work, f"rank {late[0]} has left, and rank {self.rank} still waits for it")
            if late and waited > self.timeout:
                self._give_up(work, f"rank {', '.join(map(str, late))} did not come to {line.name} within {self.timeout:g} s")

    def _give_up(self, work: Work, why: str) -> None:
        work.error = self._broken[work.line] = PeerLost(why)
        self._progress()

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
