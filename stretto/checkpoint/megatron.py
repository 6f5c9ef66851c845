"""Checkpoint folders of Megatron (megatron-core's dist_checkpointing, format torch_dist), read as they are.

Such a folder is one of DCP with Megatron's names and shapes, beside `metadata.json`, which tells the format, and `common.pt`, which has
what is the same on all ranks: the arguments of the run, its counters, the options of the optimizer. Blocks are stacked in a dim put before
(`decoder.layers.mlp.linear_fc2.weight` is [blocks, hidden, ffn]) or numbered. linear_qkv has, of each kv head, its queries, its key and its
value; linear_fc1 has the gate above the other half. Here each row of these is a row of one of our decoder's tensors. (Layout:
megatron-core 0.16, ShardedTensor in dist_checkpointing/mapping.py, transformer/mlp.py, transformer/attention.py.)
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import torch

from stretto.anatomy import DecoderShape
from stretto.checkpoint.dcp import METADATA, Item, read_items
from stretto.checkpoint.load import open_archive
from stretto.checkpoint.manifest import ITEMSIZE, Entry, Manifest, Scalar, Stored
from stretto.checkpoint.names import COMPUTES
from stretto.checkpoint.parts import DTYPES
from stretto.checkpoint.store import Store, fill
from stretto.checkpoint.torchfile import Kept, read_archive, verify
from stretto.errors import Damaged, JobError
from stretto.layout.layout import Box
from stretto.models.pretrained import config_of_shape, decoder_computes

CONFIG, COMMON = "metadata.json", "common.pt"
#: The file, beside folders called iter_0000100, that has the number of the newest.
LATEST = "latest_checkpointed_iteration.txt"
#: Module of a block of Megatron's -> ours; of the two that are put together, all that they are made of.
BLOCK: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "self_attention.linear_qkv.layer_norm": ("norm1",),
        "input_layernorm": ("norm1",),
        "self_attention.linear_qkv": ("attn.q", "attn.k", "attn.v"),
        "self_attention.linear_proj": ("attn.o",),
        "mlp.linear_fc1.layer_norm": ("norm2",),
        "pre_mlp_layernorm": ("norm2",),
        "mlp.linear_fc1": ("mlp.gate", "mlp.up"),
        "mlp.linear_fc2": ("mlp.down",),
    }
)
ENDS: Mapping[str, str] = MappingProxyType(
    {
        "embedding.word_embeddings": "embed",
        "embedding.position_embeddings": "positions",
        "decoder.final_layernorm": "norm",
        "decoder.final_norm": "norm",
        "output_layer": "head",
    }
)
LAYERS, EMBEDDING = "decoder.layers.", "embedding.word_embeddings.weight"
TENSOR = re.compile(r"(?:decoder\.layers\.(?:(?P<number>\d+)\.)?)?(?P<module>.+?)[._](?P<kind>weight|bias)(?P<half>_[wv])?")
STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<state>[^.]+)\.(?P<tensor>.+)")
#: The optimizer's own copy of the parameters, in fp32, which is what is trained.
MASTERS = ("fp32_param", "param")
#: What Megatron keeps for itself (states of kernels, of random streams, of the machine that repeats steps), one object a rank.
OBJECT = re.compile(r".*/shard_[\d_.]+")
#: Arguments with which the same weights compute something else here, and the value with which they do not.
AS_HERE: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "apply_layernorm_1p": (False, None),
        "rotary_interleaved": (False, None),
        "rotary_percent": (1.0, None),
        "use_rope_scaling": (False, None),
        "rotary_seq_len_interpolation_factor": (None, 1, 1.0),
        "qk_layernorm": (False, None),
        "multi_latent_attention": (False, None),
        "num_experts": (None, 0),
        "squared_relu": (False, None),
        "openai_gelu": (False, None),
        "attention_output_gate": (False, None),
        "window_size": (None,),
        "position_embedding_type": ("rope", "learned_absolute", None),
        "no_rope_freq": (None,),
        "apply_residual_connection_post_layernorm": (False, None),
        "softmax_type": ("vanilla", None),
        "quick_geglu": (False, None),
        "glu_linear_offset": (0.0, None),
        "activation_func_clamp_value": (None,),
    }
)


class Run(NamedTuple):
    """Rows [start, start + rows) of one of Megatron's tensors are those from `to` on of ours."""

    start: int
    rows: int
    name: str
    to: int


class Source(NamedTuple):
    """A key of the folder: the tensor of the model that it is of, and what it has of it (a state of the optimizer; "": the values)."""

    tensor: str
    state: str


# -- the folder --------------------------------------------------------------------------------------------------------


