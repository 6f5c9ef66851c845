"""Turns become rows: who is how fast, how large, whether they trained the same, and what to take, in words."""

from __future__ import annotations

import math

import pytest

from stretto.adapters.summary import Effort, RankTurn, Row, Turn, first_apart, row, steps_left
from stretto.adapters.verdict import verdict


def rank(began: float, seconds: list[float], losses: list[float], bytes_: int = 100) -> RankTurn:
    ends, at = [], began
    for one in seconds:
        at += one
        ends.append(at)
    return RankTurn(began, tuple(ends), tuple(losses), (0.5,) * len(losses), 80, bytes_, bytes_ // 2)


def test_the_middle_of_a_turn_is_timed_its_second_step_counted_and_its_last_watched() -> None:
    assert Effort.of(12) == Effort(12, tuple(range(3, 11)), traffic=1, memory=11)
    assert Effort.of(5).timed == (3,) and Effort.of(4).timed == (2,)
    assert Effort.of(3) == Effort(3, (1, 2), 1, 2)
    assert Effort.of(1) == Effort(1, (0,), 0, 0)


def test_a_step_lasts_until_its_last_rank_is_done_and_losses_are_the_shares_of_all() -> None:
    first, second = rank(10.0, [3.0, 1.0, 1.0], [1.0, 0.5, 0.25]), rank(11.0, [1.0, 4.0, 0.5], [1.0, 0.25, 0.0])
    turn = Turn(4.0, Effort(3, (0, 1, 2), 1, 2), (first, second))
    assert turn.startup == 7.0
    assert turn.seconds == [2.0, 3.0, 0.5]  # 11 to 13, to 16, to 16.5
    assert turn.losses == [2.0, 0.75, 0.25]


def rows() -> list[Row]:
    effort = Effort(4, (1, 2, 3), 1, 3)

    def turns(step: float, losses: list[float], bytes_: int) -> list[Turn]:
        return [Turn(0.0, effort, (rank(1.0, [5.0, step * k, step * k, step * k], losses, bytes_),)) for k in (1.0, 1.1)]

    ours = turns(1.0, [3.0, 2.0, 1.5, 1.0], 1000)
    rounded = turns(2.0, [3.0, 2.0, 1.5, 1.00001], 500)
    other = turns(0.5, [3.0, 2.0, 1.4, 1.0], 100)
    made = [("ours", ours), ("peer", rounded), ("wrong", other)]
    return [
        *(row(Row(name, "1", "ok"), some, ours, tokens=60, apart=5e-5) for name, some in made),
        Row("absent", None, "not installed", "pip install it"),
        Row("broken", "2", "failed", "rank 0 failed: no"),
    ]


def test_a_row_tells_speed_against_the_reference_round_by_round_and_where_losses_part() -> None:
    ours, peer, wrong, *_ = rows()
    assert ours.tokens_per_second == pytest.approx(60 / 1.05) and ours.spread == pytest.approx((60 / 1.1, 60))
    assert (ours.ratio, ours.apart_at, ours.apart_by, ours.repeats) == (1.0, None, 0.0, True)
    assert peer.ratio == pytest.approx(0.5) and peer.ratio_spread == pytest.approx((0.5, 0.5))
    assert peer.apart_at is None and peer.apart_by == pytest.approx(1e-5)
    assert (wrong.apart_at, wrong.ratio) == (3, pytest.approx(2.0))
    assert (peer.peak_bytes, peer.machine_bytes, peer.sent_bytes, peer.startup_seconds) == (500, 250, 80, 1.0)


def test_the_verdict_praises_nobody_whose_numbers_are_wrong_and_names_who_could_not() -> None:
    said = list(verdict(rows(), "dp=1", 5e-5, timed=20))
    assert said[0] == "Fastest: ours, 57.1 tokens/s (2.00 times peer)."
    assert said[1] == "Least memory on the machine: peer, 250 B (against ours 500 B)."
    assert said[2] == "wrong trains something else: its loss parts from ours's at step 3 (by 1.0e-01 at most)."
    assert said[3] == "Not on this job: broken; why stands above."
    assert said[4] == "Not installed, so not judged: absent."
    assert said[5] == "For this job here: ours where speed counts; peer where memory is short."
    assert list(verdict([], "dp=1", 5e-5, timed=20)) == ["None of the runners trained this job; the reasons stand above."]


def test_losses_that_are_equal_are_called_so() -> None:
    ours, peer, *_ = rows()
    same = "All of them train the same: their losses "
    assert f"{same}are equal to the last bit." in list(verdict([ours, ours], "dp=1", 5e-5, timed=9))
    assert f"{same}differ by 1.0e-05 at most, and 5e-05 would be rounding." in list(verdict([ours, peer], "dp=1", 5e-5, timed=9))


def test_few_timed_steps_are_called_rough() -> None:
    rough = "Only 3 steps a round were timed, so speeds are rough; write --until 20, or a job of more steps."
    assert rough in list(verdict(rows(), "dp=1", 5e-5, timed=3)) and rough not in list(verdict(rows(), "dp=1", 5e-5, timed=5))


def test_a_loss_that_is_no_number_is_apart() -> None:
    assert first_apart([1.0, math.nan], [1.0, 1.0], 1e-3) == 2
    assert first_apart([1.0, math.nan], [1.0, math.nan], 1e-3) == 2
    assert first_apart([1.0, 1.1], [1.0, 1.1 + 1e-4], 1e-3) is None


def test_a_further_round_is_as_long_as_the_time_that_is_left_allows() -> None:
    effort = Effort(6, (3, 4), 1, 5)
    turns = [Turn(0.0, effort, (rank(10.0, [5.0, *[step] * 5], [1.0] * 6),)) for step in (2.0, 1.0)]
    starts = 2 * 1.5 * 10.0  # and what it takes to end
    assert steps_left(turns, 20, starts + 12 * 3.0) == 12  # as many as mean anything
    assert steps_left(turns, 20, starts + 8 * 3.0 + 1) == 8
    assert steps_left(turns, 20, starts + 5 * 3.0) == 0 == steps_left(turns, 20, -3.0)
    assert steps_left(turns, 4, starts + 4 * 3.0) == 4  # a short job is not shortened
    assert steps_left(turns, 4, starts + 3 * 3.0) == 0
