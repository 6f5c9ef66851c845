"""Names and values as a user writes them: TOML text of a value, the nearest known key, and what peers call our keys."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from stretto.errors import JobError


class Peer(NamedTuple):
    """How to write here what a peer's key asks for: `{}` is where the value goes; `note` is what a user must know besides."""

    write: str
    note: str = ""


_STEPS = Peer("steps={}")
_ROWS = Peer("batch.micro_size={}", "rows a forward on each dp rank; batch.size is the whole job's")
_GLOBAL = Peer("batch.size={}", "rows a step of the whole job")
_SEQ = Peer("batch.seq_len={}")
_LR = Peer("optimizer.lr={}")
_CLIP = Peer("clip={}")
_ACCUMULATE = Peer("batch.micro_size=ROWS", "a step takes batch.size / dp / micro_size microbatches")
_WARMUP = Peer("schedule.warmup={}")
_RECOMPUTE = Peer('recompute="full"')
_RANKS = Peer('mesh="dp={}"', "the mesh multiplies to the number of ranks")
_SAVE = Peer("checkpoint.every={}")
_RESUME = Peer("--resume", "an option of stretto train")
_FULL = Peer("zero=3", "1 = optimizer, 2 = and gradients, 3 = and parameters, as FSDP's full shard")
_ZERO = Peer("zero=STAGE", "0 = as DDP, 1 = optimizer, 2 = and gradients, 3 = and parameters, as FSDP")
_DATA = Peer('data="text:{}"', "with its kind in front: text:, tokens:, hf: or python:")

