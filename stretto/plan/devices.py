"""Accelerators: what their datasheets say, and what of it long training runs reach.

Rates are dense (no sparsity) flops a second, bandwidths bytes a second, memory bytes. The shares in Speeds are calibrated: from
published operator benchmarks and at most two training runs a device, listed in docs/validation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from stretto.errors import JobError
from stretto.keys import nearest

GB = 10**9
TERA = 10**12


@dataclass(frozen=True)
class Speeds:
    """What kernels reach of a device's peaks, as shares (0 to 1).

    best: of flops, the best product on a cool chip. sustained: large products in a long run, where power or heat hold the chip
    back. depth: inner length at which a product reaches half of its rate, elements. attention: a flash kernel made for this
    device, forward and backward, counting what a causal mask leaves; portable: one of the generation before. streamed: of
    bandwidth, a pass over memory. narrow: what 8-bit products keep of these shares.
    """

    best: float
    sustained: float
    attention: tuple[float, float]
    portable: tuple[float, float]
    depth: int = 192
    streamed: float = 0.85
    narrow: float = 1.0


@dataclass(frozen=True)
class Device:
    """One accelerator. flops: dense peak by dtype; fp8 stands for 8-bit floats in any scaling, fp4 for 4-bit ones.

    units: multiprocessors. domain: devices that reach each other over the link `inside`; `across` is the usual one beyond. Links
    are names of hardware.LINKS. source: of the datasheet figures. gap: seconds between two kernels of one stream, when the host is
    ahead. compiles: whether blocks are worth compiling.
    """

    name: str
    memory: float
    bandwidth: float
    flops: Mapping[str, float]
    speeds: Speeds
    units: int
    domain: int
    inside: str
    across: str
    source: str
    aliases: tuple[str, ...] = ()
    gap: float = 1.5e-6
    compiles: bool = True

    def peak(self, dtype: str) -> float:
        """Dense flops a second in `dtype`; raises JobError where the device has no such units."""
        if dtype not in self.flops:
            raise JobError(f"{self.name} has no {dtype} units; write precision={min(self.flops)!r} or one of {', '.join(self.flops)}")
        return self.flops[dtype]


VOLTA = Speeds(0.80, 0.72, (0.35, 0.35), (0.35, 0.35))
AMPERE = Speeds(0.84, 0.80, (0.58, 0.48), (0.58, 0.48))
HOPPER = Speeds(0.82, 0.68, (0.60, 0.48), (0.36, 0.28), streamed=0.72, narrow=0.86)
BLACKWELL = Speeds(0.75, 0.475, (0.60, 0.41), (0.20, 0.15), depth=384, streamed=0.70, narrow=1.04)
CDNA3 = Speeds(0.60, 0.50, (0.40, 0.30), (0.30, 0.22))


def _flops(half: float, *, fp32: float, fp8: float = 0.0, fp4: float = 0.0, bf16: bool = True) -> Mapping[str, float]:
    """Peaks in tera flops by dtype, those that the device has."""
    given = {"bf16": half if bf16 else 0.0, "fp16": half, "fp8": fp8, "fp4": fp4, "fp32": fp32, "fp64": fp32 / 2}
    return MappingProxyType({dtype: rate * TERA for dtype, rate in given.items() if rate})


_A100, _H100 = _flops(312, fp32=19.5), _flops(989, fp8=1979, fp32=67)
_NVIDIA = "NVIDIA {} datasheet"

DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device("v100", 32 * GB, 900 * GB, _flops(125, fp32=15.7, bf16=False), VOLTA, 80, 8, "nvlink2", "edr4", _NVIDIA.format("V100")),
            Device("a100-40gb", 40 * GB, 1555 * GB, _A100, AMPERE, 108, 8, "nvlink3", "hdr", _NVIDIA.format("A100")),
            Device("a100", 80 * GB, 2039 * GB, _A100, AMPERE, 108, 8, "nvlink3", "hdr", _NVIDIA.format("A100"), ("a100-80gb", "a100-sxm")),
            Device("a800", 80 * GB, 2039 * GB, _A100, AMPERE, 108, 8, "nvlink3", "hdr", "an A100 with 400 GB/s of NVLink"),
            Device(
                "a100-pcie", 80 * GB, 1935 * GB, _A100, replace(AMPERE, best=0.80, sustained=0.74), 108, 8, "pcie4", "hdr4",
                _NVIDIA.format("A100 PCIe"),
            ),
            Device("h100", 80 * GB, 3350 * GB, _H100, HOPPER, 132, 8, "nvlink4", "ndr", _NVIDIA.format("H100"), ("h100-sxm", "h800")),
            Device(
                "h100-96gb", 96 * GB, 2400 * GB, _H100, replace(HOPPER, sustained=0.535, narrow=1.0), 132, 8, "nvlink4", "ndr",
                "an H100 with HBM2e held to 500 W, as torchtitan's benchmark pages describe it",
            ),
            Device(
                "h100-pcie", 80 * GB, 2000 * GB, _flops(756, fp8=1513, fp32=51), replace(HOPPER, sustained=0.62), 114, 8, "pcie5", "ndr",
                _NVIDIA.format("H100 PCIe"),
            ),
            Device("h200", 141 * GB, 4800 * GB, _H100, HOPPER, 132, 8, "nvlink4", "ndr", _NVIDIA.format("H200")),
            Device("gh200", 96 * GB, 4000 * GB, _H100, HOPPER, 132, 1, "nvlink4", "ndr", _NVIDIA.format("GH200")),
            Device(
                "b200", 180 * GB, 8000 * GB, _flops(2250, fp8=4500, fp4=9000, fp32=80), BLACKWELL, 148, 8, "nvlink5", "ndr",
                _NVIDIA.format("HGX B200"),
            ),
            Device(
                "b300", 288 * GB, 8000 * GB, _flops(2250, fp8=4500, fp4=13500, fp32=80), replace(BLACKWELL, sustained=0.515), 148, 8,
                "nvlink5", "xdr", _NVIDIA.format("HGX B300"),
            ),
            Device(
                "gb200", 186 * GB, 8000 * GB, _flops(2500, fp8=5000, fp4=10000, fp32=80), replace(BLACKWELL, sustained=0.515), 148, 64,
                "nvlink5", "ndr", _NVIDIA.format("GB200 NVL72") + "; 64 devices of a rack used",
            ),
            Device(
                "gb300", 279 * GB, 8000 * GB, _flops(2500, fp8=5000, fp4=15000, fp32=80), replace(BLACKWELL, sustained=0.66), 148, 64,
                "nvlink5", "xdr", _NVIDIA.format("GB300 NVL72") + "; 64 devices of a rack used",
            ),
            Device("mi300x", 192 * GB, 5300 * GB, _flops(1307, fp8=2615, fp32=163), CDNA3, 304, 8, "xgmi3", "ndr", "AMD MI300X datasheet"),
            Device("mi325x", 256 * GB, 6000 * GB, _flops(1307, fp8=2615, fp32=163), CDNA3, 304, 8, "xgmi3", "ndr", "AMD MI325X datasheet"),
            Device("mi355x", 288 * GB, 8000 * GB, _flops(2500, fp8=5000, fp32=157), CDNA3, 256, 8, "xgmi4", "ndr", "AMD MI355X datasheet"),
        )
    }
)  # fmt: skip


def device_of(name: str) -> Device:
    """The device of this name or alias, upper or lower case. Raises JobError naming the nearest."""
    plain = name.lower()
    for device in DEVICES.values():
        if plain == device.name or plain in device.aliases:
            return device
    known = [*DEVICES, *(alias for device in DEVICES.values() for alias in device.aliases)]
    near = nearest(plain, known)
    raise JobError(
        f'there is no device {name!r}; known are {", ".join(DEVICES)}; write "1x8 {near or "h100"}", or the path of a cluster file'
    )
