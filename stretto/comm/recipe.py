"""Recipe: what a rank does in one collective over a Line, as a list of steps that whoever waits can carry on.

A step is one activity on one piece: acts (copy these bytes there, combine these values into that), and what the others must have
counted before it may be done ([Note: one counter a rank] in comm/line.py). A recipe knows sizes and places, but holds none of the
caller's tensors: one serves all calls that are alike. comm/execute.py carries it out, in Python or compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.comm.line import AHEAD, NOBODY, Line, Need, signature

#: Where bytes lie: in the caller's tensor, where its result goes, or (MEMBER + i) with member i of the group: in its slot, or, if the
#: recipe has `peers`, in its own tensor.
X, INTO, MEMBER = 0, 1, 2


class Place(NamedTuple):
    where: int
    offset: int  # bytes


class Copy(NamedTuple):
    to: Place
    source: Place
    bytes_: int


class Combine(NamedTuple):
    """to = (or +=) parts[0] op parts[1] op ..., in this order, of `elements` values. `to` may be one of the parts, or apart."""

    to: Place
    parts: tuple[Place, ...]
    elements: int
    accumulate: bool = False


Act = Copy | Combine
#: piece -> what is done with it.
Activity = Callable[[int], Sequence[Act]]


class Step(NamedTuple):
    """One activity on one piece. stage: which activity. previous: the step, counted from 0, at which the others did the one before."""

    stage: int
    piece: int
    previous: int
    acts: tuple[Act, ...]


def nothing(piece: int) -> Sequence[Act]:
    """Here others are at work, or nobody: the count alone says something."""
    return ()


class Recipe:
    """activities: each piece goes through all of them, in turn; all but the first wait until those in `after` (positions in the
    line's group) have done the one before on this piece. Later activities follow AHEAD pieces behind, so that a rank has
    something to do while others are still writing.

    dtype, op: of what is combined. peers: of every member the caller's tensor, flat, where these can be read where they lie; at my
    own place an empty tensor (the caller's x stands there). slots: whether pieces go through slots. fills: whether the first
    activity writes mine, which must then be free. kept: whether peers may still read the caller's tensor after the last step.
    """

    def __init__(
        self,
        line: Line,
        asked: int,
        activities: tuple[Activity, ...],
        after: tuple[int, ...],
        pieces: int = 1,
        *,
        dtype: torch.dtype = torch.uint8,
        op: str = "sum",
        peers: Sequence[Tensor] | None = None,
        slots: bool = False,
        fills: bool = False,
        kept: bool = False,
    ) -> None:
        self.line, self.asked, self.after, self.pieces, self.dtype, self.op, self.peers = line, asked, after, pieces, dtype, op, peers
        self.slots, self.fills, self.kept = slots, fills, kept
        self.last = len(activities) - 1
        turns = range(pieces + self.last * AHEAD)
        every = [(stage, turn - stage * AHEAD) for turn in turns for stage in range(len(activities))]
        order = [(stage, piece) for stage, piece in every if 0 <= piece < pieces]
        at = {place: number for number, place in enumerate(order)}
        #: What carries it out, see comm/execute.py: (this, x, into, looks) -> whether it has come to its end.
        self.go: Callable[[Recipe, Tensor, Tensor, int], bool] = _nobody
        #: In order: the same stages and pieces on all ranks of the group.
        self.steps = [Step(stage, piece, at.get((stage - 1, piece), -1), tuple(activities[stage](piece))) for stage, piece in order]

    def need(self) -> Need:
        """What the step of the call under way waits for."""
        state = self.line.state
        step = self.steps[max(state.step, 0)]
        if step.stage:
            return self.after, state.start + step.previous + 1
        return (self.line.others, state.free[self.line.slot_of(step.piece)]) if self.fills and state.step >= 0 else NOBODY


def _nobody(recipe: Recipe, x: Tensor, into: Tensor, looks: int) -> bool:
    raise AssertionError("this recipe was not handed to comm/execute.py")


def barrier(line: Line, after: tuple[int, ...], asked: int | None = None) -> Recipe:
    """Until those in `after` have come here. With one memory for all that is an all-gather, or a broadcast."""
    return Recipe(line, signature("barrier", 0, torch.uint8, ()) if asked is None else asked, (nothing, nothing), after)
