"""When each action ran or would run: one type for what was measured and what was foretold."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
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