#: Keys of Megatron-LM, DeepSpeed, Transformers and Accelerate, Lightning and torchtitan, with underscores -> ours.
PEER_KEYS: Mapping[str, Peer] = MappingProxyType(
    {
        # optimizer and schedule
        "learning_rate": _LR,
        "base_lr": _LR,
        "max_lr": _LR,
        "optim": Peer("optimizer={}"),
        "optimizer_type": Peer("optimizer={}"),
        "adam_beta1": Peer("optimizer.betas=[{}, 0.95]"),
        "adam_beta2": Peer("optimizer.betas=[0.9, {}]"),
        "adam_eps": Peer("optimizer.eps={}"),
        "adam_epsilon": Peer("optimizer.eps={}"),
        "wd": Peer("optimizer.weight_decay={}"),
        "sgd_momentum": Peer("optimizer.momentum={}"),
        "max_grad_norm": _CLIP,
        "max_norm": _CLIP,
        "grad_clip": _CLIP,
        "clip_grad": _CLIP,
        "gradient_clipping": _CLIP,
        "gradient_clip_val": _CLIP,
        "warmup_steps": _WARMUP,
        "warmup_ratio": _WARMUP,
        "warmup_iters": _WARMUP,
        "warmup_num_steps": _WARMUP,
        "lr_warmup_iters": _WARMUP,
        "lr_warmup_fraction": _WARMUP,
        "min_lr": Peer("schedule.min_ratio=RATIO", "a share of optimizer.lr"),
        "min_lr_ratio": Peer("schedule.min_ratio={}"),
        "lr_scheduler": Peer("schedule={}"),
        "lr_scheduler_type": Peer("schedule={}"),
        "lr_decay_style": Peer("schedule={}"),
        "lr_decay_iters": Peer("schedule.steps={}"),
        # length
        "max_steps": _STEPS,
        "train_iters": _STEPS,
        "num_steps": _STEPS,
        "max_iters": _STEPS,
        "total_num_steps": _STEPS,
        "training_steps": _STEPS,
        "iterations": _STEPS,
        "num_train_epochs": Peer("epochs={}"),
        "num_epochs": Peer("epochs={}"),
        "max_epochs": Peer("epochs={}"),
        "train_tokens": Peer("tokens={}"),
        "max_tokens": Peer("tokens={}"),
        # batch
        "global_batch_size": _GLOBAL,
        "train_batch_size": _GLOBAL,
        "batch_size": _GLOBAL,
        "micro_batch_size": _ROWS,
        "microbatch_size": _ROWS,
        "local_batch_size": _ROWS,
        "train_micro_batch_size_per_gpu": _ROWS,
        "per_device_train_batch_size": _ROWS,
        "gradient_accumulation_steps": _ACCUMULATE,
        "accumulate_grad_batches": _ACCUMULATE,
        "num_microbatches": _ACCUMULATE,
        "grad_accum": _ACCUMULATE,
        "seq_length": _SEQ,
        "sequence_length": _SEQ,
        "max_seq_length": _SEQ,
        "max_seq_len": _SEQ,
        "max_length": _SEQ,
        "block_size": _SEQ,
        "context_length": _SEQ,
        # mesh and sharding
        "tensor_model_parallel_size": Peer('mesh="tp={}"'),
        "tensor_parallel_size": Peer('mesh="tp={}"'),
        "tensor_parallel_degree": Peer('mesh="tp={}"'),
        "pipeline_model_parallel_size": Peer('mesh="pp={}"'),
        "pipeline_parallel_size": Peer('mesh="pp={}"'),
        "pipeline_parallel_degree": Peer('mesh="pp={}"'),
        "context_parallel_size": Peer('mesh="cp={}"'),
        "context_parallel_degree": Peer('mesh="cp={}"'),
        "expert_model_parallel_size": Peer('mesh="ep={}"'),
        "expert_parallel_degree": Peer('mesh="ep={}"'),
        "data_parallel_size": Peer('mesh="dp={}"'),
        "data_parallel_shard_degree": Peer('mesh="dp={}"'),
        "data_parallel_replicate_degree": Peer('mesh="dp_replicate={}"'),
        **{axis: Peer(f'mesh="{axis}={{}}"') for axis in ("pp", "dp_replicate", "dp", "cp", "ep", "tp")},
        "num_layers_per_virtual_pipeline_stage": Peer("pipeline.chunks=CHUNKS", "stages a pipeline rank holds"),
        "pipeline_schedule": Peer("pipeline={}"),
        "world_size": _RANKS,
        "nproc_per_node": _RANKS,
        "num_gpus": _RANKS,
        "gpus": _RANKS,
        "devices": _RANKS,
        "num_processes": _RANKS,
        "strategy": _ZERO,
        "fsdp": _FULL,
        "ddp": Peer("zero=0"),
        "deepspeed": _ZERO,
        "zero_optimization": _ZERO,
        "zero_optimization.stage": Peer("zero={}"),
        "zero_stage": Peer("zero={}"),
        "sharding_strategy": _ZERO,
        "use_distributed_optimizer": Peer("zero=1"),
        "reshard_after_forward": Peer('zero.params="microbatch"', "step keeps parameters gathered for the step"),
        "fsdp_reshard_after_forward": Peer('zero.params="microbatch"', "step keeps parameters gathered for the step"),
        # precision, recompute, compile
        "bf16": Peer('precision="bf16"'),
        "fp16": Peer('precision="fp16"'),
        "dtype": Peer("precision={}"),
        "torch_dtype": Peer("precision={}"),
        "mixed_precision": Peer("precision={}"),
        "mixed_precision_param": Peer("precision={}"),
        "mixed_precision_reduce": Peer("precision.reduce={}"),
        "amp": Peer('precision="bf16"'),
        "loss_scale": Peer("precision.initial_scale={}"),
        "initial_loss_scale": Peer("precision.initial_scale={}"),
        "initial_scale_power": Peer("precision.initial_scale=65536.0", "2 to that power"),
        "loss_scale_window": Peer("precision.scale_window={}"),
        "gradient_checkpointing": _RECOMPUTE,
        "activation_checkpointing": _RECOMPUTE,
        "activation_checkpoint": _RECOMPUTE,
        "recompute_activations": Peer('recompute="selective"'),
        "recompute_granularity": Peer("recompute={}"),
        "torch_compile": Peer('compile="block"'),
        # model and data
        "model_name_or_path": Peer('model="hf:FOLDER_OR_ID"'),
        "pretrained_model_name_or_path": Peer('model="hf:FOLDER_OR_ID"'),
        "num_layers": Peer("model.blocks={}"),
        "num_hidden_layers": Peer("model.blocks={}"),
        "n_layer": Peer("model.blocks={}"),
        "hidden_size": Peer("model.hidden={}"),
        "n_embd": Peer("model.hidden={}"),
        "num_attention_heads": Peer("model.heads={}"),
        "n_head": Peer("model.heads={}"),
        "num_query_groups": Peer("model.kv_heads={}"),
        "num_key_value_heads": Peer("model.kv_heads={}"),
        "ffn_hidden_size": Peer("model.ffn={}"),
        "intermediate_size": Peer("model.ffn={}"),
        "vocab_size": Peer("model.vocab={}"),
        "tie_word_embeddings": Peer("model.tied={}"),
        "dataset": _DATA,
        "dataset_name": _DATA,
        "dataset_path": _DATA,
        "data_path": _DATA,
        "train_file": _DATA,
        "text_column": Peer("data.column={}"),
        "tokenizer_name": Peer("data.tokenizer={}"),
        "data_seed": Peer("data.seed={}"),
        "random_seed": Peer("seed={}"),
        # run
        "eval_steps": Peer("eval.every={}"),
        "eval_interval": Peer("eval.every={}"),
        "val_check_interval": Peer("eval.every={}"),
        "eval_iters": Peer("eval.batches={}"),
        "save_steps": _SAVE,
        "save_interval": _SAVE,
        "save_total_limit": Peer("checkpoint.keep={}"),
        "logging_steps": Peer("log.every={}"),
        "log_interval": Peer("log.every={}"),
        "log_every_n_steps": Peer("log.every={}"),
        "distributed_backend": Peer("comm.transport={}"),
        "ddp_backend": Peer("comm.transport={}"),
        "ddp_timeout": Peer("comm.step_timeout={}", "seconds"),
        "accelerator": Peer("device={}"),
        "run_name": Peer("name={}"),
        "output_dir": Peer("--out DIR", "an option of stretto train"),
        "save_dir": Peer("--out DIR", "an option of stretto train"),
        "resume_from_checkpoint": _RESUME,
    }
)


