"""Who can run a Job, by name: the runners of `stretto compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from stretto.adapters.ability import EXACT, PLAIN_PRECISIONS, Ability, megatron_model, whole_pipeline
from stretto.errors import JobError
from stretto.keys import nearest

COPIES = "keeps all parameters, gradients and optimizer state on every rank"
OWN_SCHEDULES = ("1f1b", "gpipe", "interleaved", "bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "none")
OWN_PRECISIONS = (*PLAIN_PRECISIONS, ("fp16", "fp32"), ("bf16", "bf16"), ("fp32", "fp64"), ("bf16", "fp64"), ("fp16", "fp64"))
TORCH_SCHEDULES: Mapping[str, str] = MappingProxyType(
    {
        "1f1b": "Schedule1F1B",
        "gpipe": "ScheduleGPipe",
        "interleaved": "ScheduleInterleaved1F1B",
        "bfs": "ScheduleLoopedBFS",
        "zb-v": "ScheduleZBVZeroBubble",
        "dualpipe-v": "ScheduleDualPipeV",
    }
)

RUNNERS: Mapping[str, Ability] = MappingProxyType(
    {
        can.name: can
        for can in (
            Ability(
                "stretto",
                "stretto",
                "stretto.adapters.own:build",
                axes=("dp", "dp_replicate", "tp", "pp", "cp", "ep"),
                zero=EXACT,
                schedules=dict.fromkeys(OWN_SCHEDULES, ""),
                precisions=OWN_PRECISIONS,
            ),
            Ability(
                "ddp",
                "torch",
                "stretto.adapters.ddp:build",
                axes=("dp", "dp_replicate"),
                zero={0: "", **{stage: f"zero={stage} has no counterpart: {COPIES}" for stage in (1, 2, 3)}},
                compile=True,
            ),
            Ability(
                "fsdp2",
                "torch",
                "stretto.adapters.fsdp2:build",
                axes=("dp", "dp_replicate", "tp", "pp"),
                zero={
                    **{stage: f"zero={stage} has no counterpart: run as stage 2, reshard_after_forward=False" for stage in (0, 1)},
                    2: "reshard_after_forward=False",
                    3: "reshard_after_forward=True",
                },
                schedules=TORCH_SCHEDULES,
                alone=(("pp", "tp"),),
                conditions=(whole_pipeline,),
            ),
            Ability(
                "deepspeed",
                "deepspeed",
                "stretto.adapters.deepspeed:build",
                axes=("dp",),
                zero=EXACT,
                extra="deepspeed",
                precisions=PLAIN_PRECISIONS[:2],
                compile=False,
            ),
            Ability(
                "megatron",
                "megatron-core",
                "stretto.adapters.megatron:build",
                axes=("dp", "tp", "pp"),
                zero={
                    0: "",
                    1: "",
                    2: "zero=2 has no counterpart: run as stage 1, its distributed optimizer",
                    3: "zero=3 is run as stage 1, its distributed optimizer; its own fully sharded mode is not run here",
                },
                extra="megatron",
                schedules={"1f1b": "own, without interleaving"},
                precisions=PLAIN_PRECISIONS[:2],
                optimizers=("adamw",),
                recompute=("none", "full"),
                compile=False,
                decoder_only=True,
                conditions=(megatron_model, whole_pipeline),
                about="on a CPU with its calls of CUDA turned away (adapters/megatron_cpu.py); its fused kernels are for GPUs",
            ),
            Ability(
                "accelerate",
                "accelerate",
                "stretto.adapters.accelerate:build",
                axes=("dp",),
                zero={0: "", **{stage: f"zero={stage} is run as its default, DDP: {COPIES}" for stage in (1, 2, 3)}},
                extra="accelerate",
                precisions=PLAIN_PRECISIONS[:2],
            ),
            Ability(
                "ray",
                "ray",
                "stretto.adapters.raytrain:drive",
                axes=("dp",),
                zero={0: "", **{stage: f"zero={stage} is run as what its prepare_model gives, DDP: {COPIES}" for stage in (1, 2, 3)}},
                extra="ray",
                driver=True,
            ),
            Ability(
                "ray+stretto",
                "ray",
                "stretto.adapters.raytrain:drive_stretto",
                axes=("dp", "dp_replicate", "tp", "pp", "cp", "ep"),
                zero=EXACT,
                extra="ray",
                schedules=dict.fromkeys(OWN_SCHEDULES, ""),
                precisions=OWN_PRECISIONS,
                driver=True,
                about="stretto's engine in Ray Train's workers",
            ),
        )
    }
)


def chosen(names: Sequence[str]) -> list[Ability]:
    """The runners of these names, each once, in order. Raises JobError for a name that is none."""
    for name in names:
        if name not in RUNNERS:
            near = nearest(name, RUNNERS)
            raise JobError(f"--runners {name!r}: no such runner; there are {', '.join(RUNNERS)}; write --runners {near or 'stretto,ddp'}")
    return [RUNNERS[name] for name in dict.fromkeys(names)]
