"""Who can run a Job, by name: the runners of `stretto compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from stretto.adapters.ability import EXACT, PLAIN_PRECISIONS, Ability, whole_pipeline
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
