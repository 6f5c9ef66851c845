"""The schedule that a job asks for, or why there can be none. Asked before ranks start and by each of them."""

from __future__ import annotations

from collections.abc import Iterable

from stretto.errors import JobError
from stretto.schedule.action import Schedule
from stretto.schedule.pipelines import pipeline
from stretto.schedule.step import training_step


def requested(
    asked: str, ranks: int, microbatches: int, chunks: int | None = None, *, compiled: bool = False, tied: Iterable[int] = ()
) -> Schedule:
    """A whole step of `ranks` pipeline ranks, by the name of its schedule. compiled: whether blocks are compiled. Raises JobError."""
    step = training_step(pipeline(asked, ranks, microbatches, chunks), tied)
    if compiled and any(action.kind == "I" for actions in step.order for action in actions):
        raise JobError(
            f'pipeline="{asked}" splits the backward, and a compiled block has but one; write pipeline="1f1b", or compile="none"'
        )
    return step
