"""A cluster from what `stretto measure` found: this machine, with its own rates and its own times of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stretto.errors import JobError
from stretto.plan.devices import Device, Speeds
from stretto.plan.hardware import Cluster, Link
from stretto.plan.measured import Copy, LinkTime, Measured, Product
from stretto.plan.traffic import MEETING

#: What of a product's rate attention reaches where nobody measured it, forward and backward.
ATTENTION = (0.5, 0.4)


def cluster_of_file(path: Path) -> Cluster:
    """The machine that a cluster file describes, with as many devices as ranks computed at once when it was measured."""
    return cluster_of(Measured.read(path))


def cluster_of(measured: Measured) -> Cluster:
    """Raises JobError where it has no product or no copy."""
    facts = measured.device
    if not facts.products or not facts.copies:
        raise JobError(f"the cluster file of {facts.name} holds no products or no copies; write one with stretto measure")
    flops = {dtype: max(one.flops_per_second for one in facts.products if one.dtype == dtype) for dtype in _dtypes(facts.products)}
    speeds = Speeds(1.0, 1.0, ATTENTION, ATTENTION, depth=_depth(facts.products), streamed=1.0)
    device = Device(
        facts.name,
        facts.memory / (facts.ranks if facts.kind == "cpu" else 1),
        2 * _copied(facts.copies),  # a copy reads and writes
        flops,
        speeds,
        1,
        facts.ranks,
        "measured",
        "measured",
        "stretto measure",
        gap=facts.call,
        compiles=facts.kind != "cpu",
    )
    link = _link(measured)
    return Cluster(f"1x{facts.ranks} {facts.name}", device, 1, facts.ranks, link, link, measured)


def _dtypes(products: Sequence[Product]) -> list[str]:
    return list(dict.fromkeys(one.dtype for one in products))


def _copied(copies: Sequence[Copy]) -> float:
    """Bytes a second of the largest copy, which no cache holds."""
    return max(copies, key=lambda one: one.bytes_).bytes_per_second


def _depth(products: Sequence[Product]) -> int:
    """Inner length at which a product reaches half of its rate: of the shortest that was measured in the first dtype."""
    first = [one for one in products if one.dtype == products[0].dtype]
    best = max(one.flops_per_second for one in first)
    short = min(first, key=lambda one: one.inner)
    return max(0, round(short.inner * (best / short.flops_per_second - 1)))


def _link(measured: Measured) -> Link:
    """The line through the all-reduces of the transport that a job takes; single collectives are looked up in the file."""
    times = times_of(measured, "all_reduce")
    if not times:
        return Link("nobody", 1e12, 1.0, 0.0, 0.0, 0.0, "one rank alone")
    fits = {fit.way: fit for fit in measured.fits}
    way = times[0].way
    bandwidth = fits[way].bandwidth
    return Link(way.transport, bandwidth if bandwidth < 1e15 else 1e12, 1.0, 0.0, fits[way].latency, 0.0, "stretto measure")


def times_of(measured: Measured, collective: str, private: bool = True) -> list[LinkTime]:
    """Times of a collective over the transport that a job takes, with as many ranks as there are."""
    for transport in MEETING:
        mine = [one for one in measured.links if (one.transport, one.collective) == (transport, collective)]
        if mine:
            fitting = [one for one in mine if one.private is private] or mine
            most = max(one.ranks for one in fitting)
            return [one for one in fitting if one.ranks == most]
    return []
