"""A long step is a short one with more rounds, and the orders say so themselves."""

from __future__ import annotations

import pytest

from stretto.schedule.action import Action
from stretto.schedule.repeat import ROUNDS, Repeat, repeats
from stretto.schedule.request import requested


def kinds(order: tuple[Action, ...]) -> list[tuple[str, int]]:
    return [(action.kind, action.stage) for action in order]


def prolonged(short: tuple[Action, ...], more: tuple[Repeat, ...]) -> list[tuple[str, int]]:
    """The long order as the repeats tell it."""
    order, done, whole = kinds(short), 0, []
    for at, length, times in more:
        whole += order[done:at] + order[at - length : at] * times
        done = at
    return whole + order[done:]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1", "none"])
@pytest.mark.parametrize(("ranks", "long"), [(1, 20), (2, 16), (4, 40)])
def test_rounds_put_into_a_short_order_make_the_long_one(schedule: str, ranks: int, long: int) -> None:
    whole = requested(schedule, ranks, long)
    shorts = [requested(schedule, ranks, few) for few in range(3, long)]
    for rank in range(ranks):
        found = [
            prolonged(short.order[rank], more) for short in shorts if (more := repeats(short.order[rank], whole.order[rank])) is not None
        ]
        assert found and all(order == kinds(whole.order[rank]) for order in found)


def test_rounds_are_compared_before_they_are_believed_and_one_is_left_after_them() -> None:
    short, long = (requested("none", 1, m).order[0] for m in (ROUNDS, 9))
    assert repeats(short, long) == (Repeat(2 * (ROUNDS - 1), 2, 9 - ROUNDS),)
    assert repeats(requested("none", 1, ROUNDS - 1).order[0], long) is None


def test_microbatches_taken_in_another_turn_are_no_rounds() -> None:
    """bfs goes through its backwards from the last microbatch to the first: none of them is like the one before it."""
    assert all(repeats(requested("bfs", 2, few).order[0], requested("bfs", 2, 16).order[0]) is None for few in range(2, 16))


def test_a_step_is_itself() -> None:
    order = requested("1f1b", 2, 8).order[1]
    assert repeats(order, order) == ()
