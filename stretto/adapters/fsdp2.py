"""torch's fully_shard (FSDP2), with DTensor tensor parallelism and torch's pipelining where the mesh asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, loss_parallel, parallelize_module

from stretto.adapters.loop import Loop, dtype_of, nothing, optimizer_of, prepared
from stretto.adapters.runner import Runner, Setting, real
from stretto.engine.loss import next_token_loss
from stretto.errors import JobError
from stretto.job import Job
from stretto.models import library
from stretto.models.decoder import Decoder
from stretto.models.stages import block_list

#: Reductions stay in what the job says, as the engine's do.
REDUCE = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


def build(setting: Setting) -> Runner:
    """See Build."""
    if setting.mesh["pp"] > 1:
        from stretto.adapters.torch_pipeline import build as build_pipeline

        return build_pipeline(setting)
    loaded, job, mesh = setting.loaded(), setting.job, mesh_of(setting)
    model = real(loaded, job.seed, setting.device, dtype_of(job))
    loss_parallelized = setting.mesh["tp"] > 1
    if loss_parallelized:
        cut_over_tp(model, mesh["tp"])
    model = prepared(model, job)
    around, shards = nothing, setting.mesh.extent("dp", "dp_replicate") > 1
    if shards:
        shard(model, mesh, setting)
        around = synchronised(model, job)
    return Loop(
        setting,
        model,
        optimizer_of(model.parameters(), job),
        loaded,
        around=_with_loss_parallel(around) if loss_parallelized else around,
        autocast=not shards,
        loss=next_token_loss,
    )


def mesh_of(setting: Setting) -> DeviceMesh:
    """The job's mesh as torch's, by the names of its axes that are longer than 1 (and dp)."""
    axes = [(axis, size) for axis, size in setting.mesh.axes if size > 1 or axis == "dp"]
    axes = axes if any(axis == "dp" for axis, _ in axes) else [("dp", 1), *axes]
    return init_device_mesh(setting.device.type, tuple(size for _, size in axes), mesh_dim_names=tuple(axis for axis, _ in axes))


def shard(model: nn.Module, mesh: DeviceMesh, setting: Setting) -> None:
    """A block a unit and the rest in the root, as torch's tutorial does; hybrid over dp_replicate."""
    job = setting.job
    names = ("dp_replicate", "dp") if setting.mesh["dp_replicate"] > 1 else ("dp",)
    over = mesh[names] if len(names) > 1 else mesh["dp"]
    low = job.precision.compute == "bf16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low else None, reduce_dtype=REDUCE[job.precision.reduce or "fp32"] if low else None
    )
    reshard = job.zero.stage == 3 and job.zero.params == "microbatch"
    options: Mapping[str, Any] = {"mesh": over, "mp_policy": policy, "reshard_after_forward": reshard}
    for block in block_list(model)[1]:
        fully_shard(block, **options)
    fully_shard(model, **options)


def synchronised(model: nn.Module, job: Job) -> Any:
    """The context of a microbatch: gradients are reduced after each, or after the last alone, as zero.gradients says."""
    assert isinstance(model, FSDPModule)
    each = job.zero.gradients == "each"

    @contextlib.contextmanager
    def around(last: bool) -> Iterator[None]:
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(each or last)
        yield

    return around


def _with_loss_parallel(around: Any) -> Any:
    @contextlib.contextmanager
    def both(last: bool) -> Iterator[None]:
        with around(last), loss_parallel():
            yield

    return both


# -- tensor parallelism -----------------------------------------------------------------------------------------------


def cut_over_tp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Projections by columns, those that follow by rows, the head by vocabulary with the loss computed on the parts (torch's tutorial
    on tensor parallelism); embeddings and norms are whole. Of a transformers model as its published plan says."""
    plan = _decoder_plan(model) if isinstance(model, Decoder) else _published_plan(model)
    parallelize_module(model, mesh, plan)


def _decoder_plan(model: Decoder) -> dict[str, ParallelStyle]:
    columns = {f"layers.*.{name}": ColwiseParallel() for name in ("attn.q", "attn.k", "attn.v", "mlp.up", "mlp.gate")}
    rows = {f"layers.*.{name}": RowwiseParallel() for name in ("attn.o", "mlp.down")}
    known = {name for name, _ in model.layers[0].named_modules()}
    plan: dict[str, ParallelStyle] = {name: style for name, style in (columns | rows).items() if name.removeprefix("layers.*.") in known}
    if not model.shape.tied:
        plan["head"] = _head()
    return plan


def _head() -> ParallelStyle:
    return ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)


def _published_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    found: dict[str, ParallelStyle] = {}
    for name, style in library.tensor_plan(model, 2).items():
        kind = style.partition(":")[0].removeprefix("shared_")
        if kind in styles:
            found[name] = styles[kind]()
        elif kind not in ("replicated", "head", "embedding_rowwise"):
            kind_of = type(model).__name__
            raise JobError(f"mesh.tp: {kind_of} is cut with {style!r}, which DTensor's styles do not have; write a mesh without tp")
    if not found:
        raise JobError(f"mesh.tp: {type(model).__name__} publishes no plan of colwise and rowwise layers; write a mesh without tp")
    return found
