"""A job as a DeepSpeed configuration (one JSON object), and a script that trains with it.

Keys: https://www.deepspeed.ai/docs/config-json/, and the config classes of release 0.19.8.
"""

from __future__ import annotations

import json
from typing import Any

from stretto.export.reading import Exported, File, Reading
from stretto.export.script import script, take

VERSION = "0.19.8"
RUN = "torchrun --nproc-per-node {ranks} train.py"
BODY = """

import deepspeed  # after the rest: it looks at devices when imported


def main():
    rank, shards, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cuda", local) if job.device == "cuda" else torch.device("cpu")
    os.environ.setdefault("LOCAL_SIZE", os.environ["LOCAL_WORLD_SIZE"])  # its shared-memory operator on CPUs reads it
    deepspeed.init_distributed("nccl" if job.device == "cuda" else "gloo")
    model = first_model().to(device)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups(model), config=str(HERE / "ds_config.json"), lr_scheduler=scheduler
    )
    for step in range(steps):
        micro, count = rows_of(step, rank, shards, device)
        told = torch.zeros((), device=device)
        for rows in micro:
            # DeepSpeed averages over ranks and microbatches; the job's loss is one sum over one number of targets
            loss = loss_of(engine, rows) * (shards * len(micro) / max(count, 1))
            told += loss.detach() / (shards * len(micro))
            engine.backward(loss)
            engine.step()  # updates at the last microbatch
        tell(step, told)


main()
"""


def export(asked: Reading) -> Exported:
    """The configuration of a resolved job."""
    cut_over_tp = _tensor(asked)
    ranks = asked.job.shards * (asked.mesh["tp"] if cut_over_tp else 1)
    micro, run = asked.micro_size, RUN.format(ranks=ranks)
    asked.axis("pp", f"DeepSpeed cuts stages only of a model written as its PipelineModule; this runs on {ranks} ranks")
    config: dict[str, Any] = {
        "train_batch_size": asked("batch.size"),
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": asked.job.microbatches,
        # 0 must be written: without it 1.0 is taken
        "gradient_clipping": asked("clip"),
        "optimizer": _optimizer(asked),
        **_schedule(asked),
        **_precision(asked),
        "zero_optimization": _zero(asked),
        **cut_over_tp,
        "steps_per_print": asked("log.every"),
        "wall_clock_breakdown": False,
    }
    asked.even_microbatches()
    take(asked)
    body = script(f"DeepSpeed {VERSION}", run, "import os\nfrom functools import partial", BODY)
    files = (
        File("ds_config.json", json.dumps(config, indent=2) + "\n"),
        File("train.py", body),
        File("job.toml", asked.job.to_toml(comments=False)),
    )
    return Exported("deepspeed", VERSION, files, asked.missing(), run)


def _tensor(asked: Reading) -> dict[str, Any]:
    """Tensor parallelism, which DeepSpeed has for transformers models that it knows."""
    tp = asked.mesh["tp"]
    if tp > 1 and asked("model.name").startswith("hf:") and asked("zero.stage") < 3:
        return {"tensor_parallel": {"autotp_size": tp}}
    asked.axis("tp", f"DeepSpeed cuts only transformers models, at stages 0 to 2; this runs on {asked.job.shards} ranks")
    return {}


def _optimizer(asked: Reading) -> dict[str, Any]:
    decay, lr = asked("optimizer.weight_decay"), asked("optimizer.lr")
    if asked("optimizer.name") == "sgd":
        return {"type": "SGD", "params": {"lr": lr, "momentum": asked("optimizer.momentum"), "weight_decay": decay}}
    params = {"lr": lr, "betas": list(asked("optimizer.betas")), "eps": asked("optimizer.eps"), "weight_decay": decay}
    return {"type": "AdamW", "params": {**params, "torch_adam": True}}  # torch's own: DeepSpeed's must be compiled first


def _schedule(asked: Reading) -> dict[str, Any]:
    shape, warmup, total, lowest = asked("schedule.shape"), asked.warmup_steps, asked.schedule_steps, asked("schedule.min_ratio")
    if shape == "constant" and not warmup:
        return {}
    late = "its schedules start two updates late, the first two at the lowest rate; train.py hands over the job's own instead"
    asked.lacks("schedule.shape", late)
    common: dict[str, Any] = {"warmup_num_steps": max(warmup, 1), "warmup_type": "linear"}
    if shape == "cosine":
        return {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": total, "cos_min_ratio": lowest, **common}}}
    common |= {"warmup_min_lr": 0.0, "warmup_max_lr": asked("optimizer.lr")}
    if shape == "linear":
        if lowest:
            asked.lacks("schedule.min_ratio", "its linear schedule falls to 0; train.py hands over the job's own instead")
        return {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": total, **common}}}
    return {"scheduler": {"type": "WarmupLR", "params": common}}


def _precision(asked: Reading) -> dict[str, Any]:
    compute, master, reduce = (asked(f"precision.{key}") for key in ("compute", "master", "reduce"))
    if compute == "fp64":
        asked.lacks("precision.compute", "there is no double precision; fp32 is what is written")
    elif master != "fp32":
        asked.lacks("precision.master", "the optimizer's weights are fp32")
    asked.lacks_if("precision.max_skips", 20, "it never stops for steps that are skipped")
    if compute not in ("bf16", "fp16"):
        return {}
    sums = "fp32" if reduce == "fp64" else reduce
    dtypes: dict[str, Any] = {"communication_data_type": sums, "data_types": {"grad_accum_dtype": sums}}
    if compute == "bf16":
        return {"bf16": {"enabled": True}, **dtypes}
    scale = round(asked("precision.initial_scale"))
    power = scale.bit_length() - 1
    if scale != 1 << power:
        asked.lacks("precision.initial_scale", f"its first loss scale is a power of two; 2**{power} is what is written")
    # its default takes two overflows to halve the scale; here each one does
    window = asked("precision.scale_window")
    return {
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": power, "loss_scale_window": window, "hysteresis": 1},
        **dtypes,
    }


def _zero(asked: Reading) -> dict[str, Any]:
    stage = asked("zero.stage")
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {"overlap_comm": asked("device") == "cuda", "contiguous_gradients": True, "reduce_scatter": True}
    each = "each" if stage >= 2 else "end"
    asked.lacks_if(
        "zero.gradients", each, f"at stage {stage} gradients are reduced {'after each microbatch' if stage >= 2 else 'once a step'}"
    )
    asked.lacks_if("zero.params", "microbatch", "stage 3 gathers parameters for each microbatch")
    asked.lacks_if("zero.granularity", "element", "buffers are cut anywhere")
    if asked.mesh["dp_replicate"] > 1 and stage == 3:
        zero |= {"mics_shard_size": asked.mesh["dp"], "mics_hierarchical_params_gather": False}  # ZeRO 3 in groups: MiCS
    elif stage:
        asked.axis("dp_replicate", f"stage {stage} cuts over all dp ranks; only stage 3 does so in groups (mics_shard_size)")
    return zero
