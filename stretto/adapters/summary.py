"""What the turns of all runners come to: a row each, side by side. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

WARM_UP = 3  # steps that are not timed, where there are enough
#: By how much losses of one step may differ, by what is computed in: rounding, not another training.
APART: Mapping[str, float] = MappingProxyType({"fp64": 1e-9, "fp32": 5e-5, "bf16": 2e-2, "fp16": 2e-2})

#: cannot: known before its ranks start; failed: it ended with an error of its own; not run: all was stopped before its turn.
Status = Literal["ok", "cannot", "not installed", "failed", "not run"]


class Effort(NamedTuple):
    """The steps of one turn, numbered from 0: which are timed, in which one bytes are counted, in which one memory is watched."""

    steps: int
    timed: tuple[int, ...]
    traffic: int
    memory: int

    @staticmethod
    def of(steps: int) -> Effort:
        """The last step's memory is watched and the second one's bytes are counted; neither is timed if others are left."""
        timed = next(
            (tuple(range(first, last)) for first, last in ((WARM_UP, steps - 1), (2, steps - 1), (1, steps)) if first < last), (0,)
        )
        return Effort(steps, timed, min(1, steps - 1), steps - 1)


#: Steps of a round after the first, which only times: as many as that, and as few as mean something (two of them are timed).
LATER_STEPS, LEAST_STEPS = 12, 6


def steps_left(turns: Sequence[Turn], steps: int, seconds: float) -> int:
    """Steps of one more round in `seconds`: at most LATER_STEPS, 0 if it cannot be done. turns: one of each runner, of the round before.

    A turn takes its start, its end (about half of that) and its steps.
    """
    fixed = sum(1.5 * turn.startup for turn in turns)
    each = sum(median(turn.seconds) for turn in turns)
    most = min(steps, LATER_STEPS)
    fit = int((seconds - fixed) / each) if each > 0 else most
    return min(most, fit) if fit >= min(most, LEAST_STEPS) else 0


class RankTurn(NamedTuple):
    """A rank's account of a turn. began, ends: seconds of the machine's monotonic clock. losses: this rank's shares. sent: bytes in one
    step. private_bytes: the most it had for itself; share_bytes: the most, with shared pages by share."""

    began: float
    ends: tuple[float, ...]
    losses: tuple[float, ...]
    norms: tuple[float | None, ...]
    sent: int | None
    private_bytes: int
    share_bytes: int


@dataclass(frozen=True)
class Turn:
    """All ranks of one turn. asked: when their start was asked for."""

    asked: float
    effort: Effort
    ranks: tuple[RankTurn, ...]

    @property
    def seconds(self) -> list[float]:
        """Of the timed steps; a step lasts from when the last rank has ended the one before until the last rank has ended it."""
        ends = [max(moments) for moments in zip(*(rank.ends for rank in self.ranks), strict=True)]
        begins = [max(rank.began for rank in self.ranks), *ends]
        every = [after - before for before, after in pairwise(begins)]
        return [every[step] for step in self.effort.timed]

    @property
    def startup(self) -> float:
        """Seconds until the last rank begins its first step."""
        return max(rank.began for rank in self.ranks) - self.asked

    @property
    def losses(self) -> list[float]:
        return [math.fsum(shares) for shares in zip(*(rank.losses for rank in self.ranks), strict=True)]


@dataclass(frozen=True)
class Row:
    """One runner. why: in words, where the status is not ok. notes: what ran otherwise than asked.

    tokens_per_second: of the whole job, from the median step; spread: lowest and highest median of a round. ratio: to the reference (the
    first row that is ok), median over rounds, with its lowest and highest. sent_bytes: the most a rank sends in a step. apart_at: the
    first step (from 1) whose loss differs from the reference's by more than APART; repeats: whether every round gave the same losses.
    """

    runner: str
    version: str | None
    status: Status
    why: str = ""
    notes: tuple[str, ...] = ()
    tokens_per_second: float | None = None
    spread: tuple[float, float] | None = None
    step_seconds: float | None = None
    ratio: float | None = None
    ratio_spread: tuple[float, float] | None = None
    peak_bytes: int | None = None
    machine_bytes: int | None = None
    sent_bytes: int | None = None
    startup_seconds: float | None = None
    losses: tuple[float, ...] = ()
    grad_norms: tuple[float | None, ...] = ()
    apart_at: int | None = None
    apart_by: float | None = None
    repeats: bool | None = None
    log: str | None = None

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def row(base: Row, turns: Sequence[Turn], reference: Sequence[Turn], tokens: int, apart: float) -> Row:
    """`base` with what its turns came to. reference: the turns that it is held against, round by round. tokens: of a step."""
    medians = [median(turn.seconds) for turn in turns]
    rates = [tokens / seconds for seconds in medians]
    ratios = [median(theirs.seconds) / mine for theirs, mine in zip(reference, medians, strict=False)]
    every = [seconds for turn in turns for seconds in turn.seconds]
    losses, expected = turns[0].losses, reference[0].losses
    at = first_apart(losses, expected, apart)
    sent = [rank.sent for rank in turns[0].ranks]
    known = dict(asdict(base))
    known.update(
        tokens_per_second=tokens / median(every),
        spread=(min(rates), max(rates)),
        step_seconds=median(every),
        ratio=median(ratios),
        ratio_spread=(min(ratios), max(ratios)),
        peak_bytes=max(rank.private_bytes for turn in turns for rank in turn.ranks) or None,
        machine_bytes=max(sum(rank.share_bytes for rank in turn.ranks) for turn in turns) or None,
        sent_bytes=None if any(one is None for one in sent) else max(one or 0 for one in sent),
        startup_seconds=median(turn.startup for turn in turns),
        losses=tuple(losses),
        grad_norms=turns[0].ranks[0].norms,
        apart_at=at,
        apart_by=max((abs(a - b) for a, b in zip(losses, expected, strict=False)), default=None),
        repeats=all(turn.losses == losses[: len(turn.losses)] for turn in turns[1:]) if len(turns) > 1 else None,
    )
    return Row(**known)


def first_apart(losses: Sequence[float], expected: Sequence[float], apart: float) -> int | None:
    """The first step (from 1) at which two trainings part; None if they do not. What is not a number is apart."""
    pairs = enumerate(zip(losses, expected, strict=False), 1)
    return next((step for step, (a, b) in pairs if not abs(a - b) <= apart), None)
