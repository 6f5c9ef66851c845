"""Timelines of a few steps, kept while they go by and joined over ranks at the end."""

from __future__ import annotations

import time

from stretto.comm.group import Group
from stretto.engine.runner import StepReport
from stretto.schedule.timeline import Span, Timeline, chrome_trace


class Profile:
    """What became of the actions of some `steps` (numbers from 1, as in metrics.jsonl) on some `ranks`."""

    def __init__(self, steps: frozenset[int], ranks: frozenset[int], rank: int) -> None:
        self.steps = steps if rank in ranks else frozenset[int]()
        self.kept: dict[int, list[Span]] = {}

    def keep(self, report: StepReport) -> None:
        """Keep the timeline of a step that is done, if it is one of those asked for."""
        if report.step + 1 in self.steps:
            self.kept[report.step + 1] = report.timeline.spans

    def trace(self, everybody: Group) -> str | None:
        """What all ranks have kept, as Chrome's trace; None if that is nothing. Collective."""
        # each machine's monotonic clock starts somewhere else; the time of day is one
        shift = time.time() - time.perf_counter()
        moved = {step: [s._replace(start=s.start + shift, stop=s.stop + shift) for s in spans] for step, spans in self.kept.items()}
        steps: dict[int, Timeline] = {}
        for kept in everybody.objects(moved, reason="timeline"):
            for step, spans in kept.items():
                steps.setdefault(step, Timeline()).spans.extend(spans)
        return chrome_trace(steps) if steps else None
