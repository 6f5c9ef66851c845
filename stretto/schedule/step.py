"""A whole training step as a Schedule: computation, the messages between stages, then REDUCE, VOTE and UPDATE.

[Note: where messages stand] A receive that is issued just before it is used deadlocks most pipelines where a send and its
receive must meet: two ranks come to wait for each other's later messages. Here both halves of a message are placed together,
at the moment at which it is made if each action takes its unit cost, so all ranks see messages in one order, that of time.
Nothing waits in it for anything later, so it ends, whatever an action really takes; and at unit costs no rank ever waits for
a message that is there. The costs are fixed: foretold seconds would give the planner and the engine different schedules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from stretto.schedule.action import LANES, Action, Schedule
from stretto.schedule.timeline import Span, simulate

#: What an action costs where only the order matters: a backward is two forwards, its halves one each, all else nothing.
UNIT: Mapping[str, float] = MappingProxyType({"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0})


def unit_cost(action: Action) -> float:
    """UNIT, for `simulate`."""
    return UNIT.get(action.kind, 0.0)


def training_step(compute: Schedule, tied: Iterable[int] = ()) -> Schedule:
    """The step that runs `compute` (a compute-only schedule, see pipelines.py): with messages, and one joint update at the end.

    tied: the stages that hold a copy of one weight, if any; a rank brings together all its copies in one TIE. Raises JobError if
    `compute` cannot be run.
    """
    placed = with_messages(compute)
    orders = []
    for rank, actions in enumerate(placed.order):
        order = list(_with_reductions(actions))
        held = placed.stages_of(rank)
        order += [Action("TIE", stage) for stage in sorted(tied) if stage in held][:1]
        order += [Action("VOTE", held[0]), Action("UPDATE", held[0])]
        orders.append(tuple(order))
    step = Schedule(compute.name, compute.stages, compute.microbatches, compute.rank_of, tuple(orders))
    step.check()
    return step


def forward_step(compute: Schedule) -> Schedule:
    """Only the forwards of `compute`, with their messages: an evaluation."""
    return with_messages(compute.only("F"))


class _Message(NamedTuple):
    """A message, in the order of time; those of one moment stand in any one order, the same on both ranks."""

    time: float
    send: Action
    receive: Action


def with_messages(compute: Schedule) -> Schedule:
    """`compute` with a SEND and a RECV wherever a stage gets its input from another rank. [Note: where messages stand]"""
    compute.check()
    spans: list[list[Span]] = [[] for _ in compute.order]
    for span in simulate(compute, unit_cost).spans:
        spans[span.rank].append(span)
    between: list[dict[int, list[Action]]] = [{} for _ in compute.order]  # rank -> how many computations before -> messages
    ended = [0] * compute.ranks
    for message in sorted(_messages(compute, spans)):
        for action in (message.send, message.receive):
            rank = compute.rank_of[action.stage]
            # after what is over by then; a receive so before what is under way: it is posted when that begins
            while ended[rank] < len(spans[rank]) and spans[rank][ended[rank]].stop <= message.time:
                ended[rank] += 1
            between[rank].setdefault(ended[rank], []).append(action)
    orders = []
    for rank, actions in enumerate(compute.order):
        order: list[Action] = []
        for i in range(len(actions) + 1):
            order += between[rank].get(i, [])
            order += actions[i : i + 1]
        orders.append(tuple(order))
    return Schedule(compute.name, compute.stages, compute.microbatches, compute.rank_of, tuple(orders))


def _messages(compute: Schedule, spans: list[list[Span]]) -> Iterator[_Message]:
    rank_of, last = compute.rank_of, compute.stages - 1
    for span in (span for mine in spans for span in mine):
        kind, stage, m = span.action
        if kind == "F" and stage < last and rank_of[stage] != rank_of[stage + 1]:
            yield _Message(span.stop, Action("SEND_F", stage, m), Action("RECV_F", stage + 1, m))
        elif kind in ("B", "I") and stage > 0 and rank_of[stage] != rank_of[stage - 1]:
            yield _Message(span.stop, Action("SEND_B", stage, m), Action("RECV_B", stage - 1, m))


def _with_reductions(actions: tuple[Action, ...]) -> Iterator[Action]:
    """After a stage's last backward its REDUCE, so that it runs beside what is left; first the messages that others wait for."""
    last = {action.stage: action for action in actions if action.kind in ("B", "W")}
    due: list[Action] = []
    for action in actions:
        if action.kind not in LANES["messages"]:
            yield from due
            due = []
        yield action
        if last.get(action.stage) == action:
            due.append(Action("REDUCE", action.stage))
    yield from due