def read_megatron(store: Store, folder: str) -> Manifest:
    """The manifest of such a folder, under the names of our decoder: parameters, in fp32 where the optimizer has them so, and its state.

    All that is used is held against the checksums of its archives once. Raises JobError for what is not understood, Damaged.
    """
    path = store.path(folder)
    _check_format(store, folder)
    common = _load(store, f"{folder}/{COMMON}")
    items, _ = read_items(store, folder)
    sources, left = _sort_out(items, path)
    shape = _shape(common, items, path)
    masters = {source.tensor for source in sources.values() if source.state in MASTERS}
    tensors: dict[str, Entry] = {}
    with ExitStack() as opened:
        reader = _Reader(store, folder, opened)
        for key, (tensor, state) in sources.items():
            if not state and tensor in masters:
                continue  # in 16 bits, what the master has in full
            stem = "model/{}" if not state or state in MASTERS else f"optimizer/{{}}/{state}"
            tensors |= {stem.format(name): entry for name, entry in reader.entries(key, tensor, items[key], shape)}
    return _manifest(store, folder, common, tensors, shape, left)


def _check_format(store: Store, folder: str) -> None:
    path = store.path(f"{folder}/{CONFIG}")
    try:
        config = json.loads(store.read(f"{folder}/{CONFIG}"))
        format_, version = config["sharded_backend"], config.get("sharded_backend_version", 1)
    except (OSError, ValueError, KeyError, TypeError):
        raise JobError(f"{path} does not tell which format of Megatron this is; give a folder that dist_checkpointing.save wrote") from None
    if (format_, version) != ("torch_dist", 1):
        raise JobError(f"{path}: format {format_} {version} of Megatron is not understood; save it with --ckpt-format torch_dist")
    if not store.has(f"{folder}/{METADATA}"):
        raise Damaged(f"{store.path(f'{folder}/{METADATA}')} is missing, and the checkpoint needs it")


def _sort_out(items: Mapping[str, Item], path: str) -> tuple[dict[str, Source], list[str]]:
    """What each key is, and the keys that are not taken. Raises JobError for one that is the model's, or the optimizer's, and unknown."""
    sources: dict[str, Source] = {}
    left: list[str] = []
    strange: list[str] = []
    for key, item in items.items():
        state = STATE.fullmatch(key)
        tensor, kind = (state["tensor"], state["state"]) if state else (key, "")
        if OBJECT.fullmatch(key) or not item.dtype:
            left.append(key)
        elif "optimizer" in key and not state:
            raise JobError(
                f"{path} has the optimizer's state by pieces of Megatron's own buffers ({key}), which only the same mesh can read; save it "
                "with --dist-ckpt-optim-fully-reshardable, or the weights alone with --no-save-optim"
            )
        elif _known(tensor):
            sources[key] = Source(tensor, kind)
        else:
            strange.append(key)
    if strange:
        raise JobError(
            f"{path} has tensors that our decoder has not: {', '.join(sorted(strange)[:3])} ({len(strange)} in all); a GPT of dense blocks "
            "with grouped heads is understood (no experts, no latent attention, no norms of queries and keys)"
        )
    if EMBEDDING not in sources:
        raise JobError(f"{path} holds no {EMBEDDING}; its keys are {', '.join([*items][:5])} ({len(items)} in all)")
    return sources, left


def _known(tensor: str) -> bool:
    found = TENSOR.fullmatch(tensor)
    if not found:
        return False
    inside = tensor.startswith(LAYERS)
    return found["module"] in (BLOCK if inside else ENDS) and (found["half"] is None or found["module"] == "mlp.linear_fc1")


def _shape(common: Mapping[str, Any], items: Mapping[str, Item], path: str) -> DecoderShape:
    """The decoder that was trained, by the arguments of the run. Raises JobError."""
    args = common.get("args")
    if args is None:
        raise JobError(f"{path}/{COMMON} has no args, which tell how linear_qkv is put together; save it as Megatron's training does")
    told = args if isinstance(args, Mapping) else vars(args)
    for name, usual in AS_HERE.items():
        if told.get(name) not in usual:
            raise JobError(
                f"{path} was trained with {name}={told[name]}, which our decoder does not compute: its weights mean another model"
            )
    vocab, hidden = items[EMBEDDING].shape
    heads = told["num_attention_heads"]
    grouped = told.get("group_query_attention", told.get("num_query_groups") is not None)
    try:
        return DecoderShape(
            hidden=hidden,
            blocks=told["num_layers"],
            heads=heads,
            kv_heads=told["num_query_groups"] if grouped else heads,
            head_dim=told.get("kv_channels") or hidden // heads,
            ffn=told["ffn_hidden_size"],
            vocab=min(told.get("vocab_size") or vocab, vocab),
            positions=items["embedding.position_embeddings.weight"].shape[0] if "embedding.position_embeddings.weight" in items else 0,
            position="learned" if "embedding.position_embeddings.weight" in items else "rope",
            norm="rms" if told.get("normalization") == "RMSNorm" else "layer",
            mlp="swiglu" if told.get("swiglu") else "gelu",
            bias=bool(told.get("add_bias_linear", True)),
            tied="output_layer.weight" not in items,
            norm_eps=told.get("norm_epsilon", told.get("layernorm_epsilon", 1e-5)),
            rope_theta=float(told.get("rotary_base", 10000)),
        )
    except KeyError as missing:
        raise JobError(f"{path}/{COMMON}: its args have no {missing}, which tells how linear_qkv is put together") from None


