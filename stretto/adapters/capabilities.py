"""What each framework can do, as data: every cell names the file of that version that says so. docs/frameworks.md is drawn from it.

A cell is about the framework, not about its adapter here, which may run less (adapters/catalog.py says what).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

Can = Literal["yes", "partly", "no"]


class Cell(NamedTuple):
    """Whether a framework can do something; words: how, or what is missing. file: where its version says so, below FOLDERS; text: what
    stands there ("": the file's being there says it)."""

    can: Can
    words: str
    file: str = ""
    text: str = ""


#: Framework -> (distribution, the version that was read).
VERSIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "stretto": ("stretto", "0.1"),
        "torch": ("torch", "2.13"),
        "DeepSpeed": ("deepspeed", "0.19"),
        "Megatron-Core": ("megatron-core", "0.16"),
        "Accelerate": ("accelerate", "1.15"),
        "Ray Train": ("ray", "2.60"),
    }
)

#: Framework -> the folder of its package that `file` is below.
FOLDERS: Mapping[str, str] = MappingProxyType(
    {
        "stretto": "stretto",
        "torch": "torch/distributed",
        "DeepSpeed": "deepspeed",
        "Megatron-Core": "megatron/core",
        "Accelerate": "accelerate",
        "Ray Train": "ray/train/v2",
    }
)

_RAY = Cell("no", "brings none of its own: what runs in its workers does it")

