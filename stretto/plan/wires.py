"""Bytes that a device sends in a step, by what for and through which link.

Nothing is counted a second time: the layout is priced once more on links that take a second a byte and nothing else, so the seconds
of its collectives are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from stretto.plan.explain import crossings_of
from stretto.plan.hardware import Cluster, Link
from stretto.plan.known import Known
from stretto.plan.predict import Predictor

#: Bytes a second of a link that counts, and of one that does not.
COUNTS, FREE = 1.0, 1e30


class Wire(NamedTuple):
    """words: what for. inside: bytes through the device's link in its machine, of the busiest pipeline rank; across: through its network
    card."""

    words: str
    inside: float
    across: float

    def seconds(self, cluster: Cluster) -> float:
        """What the slower of the two links takes at what large collectives reach of it."""
        return max(self.inside / cluster.inside.reached, self.across / cluster.across.reached)


def wires(predictor: Predictor) -> tuple[Wire, ...]:
    """What a device of a layout sends in a step; only what there is."""
    inside, across = _counted(predictor, COUNTS, FREE), _counted(predictor, FREE, COUNTS)
    m = predictor.setting.microbatches

    def of(words: str, count: Callable[[Predictor, Sequence[int]], float]) -> Wire:
        return Wire(words, *(max(count(one, stages) for stages in one.ranks) for one in (inside, across)))

    found = (
        of(crossings_of(predictor.setting), lambda one, stages: m * sum(w.crossing for stage in stages for w in one.work(stage))),
        of("microbatches to other stages", lambda one, stages: m * _neighbours(one, stages) * one.message()),
        of("parameters and gradients while blocks run", lambda one, stages: m * sum(w.beside for stage in stages for w in one.work(stage))),
        of("gradients meet", lambda one, stages: one.ends(stages)[0]),
        of("parameters come back", lambda one, stages: one.ends(stages)[1]),
    )
    return tuple(Wire(wire.words, *(0.0 if n < 1 else n for n in wire[1:])) for wire in found if wire.inside >= 1 or wire.across >= 1)


def _counted(predictor: Predictor, inside: float, across: float) -> Predictor:
    """The layout where every collective shows all that it sends."""
    links = [Link("counted", bandwidth, 1.0, 0.0, 0.0, 0.0, "") for bandwidth in (inside, across)]
    cluster = replace(predictor.cluster, inside=links[0], across=links[1], measured=None)
    software = replace(predictor.software, reduce="after", gather="after", backward_gather="overlap", tensor="none")
    return Predictor.of(Known(predictor.anatomy, cluster, software, predictor.schedules), predictor.setting)


def _neighbours(predictor: Predictor, stages: Sequence[int]) -> int:
    """Messages of a microbatch that leave a rank: forward to the next stage and backward to the one before, if others hold those."""
    holders = predictor.ranks_of
    return sum(0 <= other < len(holders) and holders[other] != holders[stage] for stage in stages for other in (stage - 1, stage + 1))
