"""Actions of a training step and the one rule of which must come before which."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from stretto.errors import JobError

#: F forward, B backward, I and W its halves (input and weight gradient); then messages between stages, and a step's end.
KINDS = ("F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B", "REDUCE", "VOTE", "UPDATE")


class Action(NamedTuple):
    """One thing a rank does: of which stage, for which microbatch (None: once a step). Prints as 2F0 and parses back."""

    kind: str
    stage: int
    microbatch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"

    @staticmethod
    def parse(text: str) -> Action:
        found = re.fullmatch(r"(\d+)([A-Z_]+)(\d+)?", text)
        if not found or found[2] not in KINDS:
            raise JobError(f"{text!r} is no action; write stage, kind and microbatch, as 2F0 (kinds: {' '.join(KINDS)})")
        return Action(found[2], int(found[1]), None if found[3] is None else int(found[3]))


@dataclass(frozen=True)
class Schedule:
    """What each pipeline rank issues, in order. `rank_of[stage]` is the pipeline rank that holds the stage."""

    name: str
    stages: int
    microbatches: int
    rank_of: tuple[int, ...]
    order: tuple[tuple[Action, ...], ...]
    _has: frozenset[Action] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_has", frozenset(action for actions in self.order for action in actions))

    @cached_property
    def ranks(self) -> int:
        return len(self.order)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """What must have finished, on whichever rank, before `action` can start. The only place that says so.

        [Note: messages] With SEND/RECV in the schedule a stage waits for its own receive, the receive for the send; without
        them it waits for its neighbour's computation itself.
        """
        kind, stage, m = action
        first, last = stage == 0, stage == self.stages - 1
        back = "I" if Action("I", stage, m) in self._has else "B"
        if kind == "F":
            return () if first else self._from(Action("RECV_F", stage, m), Action("F", stage - 1, m))
        if kind in ("B", "I"):
            mine = (Action("F", stage, m),)
            next_back = "I" if Action("I", stage + 1, m) in self._has else "B"
            return mine if last else mine + self._from(Action("RECV_B", stage, m), Action(next_back, stage + 1, m))
        if kind == "W":
            return (Action("I", stage, m),)
        if kind == "SEND_F":
            return (Action("F", stage, m),)
        if kind == "SEND_B":
            return (Action(back, stage, m),)
        if kind == "RECV_F":
            return (Action("SEND_F", stage - 1, m),)
        if kind == "RECV_B":
            return (Action("SEND_B", stage + 1, m),)
        if kind == "REDUCE":
            return tuple(a for a in self.order[self.rank_of[stage]] if a.stage == stage and a.kind in ("B", "I", "W"))
        if kind == "VOTE":
            return tuple(sorted(a for a in self._has if a.kind == "REDUCE"))
        if kind == "UPDATE":
            return (Action("VOTE", stage),)
        raise ValueError(f"unknown kind of action {kind}")

    def _from(self, message: Action, computation: Action) -> tuple[Action, ...]:
        return (message,) if message in self._has else (computation,)

    def check(self) -> None:
        """Prove that the schedule ends: every rank can go through its order. Raises JobError saying who waits for whom."""
        for actions in self.order:
            if len(set(actions)) != len(actions):
                twice = next(a for i, a in enumerate(actions) if a in actions[:i])
                raise JobError(f"schedule {self.name}: {twice} stands twice in the order of one rank")
        done: set[Action] = set()
        at = [0] * self.ranks
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(self.order):
                while at[rank] < len(actions) and all(need in done for need in self.needs(actions[at[rank]])):
                    done.add(actions[at[rank]])
                    at[rank] += 1
                    moved = True
        stuck = []
        for rank, actions in enumerate(self.order):
            if at[rank] < len(actions):
                action = actions[at[rank]]
                missing = [str(need) for need in self.needs(action) if need not in done]
                stuck.append(f"rank {rank} waits at {action} for {', '.join(missing)}")
        if stuck:
            raise JobError(f"schedule {self.name} never ends: {'; '.join(stuck)}")
