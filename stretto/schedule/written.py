"""A schedule of one's own, from a text file: a line a pipeline rank, as `0F0 0F1 0B0 0B1`; # begins a comment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from stretto.errors import JobError
from stretto.schedule.action import Action, Schedule

#: What is written; messages and the step's end are put in by schedule/step.py.
WRITTEN = ("F", "B", "I", "W")


def written(path: str, ranks: int, microbatches: int) -> Schedule:
    """The compute-only schedule in the file at `path`, for `ranks` pipeline ranks and `microbatches`.

    A stage is on the rank in whose line its first forward stands. Raises JobError for what is no schedule, or one of others.
    """
    name = f"file:{path}"
    orders = _orders(path)
    if len(orders) != ranks:
        raise JobError(f'pipeline="{name}" has {len(orders)} lines, so it is for pp={len(orders)}, and the mesh has pp={ranks}')
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(orders):
        if not actions:
            raise JobError(f'pipeline="{name}": rank {rank} has nothing to do; give it a stage, or write a mesh with fewer pp')
        for action in actions:
            if action.kind == "F":
                rank_of.setdefault(action.stage, rank)
    for rank, actions in enumerate(orders):  # stages without a forward, which `check` will name
        for action in actions:
            rank_of.setdefault(action.stage, rank)
    stages = max(rank_of) + 1
    for stage in range(stages):
        if stage not in rank_of:
            raise JobError(f'pipeline="{name}" has a stage {stages - 1} and no stage {stage}; number stages from 0 without gaps')
    count = count_written(path)
    if count != microbatches:
        raise JobError(
            f'pipeline="{name}" is for {count} microbatches (0 to {count - 1}), and a step has {microbatches}; '
            f"write batch.size and batch.micro_size so that each dp rank has {count}"
        )
    schedule = Schedule(name, stages, count, tuple(rank_of[stage] for stage in range(stages)), tuple(orders))
    schedule.check()
    if not any(action.kind in ("B", "I") for action in orders[0]):
        raise JobError(f'pipeline="{name}" has no backward; write a B (or I and W) for each F')
    return schedule


def count_written(path: str) -> int:
    """How many microbatches the schedule in the file has."""
    return max(action.microbatch or 0 for actions in _orders(path) for action in actions) + 1


def _orders(path: str) -> list[tuple[Action, ...]]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise JobError(f'pipeline="file:{path}" cannot be read ({problem}); write a text file with a line a pp rank, as 0F0 0B0') from None
    orders = [tuple(_actions(line, path, number)) for number, line in enumerate(text.splitlines(), 1) if line.partition("#")[0].strip()]
    if not orders:
        raise JobError(f'pipeline="file:{path}" is empty; write a line a pp rank, as 0F0 0B0')
    return orders


def _actions(line: str, path: str, number: int) -> Iterator[Action]:
    for word in line.partition("#")[0].split():
        try:
            action = Action.parse(word)
        except JobError as problem:
            raise JobError(f'pipeline="file:{path}", line {number}: {problem}') from None
        if action.kind not in WRITTEN or action.microbatch is None:
            raise JobError(
                f'pipeline="file:{path}", line {number}: {word} is not computation; write F, B, I and W with a microbatch, as 0F0: '
                "messages and the step's end are put in"
            )
        yield action
