"""Seconds of collectives against the closed formulas of the ring and tree, and published nccl-tests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.layout.mesh import Mesh
from stretto.plan.hardware import LINKS, Cluster, Link
from stretto.plan.traffic import Seats, collective_seconds

PLAIN = Link("plain", 40e9, 1.0, 10e-6, 0.0, 0.0, "no start, no ramp: the ring alone")


def one_kind(ranks: int) -> Cluster:
    """A cluster in which every rank reaches its neighbour alike."""
    return replace(Cluster.of(f"1x{ranks} h100"), inside=replace(PLAIN, inwards=1.0), across=PLAIN)


def brute_seats(mesh: Mesh, axes: tuple[str, ...], per_node: int) -> Seats:
    """Counted: rank 0's group, machine by machine."""
    group = mesh.group(0, *axes)
    machines = {rank // per_node for rank in group}
    return Seats(len(group), max(sum(rank // per_node == m for rank in group) for m in machines), len(machines))


@pytest.mark.parametrize("axes", [("tp",), ("dp",), ("dp", "cp"), ("pp",), ("dp", "cp", "ep"), ("dp_replicate",)])
@pytest.mark.parametrize(
    "sizes", [{"dp": 8, "tp": 4}, {"pp": 2, "dp": 4, "cp": 2, "tp": 8}, {"dp_replicate": 4, "dp": 8}, {"dp": 16, "tp": 16}]
)
def test_seats_are_those_counted_machine_by_machine(axes: tuple[str, ...], sizes: dict[str, int]) -> None:
    mesh = Mesh.of(**sizes)
    assert Seats.of(mesh, axes, 8) == brute_seats(mesh, axes, 8)


def test_a_ring_takes_its_textbook_time() -> None:
    """REFERENCE R: 1 GiB over 64 ranks, 10 us and 40 GB/s: 54.11 ms; half of it without the second half of an all-reduce."""
    seats = Seats(64, 64, 1)
    ring = collective_seconds(one_kind(64), seats, "all_gather", 2**30)
    assert 2 * ring == pytest.approx(54.11e-3, rel=1e-3)
    assert collective_seconds(one_kind(64), seats, "reduce_scatter", 2**30) == ring


def test_alone_or_with_nothing_to_say_nothing_is_sent() -> None:
    cluster = Cluster.of("2x8 h100")
    assert collective_seconds(cluster, Seats(1, 1, 1), "all_reduce", 1e9) == 0
    assert collective_seconds(cluster, Seats(8, 8, 1), "all_reduce", 0) == 0
    with pytest.raises(ValueError, match="no price"):
        collective_seconds(cluster, Seats(8, 8, 1), "gossip", 1)


def test_a_group_uses_as_many_network_cards_as_it_has_ranks_in_a_machine() -> None:
    cluster = Cluster.of("4x8 h100")
    one, all_ = (collective_seconds(cluster, Seats(4 * near, near, 4), "all_gather", 1e11) for near in (1, 8))
    assert one / all_ == pytest.approx((3 / 4) / (31 / 32 / 8), rel=0.01)


#: ml-engineering @ 744d01e18b, network/README.md, and (40 GB) NetX-lab/Echo @ 15f0d12c41: machines, bytes, GB/s on the bus.
MEASURED = [
    ("1x8 a100", 2**34, 234.89),
    ("1x8 a100-40gb", 2**27, 209.83),
    ("1x8 a100-40gb", 2**24, 124.60),
    ("1x8 h200", 2**34, 482.26),
    ("1x8 h200", 2**26, 346.51),
    ("1x8 b200", 2**34, 845.67),
    ("4x8 h200", 2**32, 364.87),
    ("4x8 b200", 2**34, 381.80),
]


@pytest.mark.parametrize(("words", "bytes_", "busbw"), MEASURED)
def test_all_reduces_are_near_published_ones(words: str, bytes_: int, busbw: float) -> None:
    cluster = Cluster.of(words)
    seats = Seats(cluster.devices, 8, cluster.nodes)
    foretold = 2 * (seats.ranks - 1) / seats.ranks * bytes_ / collective_seconds(cluster, seats, "all_reduce", bytes_)
    assert foretold == pytest.approx(busbw * 1e9, rel=0.2)


def test_links_reach_less_than_they_are_sold_for() -> None:
    assert all(0 < link.reached < link.bandwidth for link in LINKS.values())
