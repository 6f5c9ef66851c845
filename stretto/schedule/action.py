"""Actions of a training step and the one rule of which must come before which."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from stretto.errors import JobError
from stretto.layout.balance import Held

#: What lanes a rank has, and who runs in which. In a lane one action follows the other; lanes run beside each other.
#: F forward, B backward, I and W its halves (input and weight gradient); then messages between stages; gradients added over
#: data-parallel ranks (REDUCE) and over the two stages that hold a tied weight (TIE); and a step's end.
LANES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "compute": ("F", "B", "I", "W", "VOTE", "UPDATE"),
        "messages": ("SEND_F", "RECV_F", "SEND_B", "RECV_B"),
        "reductions": ("REDUCE", "TIE"),
    }
)
KINDS = tuple(kind for kinds in LANES.values() for kind in kinds)
LANE_OF: Mapping[str, str] = MappingProxyType({kind: lane for lane, kinds in LANES.items() for kind in kinds})


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


class _Graph(NamedTuple):
    """Events by number. names: of all that is waited for; waits: of each event of the schedule, the numbers of what it waits for."""

    names: list[Action]
    waits: list[tuple[int, ...]]


class Numbered(NamedTuple):
    """The events of a schedule by number, each after what it waits for. kinds: the (kind, stage) of the actions that are one event,
    a SEND's and its RECV's for example; events: which of `kinds` each is, and the numbers of the events that it waits for, on its own
    rank and on others."""

    kinds: tuple[tuple[tuple[str, int], ...], ...]
    events: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True)
class Schedule:
    """What each pipeline rank issues, in order. `rank_of[stage]` is the pipeline rank that holds the stage.

    [Note: lanes and meetings] A rank goes through its order: it runs what is in the compute lane, and hands messages and
    reductions to lanes of their own, which work beside it, each in the order in which it was handed them. A SEND and its RECV
    meet: neither ends before both have come to the front of their lanes. That is the strictest of the transports (NCCL); what
    ends there ends everywhere.
    """

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

    def __contains__(self, action: object) -> bool:
        return action in self._has

    def __str__(self) -> str:
        """A line a rank, as a file for `pipeline="file:PATH"` has it."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.order)

    def needs(self, action: Action) -> tuple[Action, ...]:
        """What must have finished, on whichever rank, before `action` can start. The only place that says so.

        [Note: messages] With SEND/RECV in the schedule a stage waits for its own receive, the receive for the send; without
        them it waits for its neighbour's computation itself.
        """
        kind, stage, m = action
        first, last = stage == 0, stage == self.stages - 1
        if kind == "F":
            return () if first else self._from(Action("RECV_F", stage, m), Action("F", stage - 1, m))
        if kind in ("B", "I"):
            mine = (Action("F", stage, m),)
            return mine if last else mine + self._from(Action("RECV_B", stage, m), self.back(stage + 1, m))
        if kind == "W":
            return (Action("I", stage, m),)
        if kind == "SEND_F":
            return (Action("F", stage, m),)
        if kind == "SEND_B":
            return (self.back(stage, m),)
        if kind == "RECV_F":
            return (Action("SEND_F", stage - 1, m),)
        if kind == "RECV_B":
            return (Action("SEND_B", stage + 1, m),)
        if kind == "REDUCE":
            return tuple(a for a in self.order[self.rank_of[stage]] if a.stage == stage and a.kind in ("B", "I", "W"))
        if kind == "TIE":
            return tuple(Action("REDUCE", tied) for tied in range(self.stages) if Action("TIE", tied) in self._has)
        if kind == "VOTE":
            return self._summed
        if kind == "UPDATE":
            return (Action("VOTE", stage),)
        raise ValueError(f"unknown kind of action {kind}")

    def back(self, stage: int, microbatch: int | None) -> Action:
        """The action that makes the gradient of a stage's input: its whole backward, or the first half of it."""
        half = Action("I", stage, microbatch)
        return half if half in self._has else Action("B", stage, microbatch)

    def _from(self, message: Action, computation: Action) -> tuple[Action, ...]:
        return (message,) if message in self._has else (computation,)

    @cached_property
    def _summed(self) -> tuple[Action, ...]:
        return tuple(sorted(a for a in self._has if a.kind in LANES["reductions"]))

    @cached_property
    def waits(self) -> dict[Action, tuple[Action, ...]]:
        """For each event all that must be over before it begins: what it needs, what its rank computes before it, and what
        stands before it in its lane. A SEND and its RECV are one event, under the name of the SEND. [Note: lanes and meetings]"""
        names, graph = self._graph.names, self._graph.waits
        return {names[i]: tuple(names[before] for before in graph[i]) for i in range(len(graph))}

    @cached_property
    def _graph(self) -> _Graph:
        """`waits` by numbers: a search makes hundreds of schedules, and names are slow to look up."""
        number: dict[Action, int] = {}
        at: dict[Action, int] = {}
        for actions in self.order:
            for action in actions:
                event = self.event(action)
                at[action] = number.setdefault(event, len(number))
                at.setdefault(event, at[action])
        names = list(number)
        waits: list[dict[int, None]] = [{} for _ in names]
        for actions in self.order:
            position = {action: i for i, action in enumerate(actions)}
            front: dict[str, int] = {}
            too_early: list[int] = []  # handed to a lane before the rank has made what they need: it stands still at them
            for i, action in enumerate(actions):
                mine_at, lane, needs = at[action], LANE_OF[action.kind], self.needs(action)
                mine = waits[mine_at]
                for need in needs:
                    if need not in at:  # nowhere in the schedule: a name to wait for, for ever
                        at[need] = len(names)
                        names.append(need)
                    mine[at[need]] = None
                if "compute" in front:
                    mine[front["compute"]] = None
                if lane in front:
                    mine[front[lane]] = None
                for early in too_early:
                    mine[early] = None
                front[lane] = mine_at
                if lane != "compute" and any(position.get(need, -1) > i for need in needs):
                    too_early.append(mine_at)
        for own, before in enumerate(waits):
            before.pop(own, None)
        return _Graph(names, [tuple(before) for before in waits])

    def event(self, action: Action) -> Action:
        """A receive's send; any other action itself."""
        kind, stage, m = action
        if kind == "RECV_F":
            return Action("SEND_F", stage - 1, m)
        if kind == "RECV_B":
            return Action("SEND_B", stage + 1, m)
        return action

    @cached_property
    def sequence(self) -> list[Action]:
        """All events, each after what it waits for. Raises JobError saying who waits for whom where there is no such order."""
        return [self._graph.names[event] for event in self._sequence]

    @cached_property
    def _sequence(self) -> list[int]:
        names, waits = self._graph
        left = [len(before) for before in waits]
        after: list[list[int]] = [[] for _ in names]
        for event, before in enumerate(waits):
            for earlier in before:
                after[earlier].append(event)
        ready = [event for event, count in enumerate(left) if not count]
        for event in ready:  # grows while it is walked
            for later in after[event]:
                left[later] -= 1
                if not left[later]:
                    ready.append(later)
        if len(ready) < len(waits):
            raise JobError(f"schedule {self.name} never ends: {self._stuck(self.waits, {names[event] for event in ready})}")
        return ready

    @cached_property
    def numbered(self) -> Numbered:
        """`waits` by numbers in the order of `sequence`."""
        names, waits = self._graph
        new = [0] * len(names)
        for i, event in enumerate(self._sequence):
            new[event] = i
        ranks = [self.rank_of[name.stage] for name in names]
        kinds: dict[tuple[tuple[str, int], ...], int] = {}
        events = []
        for event in self._sequence:
            kind, stage, _ = names[event]
            both: tuple[tuple[str, int], ...] = ((kind, stage),)
            if kind in ("SEND_F", "SEND_B"):
                both = (*both, ("RECV_F", stage + 1) if kind == "SEND_F" else ("RECV_B", stage - 1))
            rank, before = ranks[event], waits[event]
            near = tuple([new[i] for i in before if ranks[i] == rank])
            far = tuple([new[i] for i in before if ranks[i] != rank]) if len(near) < len(before) else ()
            events.append((kinds.setdefault(both, len(kinds)), near, far))
        return Numbered(tuple(kinds), tuple(events))

    def _stuck(self, waits: Mapping[Action, tuple[Action, ...]], done: set[Action]) -> str:
        """Where each rank stands still, and the circle in which they wait for each other (or what is not in the schedule at all)."""
        lines = []
        for rank, actions in enumerate(self.order):
            action = next((a for a in actions if self.event(a) not in done), None)
            if action is not None:
                missing = [str(before) for before in waits[self.event(action)] if before not in done]
                lines.append(f"rank {rank} waits at {action} for {', '.join(missing)}")
        here = next(event for event in waits if event not in done)
        seen: dict[Action, int] = {}
        while here in waits and here not in seen:
            seen[here] = len(seen)
            here = next(before for before in waits[here] if before not in done)
        if here in seen:
            circle = [str(event) for event in list(seen)[seen[here] :]]
            lines.append(f"the circle: {' waits for '.join([*circle, circle[0]])}")
        return "; ".join(lines)

    def check(self) -> None:
        """Prove that this is a whole step and that it ends: every action once, on the rank of its stage; every message sent and
        received; no circle of waiting. Raises JobError saying what is wrong, or who waits for whom."""
        for problem in self._wrong():
            raise JobError(f"schedule {self.name}: {problem}")
        _ = self.sequence

    def _wrong(self) -> Iterator[str]:
        at: dict[Action, int] = {}
        for rank, actions in enumerate(self.order):
            for action, times in Counter(actions).items():
                if times > 1:
                    yield f"{action} stands twice in the order of rank {rank}; write it once"
                if action in at:
                    yield f"{action} stands on ranks {at[action]} and {rank}; write it once, on rank {at[action]}"
                at[action] = rank
        wanted = set(self._whole())
        for action in sorted(self._has - wanted, key=str):
            if action.stage >= self.stages or (action.microbatch or 0) >= self.microbatches:
                yield f"{action} is none of its {self.stages} stages and {self.microbatches} microbatches; take it out"
            yield f"{action} has no place in it; take it out"
        for action in sorted(wanted - self._has, key=str):
            rank = self.rank_of[action.stage]
            partner = next((a for a in self._has if self.event(a) == self.event(action)), None)
            whose = f", so {partner} meets nobody" if partner else ""
            yield f"{action} is missing{whose}; write it in the order of rank {rank}, which holds stage {action.stage}"
        for action, rank in at.items():
            if self.rank_of[action.stage] != rank:
                yield f"{action} stands on rank {rank}, and rank {self.rank_of[action.stage]} holds stage {action.stage}; write it there"

    def _whole(self) -> Iterator[Action]:
        """Every action that a step of these stages and microbatches has, as far as its kinds are in this schedule: backwards whole
        or in halves, messages or none, a step's end or none."""
        kinds = {action.kind for action in self._has}
        backward, messages = kinds & {"B", "I", "W", "REDUCE", "VOTE", "UPDATE"}, kinds & set(LANES["messages"])
        for stage in range(self.stages):
            for m in range(self.microbatches):
                yield Action("F", stage, m)
                if backward:
                    halves = Action("I", stage, m) in self._has or Action("W", stage, m) in self._has
                    yield from (Action(kind, stage, m) for kind in ("IW" if halves else "B"))
            if messages and stage and self.rank_of[stage] != self.rank_of[stage - 1]:
                for m in range(self.microbatches):
                    yield from (Action("SEND_F", stage - 1, m), Action("RECV_F", stage, m))
                    if backward:
                        yield from (Action("SEND_B", stage, m), Action("RECV_B", stage - 1, m))
        if kinds & {"REDUCE", "VOTE", "UPDATE"}:
            yield from (Action("REDUCE", stage) for stage in range(self.stages))
            yield from (Action(kind, min(self.stages_of(rank))) for rank in range(self.ranks) for kind in ("VOTE", "UPDATE"))
        yield from (action for action in self._has if action.kind == "TIE")

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a pipeline rank holds, in the order in which a microbatch meets them."""
        return tuple(stage for stage, holder in enumerate(self.rank_of) if holder == rank)

    def peak(self, rank: int) -> int:
        """The most (stage, microbatch) pairs whose activations the rank holds at a time: from F until B, or until W."""
        held = most = 0
        for action in self.order[rank]:
            held += (action.kind == "F") - (action.kind in ("B", "W"))
            most = max(most, held)
        return most

    @cached_property
    def held(self) -> Held:
        """Of each rank its fullest moments: microbatches under way in each of its stages, from F until B, or until W. Moments of which
        another has as much everywhere are left out."""
        return tuple(self._fullest(rank) for rank in range(self.ranks))

    def _fullest(self, rank: int) -> tuple[tuple[int, ...], ...]:
        place = {stage: at for at, stage in enumerate(self.stages_of(rank))}
        held = [0] * len(place)
        seen: dict[tuple[int, ...], None] = {}
        for kind, stage, _ in self.order[rank]:
            if kind == "F":
                held[place[stage]] += 1
                seen[tuple(held)] = None
            elif kind in ("B", "W"):
                held[place[stage]] -= 1
        most: list[tuple[int, ...]] = []
        for one in sorted(seen, key=sum, reverse=True):
            if not any(all(a <= b for a, b in zip(one, other, strict=True)) for other in most):
                most.append(one)
        return tuple(most)

    def only(self, kinds: Iterable[str]) -> Schedule:
        """The schedule with only these kinds of actions, in the same order: "F" is an evaluation's."""
        kept = tuple(tuple(action for action in actions if action.kind in kinds) for actions in self.order)
        return Schedule(self.name, self.stages, self.microbatches, self.rank_of, kept)
