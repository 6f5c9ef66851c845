"""When each action ran or would run: one type for what was measured and what was foretold."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from stretto.schedule.action import Action, Schedule


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

    @contextmanager
    def span(self, action: Action) -> Iterator[None]:
        start = self.now()
        try:
            yield
        finally:
            self.spans.append(Span(self.rank, action, start, self.now()))

    @property
    def seconds(self) -> float:
        """From the first start to the last stop."""
        return max((s.stop for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    def busy(self, rank: int) -> float:
        """Seconds in which `rank` ran an action."""
        return sum(s.stop - s.start for s in self.spans if s.rank == rank)

    def chrome_trace(self) -> str:
        """JSON in Chrome's trace format (complete events, microseconds), which Perfetto opens."""
        origin = min((s.start for s in self.spans), default=0.0)
        events = [
            {
                "name": str(s.action),
                "cat": s.action.kind,
                "ph": "X",
                "pid": 0,
                "tid": s.rank,
                "ts": (s.start - origin) * 1e6,
                "dur": (s.stop - s.start) * 1e6,
            }
            for s in self.spans
        ]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def simulate(schedule: Schedule, seconds: Callable[[Action], float]) -> Timeline:
    """When each action would run if it took `seconds(action)`: each rank goes through its order, waiting for what `needs` says."""
    schedule.check()
    stop: dict[Action, float] = {}
    free = [0.0] * schedule.ranks
    at = [0] * schedule.ranks
    timeline = Timeline()
    left = sum(len(actions) for actions in schedule.order)
    while left:
        for rank, actions in enumerate(schedule.order):
            while at[rank] < len(actions) and all(need in stop for need in schedule.needs(actions[at[rank]])):
                action = actions[at[rank]]
                start = max([free[rank], *(stop[need] for need in schedule.needs(action))])
                stop[action] = free[rank] = start + seconds(action)
                timeline.spans.append(Span(rank, action, start, stop[action]))
                at[rank] += 1
                left -= 1
    return timeline
