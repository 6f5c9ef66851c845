"""Recipe: what a rank does in one collective over a Line, as a list of steps that whoever waits can carry on.

A step is one activity on one piece, and what the others must have counted before it may be done ([Note: one counter a rank]
in comm/line.py). A recipe knows sizes and places, but holds none of the caller's tensors: one serves all calls that are alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from stretto.comm.line import AHEAD, Line, signature

#: (x, into, piece, slot): into is where a reduce-scatter leaves its result, else x itself.
Activity = Callable[[Tensor, Tensor, int, int], None]


def nothing(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
    """Here others are at work, or nobody: the count alone says something."""


class Recipe:
    """activities: each piece goes through all of them, in turn; all but the first wait until those in `after` (positions in the
    line's group) have done the one before on this piece. Later activities follow AHEAD pieces behind, so that a rank has
    something to do while others are still writing.

    slots: whether pieces go through slots. fills: whether the first activity writes mine, which must then be free.
    kept: whether peers may still read the caller's tensor when the last step is done.
    """

    def __init__(
        self,
        line: Line,
        asked: int,
        activities: tuple[Activity, ...],
        after: tuple[int, ...],
        pieces: int = 1,
        *,
        slots: bool = False,
        fills: bool = False,
        kept: bool = False,
    ) -> None:
        self.line, self.asked, self.activities, self.after, self.pieces = line, asked, activities, after, pieces
        self.slots, self.fills, self.kept = slots, fills, kept
        self.last = len(activities) - 1
        turns = range(pieces + self.last * AHEAD)
        every = [(stage, turn - stage * AHEAD) for turn in turns for stage in range(len(activities))]
        #: (stage, piece), in order: the same on all ranks of the group.
        self.steps = [(stage, piece) for stage, piece in every if 0 <= piece < pieces]


def barrier(line: Line, after: tuple[int, ...], asked: int | None = None) -> Recipe:
    """Until those in `after` have come here. With one memory for all that is an all-gather, or a broadcast."""
    return Recipe(line, signature("barrier", 0, torch.uint8, ()) if asked is None else asked, (nothing, nothing), after)
