"""Seconds of collectives among ranks of a mesh on a cluster: where the ranks of a group sit, and what its ring or tree takes.

The ring is the Program of schedule/algorithms.py in closed form (tests/plan/test_traffic.py holds the two together); what NCCL
adds to it, a start and a ramp, comes from published nccl-tests (docs/validation.md).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from stretto.layout.mesh import Mesh
from stretto.plan.hardware import Cluster

#: Bytes at which half of the ramp is felt.
RAMP = 1e6


class Seats(NamedTuple):
    """How a group sits: `ranks` in all, `near` of them in each machine, in `nodes` machines."""

    ranks: int
    near: int
    nodes: int

    @staticmethod
    def of(mesh: Mesh, axes: tuple[str, ...], per_node: int) -> Seats:
        """Of any group along `axes`; where machines hold unequal parts of it, of the largest."""
        ranks, near, stride = 1, 1, 1
        for name, size in reversed(mesh.axes):
            if name in axes:
                ranks *= size
                near *= max(1, min(size, per_node // stride))
            stride *= size
        near = min(near, ranks, per_node)
        return Seats(ranks, near, -(-ranks // near))


def collective_seconds(cluster: Cluster, seats: Seats, collective: str, bytes_: float) -> float:
    """A buffer of `bytes_` (of all ranks together, as nccl-tests counts it) through one collective among the seats."""
    n, near, nodes = seats
    if n <= 1 or bytes_ <= 0 or collective == "none":
        return 0.0
    inside, across = cluster.inside, cluster.across
    link = across if nodes > 1 else inside
    fixed = link.start + link.ramp * bytes_ / (bytes_ + RAMP)
    wire = bytes_ * (n - 1) / n
    width = min(inside.reached, near * across.reached) if nodes > 1 else inside.reached
    if collective == "all_to_all":
        far = bytes_ * (n - near) / n  # what leaves the machine goes through this rank's own card
        return fixed + max((bytes_ - far) / inside.reached, far / across.reached if nodes > 1 else 0.0)
    hops = (n - nodes) * inside.hop + (nodes - 1) * across.hop
    if collective in ("all_gather", "reduce_scatter"):
        return fixed + hops + wire / width
    if collective == "all_reduce":
        if nodes == 1 and n > 4:
            width *= inside.inwards
        tree = 2 * ((near - 1) * inside.hop + math.ceil(math.log2(nodes)) * across.hop)
        return fixed + min(2 * hops, tree) + 2 * wire / width
    raise ValueError(f"no price for {collective}")


def message_seconds(cluster: Cluster, far: bool, bytes_: float) -> float:
    """One message to another rank, in the same machine or (far) another."""
    link = cluster.across if far else cluster.inside
    return link.start + bytes_ / link.reached
