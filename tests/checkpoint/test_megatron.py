"""Folders in the format that megatron-core documents: stacked blocks, fused matrices, parts of several ranks, masters in fp32."""

from __future__ import annotations

import argparse
import io
import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from stretto.checkpoint.convert import convert
from stretto.checkpoint.kinds import inspect
from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.errors import Damaged, JobError
from stretto.job import Job
from stretto.models import library

SHAPE = {"name": "tiny", "blocks": 4, "hidden": 24, "heads": 6, "kv_heads": 2, "ffn": 36, "vocab": 50}
PADDED, DIM = 56, 4  # rows of the embedding there, and elements of a head
KINDS = ("", "exp_avg", "exp_avg_sq")
BATCH = {"input_ids": torch.arange(72).view(12, 6) % 50, "labels": torch.arange(72).view(12, 6) % 50}


def values():
    """What is to be found again: (our name, kind) -> tensor; kind "" is the parameter."""
    torch.manual_seed(0)
    model = library.load("tiny", overrides=job("dp=1").model.sizes()).model.to_empty(device="cpu")
    return {(name, kind): torch.rand_like(p) for kind in KINDS for name, p in model.named_parameters()}


def job(mesh, **keys):
    return Job.load({"model": SHAPE, "batch": 12, "batch.seq_len": 6, "schedule": "constant", "mesh": mesh}, **keys)


def megatron_tensors(ours, kind, tp):
    """(key, global shape, offset, part) as tp ranks save them; blocks are stacked."""
    of = lambda name: ours[name, kind]
    for block in range(4):
        pre = f"layers.{block}."
        q, k, v = (of(f"{pre}attn.{n}.weight") for n in "qkv")
        rows = []
        for group in range(2):
            rows += [q[3 * DIM * group : 3 * DIM * (group + 1)], k[DIM * group : DIM * (group + 1)], v[DIM * group : DIM * (group + 1)]]
        qkv = torch.cat(rows)
        for rank in range(tp):
            n = len(qkv) // tp
            yield "self_attention.linear_qkv.weight", (4, *qkv.shape), (block, rank * n, 0), qkv[rank * n : (rank + 1) * n][None]
            for name, leaf in (("attn.o", "self_attention.linear_proj"), ("mlp.down", "mlp.linear_fc2")):
                whole = of(f"{pre}{name}.weight")
                n = whole.shape[1] // tp
                yield f"{leaf}.weight", (4, *whole.shape), (block, 0, rank * n), whole[:, rank * n : (rank + 1) * n][None]
            for number, name in enumerate(("gate", "up")):
                whole = of(f"{pre}mlp.{name}.weight")
                n = len(whole) // tp
                start = number * len(whole) + rank * n
                yield "mlp.linear_fc1.weight", (4, 72, 24), (block, start, 0), whole[rank * n : (rank + 1) * n][None]
        yield "self_attention.linear_qkv.layer_norm_weight", (4, 24), (block, 0), of(f"{pre}norm1.weight")[None]
        yield "mlp.linear_fc1.layer_norm_weight", (4, 24), (block, 0), of(f"{pre}norm2.weight")[None]


def ends(ours, kind, tp):
    for key, name in (("embedding.word_embeddings.weight", "embed.weight"), ("output_layer.weight", "head.weight")):
        padded = torch.cat([ours[name, kind], torch.full((PADDED - 50, 24), 9.0)])
        n = PADDED // tp
        for rank in range(tp):
            yield key, (PADDED, 24), (rank * n, 0), padded[rank * n : (rank + 1) * n]
    yield "decoder.final_layernorm.weight", (24,), (0,), ours["norm.weight", kind]


ARGS = {
    "num_layers": 4,
    "num_attention_heads": 6,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": DIM,
    "ffn_hidden_size": 36,
    "vocab_size": 50,
    "padded_vocab_size": PADDED,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "swiglu": True,
    "add_bias_linear": False,
    "rotary_base": 10000,
    "consumed_train_samples": 28,
}


def write(folder, *, tp=2, numbered=False, masters="fp32_param", extra=(), args=ARGS, backend="torch_dist", drop=()):
    """A folder as megatron-core writes it: archives one after another in a file a rank."""
    ours, folder_files, listed, where = values(), {}, {}, {}
    folder.mkdir(parents=True)

    def put(key, shape, offset, part, file):
        chunk = ChunkStorageMetadata(torch.Size(offset), part.shape)
        if key in listed:
            listed[key].chunks.append(chunk)
        else:
            listed[key] = TensorStorageMetadata(TensorProperties(part.dtype), torch.Size(shape), [chunk])
        store(MetadataIndex(key, torch.Size(offset)), part.clone(), file)

    def store(index, value, file):
        packed = io.BytesIO()
        torch.save(value, packed)
        content = folder_files.setdefault(file, bytearray())
        where[index] = _StorageInfo(file, len(content), packed.tell())
        content += packed.getvalue()

    for kind in KINDS:
        for inside, tensors in ((True, megatron_tensors(ours, kind, tp)), (False, ends(ours, kind, tp))):
            for number, (leaf, shape, offset, part) in enumerate(tensors):
                if leaf in drop:
                    continue
                file = f"__{number % tp}_0.distcp"
                if inside and numbered:
                    key, shape, offset, part = f"decoder.layers.{offset[0]}.{leaf}", shape[1:], offset[1:], part[0]
                else:
                    key = f"decoder.layers.{leaf}" if inside else leaf
                if kind:
                    put(f"optimizer.state.{kind}.{key}", shape, offset, part, file)
                elif masters:
                    put(f"optimizer.state.{masters}.{key}", shape, offset, part, file)
                    put(key, shape, offset, part.bfloat16(), file)
                else:
                    put(key, shape, offset, part, file)
    for key, shape in extra:
        put(key, shape, (0,) * len(shape), torch.zeros(shape), "__0_0.distcp")
    listed["rng_state/shard_0_1"] = BytesStorageMetadata()
    store(MetadataIndex("rng_state/shard_0_1"), [{"random": 1}], "__0_0.distcp")
    for file, content in folder_files.items():
        (folder / file).write_bytes(content)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(listed, {}, where)))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "sharded_backend_version": 1, "common_backend": "torch"}))
    groups = {"state": {"common_step": torch.tensor(7.0)}, "param_groups": [{"lr": 1e-3, "step": 7}]}
    common = {"iteration": 7, "checkpoint_version": 3.0, "optimizer": {"optimizer": groups}}
    torch.save({**common, **({"args": argparse.Namespace(**args)} if args else {})}, folder / "common.pt")
    return ours


