"""A run on as many ranks as there are: between two numbers, with the mesh that fits them.

Batch, seed and schedule stay, so it is the same run on any number of ranks, up to the order in which sums are taken.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal, NamedTuple

from stretto.errors import JobError
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.plan.hardware import Cluster

#: What a change of mesh leaves as it is: nothing of what is computed, nor how, where the job says it.
KEPT = frozenset({"zero.stage", "recompute", "compile.mode", "pipeline.schedule"})


class Workers(NamedTuple):
    """The numbers of ranks that a run may have."""

    least: int
    most: int

    @classmethod
    def parse(cls, text: str) -> Workers:
        """'4', or '2-8'. Raises JobError."""
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most:
            raise JobError(f"--num-workers {text} is not possible; write a number of ranks, as --num-workers 4, or a range, as 2-8")
        return cls(least, most)


def job_on(job: Job, places: int, kind: Literal["cpu", "cuda"], workers: Workers, cluster: Cluster | None) -> Job:
    """The job with a mesh of as many of `places` devices of a kind as it can use. job: as it was asked for, not resolved.

    Its own mesh where that has as many ranks, or can (dp=auto); else the one that is foretold to be the fastest on `cluster`, whose
    machines are as many as needed. Raises JobError where there are too few devices, or no mesh can be had.
    """
    most = min(places, workers.most)
    if most < workers.least:
        raise JobError(f"--num-workers {workers.least}-{workers.most}: there is room for {places} ranks; add nodes, or write fewer")
    trouble: JobError | None = None
    for ranks in range(most, workers.least - 1, -1):
        try:
            found = _with_ranks(job, ranks, cluster)
            found.resolve(ranks, kind, ranks)
            return found
        except JobError as error:
            trouble = trouble or error
    assert trouble is not None
    raise trouble


def _with_ranks(job: Job, ranks: int, cluster: Cluster | None) -> Job:
    own = job.mesh or "dp=auto"
    try:
        mesh = Mesh.parse(own, ranks)
        if mesh.size == ranks:
            return job.with_(mesh=str(mesh))
    except JobError:
        pass  # tp=4 dp=auto is nothing for 2 ranks
    if cluster is None:
        raise JobError(
            f'mesh="{own}" is not one of {ranks} ranks, and nothing is known of their devices; write --cluster, as for stretto plan, '
            "or dp=auto in the mesh"
        )
    from stretto.plan.planning import plan_job

    planned = plan_job(job, _resized(cluster, ranks), _kept(job), 1)
    assert planned.best is not None
    found = planned.best.job
    # a plan also says what the job leaves to its defaults: only what belongs to the mesh is taken
    return job.with_(mesh=found.mesh, batch={"micro_size": found.batch.micro_size}, pipeline={"chunks": found.pipeline.chunks})


def _kept(job: Job) -> Collection[str]:
    return KEPT | ({"batch.micro_size"} if job.batch.micro_size else set())


def _resized(cluster: Cluster, ranks: int) -> Cluster:
    """So many of its devices: of whole machines, or one on each."""
    try:
        return cluster.resized(ranks)
    except JobError:
        return Cluster.resized(cluster.resized(1), ranks)
