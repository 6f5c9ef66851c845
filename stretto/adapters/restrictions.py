"""What each runner's framework may combine when it is foretold: read from the table of capabilities, and what that cannot say as data.

The table (capabilities.py) names for every framework which axes, stages of ZeRO and combinations it has, and where its version says so.
A Way here is one of the frameworks' own ways to run: what it could use at most. What the table calls "no" is taken out of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from stretto.adapters.capabilities import TABLE, Cell
from stretto.layout.mesh import Mesh
from stretto.limits import LATER
from stretto.plan.hardware import Cluster
from stretto.plan.setting import Setting
from stretto.plan.software import STACKS, STRETTO, STRETTO_COMPILED, Software
from stretto.plan.space import Limits, Space

#: Axis -> the row of the table that says whether a framework has it.
AXIS_ROWS: Mapping[str, str] = MappingProxyType(
    {
        "dp_replicate": "cut inside a group, copied across (hybrid)",
        "tp": "tensor parallelism",
        "pp": "pipeline schedules",
        "cp": "context parallelism",
        "ep": "expert parallelism",
    }
)
#: Stage of ZeRO -> its row; and the row for stages 2 and 3 beside a pipeline.
ZERO_ROWS: Mapping[int, str] = MappingProxyType(
    {
        1: "optimizer state cut (ZeRO 1)",
        2: "gradients and parameters cut (ZeRO 2, 3)",
        3: "gradients and parameters cut (ZeRO 2, 3)",
    }
)
PIPELINE_ZERO = "a pipeline with ZeRO 2 or 3"
SEQUENCE = "tokens cut between tensor-parallel layers"

ALL_AXES = ("dp", "dp_replicate", "tp", "pp", "cp", "ep")


@dataclass(frozen=True)
class Way:
    """One way in which a framework runs.

    name: in its own words. axes, zero, schedules: what it uses at most; () of schedules: all of ours. stacks: how it behaves, by whether
    blocks are compiled. params: how long gathered parameters stay, as zero.params. even: whether kv heads and blocks must be cut evenly.
    kernels: what it computes with that is not torch's. asked: stages of ZeRO that a job may ask for to get it; (): those of `zero`.
    """

    name: str
    axes: tuple[str, ...]
    zero: tuple[int, ...]
    stacks: Mapping[bool, Software]
    schedules: tuple[str, ...] = ()
    params: Literal["microbatch", "step"] = "microbatch"
    even: bool = True
    kernels: str = ""
    asked: tuple[int, ...] = ()


@dataclass(frozen=True)
class Peer:
    """A runner's framework. framework: its column of the table; ways: of which a user would take the best; not_priced: what it has and
    is not foretold."""

    runner: str
    framework: str
    ways: tuple[Way, ...]
    not_priced: str = ""

    def cell(self, row: str) -> Cell:
        return TABLE[row][self.framework]

    def has(self, row: str) -> bool:
        return self.cell(row).can != "no"


# All of torch's family run the model that we run, with torch's kernels: what a block costs is ours, and they differ in how they cut, send
# and keep. Stages are cut by hand, as even as can be; torch's schedules wait for a message before they compute; DTensor keeps what it
# gathered. Megatron has kernels of its own, whose stack published runs have calibrated (docs/validation.md).
_EAGER = replace(STRETTO, name="torch", stages="even", messages="wait", regather="never")
_COMPILED = replace(STRETTO_COMPILED, name="torch, compiled", stages="even", messages="wait")
_TORCH: Mapping[bool, Software] = MappingProxyType({False: _EAGER, True: _COMPILED})
#: runtime/zero/config.py of 0.19: buckets of 500 million elements for reducing and for gathering; overlap_comm in stage 3 alone by default.
_BUCKETS = 2 * 5e8 * 2
_DEEPSPEED: Mapping[bool, Software] = MappingProxyType(
    {k: replace(one, name="DeepSpeed", reduce="after", gather="after", buckets=_BUCKETS) for k, one in _TORCH.items()}
)
_DEEPSPEED_3: Mapping[bool, Software] = MappingProxyType({k: replace(one, name="DeepSpeed", buckets=_BUCKETS) for k, one in _TORCH.items()})
_MEGATRON: Mapping[bool, Software] = MappingProxyType({False: replace(STACKS["Megatron-Core 2024"], name="Megatron-Core")})
_FUSED = "its fused kernels for the loss, norms, rotations and activations"
_OWN: Mapping[bool, Software] = MappingProxyType({False: STRETTO, True: STRETTO_COMPILED})

_DDP = Way("DistributedDataParallel", ("dp",), (0,), _TORCH)
_FSDP_AXES = ("dp", "dp_replicate", "tp", "cp")

PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        peer.runner: peer
        for peer in (
            Peer("stretto", "stretto", (Way("its engine", ALL_AXES, (0, 1, 2, 3), _OWN, even=False),)),
            Peer("ddp", "torch", (_DDP, Way("DDP with ZeroRedundancyOptimizer", ("dp",), (1,), _TORCH))),
            Peer(
                "fsdp2",
                "torch",
                (
                    Way("fully_shard", (*_FSDP_AXES, "pp"), (3,), _TORCH),
                    Way("fully_shard, parameters kept for the step", (*_FSDP_AXES, "pp"), (3,), _TORCH, params="step", asked=(2, 3)),
                ),
            ),
            Peer(
                "deepspeed",
                "DeepSpeed",
                (
                    Way("ZeRO 0 to 2, with AutoTP", ("dp", "tp"), (0, 1, 2), _DEEPSPEED),
                    Way("ZeRO 3, with AutoTP", ("dp", "tp"), (3,), _DEEPSPEED_3),
                    Way("its pipeline", ("dp", "pp"), (0, 1, 2, 3), _DEEPSPEED, schedules=("1f1b",)),
                ),
                "all-to-all over tokens (Ulysses), experts, host memory and NVMe",
            ),
            Peer(
                "megatron",
                "Megatron-Core",
                (
                    Way("its distributed optimizer", ALL_AXES, (0, 1), _MEGATRON, schedules=("1f1b", "interleaved"), kernels=_FUSED),
                    Way("Megatron-FSDP", ("dp", "dp_replicate", "tp", "cp", "ep"), (2, 3), _MEGATRON, kernels=_FUSED),
                ),
                "8-bit products, its optimizer on the host",
            ),
            Peer("accelerate", "Accelerate", (_DDP, Way("FSDP2", _FSDP_AXES, (3,), _TORCH))),
            Peer("ray", "Ray Train", (_DDP, Way("FSDP1 through prepare_model", ("dp",), (3,), _TORCH))),
            Peer("ray+stretto", "stretto", (Way("stretto in Ray's workers", ALL_AXES, (0, 1, 2, 3), _OWN, even=False),)),
        )
    }
)


def narrowed(peer: Peer, way: Way) -> Way:
    """The way without what the table says its framework does not have. Ray brings nothing of its own: what runs in it is torch's."""
    if peer.framework == "Ray Train":
        return way
    axes = tuple(axis for axis in way.axes if axis not in AXIS_ROWS or peer.has(AXIS_ROWS[axis]))
    zero = tuple(stage for stage in way.zero if stage not in ZERO_ROWS or peer.has(ZERO_ROWS[stage]))
    return replace(way, axes=axes, zero=zero)


