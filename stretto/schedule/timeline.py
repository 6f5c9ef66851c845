"""When each action ran or would run: one type for what was measured and what was foretold."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from stretto.schedule.action import LANE_OF, Action, Schedule


class Span(NamedTuple):
    """`action` on `rank` from `start` to `stop`, in seconds."""

    rank: int
    action: Action
    start: float
    stop: float


@dataclass
class Timeline:
    """Spans of one step. `now` reads the clock, so that tests can give their own."""

    rank: int = 0
    spans: list[Span] = field(default_factory=list)
    now: Callable[[], float] = time.perf_counter
    _start: float = field(default=0.0, init=False)

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        self._start = self.now()
        try:
            yield
        finally:
            self.spans.append(Span(self.rank, action, self._start, self.now()))

    def arrived(self) -> None:
        """What the action under way has waited for is there: it begins now. Waiting is idle time, not the action's."""
        self._start = self.now()

    @property
    def seconds(self) -> float:
        """From the first start to the last stop."""
        return max((s.stop for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Seconds in which `rank` computed; messages and reductions run beside that."""
        return sum(s.stop - s.start for s in self.spans if s.rank == rank and LANE_OF[s.action.kind] == "compute")

    def bubble(self, rank: int) -> float:
        """Seconds of the step in which `rank` did not compute."""
        return self.seconds - self.busy(rank)


def chrome_trace(steps: Mapping[int, Timeline]) -> str:
    """JSON in Chrome's trace format, which Perfetto opens: a row a rank, on it each step (by its number) and below it its actions.

    Complete events, in microseconds from the first start of all.
    """
    origin = min((span.start for timeline in steps.values() for span in timeline.spans), default=0.0)
    ranks = sorted({span.rank for timeline in steps.values() for span in timeline.spans})
    events: list[dict[str, object]] = [{"name": "thread_name", "ph": "M", "pid": 0, "tid": r, "args": {"name": f"rank {r}"}} for r in ranks]
    for step, timeline in sorted(steps.items()):
        for rank in ranks:
            mine = [span for span in timeline.spans if span.rank == rank]
            if mine:
                whole = min(span.start for span in mine), max(span.stop for span in mine)
                events.append(_complete(f"step {step}", "step", rank, *whole, origin))
                events += [_complete(str(s.action), s.action.kind, rank, s.start, s.stop, origin) for s in mine]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _complete(name: str, category: str, rank: int, start: float, stop: float, origin: float) -> dict[str, object]:
    times = {"ts": (start - origin) * 1e6, "dur": (stop - start) * 1e6}
    return {"name": name, "cat": category, "ph": "X", "pid": 0, "tid": rank, **times}


def read_chrome_trace(text: str) -> dict[int, Timeline]:
    """The timelines that `chrome_trace` wrote, by step; in seconds from the first start of all. Raises ValueError for other text."""
    steps: dict[int, Timeline] = {}
    now: dict[object, Timeline] = {}  # of each rank, the step that was begun last
    for event in json.loads(text)["traceEvents"]:
        if event["ph"] != "X":
            continue
        if event["cat"] == "step":
            now[event["tid"]] = steps.setdefault(int(event["name"].removeprefix("step ")), Timeline())
        else:
            start = event["ts"] / 1e6
            now[event["tid"]].spans.append(Span(event["tid"], Action.parse(event["name"]), start, start + event["dur"] / 1e6))
    return steps


def simulate(schedule: Schedule, seconds: Callable[[Action], float]) -> Timeline:
    """When each action would run if it took `seconds(action)`, in the lanes of its rank: as soon as what it waits for is over.

    A message takes the longer of what its SEND and its RECV take, and is under way on both ranks at once. Spans stand rank by
    rank in the order of the schedule. Raises JobError if the schedule never ends.
    """
    waits = schedule.waits
    at: dict[Action, tuple[float, float]] = {}
    cost: dict[Action, float] = {}
    for actions in schedule.order:
        for action in actions:
            event = schedule.event(action)
            cost[event] = max(cost.get(event, 0.0), seconds(action))
    for event in schedule.sequence:
        start = max([at[before][1] for before in waits[event]], default=0.0)
        at[event] = start, start + cost[event]
    spans = [Span(rank, action, *at[schedule.event(action)]) for rank, actions in enumerate(schedule.order) for action in actions]
    return Timeline(spans=spans)


def makespan(schedule: Schedule, seconds: Mapping[tuple[str, int], float], across: float = 0.0) -> float:
    """The seconds of what `simulate` makes, where an action costs what its (kind, stage) says, and nothing if that is not there.

    across: seconds until another rank can use what an action made, for schedules without messages. Thousands of times a search asks
    one schedule with other costs: what waits for what is numbered once, and only times are new.
    """
    numbered = schedule.numbered
    costs = [max(seconds.get(action, 0.0) for action in actions) for actions in numbered.kinds]
    ends: list[float] = []
    for kind, near, far in numbered.events:
        start = 0.0
        for i in near:
            if ends[i] > start:
                start = ends[i]
        for i in far:
            if ends[i] + across > start:
                start = ends[i] + across
        ends.append(start + costs[kind])
    return max(ends, default=0.0)
