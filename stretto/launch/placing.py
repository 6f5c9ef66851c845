"""Ranks on machines: how many on each, before any of them is started."""

from __future__ import annotations

from typing import NamedTuple

from stretto.errors import JobError
from stretto.job import Job
from stretto.layout.mesh import Mesh


class Placing(NamedTuple):
    """`ranks` ranks, as many on each of `nodes` machines; tp neighbours share a machine where `tp_inside`."""

    nodes: int
    ranks: int
    gpus: bool
    tp_inside: bool

    @property
    def per_node(self) -> int:
        return self.ranks // self.nodes


def placing(job: Job, nodes: int | None) -> Placing:
    """Where the ranks of a resolved job go. nodes: as asked for; None: one. Raises JobError where they cannot be shared evenly."""
    mesh = Mesh.parse(job.mesh)
    count = 1 if nodes is None else nodes
    if count < 1 or mesh.size % count:
        fits = ", ".join(str(n) for n in range(1, mesh.size + 1) if mesh.size % n == 0)
        raise JobError(f'--nodes {count}: the {mesh.size} ranks of mesh="{mesh}" cannot be shared evenly; use --nodes in {{{fits}}}')
    return Placing(count, mesh.size, job.device == "cuda", (mesh.size // count) % mesh["tp"] == 0)
