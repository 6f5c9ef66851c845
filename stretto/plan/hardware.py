"""Links and clusters: how devices reach each other. Bandwidths are bytes a second in one direction for one device."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from stretto.errors import JobError
from stretto.keys import nearest
from stretto.plan.devices import GB, Device, device_of
from stretto.plan.measured import Measured

MICRO = 1e-6


@dataclass(frozen=True)
class Link:
    """How ranks reach each other: along NVLink inside a machine, over network cards between machines.

    bandwidth: nominal, of one device one way. share: what large collectives reach of it. hop: seconds for a message to the
    next rank of a ring. start: seconds before a collective begins. ramp: seconds lost while a message of some megabytes
    fills the pipe. inwards: whether the switch adds on the way (NVLS), so that an all-reduce crosses each wire once.
    """

    name: str
    bandwidth: float
    share: float
    hop: float
    start: float
    ramp: float
    source: str
    inwards: float = 1.0

    @property
    def reached(self) -> float:
        return self.bandwidth * self.share


#: NCCL's own constants for a device's links, 20 GB/s a link on Ampere, 20.6 on Hopper, 40.1 on Blackwell (REFERENCE A6),
#: and the hops, starts and ramps of published nccl-tests (docs/validation.md, "Calibration").
LINKS: Mapping[str, Link] = MappingProxyType(
    {
        link.name: link
        for link in (
            Link("nvlink2", 150 * GB, 0.80, 2.2 * MICRO, 6 * MICRO, 50 * MICRO, "V100 datasheet: 6 links of 25 GB/s"),
            Link("nvlink3", 300 * GB, 0.775, 1.9 * MICRO, 5 * MICRO, 55 * MICRO, "A100 datasheet: 12 links of 25 GB/s"),
            Link("nvlink4", 450 * GB, 0.81, 1.9 * MICRO, 12 * MICRO, 45 * MICRO, "H100 datasheet: 18 links of 25 GB/s", inwards=1.31),
            Link("nvlink5", 900 * GB, 0.755, 1.9 * MICRO, 12 * MICRO, 45 * MICRO, "B200 datasheet: 18 links of 50 GB/s", inwards=1.23),
            Link("xgmi3", 448 * GB, 0.70, 3 * MICRO, 12 * MICRO, 60 * MICRO, "MI300X datasheet: 7 links of 64 GB/s to 7 peers"),
            Link("xgmi4", 535 * GB, 0.70, 3 * MICRO, 12 * MICRO, 60 * MICRO, "MI355X datasheet: 7 links of 76.5 GB/s to 7 peers"),
            Link("pcie4", 32 * GB, 0.80, 4 * MICRO, 12 * MICRO, 60 * MICRO, "PCI Express 4.0, 16 lanes"),
            Link("pcie5", 64 * GB, 0.80, 4 * MICRO, 12 * MICRO, 60 * MICRO, "PCI Express 5.0, 16 lanes"),
            Link("hdr", 25 * GB, 0.88, 5 * MICRO, 20 * MICRO, 80 * MICRO, "InfiniBand HDR, 200 Gbit/s, one card a device"),
            Link("hdr4", 12.5 * GB, 0.88, 5 * MICRO, 20 * MICRO, 80 * MICRO, "InfiniBand HDR, 200 Gbit/s, four cards for eight devices"),
            Link("ndr", 50 * GB, 0.91, 5 * MICRO, 20 * MICRO, 80 * MICRO, "InfiniBand NDR, 400 Gbit/s, one card a device"),
            Link("xdr", 100 * GB, 0.91, 5 * MICRO, 20 * MICRO, 80 * MICRO, "InfiniBand XDR, 800 Gbit/s, one card a device"),
            Link("edr4", 6.25 * GB, 0.90, 6 * MICRO, 20 * MICRO, 80 * MICRO, "four cards of 100 Gbit/s for eight devices"),
            Link("ethernet100", 12.5 * GB, 0.80, 12 * MICRO, 30 * MICRO, 100 * MICRO, "Ethernet, 100 Gbit/s, one card a device"),
        )
    }
)


@dataclass(frozen=True)
class Cluster:
    """`nodes` machines of `per_node` devices; ranks fill one machine after the other. measured: what was timed of it, if it was."""

    name: str
    device: Device
    nodes: int
    per_node: int
    inside: Link
    across: Link
    measured: Measured | None = None

    @property
    def devices(self) -> int:
        return self.nodes * self.per_node

    def resized(self, devices: int) -> Cluster:
        """The same machines, as many as `devices` fill."""
        per_node = min(self.per_node, devices)
        if devices < 1 or devices % per_node:
            raise JobError(f"{devices} devices do not fill machines of {self.per_node}; write a multiple of {self.per_node}")
        return replace(self, nodes=devices // per_node, per_node=per_node, name=f"{devices // per_node}x{per_node} {self.device.name}")

    @staticmethod
    def of(text: str) -> Cluster:
        """'64x8 h100', '1x8 a100 pcie4 hdr' (then links inside and between machines), or a device's name: one machine of it.

        Raises JobError naming what is nearest.
        """
        found = re.fullmatch(r"\s*(?:(\d+)\s*x\s*(\d+)\s+)?([\w.-]+)(?:\s+([\w.-]+))?(?:\s+([\w.-]+))?\s*", text.lower())
        if not found:
            raise JobError(f'cluster {text!r} is not machines x devices and their kind; write "64x8 h100", or the path of a cluster file')
        nodes, per_node, name, *links = found.groups()
        device = device_of(name)
        nodes_, per_node_ = int(nodes or 1), int(per_node or min(device.domain, 8))
        if nodes_ < 1 or per_node_ < 1:
            raise JobError(f'cluster {text!r} has no devices; write at least "1x1 {name}"')
        inside, across = (_link(given or default) for given, default in zip(links, (device.inside, device.across), strict=True))
        return Cluster(f"{nodes_}x{per_node_} {device.name}", device, nodes_, per_node_, inside, across)


def _link(name: str) -> Link:
    if name not in LINKS:
        raise JobError(f"there is no link {name!r}; known are {', '.join(LINKS)}; write {nearest(name, LINKS) or 'ndr'}")
    return LINKS[name]