def beside_pipeline(peer: Peer, stages: tuple[int, ...]) -> tuple[int, ...]:
    """Of stages of ZeRO those that a framework has beside a pipeline; "partly" is the distributed optimizer: stage 1, and no more."""
    return stages if peer.cell(PIPELINE_ZERO).can == "yes" else tuple(stage for stage in stages if stage < 2)


def combines(peer: Peer) -> str:
    """What it can combine, as 'dp, tp and ZeRO 0, 1, 2, 3, or dp, pp and ZeRO 0, 1 beside pp'."""
    parts: dict[tuple[tuple[str, ...], bool], set[int]] = {}
    for way in (narrowed(peer, way) for way in peer.ways):
        beside = beside_pipeline(peer, way.zero) if "pp" in way.axes else way.zero
        parts.setdefault((way.axes, beside != way.zero), set()).update(beside)
    return ", or ".join(
        f"{', '.join(axes)} and ZeRO {', '.join(map(str, sorted(zero)))}{' beside pp' * narrower}"
        for (axes, narrower), zero in parts.items()
    )


def reaches(peer: Peer, row: str) -> bool:
    """Whether any of its ways makes use of a row of the table."""
    ways = [narrowed(peer, way) for way in peer.ways]
    if row == PIPELINE_ZERO:
        return any("pp" in way.axes and max(beside_pipeline(peer, way.zero)) > 1 for way in ways)
    axes = [axis for axis, its in AXIS_ROWS.items() if its == row]
    least = min((stage for stage, its in ZERO_ROWS.items() if its == row), default=4)  # who cuts parameters cuts the optimizer's state too
    return any(any(axis in way.axes for axis in axes) or max(way.zero) >= least for way in ways)


