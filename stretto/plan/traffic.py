"""Seconds of collectives among ranks of a mesh on a cluster: where the ranks of a group sit, and what its ring or tree takes.

The ring is the Program of schedule/algorithms.py in closed form (tests/plan/test_traffic.py holds the two together); what NCCL
adds to it, a start and a ramp, comes from published nccl-tests (docs/validation.md).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from stretto.errors import JobError
from stretto.layout.mesh import Mesh
from stretto.plan.hardware import Cluster
from stretto.plan.measured import CROSSES, Measured

#: Transports by which ranks of one machine meet, the one that a job takes first.
MEETING = ("nccl", "shm", "messages", "gloo")
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
    if cluster.measured:
        return _looked_up(cluster.measured, n, collective, bytes_)
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


def _looked_up(measured: Measured, ranks: int, collective: str, bytes_: float) -> float:
    """As it was measured, over the transport that a job takes; of other numbers of ranks by what crosses the busiest link."""
    ways = [way for way in measured.curves if way.collective == collective and way.private]
    ways = ways or [way for way in measured.curves if way.collective == collective]
    if not ways:
        raise JobError(f"the cluster file has no {collective}, which this layout needs; write stretto measure --ranks {ranks}")
    way = min(ways, key=lambda way: (MEETING.index(way.transport) if way.transport in MEETING else 9, abs(way.ranks - ranks)))
    return measured.seconds(way, bytes_) * CROSSES[collective](ranks) / CROSSES[collective](way.ranks)


def message_seconds(cluster: Cluster, far: bool, bytes_: float) -> float:
    """One message to another rank, in the same machine or (far) another."""
    if cluster.measured:
        return _looked_up(cluster.measured, 2, "send", bytes_)
    link = cluster.across if far else cluster.inside
    return link.start + bytes_ / link.reached