# -- tensors -----------------------------------------------------------------------------------------------------------


class _Reader:
    """Finds where in the folder's files rows of tensors lie; each file is opened once."""

    def __init__(self, store: Store, folder: str, opened: ExitStack) -> None:
        self.store, self.folder, self.opened = store, folder, opened
        self.files: dict[str, IO[bytes]] = {}

    def entries(self, key: str, tensor: str, item: Item, shape: DecoderShape) -> Iterator[tuple[str, Entry]]:
        """What a key holds of our tensors, by their names. Each archive is held against its checksum. Raises Damaged, JobError."""
        found = TENSOR.fullmatch(tensor)
        assert found is not None, tensor
        inside = tensor.startswith(LAYERS)
        stacked = inside and found["number"] is None
        whole = item.shape[1:] if stacked else item.shape
        runs = tuple(_runs(found["module"], found["kind"], found["half"], whole[0], inside, shape))
        shapes = {run.name: (max(one.to + one.rows for one in runs if one.name == run.name), *whole[1:]) for run in runs}
        stored: dict[tuple[str, str | None], list[Stored]] = {}
        for chunk in item.stored:
            start = self._start(key, item.dtype, chunk)
            (first, low, *offset), (blocks, rows, *sizes) = chunk.box if stacked else ((0, *chunk.box.offset), (1, *chunk.box.shape))
            row = math.prod(sizes) * ITEMSIZE[item.dtype]
            for block, run in itertools.product(range(blocks), runs):
                begins, ends = max(run.start, low), min(run.start + run.rows, low + rows)
                if begins >= ends:
                    continue
                number = str(first + block) if stacked else found["number"]
                box = Box((run.to + begins - run.start, *offset), (ends - begins, *sizes))
                at = start + (block * rows + begins - low) * row
                stored.setdefault((run.name, number), []).append(Stored(box, chunk.file, at, ()))
        for (name, number), boxes in stored.items():
            yield f"layers.{number}.{name}" if inside else name, Entry(shapes[name], item.dtype, tuple(boxes))

    def _start(self, key: str, dtype: str, chunk: Stored) -> int:
        """The first byte of what an archive holds."""
        if chunk.file not in self.files:
            self.files[chunk.file] = self.opened.enter_context(self.store.open(f"{self.folder}/{chunk.file}"))
        path = self.store.path(f"{self.folder}/{chunk.file}")
        kept = open_archive(self.files[chunk.file], chunk, key, dtype, path)
        verify(self.files[chunk.file], kept.record, path)
        return kept.record.start + kept.first * ITEMSIZE[dtype]