TABLE: Mapping[str, Mapping[str, Cell]] = MappingProxyType(
    {
        "optimizer state cut (ZeRO 1)": {
            "stretto": Cell("yes", "`zero=1`", "layout/zero.py"),
            "torch": Cell(
                "yes",
                "`ZeroRedundancyOptimizer` beside DDP",
                "optim/zero_redundancy_optimizer.py",
                "class ZeroRedundancy",
            ),
            "DeepSpeed": Cell("yes", "`stage: 1`", "runtime/zero/config.py", "class ZeroStageEnum"),
            "Megatron-Core": Cell(
                "yes", "distributed optimizer", "distributed/distributed_data_parallel_config.py", "use_distributed_optimizer"
            ),
            "Accelerate": Cell("partly", "through its DeepSpeed plugin", "utils/dataclasses.py", "class DeepSpeedPlugin"),
            "Ray Train": _RAY,
        },
        "gradients and parameters cut (ZeRO 2, 3)": {
            "stretto": Cell("yes", "`zero=2`, `zero=3`", "layout/zero.py"),
            "torch": Cell("yes", "`fully_shard` (FSDP2)", "fsdp/_fully_shard/_fully_shard.py", "reshard_after_forward"),
            "DeepSpeed": Cell("yes", "`stage: 2`, `stage: 3`", "runtime/zero/config.py", "class ZeroStageEnum"),
            "Megatron-Core": Cell(
                "yes", "Megatron-FSDP", "distributed/distributed_data_parallel_config.py", "data_parallel_sharding_strategy"
            ),
            "Accelerate": Cell("yes", "FSDP1, FSDP2 or DeepSpeed by plugin", "utils/dataclasses.py", "fsdp_version"),
            "Ray Train": Cell("partly", "`prepare_model` wraps in DDP or FSDP1", "torch/train_loop_utils.py", "FullyShardedDataParallel"),
        },
        "cut inside a group, copied across (hybrid)": {
            "stretto": Cell("yes", "`dp_replicate`", "layout/mesh.py", "dp_replicate"),
            "torch": Cell("yes", "`fully_shard` over a mesh of two dims", "fsdp/_fully_shard/_fully_shard.py", "HSDP"),
            "DeepSpeed": Cell("partly", "of parameters (hpZ)", "runtime/zero/config.py", "zero_hpz_partition_size"),
            "Megatron-Core": Cell(
                "yes",
                "several instances of the distributed optimizer",
                "distributed/distributed_data_parallel_config.py",
                "num_distributed_optimizer_instances",
            ),
            "Accelerate": Cell("yes", "`dp_replicate_size`", "parallelism_config.py", "dp_replicate_size"),
            "Ray Train": _RAY,
        },
        "tensor parallelism": {
            "stretto": Cell("yes", "by published or own plan, uneven cuts too", "parallel/tensor.py"),
            "torch": Cell("yes", "DTensor styles, a plan of one's own", "tensor/parallel/style.py", "class ColwiseParallel"),
            "DeepSpeed": Cell("yes", "AutoTP", "runtime/tensor_parallel/config.py", "autotp_size"),
            "Megatron-Core": Cell("yes", "of its own layers", "tensor_parallel/layers.py", "class ColumnParallelLinear"),
            "Accelerate": Cell("partly", "of transformers models, not beside DDP", "parallelism_config.py", "composing DDP + TP"),
            "Ray Train": _RAY,
        },
        "tokens cut between tensor-parallel layers": {
            "stretto": Cell("yes", "`tensor.sequence`", "parallel/stream.py"),
            "torch": Cell("yes", "`SequenceParallel`", "tensor/parallel/style.py", "class SequenceParallel"),
            "DeepSpeed": Cell("no", "not found in it"),
            "Megatron-Core": Cell("yes", "`sequence_parallel`", "model_parallel_config.py", "sequence_parallel"),
            "Accelerate": Cell("no", "not found in it"),
            "Ray Train": _RAY,
        },
        "pipeline schedules": {
            "stretto": Cell("yes", "gpipe, 1f1b, interleaved, bfs, zb-h1, zb-h2, zb-v, dualpipe-v, a file", "schedule/pipelines.py"),
            "torch": Cell(
                "yes",
                "GPipe, 1F1B, interleaved, looped BFS, zero-bubble, ZBV, DualPipeV",
                "pipelining/schedules.py",
                "class ScheduleDualPipeV",
            ),
            "DeepSpeed": Cell("yes", "1F1B", "runtime/pipe/schedule.py", "class TrainSchedule"),
            "Megatron-Core": Cell(
                "yes",
                "1F1B, interleaved",
                "pipeline_parallel/schedules.py",
                "def forward_backward_pipelining_with_interleaving",
            ),
            "Accelerate": Cell("no", "for inference only", "inference.py", "def prepare_pippy"),
            "Ray Train": _RAY,
        },
        "a pipeline with ZeRO 2 or 3": {
            "stretto": Cell("yes", "each stage sharded over `dp`", "parallel/parallelize.py"),
            "torch": Cell("yes", "`fully_shard` in each stage", "pipelining/stage.py", "FSDPModule"),
            "DeepSpeed": Cell(
                "no",
                "stages 0 and 1 alone",
                "runtime/pipe/engine.py",
                "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
            ),
            "Megatron-Core": Cell("partly", "the distributed optimizer (stage 1)", "optimizer/distrib_optimizer.py"),
            "Accelerate": Cell("no", "no pipeline for training", "inference.py", "def prepare_pippy"),
            "Ray Train": _RAY,
        },
        "context parallelism": {
            "stretto": Cell("no", "not in this version", "limits.py", '"cp"'),
            "torch": Cell("yes", "experimental", "tensor/experimental/_context_parallel"),
            "DeepSpeed": Cell("yes", "all-to-all (Ulysses)", "sequence/layer.py", "class DistributedAttention"),
            "Megatron-Core": Cell("yes", "`context_parallel_size`", "model_parallel_config.py", "context_parallel_size"),
            "Accelerate": Cell("yes", "`cp_size`, torch's", "parallelism_config.py", "cp_size"),
            "Ray Train": _RAY,
        },
        "expert parallelism": {
            "stretto": Cell("no", "not in this version", "limits.py", '"ep"'),
            "torch": Cell("no", "parts to build it of, as torchtitan does"),
            "DeepSpeed": Cell("yes", "`ep_size` of its MoE layer", "moe/layer.py", "ep_size"),
            "Megatron-Core": Cell("yes", "`expert_model_parallel_size`", "model_parallel_config.py", "expert_model_parallel_size"),
            "Accelerate": Cell("no", "not found in it"),
            "Ray Train": _RAY,
        },
        "optimizer or parameters kept on the host": {
            "stretto": Cell("no", "not in this version"),
            "torch": Cell("yes", "`CPUOffloadPolicy`", "fsdp/_fully_shard/_fsdp_api.py", "class CPUOffloadPolicy"),
            "DeepSpeed": Cell("yes", "host memory and NVMe", "runtime/zero/offload_config.py", "nvme"),
            "Megatron-Core": Cell("yes", "the optimizer", "optimizer/optimizer_config.py", "optimizer_cpu_offload"),
            "Accelerate": Cell("partly", "FSDP's and DeepSpeed's", "utils/dataclasses.py", "cpu_offload"),
            "Ray Train": _RAY,
        },
        "a checkpoint goes on on another mesh": {
            "stretto": Cell("yes", "any mesh to any mesh, as it is", "checkpoint/load.py"),
            "torch": Cell("yes", "DCP reads other shardings", "checkpoint/planner_helpers.py", "create_read_items"),
            "DeepSpeed": Cell("partly", "converted first (universal checkpoint)", "checkpoint/ds_to_universal.py"),
            "Megatron-Core": Cell("yes", "dist_checkpointing", "dist_checkpointing/serialization.py", "def load("),
            "Accelerate": Cell("partly", "as FSDP or DeepSpeed do", "utils/fsdp_utils.py", "torch.distributed.checkpoint"),
            "Ray Train": Cell("no", "keeps what its workers report", "api/config.py", "class CheckpointConfig"),
        },
        "restarts after a failure": {
            "stretto": Cell("partly", "under torchrun or Ray; saves and resumes itself", "launch/resuming.py"),
            "torch": Cell("yes", "torchrun starts all ranks again", "run.py", "max-restarts"),
            "DeepSpeed": Cell("no", "left to the launcher"),
            "Megatron-Core": Cell("no", "left to the launcher"),
            "Accelerate": Cell("yes", "torchrun's", "commands/launch.py", "max_restarts"),
            "Ray Train": Cell("yes", "`max_failures`, another number of workers too", "api/config.py", "Union[int, Tuple[int, int]]"),
        },
        "a model as it is": {
            "stretto": Cell("yes", "any module for dp and ZeRO; tp and pp by plan", "parallel/parallelize.py"),
            "torch": Cell("partly", "any module for DDP and FSDP2; tp and pp by hand", "pipelining/_IR.py", "def pipeline("),
            "DeepSpeed": Cell("partly", "for ZeRO; pipelines want a list of layers", "runtime/pipe/module.py", "layers (Iterable)"),
            "Megatron-Core": Cell("no", "models are built of its own layers", "models/gpt/gpt_model.py", "class GPTModel"),
            "Accelerate": Cell("yes", "any module", "accelerator.py", "def prepare("),
            "Ray Train": Cell("yes", "any module", "torch/train_loop_utils.py", "def prepare_model("),
        },
    }
)

SIGNS: Mapping[Can, str] = MappingProxyType({"yes": "yes", "partly": "partly", "no": "-"})


def markdown() -> str:
    """The table as docs/frameworks.md shows it."""
    head = ["", *(f"{name} {version}" for name, (_, version) in VERSIONS.items())]
    lines = [head, ["---"] * len(head)]
    lines += [[feature, *(_cell(cells[name]) for name in VERSIONS)] for feature, cells in TABLE.items()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def sources() -> str:
    """Where each cell was read, as a list."""
    lines = []
    for feature, cells in TABLE.items():
        found = [f"{name} `{cell.file}`" for name, cell in cells.items() if cell.file]
        lines.append(f"- {feature}: {'; '.join(found)}")
    return "\n".join(lines) + "\n"


def _cell(cell: Cell) -> str:
    return f"{SIGNS[cell.can]}: {cell.words}" if cell.can != "no" else f"- ({cell.words})"