def spaces(peer: Peer, way: Way, space: Space) -> Iterator[Space]:
    """The part of a search's space that a way can reach: without a pipeline, and with one, where ZeRO may be narrower."""
    way = narrowed(peer, way)
    base = replace(space.base, params=way.params, sequence=space.base.sequence and peer.has(SEQUENCE))
    stages = way.zero
    if space.zero:
        stages = stages if set(way.asked) & set(space.zero) else tuple(stage for stage in stages if stage in space.zero)
    schedules = way.schedules if not space.schedules else tuple(one for one in space.schedules if one in (way.schedules or (one,)))
    compiled = tuple(one for one in space.compiled if one in way.stacks) or tuple(way.stacks)
    meshes = list(_meshes(way, space))
    for pipelined, allowed in ((False, stages), (True, beside_pipeline(peer, stages))):
        some = tuple(mesh for mesh in meshes if (mesh["pp"] > 1) is pipelined)
        orders = schedules if pipelined else ()
        if some and allowed and (not pipelined or orders or not (way.schedules or space.schedules)):
            narrower = replace(space, base=base, meshes=some, zero=allowed, schedules=orders, compiled=compiled, later=None)
            if any(narrower.shardings(family) for family in narrower.families):
                yield narrower


def _meshes(way: Way, space: Space) -> Iterator[Mesh]:
    """Meshes of the space that a way has the axes for. Ours are those that the engine runs."""
    own = way.stacks is _OWN
    for family in space.families:
        for mesh in dict.fromkeys(sharding.mesh for sharding in space.shardings(family)):
            long = [axis for axis, size in mesh.axes if size > 1 and axis != "dp"]
            if all(axis in way.axes and not (own and axis in LATER) for axis in long) and (not way.even or _even(mesh, space.limits)):
                yield mesh


def _even(mesh: Mesh, limits: Limits) -> bool:
    """Whether kv heads and blocks are cut evenly."""
    return limits.kv_heads % mesh["tp"] == 0 and limits.blocks % mesh["pp"] == 0


def stacks_on(way: Way, cluster: Cluster) -> dict[bool, Software]:
    """How a way behaves there. On a machine that was measured, which is one of CPUs, nobody's kernels for GPUs are there."""
    if not cluster.measured:
        return dict(way.stacks)
    return {
        compiled: replace(
            one, attention="flash", fused=STRETTO.fused, loss="eager", accumulate="separate", tensor="none", host=STRETTO.host
        )
        for compiled, one in way.stacks.items()
    }


def needs(setting: Setting) -> tuple[str, ...]:
    """Rows of the table that a setting makes use of."""
    size, copies = setting.size, setting.mesh.extent("dp", "dp_replicate", "cp") > 1
    rows = [AXIS_ROWS[axis] for axis in AXIS_ROWS if size[axis] > 1]
    rows += [ZERO_ROWS[setting.zero]] * (copies and setting.zero > 0)
    rows += [PIPELINE_ZERO] * (copies and size["pp"] > 1 and setting.zero > 1)
    return tuple(dict.fromkeys(rows))
