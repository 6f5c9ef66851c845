"""Rounds of a step that are all alike: how a step of many microbatches follows from one of few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from stretto.schedule.action import Action


class Repeat(NamedTuple):
    """More rounds: `times` of them, of `length` actions each, come in a long order where a short one is at index `at`. They are as the
    ones before `at`; one more such round follows."""

    at: int
    length: int
    times: int


#: Equal rounds that a short order must have at least: the first, in which sums begin; two to compare; and the last, in which they end.
ROUNDS = 4


def repeats(short: Sequence[Action], long: Sequence[Action]) -> tuple[Repeat, ...] | None:
    """What makes the order of one rank in a short step that of a longer one of the same schedule; None if that is not rounds alone.

    Actions are alike if they do the same to the microbatch that is next in turn for them.
    """
    few, many = _turns(short), _turns(long)
    found: list[Repeat] = []
    at = there = 0
    while there < len(many):
        if at < len(few) and few[at] == many[there]:
            at, there = at + 1, there + 1
            continue
        length, times = _rounds(few[:at], many[there:])
        if not times:
            return None
        found.append(Repeat(at - length, length, times))
        there += length * times
    return tuple(found) if at == len(few) else None


def _rounds(before: Sequence[object], after: Sequence[object]) -> tuple[int, int]:
    """(length, times) of the shortest round that `before` ends with ROUNDS times and `after` begins with; (0, 0) if there is none."""
    for length in range(1, len(before) // ROUNDS + 1):
        round_ = before[-length:]
        if before[-ROUNDS * length :] == [*round_] * ROUNDS:
            times = 0
            while after[times * length : (times + 1) * length] == round_:
                times += 1
            if times:
                return length, times
    return 0, 0


def _turns(order: Sequence[Action]) -> list[tuple[str, int, int]]:
    """Kind, stage, and how far the microbatch is from the one in turn."""
    done: Counter[tuple[str, int]] = Counter()
    turns = []
    for kind, stage, m in order:
        turns.append((kind, stage, 0 if m is None else m - done[kind, stage]))
        done[kind, stage] += 1
    return turns