def show(value: object) -> str:
    """A value as TOML text: what to_toml writes and what messages quote. None is "auto"."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        plain = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in plain) + '"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(show(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_key(key)} = {show(item)}' for key, item in value.items())}}}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return '"auto"' if value is None else repr(value)


def _key(name: object) -> str:
    """A key as TOML text: bare where it may be."""
    text = str(name)
    return text if re.fullmatch(r"[A-Za-z0-9_.-]+", text) else show(text)


def short(value: object) -> str:
    """`show`, cut to what fits in a message."""
    text = show(value)
    return text if len(text) <= 60 else text[:56] + " ..."


def read_value(text: str) -> object:
    """What `text` means as the value of KEY=VALUE: TOML if it parses, else the text itself."""
    if "\n" in text or "\r" in text:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def read_file(path: Path) -> dict[str, object]:
    """The tables of a TOML file. Raises JobError naming the file, and the line where it is not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        what, _, where = str(error).rpartition(" (at ")
        place = f" {where.rstrip(')')}" if what else ""
        raise JobError(f"{path}{place} is not TOML: {what or error}; write lines as key = value, text in quotes") from None
    except UnicodeDecodeError:
        raise JobError(f"{path} is not a text file in utf-8; write the path of a TOML file") from None
    except OSError as error:
        raise JobError(f"{path} cannot be read: {error.strerror}; write the path of a TOML file") from None


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like `name`, or None where none is."""
    from difflib import get_close_matches  # only a wrong request pays for this import

    close = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return close[0] if close else None


def unknown(key: str, value: object, known: Iterable[str]) -> str:
    """One line about a key that is none of `known` (dotted names and sections): whose it is or which is nearest, and what to write."""
    if isinstance(value, Mapping) and value:
        inner, held = next(iter(value.items()))
        if f"{key}.{inner}" in PEER_KEYS or key.replace("-", "_").lstrip("_") not in PEER_KEYS:
            return unknown(f"{key}.{inner}", held, known)
    names = list(known)
    plain = key.replace("-", "_").lstrip("_").lower()
    key = _key(key)
    asked = f"{key}={short(value)}"
    if plain in names:
        return f"{asked} is written {plain} here; write {plain}={short(value)}"
    leaf = plain.rpartition(".")[2]
    peer = PEER_KEYS.get(plain) or PEER_KEYS.get(leaf)
    if peer:
        text = _bare(value) if '"' in peer.write else short(value)
        note = f" ({peer.note})" if peer.note else ""
        write = "leave it out" if value is False and "{}" not in peer.write else f"write {peer.write.format(text)}"
        return f"{asked} is {peer.write.partition('=')[0]} here{note}; {write}"
    same = [name for name in names if name.rpartition(".")[2] == leaf]
    if same:
        return f"{asked}: there is no key {key}; write {' or '.join(f'{name}={short(value)}' for name in same)}"
    near = nearest(plain, names) or nearest(leaf, names)
    if near:
        return f"{asked}: there is no key {key}; the nearest is {near}; write {near}={short(value)}"
    return f"{asked}: there is no key {key}, nor one like it; `stretto keys` lists them all"


def _bare(value: object) -> str:
    """A value inside quotes that the template already has."""
    return show(value)[1:-1] if isinstance(value, str) else short(value)