def _runs(module: str, kind: str, half: str | None, rows: int, inside: bool, shape: DecoderShape) -> Iterator[Run]:
    """Which rows of a tensor of Megatron's are which of ours."""
    named = [f"{name}.{kind}" for name in (BLOCK[module] if inside else (ENDS[module],))]
    if module == "self_attention.linear_qkv":
        width, queries = shape.head_dim, shape.heads // shape.kv_heads * shape.head_dim
        if rows != shape.kv_heads * (queries + 2 * width):
            raise JobError(
                f"linear_qkv has {rows} rows, and its args say {shape.kv_heads} kv heads of {queries // width} queries x {width}"
            )
        for group in range(shape.kv_heads):
            start = group * (queries + 2 * width)
            yield Run(start, queries, named[0], group * queries)
            yield Run(start + queries, width, named[1], group * width)
            yield Run(start + queries + width, width, named[2], group * width)
    elif module == "mlp.linear_fc1" and half:
        yield Run(0, rows, named[("_w", "_v").index(half)], 0)
    elif module == "mlp.linear_fc1" and shape.mlp == "swiglu":
        yield Run(0, rows // 2, named[0], 0)
        yield Run(rows // 2, rows // 2, named[1], 0)
    elif module == "mlp.linear_fc1":
        yield Run(0, rows, named[1], 0)
    elif named[0] in ("embed.weight", "head.weight"):
        yield Run(0, min(rows, shape.vocab), named[0], 0)  # beyond are rows that only fill up
    else:
        yield Run(0, rows, named[0], 0)


# -- what stands beside tensors ----------------------------------------------------------------------------------------


def _manifest(
    store: Store, folder: str, common: Mapping[str, Any], tensors: dict[str, Entry], shape: DecoderShape, left: Sequence[str]
) -> Manifest:
    kinds = {name.rpartition("/")[2] for name in tensors if name.startswith("optimizer/")}
    stateful = {name.split("/")[1] for name in tensors if name.startswith("optimizer/")}
    optimizer = _optimizer(common)
    updates = _updates(store, folder, optimizer)
    if kinds and updates is None:
        raise JobError(
            f"{store.path(folder)}/{COMMON} does not tell how many steps the optimizer has made; its moments mean nothing without"
        )
    steps = common.get("iteration")
    steps = steps if isinstance(steps, int) else updates or 0
    for name, entry in tensors.items():
        if name.startswith("model/"):
            trained = not stateful or name.partition("/")[2] in stateful
            aliases = ("head.weight",) if shape.tied and name == "model/embed.weight" else ()
            tensors[name] = replace(entry, trainable=trained, aliases=aliases)
    args = common.get("args")
    samples = getattr(args, "consumed_train_samples", 0) or 0
    state: dict[str, Any] = {
        "steps": steps,
        "updates": updates or 0,
        "skips": 0,
        "scale": None,
        "loaders": [],
        "optimizer": {frozenset({"exp_avg", "exp_avg_sq"}): "AdamW", frozenset({"momentum_buffer"}): "SGD"}.get(frozenset(kinds)),
    }
    scalars = {f"optimizer/{name}/step": Scalar("F32", float(updates or 0)) for name in stateful} if "exp_avg" in kinds else {}
    files = {one.file: store.size(f"{folder}/{one.file}") for entry in tensors.values() for one in entry.stored}
    try:
        config: Any = config_of_shape(shape)
    except JobError as error:
        config = str(error)
    facts = {"left": [*left], "from": store.path(folder), "huggingface": config, COMPUTES: decoder_computes(shape)}
    manifest = Manifest(steps, "", 0, tensors, scalars, files, state, {"samples": samples, "best": None}, facts=facts)
    manifest.check()
    return manifest


def _optimizer(common: Mapping[str, Any]) -> Mapping[str, Any]:
    """What torch's optimizer has told of itself, inside what Megatron's has."""
    found = common.get("optimizer") or {}
    inner = found.get("optimizer") if isinstance(found, Mapping) else None
    return inner if isinstance(inner, Mapping) else found if isinstance(found, Mapping) else {}


def _updates(store: Store, folder: str, optimizer: Mapping[str, Any]) -> int | None:
    """Updates that the optimizer has made: one number for all, or one a group. Raises JobError where groups differ."""
    state = optimizer.get("state")
    told = [state["common_step"]] if isinstance(state, Mapping) and "common_step" in state else []
    told += [group["step"] for group in optimizer.get("param_groups") or () if isinstance(group, Mapping) and group.get("step") is not None]
    numbers = {_number(store, f"{folder}/{COMMON}", value) for value in told}
    if len(numbers) > 1:
        raise JobError(f"{store.path(folder)}/{COMMON}: groups have made {sorted(numbers)} steps; one number is understood")
    return int(numbers.pop()) if numbers else None


def _number(store: Store, file: str, value: Any) -> float:
    """A number, or one in a tensor of one element."""
    if isinstance(value, int | float):
        return value
    if not isinstance(value, Kept) or math.prod(value.shape) != 1:
        raise JobError(f"{store.path(file)}: {value!r} is no number of steps")
    held = bytearray(ITEMSIZE[value.dtype])
    with store.open(file) as opened:
        fill(opened, value.record.start + value.first * len(held), memoryview(held), store.path(file))
    return float(torch.frombuffer(held, dtype=DTYPES[value.dtype]).item())


def _load(store: Store, name: str) -> dict[str, Any]:
    path = store.path(name)
    if not store.has(name):
        raise Damaged(f"{path} is missing, and the checkpoint needs it")
    with store.open(name) as file:
        found = read_archive(file, 0, store.size(name), path)
    if not isinstance(found, dict):
        raise JobError(f"{path} holds no dict, and is not understood")
    return found
