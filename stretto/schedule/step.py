"""A whole training step as a Schedule: computation, then REDUCE, VOTE and UPDATE."""

from __future__ import annotations

from stretto.schedule.action import Action, Schedule


def training_step(microbatches: int) -> Schedule:
    """The step of a model that is not cut into stages: each microbatch forward and back, then one joint update.

    It is the pipeline schedule of one stage; pipelines of several stages are made by schedule/pipelines.py from the same actions.
    """
    order: list[Action] = []
    for m in range(microbatches):
        order += [Action("F", 0, m), Action("B", 0, m)]
    order += [Action("REDUCE", 0), Action("VOTE", 0), Action("UPDATE", 0)]
    schedule = Schedule("one stage", 1, microbatches, (0,), (tuple(order),))
    schedule.check()
    return schedule
