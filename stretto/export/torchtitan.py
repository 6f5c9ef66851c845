"""A job as a torchtitan configuration (TOML), and a module that tells torchtitan the sizes of its model.

Keys: JobConfig of torchtitan 0.2.2, the last release that reads TOML files. Later ones take the same keys as options
(--training.steps 100) over a configuration written in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stretto.anatomy import DecoderShape
from stretto.export.outline import outline
from stretto.export.reading import Exported, File, Reading, comments
from stretto.keys import show

VERSION = "0.2.2"
RUN = "PYTHONPATH=. torchrun --nproc-per-node {ranks} -m torchtitan.train --job.config_file torchtitan.toml"
#: Our pipeline schedules -> torch's, by which torchtitan names them.
SCHEDULES: Mapping[str, str] = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "bfs": "LoopedBFS", "zb-v": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV", "none": "1F1B",
}  # fmt: skip
FLAVOR = '''\
"""The model of {name}, as torchtitan's Llama of these sizes. Written by `stretto export`; found by experimental.custom_import."""

from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

llama3_args["{flavor}"] = TransformerModelArgs(
    dim={hidden},
    n_layers={blocks},
    n_heads={heads},
    n_kv_heads={kv_heads},
    vocab_size={vocab},
    multiple_of={ffn},  # with the next: the MLP is exactly this wide
    ffn_dim_multiplier={multiplier},
    norm_eps={norm_eps},
    rope_theta={rope_theta},
    max_seq_len={seq_len},
)
'''


def export(asked: Reading) -> Exported:
    """The configuration of a resolved job."""
    run = RUN.format(ranks=asked.mesh.size)
    shape, name = outline(asked, "torchtitan"), asked.job.name
    tables: dict[str, Mapping[str, Any]] = {
        "job": {"description": f"{name}, written by stretto export", "dump_folder": "outputs"},
        "metrics": {"log_freq": asked("log.every")},
        "model": {"name": "llama3", "flavor": name, "hf_assets_path": _assets(asked)},
        "optimizer": _optimizer(asked),
        "lr_scheduler": _schedule(asked),
        "training": _training(asked),
        "parallelism": _parallelism(asked),
        "checkpoint": _checkpoint(asked),
        "activation_checkpoint": _recompute(asked),
        "compile": {"enable": asked("compile.mode") == "block", "components": ["model"], "backend": asked("compile.backend")},
        "comm": {
            "init_timeout_seconds": _seconds(asked("comm.init_timeout")),
            "train_timeout_seconds": _seconds(asked("comm.step_timeout")),
        },
        "validation": _validation(asked),
        "debug": {"seed": asked("seed")},
        "experimental": {"custom_import": "stretto_flavor"},
    }
    flavor = _flavor(asked, shape)
    missing = asked.missing()
    text = "\n".join(f"[{table}]\n" + "".join(f"{key} = {show(value)}\n" for key, value in keys.items()) for table, keys in tables.items())
    head = comments(f"{name} for torchtitan {VERSION}, written by stretto export", missing, run)
    files = (File("torchtitan.toml", f"{head}\n{text}"), File("stretto_flavor.py", flavor))
    return Exported("torchtitan", VERSION, files, missing, run)


def _flavor(asked: Reading, shape: DecoderShape) -> str:
    """torchtitan's Llama of these sizes. What it is otherwise is listed."""
    unlike = {
        "learned positions": shape.position == "learned",
        "LayerNorm": shape.norm == "layer",
        "a GELU MLP": shape.mlp == "gelu",
        "biases": shape.bias,
        "a tied head": shape.tied,
        "heads that are not hidden / heads wide": shape.head_dim * shape.heads != shape.hidden,
    }
    words = [what for what, has in unlike.items() if has]
    if words:
        asked.lacks("model.name", f"has {', '.join(words)}; torchtitan's Llama of its sizes has rope, RMSNorm, SwiGLU and none of that")
    asked.lacks("seed", "the first values are others: torchtitan draws them itself, scaled by depth")
    # its MLP is int(multiplier * int(8 hidden / 3)), rounded up to a multiple of multiple_of
    multiplier = round(0.99 * shape.ffn / (8 * shape.hidden // 3), 6)
    return FLAVOR.format(
        name=asked.job.name,
        flavor=asked.job.name,
        hidden=shape.hidden,
        blocks=shape.blocks,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        vocab=shape.vocab,
        ffn=shape.ffn,
        multiplier=multiplier,
        norm_eps=shape.norm_eps,
        rope_theta=shape.rope_theta,
        seq_len=asked("batch.seq_len"),
    )


def _assets(asked: Reading) -> str:
    """The folder with a tokenizer: the model's own, else the user's to name."""
    name: str = asked("model.name")
    if name.startswith("hf:"):
        return name.removeprefix("hf:")
    if asked("data.tokenizer"):
        return str(asked("data.tokenizer"))
    asked.lacks("data.tokenizer", "it always reads a tokenizer; put one into ./tokenizer, whose ids are below the model's vocab")
    return "./tokenizer"


def _optimizer(asked: Reading) -> dict[str, Any]:
    if asked("optimizer.name") != "adamw":
        asked.lacks("optimizer.name", "it has Adam and AdamW; AdamW is what is written")
        asked("optimizer.momentum")
    beta1, beta2 = asked("optimizer.betas")
    if asked("optimizer.weight_decay"):
        asked.lacks("optimizer.weight_decay", "norm weights decay too; here only tensors of 2 or more dims")
    implementation = "fused" if asked("device") == "cuda" else "foreach"
    return {
        "name": "AdamW", "lr": asked("optimizer.lr"), "beta1": beta1, "beta2": beta2, "eps": asked("optimizer.eps"),
        "weight_decay": asked("optimizer.weight_decay"), "implementation": implementation,
    }  # fmt: skip


def _schedule(asked: Reading) -> dict[str, Any]:
    shape = asked("schedule.shape")
    common = {"warmup_steps": asked.warmup_steps, "total_steps": asked.schedule_steps}
    if shape == "constant":
        asked("schedule.min_ratio")
        return {**common, "decay_ratio": 0.0}
    return {**common, "decay_type": shape, "min_lr_factor": asked("schedule.min_ratio")}


def _training(asked: Reading) -> dict[str, Any]:
    compute, master = asked("precision.compute"), asked("precision.master")
    if compute in ("fp64", "fp16"):
        asked.lacks("precision.compute", "it computes in float32 or bfloat16; float32 is what is written")
    elif master not in ("fp32", compute):
        asked.lacks("precision.master", "the weights are float32")
    asked.lacks_if("precision.reduce", "fp32", "gradients are reduced in float32")
    asked.lacks_if("precision.max_skips", 20, "it never stops for steps that are skipped")
    asked.even_microbatches()
    source = asked("data.source")
    asked.lacks(
        "data.source", f"its data sets are c4 and what its code registers (hf_datasets/text_datasets.py), and {source} is none of them"
    )
    pipelined = asked.mesh["pp"] > 1
    return {
        "dataset": "c4",
        "local_batch_size": asked.job.rows_per_rank if pipelined else asked.micro_size,
        "global_batch_size": asked("batch.size"),
        "seq_len": asked("batch.seq_len"),
        "max_norm": asked("clip") or float("inf"),  # 0 would scale every gradient to nothing
        "steps": asked.total_steps,
        "dtype": "bfloat16" if compute == master == "bf16" else "float32",
        "mixed_precision_param": "bfloat16" if compute == "bf16" else "float32",
        "mixed_precision_reduce": "float32",
    }


def _parallelism(asked: Reading) -> dict[str, Any]:
    mesh, stage = asked.mesh, asked("zero.stage")
    copied = stage == 0
    if copied and mesh["dp_replicate"] > 1 and mesh["dp"] > 1:
        asked.axis("dp_replicate", "is one axis with dp where nothing is cut")
    if stage == 1 and mesh["dp"] > 1:
        asked.lacks(
            "zero.stage", "gradients and parameters are cut with the optimizer's state; fsdp_reshard_after_forward=never is nearest"
        )
    each = asked("zero.gradients")
    if stage and each == "end" and asked.job.microbatches > 1:
        asked.lacks("zero.gradients", "gradients are reduced after each microbatch")
    asked.lacks_if("zero.granularity", "element", "each parameter is cut along its first dim")
    asked.axis("ep", "its dense Llama has no experts")
    keys: dict[str, Any] = {
        "data_parallel_replicate_degree": mesh.extent("dp_replicate", "dp") if copied else mesh["dp_replicate"],
        "data_parallel_shard_degree": 1 if copied else mesh["dp"],
        "fsdp_reshard_after_forward": "always" if stage == 3 and asked("zero.params") == "microbatch" else "never",
        "tensor_parallel_degree": mesh["tp"],
        "pipeline_parallel_degree": mesh["pp"],
        "context_parallel_degree": mesh["cp"],
    }
    if asked("tensor.sequence") is False and mesh["tp"] > 1:
        asked.lacks("tensor.sequence", "the tokens are always cut with tensor parallelism")
    if mesh["pp"] > 1:
        name = asked("pipeline.schedule")
        if name not in SCHEDULES:
            asked.lacks("pipeline.schedule", f"it has {', '.join(SCHEDULES.values())}; 1F1B is what is written")
        keys["pipeline_parallel_schedule"] = SCHEDULES.get(name, "1F1B")
        keys["pipeline_parallel_microbatch_size"] = asked.micro_size
        asked.lacks_if("pipeline.split", (), "is module_fqns_per_model_part, by the names of its own modules")
        asked.lacks_if("pipeline.chunks", None, "it has two stages a rank where the schedule has several")
    return keys


def _checkpoint(asked: Reading) -> dict[str, Any]:
    every, keep = asked("checkpoint.every"), asked("checkpoint.keep")
    keys: dict[str, Any] = {"enable": bool(every), "interval": every or 500, "keep_latest_k": max(keep, 2), "last_save_model_only": False}
    keys["async_mode"] = "async" if asked("checkpoint.background") and every else "disabled"
    if every and keep == 1:
        asked.lacks("checkpoint.keep", "at least 2 are kept: the newest may not be complete")
    if asked("model.name").startswith("hf:") and asked("model.weights") != "random":
        keys |= {"enable": True, "initial_load_path": asked("model.name").removeprefix("hf:"), "initial_load_in_hf": True}
    return keys


def _recompute(asked: Reading) -> dict[str, Any]:
    mode = asked("recompute")
    return {"mode": mode, "selective_ac_option": "op"} if mode == "selective" else {"mode": mode}


def _validation(asked: Reading) -> dict[str, Any]:
    every = asked("eval.every")
    if every:
        asked.lacks("eval.data", "it evaluates on c4_validation, or what its code registers")
    keys = {"enable": bool(every), "freq": every or 10, "seq_len": asked("batch.seq_len"), "local_batch_size": asked.micro_size}
    return {**keys, "steps": asked("eval.batches") or -1}


def _seconds(value: float) -> int:
    return max(1, round(value))
