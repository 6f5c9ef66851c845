"""A job as arguments of Megatron-LM's pretrain_gpt.py, one option a line.

Options: megatron/training/arguments.py of release core_v0.16.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from stretto.export.outline import outline
from stretto.export.reading import Exported, File, Reading, comments

VERSION = "core_v0.16.1"
RUN = "torchrun --nproc-per-node {ranks} pretrain_gpt.py $(grep -v '^#' megatron.args)"

Option = tuple[str, object]  # its value; True for a switch


def export(asked: Reading) -> Exported:
    """The arguments of a resolved job."""
    run = RUN.format(ranks=asked.mesh.size)
    if asked.mesh["tp"] > 1 and asked("zero.stage") < 2:
        run = f"CUDA_DEVICE_MAX_CONNECTIONS=1 {run}"  # asked for with tp, and refused with its FSDP
    groups = (_model, _mesh, _batch, _optimizer, _precision, _recompute, _data, _run)
    options = [option for group in groups for option in group(asked)]
    lines = [f"--{name}" if value is True else f"--{name} {value}" for name, value in options]
    missing = asked.missing()
    head = comments(
        f"{asked.job.name} for Megatron-LM {VERSION}, written by stretto export; give it from Megatron-LM's folder", missing, run
    )
    return Exported("megatron", VERSION, (File("megatron.args", head + "\n".join(lines) + "\n"),), missing, run)


def _model(asked: Reading) -> Iterator[Option]:
    shape = outline(asked, "Megatron-LM")
    yield "num-layers", shape.blocks
    yield "hidden-size", shape.hidden
    yield "num-attention-heads", shape.heads
    yield "kv-channels", shape.head_dim
    yield "ffn-hidden-size", shape.ffn
    if shape.kv_heads != shape.heads:
        yield "group-query-attention", True
        yield "num-query-groups", shape.kv_heads
    length = asked("batch.seq_len")
    yield "seq-length", length
    yield "max-position-embeddings", max(length, shape.positions)
    yield "position-embedding-type", "rope" if shape.position == "rope" else "learned_absolute"
    if shape.position == "rope":
        yield "rotary-base", round(shape.rope_theta)
    yield "normalization", "RMSNorm" if shape.norm == "rms" else "LayerNorm"
    yield "norm-epsilon", shape.norm_eps
    if shape.mlp == "swiglu":
        yield "swiglu", True
    if not shape.bias:
        yield "disable-bias-linear", True
    elif shape.position == "rope":
        asked.lacks("model.name", "of its layers some have a bias and others not; here all have one")
    if not shape.tied:
        yield "untie-embeddings-and-output-weights", True
    yield "init-method-std", shape.init_std
    asked.lacks("seed", "the first values are others: Megatron draws them itself, and scales those of output layers by depth")
    yield "attention-dropout", 0.0
    yield "hidden-dropout", 0.0
    # the null tokenizer adds one token, its end of document
    yield "tokenizer-type", "NullTokenizer"
    yield "vocab-size", shape.vocab - 1
    yield "make-vocab-size-divisible-by", 1


def _mesh(asked: Reading) -> Iterator[Option]:
    mesh, stage = asked.mesh, asked("zero.stage")
    yield "tensor-model-parallel-size", mesh["tp"]
    yield "pipeline-model-parallel-size", mesh["pp"]
    yield "context-parallel-size", mesh["cp"]
    if mesh["ep"] > 1:
        yield "expert-model-parallel-size", mesh["ep"]
    if mesh["tp"] > 1 and asked("tensor.sequence") is not False:
        yield "sequence-parallel", True
    if mesh["pp"] > 1:
        yield from _pipeline(asked)
    if stage == 1:
        yield "use-distributed-optimizer", True
        if mesh["dp_replicate"] > 1:
            yield "num-distributed-optimizer-instances", mesh["dp_replicate"]
    elif stage > 1:
        yield "use-megatron-fsdp", True
        yield "data-parallel-sharding-strategy", "optim_grads" if stage == 2 else "optim_grads_params"
        yield "no-gradient-accumulation-fusion", True
        yield "ckpt-format", "fsdp_dtensor"
        if mesh["dp_replicate"] > 1:
            yield "num-distributed-optimizer-instances", mesh["dp_replicate"]
        if mesh["pp"] > 1:
            asked.lacks("zero.stage", "Megatron-FSDP with pipeline stages is not what its release tests")
    asked.lacks_if(
        "zero.gradients",
        "each" if stage == 3 else "end",
        "Megatron reduces gradients in its own buckets, at the end of a step below stage 3",
    )
    asked.lacks_if("zero.params", "microbatch", "Megatron-FSDP gathers parameters for each microbatch")
    asked.lacks_if("zero.granularity", "element", "buffers are cut anywhere")
    if asked("device") == "cpu":
        asked.lacks("device", "Megatron-LM runs on GPUs; take these arguments to a machine with one for each rank")
    yield "distributed-timeout-minutes", max(1, math.ceil(asked("comm.step_timeout") / 60))


def _pipeline(asked: Reading) -> Iterator[Option]:
    name, chunks = asked("pipeline.schedule"), asked("pipeline.chunks")
    if name == "interleaved":
        yield "num-virtual-stages-per-pipeline-rank", chunks or 2
    elif name not in ("1f1b", "none"):
        asked.lacks("pipeline.schedule", "Megatron has 1f1b and interleaved; 1f1b is what these arguments give")
    asked.lacks_if("pipeline.split", (), "is --pipeline-model-parallel-layout, by counts of layers")


def _batch(asked: Reading) -> Iterator[Option]:
    asked.even_microbatches()
    yield "micro-batch-size", asked.micro_size
    yield "global-batch-size", asked("batch.size")
    yield "train-iters", asked.total_steps


def _optimizer(asked: Reading) -> Iterator[Option]:
    name, lr, shape = asked("optimizer.name"), asked("optimizer.lr"), asked("schedule.shape")
    yield "optimizer", "adam" if name == "adamw" else "sgd"
    yield "lr", lr
    yield "lr-decay-style", shape
    yield "lr-decay-iters", asked.schedule_steps
    yield "lr-warmup-iters", asked.warmup_steps
    if asked.warmup_steps:
        asked.lacks("schedule.warmup", "its first update has a learning rate of 0, one update later than here")
    lowest = asked("schedule.min_ratio")
    yield "min-lr", lr if shape == "constant" else lr * lowest
    yield "weight-decay", asked("optimizer.weight_decay")
    if name == "adamw":
        yield "adam-beta1", asked("optimizer.betas")[0]
        yield "adam-beta2", asked("optimizer.betas")[1]
        yield "adam-eps", asked("optimizer.eps")
    else:
        yield "sgd-momentum", asked("optimizer.momentum")
    yield "clip-grad", asked("clip")


def _precision(asked: Reading) -> Iterator[Option]:
    compute, master, reduce = (asked(f"precision.{key}") for key in ("compute", "master", "reduce"))
    if compute in ("bf16", "fp16"):
        yield compute, True
        if reduce == "bf16":
            yield "grad-reduce-in-bf16", True
        elif reduce == "fp32":
            yield "accumulate-allreduce-grads-in-fp32", True
    if compute == "fp16":
        yield "initial-loss-scale", asked("precision.initial_scale")
        yield "loss-scale-window", asked("precision.scale_window")
        yield "hysteresis", 1  # each overflow halves the scale
    if compute == "fp64":
        asked.lacks("precision.compute", "there is no double precision; fp32 is what is written")
    elif master != "fp32":
        asked.lacks("precision.master", "the optimizer's weights are fp32")
    asked.lacks_if("precision.max_skips", 20, "it never stops for steps that are skipped")


def _recompute(asked: Reading) -> Iterator[Option]:
    mode = asked("recompute")
    if mode != "none":
        yield "recompute-granularity", mode
    if mode == "full":
        yield "recompute-method", "uniform"
        yield "recompute-num-layers", 1
    if mode == "selective":
        asked.lacks("recompute", "recomputes the core of attention, here all that is cheap")


def _data(asked: Reading) -> Iterator[Option]:
    source = asked("data.source")
    yield "mock-data", True
    if source == "random":
        asked.lacks("data.source", "the random tokens are others: --mock-data draws its own")
    else:
        made = "make FILE.bin of the text with its tools/preprocess_data.py, and write --data-path FILE --split 100,0,0 for --mock-data"
        asked.lacks("data.source", f"it reads its own files of tokens: {made}")


def _run(asked: Reading) -> Iterator[Option]:
    yield "seed", asked("seed") or 1234  # 0 is refused
    yield "log-interval", asked("log.every")
    yield "eval-interval", asked("eval.every") or 1000
    yield "eval-iters", (asked("eval.batches") or 10) if asked("eval.every") else 0
    if asked("checkpoint.every"):
        yield "save", "checkpoints"
        yield "load", "checkpoints"
        yield "save-interval", asked("checkpoint.every")
    asked.lacks_if("compile.mode", "none", "Megatron has fused kernels of its own, and does not compile blocks")
