"""A job as an Accelerate configuration (YAML for `accelerate launch --config_file`), and a script that trains with it.

Keys: those of ClusterConfig in accelerate 1.15, and https://huggingface.co/docs/accelerate/usage_guides/fsdp.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stretto.export.reading import Exported, File, Reading, comments
from stretto.export.script import script, take

VERSION = "1.15"
RUN = "accelerate launch --config_file accelerate.yaml train.py"
BODY = """

from accelerate import Accelerator


def optimizer_of(model):
    keys = job.optimizer
    if keys.name == "sgd":
        return torch.optim.SGD(groups(model), lr=keys.lr, momentum=keys.momentum)
    return torch.optim.AdamW(groups(model), lr=keys.lr, betas=keys.betas, eps=keys.eps)


def main():
    accelerator = Accelerator(gradient_accumulation_steps=job.microbatches)
    rank, shards, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    if accelerator.state.deepspeed_plugin is not None:  # it must know rows a forward, and sees no data loader
        accelerator.state.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = job.batch.micro_size or job.rows_per_rank
    model = first_model()
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * factor(update=step)
        micro, count = rows_of(step, rank, shards, device)
        told = torch.zeros((), device=device)
        for rows in micro:
            with accelerator.accumulate(model):
                # Accelerate averages over ranks and microbatches; the job's loss is one sum over one number of targets
                loss = loss_of(model, rows) * (shards * len(micro) / max(count, 1))
                told += loss.detach() / (shards * len(micro))
                accelerator.backward(loss)
                if accelerator.sync_gradients and job.clip:
                    accelerator.clip_grad_norm_(model.parameters(), job.clip)
                optimizer.step()
                optimizer.zero_grad()
        tell(step, told)
    accelerator.end_training()


main()
"""
MIXED: Mapping[str, str] = {"fp32": "no", "fp64": "no", "bf16": "bf16", "fp16": "fp16"}
#: Class of a built-in decoder's blocks, each of which FSDP shards as a unit; of transformers models Accelerate knows it.
BLOCK = "Block"


def export(asked: Reading) -> Exported:
    """The configuration of a resolved job."""
    mesh, stage = asked.mesh, asked("zero.stage")
    cpu = asked("device") == "cpu"
    kind = _kind(stage, cpu, asked.job.shards)
    cut_over_tp = kind == "FSDP" and asked.shape is None and mesh["tp"] > 1
    ranks = asked.job.shards * (mesh["tp"] if cut_over_tp else 1)
    asked.axis("pp", f"a configuration knows no pipeline stages for training; this runs on {ranks} ranks")
    if not cut_over_tp:
        asked.axis(
            "tp", f"tensor parallelism is FSDP2's (zero=3), of transformers models loaded with a tp_plan; this runs on {ranks} ranks"
        )
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kind,
        "use_cpu": cpu,
        "mixed_precision": MIXED[asked("precision.compute")],
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": ranks,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
    }
    if cpu and ranks > 1:
        asked.lacks("device", "accelerate launch starts several ranks on CPUs through mpirun alone (--mpirun_hostfile)")
    _precision(asked)
    if kind == "FSDP":
        config["fsdp_config"] = _fsdp(asked)
        if mesh["dp_replicate"] > 1 or cut_over_tp:
            config["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": mesh["dp_replicate"],
                "parallelism_config_dp_shard_size": mesh["dp"],
                "parallelism_config_tp_size": mesh["tp"] if cut_over_tp else 1,
                "parallelism_config_cp_size": 1,
            }
    if kind == "DEEPSPEED":
        config["deepspeed_config"] = _deepspeed(asked)
        asked.axis("dp_replicate", "DeepSpeed cuts over all dp ranks")
    asked.even_microbatches()
    for key in ("optimizer.name", "optimizer.lr", "optimizer.betas", "optimizer.eps", "optimizer.weight_decay", "optimizer.momentum"):
        asked(key)  # in train.py, by job.toml
    for key in ("schedule.shape", "schedule.min_ratio", "clip"):
        asked(key)
    take(asked)
    missing = asked.missing()
    files = (
        File(
            "accelerate.yaml",
            comments(f"{asked.job.name} for Accelerate {VERSION}, written by stretto export", missing, RUN) + yaml(config),
        ),
        File("train.py", script(f"Accelerate {VERSION}", RUN, "from functools import partial", BODY)),
        File("job.toml", asked.job.to_toml(comments=False)),
    )
    return Exported("accelerate", VERSION, files, missing, RUN)


def _kind(stage: int, cpu: bool, ranks: int) -> str:
    """DDP keeps everything on every rank, as stage 0; DeepSpeed has stages 1 and 2; FSDP2 is stage 3, on GPUs alone."""
    if ranks == 1:
        return "NO"
    if stage == 0:
        return "MULTI_CPU" if cpu else "MULTI_GPU"
    return "FSDP" if stage == 3 and not cpu else "DEEPSPEED"


def _precision(asked: Reading) -> None:
    if asked("precision.compute") == "fp64":
        asked.lacks("precision.compute", "mixed_precision knows no, fp16 and bf16; double precision is a matter of the model")
    elif asked("precision.master") != "fp32":
        asked.lacks("precision.master", "the weights that the optimizer updates are those of the model, fp32")
    asked.lacks_if("precision.reduce", asked("precision.master"), "is a MixedPrecisionPolicy in code, and no key")
    asked.lacks_if("precision.max_skips", 20, "it never stops for steps that are skipped")
    for key in ("initial_scale", "scale_window"):
        default = 65536.0 if key == "initial_scale" else 2000
        asked.lacks_if(f"precision.{key}", default, "is a GradScalerKwargs in code, and no key")


def _fsdp(asked: Reading) -> dict[str, Any]:
    asked.lacks_if("zero.gradients", "each", "gradients are reduced after each microbatch")
    asked.lacks_if("zero.granularity", "element", "each parameter is cut along its first dim")
    config: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": asked("zero.params") == "microbatch",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": False,
        "fsdp_activation_checkpointing": False,  # train.py recomputes as the job says
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    if asked.shape is not None:
        config["fsdp_transformer_layer_cls_to_wrap"] = BLOCK
    return config


def _deepspeed(asked: Reading) -> dict[str, Any]:
    stage = asked("zero.stage")
    asked.lacks_if("zero.gradients", "each" if stage >= 2 else "end", f"DeepSpeed's stage {stage} does it otherwise")
    asked.lacks_if("zero.granularity", "element", "buffers are cut anywhere")
    return {
        "zero_stage": stage,
        "gradient_accumulation_steps": asked.job.microbatches,
        "gradient_clipping": asked("clip"),
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": False,
    }


def yaml(table: Mapping[str, Any], indent: str = "") -> str:
    """A table of tables as YAML. Values are written as JSON, which YAML reads alike."""
    lines = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines.append(f"{indent}{key}:\n{yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: object) -> str:
    """JSON, but for 1e-08: many readers of YAML take that for text if it has no dot."""
    text = json.dumps(value)
    return text.replace("e", ".0e") if isinstance(value, float) and "e" in text and "." not in text else text
