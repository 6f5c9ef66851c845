"""What a job will cost before anything is rented: seconds, bytes and messages of any mesh on any cluster. No torch.

The package itself can be called: `stretto.plan(job, cluster="8x8 h100")`. [Note: a package that is a function], in stretto.launch.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stretto.job import Job
    from stretto.plan.planning import Row


def plan(job: Job | str | Path, cluster: str, *, keep: Collection[str] = (), top: int = 6) -> tuple[Row, ...]:
    """The best layouts of a job on a cluster, best first, one a mesh; each with the `job` that runs it, and why it takes what it takes.

    cluster: "64x8 h100" (machines x devices and their kind), or the path of a file of `stretto measure`. keep: full names of keys that
    are not to be changed, as "zero.stage". top: meshes that the engine runs; some that it does not run yet are among them, and say so.
    Raises JobError where nothing fits, with the nearest that would.
    """
    from stretto.job import Job
    from stretto.plan.asking import read_cluster
    from stretto.plan.planning import plan_job

    return plan_job(job if isinstance(job, Job) else Job.load(job), read_cluster(cluster), keep, top).rows


class _Package(ModuleType):
    __call__ = staticmethod(plan)


sys.modules[__name__].__class__ = _Package
