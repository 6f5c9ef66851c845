"""Line: what the ranks of a group share on one channel: a counter each, and a few slots each for pieces of tensors.

[Note: one counter a rank] On a line every rank does the same activities in the same order (write a piece, add it up, copy it
out), and counts those it has done. To wait is to wait until others have counted so far. An activity waits only for activities
with smaller numbers, so the rank that is furthest behind can always go on: a line cannot deadlock, whatever the timing. Only a
rank writes its own counter, and x86 shows writes in the order in which they were made: who sees a count sees the data too.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.comm.machine import Machine, file_of, new_memory
from stretto.errors import Mismatch, PeerLost

#: Bytes of a slot: a piece that one rank wrote is still in cache when another reads it. The compiled steps (comm/execute.py) have
#: little to do between pieces, so they take smaller ones, which stay in a nearer cache.
SLOT, SLOT_COMPILED = 1 << 20, 1 << 17
#: Slots a rank: some are read while others are being filled.
SLOTS = 4
#: Pieces by which an activity runs ahead of the next one on the same piece.
AHEAD = 1
#: 8-byte words of a rank's own part of the counters, two cache lines: its count, its state, what its last calls asked for.
WORDS, STATE, CALLS, CALLS_KEPT = 16, 1, 2, 8
PRESENT, LEFT = 1, 2

KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "barrier", "memory")
CODES = {kind: code << 60 for code, kind in enumerate(KINDS)}
DTYPES = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
DTYPE_CODES = {dtype: code << 54 for code, dtype in enumerate(DTYPES)}
OTHER = len(DTYPES) << 54
#: Positions in the line's group, and the count that each of them must have reached.
Need = tuple[tuple[int, ...], int]
NOBODY: Need = ((), 0)


def signature(kind: str, elements: int, dtype: torch.dtype, rest: tuple[int, ...]) -> int:
    """What a call asks for in 64 bits: kind, dtype and elements can be read from it, of the rest only whether it is the same."""
    return CODES[kind] | DTYPE_CODES.get(dtype, OTHER) | (hash(rest) & 0x3FFF) << 40 | elements & 0xFFFFFFFFFF


def described(signature: int) -> str:
    """'all_reduce of 5 float32'."""
    code = signature >> 54 & 63
    dtype = str(DTYPES[code]).removeprefix("torch.") if code < len(DTYPES) else "values"
    return f"{KINDS[signature >> 60]} of {signature & 0xFFFFFFFFFF} {dtype}"


class State(ctypes.Structure):
    """What a rank knows of a line; laid out as comm/steps.c reads it.

    words: everybody's counters. slots: where the slots begin. stride: words a rank. count: activities I have done; start: before the
    call under way. calls: that have begun. turn: pieces that have gone through slots; first: before the call under way. step: of that
    call, -1 between calls. agreed: whether peers were seen to have asked for the same. free: for each slot the count of everybody
    once it may be written again.
    """

    words: int | None
    slots: int | None
    count: int
    start: int
    calls: int
    turn: int
    first: int
    step: int
    agreed: int
    free: ctypes.Array[ctypes.c_uint64]

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("words", "slots")),
        *((name, ctypes.c_int64) for name in ("size", "index", "slot", "many", "stride", "calls_at", "calls_kept")),
        *((name, ctypes.c_uint64) for name in ("count", "start", "calls")),
        *((name, ctypes.c_int64) for name in ("turn", "first", "step", "agreed")),
        ("free", ctypes.c_uint64 * 8),
    ]


class Line:
    """See the module. ranks: of the group, in its order. slot: bytes of one, a multiple of 64.

    `open` must have returned True before anything else is asked.
    """

    def __init__(self, machine: Machine, ranks: tuple[int, ...], name: str, slot: int = SLOT) -> None:
        self.machine, self.ranks, self.name, self.slot = machine, ranks, name, slot
        self.size, self.index = len(ranks), ranks.index(machine.rank)
        self.others = tuple(i for i in range(self.size) if i != self.index)
        self.state = State(None, None, self.size, self.index, slot, SLOTS, WORDS, CALLS, CALLS_KEPT, step=-1)
        self.memory: Tensor | None = None
        self._words = memoryview(b"")
        self._base = 0
        self._descriptor = -1
        self._asked = 0.0
        self._head = -(-self.size * WORDS * 8 // 4096) * 4096
        self._typed: dict[torch.dtype, list[list[Tensor]]] = {}
        self._parts: dict[tuple[torch.dtype, int, int, int], list[Tensor]] = {}
        self._spare: dict[torch.dtype, Tensor] = {}

    # -- opening and leaving ---------------------------------------------------------------------------------------

    def open(self) -> bool:
        """Whether the memory is there. The group's first rank makes it; the others look whether it has, and do not wait."""
        if self.memory is not None:
            return True
        if self.size > 1 and self.index > 0:
            return self._join()
        self._memory_is(*new_memory(self._head + self.size * SLOTS * self.slot))
        if self.size > 1:
            _, descriptor, inode = file_of(self._descriptor)
            self.machine.store.set(self.name, f"{descriptor} {inode}")
        return True

    def _join(self) -> bool:
        now = time.monotonic()
        if now < self._asked + 2e-4:
            return False
        self._asked = now
        store = self.machine.store
        try:
            if not store.check([self.name]):
                return False
            file = [int(number) for number in store.get(self.name).split()]
        except RuntimeError as error:
            raise PeerLost(f"the rank that keeps the store is gone: {str(error).splitlines()[0]}") from error
        self._memory_is(self.machine.peers_memory(self.ranks[0], file, self._head + self.size * SLOTS * self.slot), -1)
        return True

    def _memory_is(self, memory: Tensor, descriptor: int) -> None:
        self.memory, self._descriptor = memory, descriptor
        self._base = memory.data_ptr() + self._head
        self._words = memoryview(memory[: self._head].numpy()).cast("Q")  # type: ignore[arg-type]
        self.state.words, self.state.slots = memory.data_ptr(), self._base
        self._own = self.index * WORDS
        self._words[self._own + STATE] = PRESENT

    def awaited(self) -> list[int]:
        """Ranks that have not mapped memory that I made."""
        if self._descriptor < 0:
            return []
        return [rank for i, rank in enumerate(self.ranks) if self._words[i * WORDS + STATE] == 0]

    def settle(self) -> None:
        """Once all have mapped the memory its descriptor is not needed."""
        if self._descriptor >= 0 and not self.awaited():
            os.close(self._descriptor)
            self._descriptor = -1

    def leave(self) -> None:
        """Tell whoever waits for me that I shall not come any more."""
        if self.memory is not None:
            self._words[self._own + STATE] = LEFT

    def close(self) -> None:
        """Let nobody map the memory any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # -- counting --------------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Activities I have done."""
        return self.state.count

    def tick(self) -> None:
        """I have done one more activity."""
        self.state.count += 1
        self._words[self._own] = self.state.count

    def reached(self, need: Need) -> bool:
        words, (who, number) = self._words, need
        for i in who:  # noqa: SIM110  (this is asked most often of all: a loop costs half of what all() does)
            if words[i * WORDS] < number:
                return False
        return True

    def behind(self, need: Need) -> list[int]:
        """Ranks that are still waited for; before the line is open, the one that opens it."""
        if self.memory is None:
            return [self.ranks[0]]
        return [self.ranks[i] for i in need[0] if self._words[i * WORDS] < need[1]]

    def has_left(self, rank: int) -> bool:
        return self.memory is not None and self._words[self.ranks.index(rank) * WORDS + STATE] == LEFT

    # -- agreement -------------------------------------------------------------------------------------------------

    def begin(self, asked: int, pieces: int) -> None:
        """A call begins: leave word of what it asks for, before its first activity is counted. pieces: it takes through slots."""
        state = self.state
        self._words[self._own + CALLS + state.calls % CALLS_KEPT] = asked
        state.calls += 1
        state.step, state.agreed, state.start, state.first = 0, 0, state.count, state.turn
        state.turn += pieces

    def agree(self, who: Sequence[int]) -> None:
        """Raise Mismatch if one of these, whose first activity of this call is done, asked for something else."""
        calls = self.state.calls
        place = CALLS + (calls - 1) % CALLS_KEPT
        mine = self._words[self._own + place]
        for i in who:
            theirs = self._words[i * WORDS + place]
            if theirs == mine:
                continue
            me, peer, asked, other = self.machine.rank, self.ranks[i], described(mine), described(theirs)
            if asked != other:
                raise Mismatch(f"{self.name}, call {calls}: rank {me} asks for {asked}, rank {peer} for {other}")
            raise Mismatch(
                f"{self.name}, call {calls}: ranks {me} and {peer} ask for {asked}, but cut otherwise, by another operation, or "
                "lying elsewhere in shared memory"
            )

    # -- slots -----------------------------------------------------------------------------------------------------

    def slot_of(self, piece: int) -> int:
        """The slot through which this piece of the call under way goes."""
        return (self.state.first + piece) % SLOTS

    def address(self, member: int, slot: int) -> int:
        """Where a slot of a member of the group begins in this process."""
        return self._base + (member * SLOTS + slot) * self.slot

    def parts(self, slot: int, dtype: torch.dtype, low: int, high: int) -> list[Tensor]:
        """Elements [low, high) of this slot of every rank, in group order."""
        key = (dtype, slot, low, high)
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) >= 64:
                self._parts.clear()
            found = self._parts[key] = [slots[slot][low:high] for slots in self._slots(dtype)]
        return found

    def spare(self, dtype: torch.dtype, elements: int) -> Tensor:
        """Memory of my own for intermediate sums."""
        if dtype not in self._spare:
            with torch.inference_mode(False):
                self._spare[dtype] = torch.empty(self.slot // dtype.itemsize, dtype=dtype)
        return self._spare[dtype][:elements]

    def _slots(self, dtype: torch.dtype) -> list[list[Tensor]]:
        if dtype not in self._typed:
            assert self.memory is not None
            with torch.inference_mode(False):
                every = list(self.memory[self._head :].view(dtype).split(self.slot // dtype.itemsize))
            self._typed[dtype] = [every[i * SLOTS : (i + 1) * SLOTS] for i in range(self.size)]
        return self._typed[dtype]
