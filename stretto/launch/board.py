"""One shared page on which every rank notes where it is, so that a rank that dies without a word can still be placed."""

from __future__ import annotations

import mmap
import os
import struct
from typing import NamedTuple

SLOT = 64  # bytes, a cache line: ranks do not disturb one another
PLACE = struct.Struct("<q56s")  # step + 1 (0: not in a step yet, as in a fresh page), action in utf-8


class Place(NamedTuple):
    """Where a rank is: the step it is in (None before the first) and the action it last began ("" if it never said)."""

    step: int | None
    action: str

    def __str__(self) -> str:
        """As it follows "failed": at step 3, action 0F2; an action in words stands as it is: at step 3, reading data."""
        if self.step is None:
            return self.action or "before its first line"
        if not self.action:
            return f"at step {self.step}"
        return f"at step {self.step}, {self.action if ' ' in self.action else f'action {self.action}'}"


class Board:
    """A 64-byte slot for each rank, and one in front for what the parent asks of all of them.

    Written by plain stores, without locks: a rank writes its own slot only, and a reader of a torn slot is at worst
    one action off.
    """

    def __init__(self, page: mmap.mmap) -> None:
        self.page = page

    @classmethod
    def over(cls, file: int, ranks: int) -> Board:
        """The board in an open file (an inheritable descriptor), which is grown to hold `ranks` slots."""
        size = SLOT * (ranks + 1)
        if os.fstat(file).st_size < size:
            os.ftruncate(file, size)
        return cls(mmap.mmap(file, size))

    @classmethod
    def private(cls, ranks: int) -> Board:
        """A board that no other process sees: under torchrun and srun nobody of ours is there to read it."""
        return cls(mmap.mmap(-1, SLOT * (ranks + 1)))

    def write(self, rank: int, step: int | None, action: str) -> None:
        """Note that `rank` now begins `action` of `step`."""
        PLACE.pack_into(self.page, SLOT * (rank + 1), 0 if step is None else step + 1, action.encode()[:56])

    def read(self, rank: int) -> Place:
        """The place that `rank` noted last."""
        step, action = PLACE.unpack_from(self.page, SLOT * (rank + 1))
        text = action.rstrip(b"\0").decode(errors="ignore")
        return Place(step - 1 if step else None, text)

    def ask_to_stop(self) -> None:
        """Ask all ranks to end after the step they are in (a flag, not a signal: none can arrive too early)."""
        self.page[0] = 1

    @property
    def asked_to_stop(self) -> bool:
        return self.page[0] == 1

    def call_off(self) -> None:
        """Tell all ranks that the run is over: what they do now no longer matters."""
        self.page[1] = 1

    @property
    def called_off(self) -> bool:
        return self.page[1] == 1

    def promise(self) -> None:
        """Tell the parent that ranks have something to save should one of them be lost."""
        self.page[2] = 1

    @property
    def promised(self) -> bool:
        return self.page[2] == 1
