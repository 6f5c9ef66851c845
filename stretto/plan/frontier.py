"""The frontier of a job on a cluster: the fastest layout within each amount of memory a device."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from stretto.job import Job
from stretto.plan.asking import Asked, ask
from stretto.plan.explain import Explainer
from stretto.plan.hardware import Cluster
from stretto.plan.planning import Row, row_of
from stretto.plan.search import USABLE, ours, search

#: Most points of a frontier, and the share of memory that the next point saves at least.
MOST_POINTS, STEP = 10, 0.06


def frontier(job: Job, cluster: Cluster, keep: Collection[str] = ()) -> tuple[Row, ...]:
    """Layouts of which none is both faster and smaller than another; the fastest first. Only meshes that the engine runs.

    Each is the answer of the whole search within less memory than the one before it needs. Empty where nothing fits. Raises JobError.
    """
    return tuple(_points(ask(job, cluster, keep)))


def _points(asked: Asked) -> Iterator[Row]:
    memory = asked.cluster.device.memory
    space = replace(asked.space, later=False)
    for _ in range(MOST_POINTS):
        smaller = replace(asked.cluster, device=replace(asked.cluster.device, memory=memory))
        known = ours(asked.anatomy, smaller)
        found = search(known, space, 1).plans
        if not found:
            return
        yield row_of(asked, found[0], Explainer(known).why(found[0]))
        memory = found[0].memory.peak * (1 - STEP) / USABLE
