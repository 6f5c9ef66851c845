"""The step of a model that is not cut into stages."""

from __future__ import annotations

import pytest

from stretto.schedule.action import Action
from stretto.schedule.step import training_step


@pytest.mark.parametrize("microbatches", [1, 3])
def test_each_microbatch_goes_forward_and_back_before_the_next(microbatches: int) -> None:
    schedule = training_step(microbatches)
    text = " ".join(str(action) for action in schedule.order[0])
    assert text == " ".join(f"0F{m} 0B{m}" for m in range(microbatches)) + " 0REDUCE 0VOTE 0UPDATE"
    assert (schedule.stages, schedule.ranks, schedule.microbatches) == (1, 1, microbatches)


def test_the_update_waits_for_the_vote_and_the_vote_for_every_backward() -> None:
    schedule = training_step(2)
    assert schedule.needs(Action("UPDATE", 0)) == (Action("VOTE", 0),)
    assert schedule.needs(Action("VOTE", 0)) == (Action("REDUCE", 0),)
    assert set(schedule.needs(Action("REDUCE", 0))) == {Action("B", 0, 0), Action("B", 0, 1)}