@pytest.mark.parametrize(
    ("mesh", "zero", "how"),
    [("dp=1", 0, {}), ("tp=2", 1, {"numbered": True}), ("dp=3", 3, {"masters": "param"}), ("pp=2", 0, {"tp": 1, "masters": None})],
)
def test_any_mesh_has_every_row_of_it_where_it_belongs(mesh, zero, how, tmp_path):
    ours = write(tmp_path / "m", **how)

    def load(world):
        with Engine(library.load("tiny", seed=3, overrides=job(mesh).model.sizes()), job(mesh, zero=zero), world) as engine:
            notes = engine.load(tmp_path / "m")
            parameters = dict(engine.full_state())
            engine.save(tmp_path / "ours")
            return parameters, engine.steps, engine.updates, notes["samples"], engine.step(BATCH).committed

    parameters, *counts = run_threads(load, int(mesh[-1]))[0]
    assert counts == [7, 7, 28, True]
    assert all(torch.equal(x, ours[name, ""]) for name, x in parameters.items()) and len(parameters) == len(ours) // 3
    convert(str(tmp_path / "ours"), str(tmp_path / "dcp"), "dcp")
    state = {f"optimizer.state.{name}.{kind}": torch.zeros_like(x) for (name, kind), x in ours.items() if kind}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(state[f"optimizer.state.{name}.{kind}"], x) for (name, kind), x in ours.items() if kind)


def test_a_run_folder_of_it_is_told_of_and_becomes_a_checkpoint_and_a_llama(tmp_path):
    ours = write(tmp_path / "runs/iter_0000007")
    (tmp_path / "runs/latest_checkpointed_iteration.txt").write_text("7")
    told = inspect(str(tmp_path / "runs"), verify=True)
    assert (told.kind, told.about["step"], told.about["not taken"]) == ("megatron", 7, "rng_state/shard_0_1")
    assert (
        told.about["kinds"]["optimizer"]
        == 2 * told.about["kinds"]["model"]
        == 8 * sum(x.numel() for (_, kind), x in ours.items() if not kind)
    )
    convert(str(tmp_path / "runs"), str(tmp_path / "c"))
    convert(str(tmp_path / "c"), str(tmp_path / "hf"))
    found = load_file(tmp_path / "hf/model.safetensors")
    assert torch.equal(found["model.layers.1.self_attn.k_proj.weight"], ours["layers.1.attn.k.weight", ""])
    assert torch.equal(found["lm_head.weight"], ours["head.weight", ""])


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"backend": "zarr"}, "format zarr 1 of Megatron is not understood; save it with --ckpt-format torch_dist"),
        ({"args": None}, "has no args, which tell how linear_qkv is put together"),
        ({"args": {**ARGS, "num_query_groups": 3}}, "linear_qkv has 40 rows, and its args say 3 kv heads of 2 queries x 4"),
        ({"args": {**ARGS, "apply_layernorm_1p": True}}, "trained with apply_layernorm_1p=True, which our decoder does not compute"),
        ({"args": {key: value for key, value in ARGS.items() if key != "ffn_hidden_size"}}, "args have no 'ffn_hidden_size'"),
        (
            {"extra": [("decoder.layers.mlp.router.weight", (4, 8, 24))]},
            r"our decoder has not: decoder.layers.mlp.router.weight \(1 in all\)",
        ),
        (
            {
                "extra": [
                    ("optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg", (64,))
                ]
            },
            "by pieces of Megatron's own buffers .* --dist-ckpt-optim-fully-reshardable, or the weights alone with --no-save-optim",
        ),
        ({"drop": ("embedding.word_embeddings.weight",)}, "holds no embedding.word_embeddings.weight"),
    ],
)
def test_what_is_not_understood_is_refused(how, match, tmp_path):
    write(tmp_path / "m", **how)
    with pytest.raises(JobError, match=match):
        inspect(str(tmp_path / "m"))


def test_a_flipped_bit_a_missing_part_and_a_missing_file_are_errors(tmp_path):
    write(tmp_path / "m")
    file = tmp_path / "m/__1_0.distcp"
    content = bytearray(file.read_bytes())
    at = content.index(values()["layers.2.mlp.down.weight", "exp_avg"][:, 18:].contiguous().numpy().tobytes())
    file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(Damaged, match="__1_0.distcp is damaged"):
        inspect(str(tmp_path / "m"))
    file.unlink()
    with pytest.raises(Damaged, match="__1_0.distcp is missing"):
        inspect(str(tmp_path / "m"))
