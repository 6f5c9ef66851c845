"""The training loops that are compared: torch's DDP and FSDP2, and stretto at each ZeRO stage.

One model (stretto's decoder) with the same first values, one loss, one update: they differ in how ranks share the work only.
Run as a program it is one rank of a team (benchmarks/turns.py): variants.py VARIANT[@BACKEND] JOB PRECISION ROWS CLIP.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from turns import Answer, limit_life, serve

import stretto.comm.shm
from stretto.anatomy import DECODERS
from stretto.engine.engine import Engine
from stretto.engine.watch import MemoryWatch
from stretto.job import Job
from stretto.models import library
from stretto.models.decoder import Decoder, fill

#: Batches that are used in turn, drawn from generators of these seeds.
BATCH_SEEDS = (1000, 1001, 1002, 1003)

Batch = Mapping[str, Tensor]
#: One optimizer step on the batch of all ranks; returns a loss whose mean over ranks is the loss of the step.
Step = Callable[[Batch], float]


@dataclass(frozen=True)
class Setting:
    """What every variant is given alike. rows: of all ranks together. clip: the norm that gradients are clipped to, 0 for none."""

    job: str
    ranks: int
    rank: int
    precision: Literal["fp32", "bf16"]
    rows: int
    clip: float = 0.0

    @property
    def decoder(self) -> str:
        """The built-in decoder's name."""
        return Job.load(self.job).model.name


def batches(setting: Setting) -> list[Batch]:
    """The batches of all ranks, the same on each: random tokens and the tokens after them, [rows, seq_len]."""
    vocab, length = DECODERS[setting.decoder].vocab, Job.load(setting.job).batch.seq_len
    drawn = [torch.randint(0, vocab, (setting.rows, length + 1), generator=torch.Generator().manual_seed(seed)) for seed in BATCH_SEEDS]
    return [{"input_ids": tokens[:, :-1], "shift_labels": tokens[:, 1:]} for tokens in drawn]


def ddp(setting: Setting, **options: Any) -> Step:
    """DistributedDataParallel; bf16 is autocast."""
    model = DistributedDataParallel(_decoder(setting), **options)
    return _plain_loop(setting, model, model.parameters(), contextlib.nullcontext)


def ddp_view(setting: Setting) -> Step:
    """DDP whose gradients are views of its buckets, which saves one copy."""
    return ddp(setting, gradient_as_bucket_view=True)


def compute(setting: Setting) -> Step:
    """What DDP would take if gradients cost nothing to add: they are not added, and ranks drift apart."""
    model = DistributedDataParallel(_decoder(setting))
    return _plain_loop(setting, model, model.parameters(), model.no_sync)


def fsdp2(setting: Setting) -> Step:
    """fully_shard, a block a unit and the rest in the root; bf16 is its MixedPrecisionPolicy with fp32 reduction."""
    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = low if setting.precision == "bf16" else MixedPrecisionPolicy()
    mesh = init_device_mesh("cpu", (setting.ranks,))
    model = _decoder(setting)
    for block in model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _plain_loop(setting, model, model.parameters(), contextlib.nullcontext, autocast=False)


def tensor_parallel(setting: Setting) -> Step:
    """DTensor: projections cut by columns, those that follow by rows; every rank sees all rows of the batch."""
    model = _decoder(setting)
    cuts = {name: ColwiseParallel() for name in ("attn.q", "attn.k", "attn.v", "mlp.up", "mlp.gate")}
    cuts |= {name: RowwiseParallel() for name in ("attn.o", "mlp.down")}
    mesh = init_device_mesh("cpu", (setting.ranks,))
    for block in model.layers:
        names = {name for name, _ in block.named_modules()}
        parallelize_module(block, mesh, {name: cut for name, cut in cuts.items() if name in names})
    return _plain_loop(replace(setting, ranks=1, rank=0), model, model.parameters(), contextlib.nullcontext)


def stretto(stage: int, transport: str = "auto") -> Callable[[Setting], Step]:
    """The engine at a ZeRO stage, without a schedule, as the plain loops. transport: auto is shared memory on one machine."""

    def build(setting: Setting) -> Step:
        job = Job.load(
            setting.job,
            mesh=f"dp={setting.ranks}",
            zero=stage,
            precision=setting.precision,
            device="cpu",
            clip=setting.clip,
            schedule="constant",
            **{"batch.size": setting.rows, "comm.transport": transport},
        )
        engine = Engine(library.load(job.model.name, seed=job.seed), job)
        return lambda batch: engine.step(batch).loss

    return build


VARIANTS: dict[str, Callable[[Setting], Step]] = {
    "ddp": ddp,
    "ddp-view": ddp_view,
    "compute": compute,
    "fsdp2": fsdp2,
    "tp": tensor_parallel,
    "zero0": stretto(0),
    "zero1": stretto(1),
    "zero2": stretto(2),
    "zero3": stretto(3),
    "zero0-gloo": stretto(0, "gloo"),
    "zero1-gloo": stretto(1, "gloo"),
    "zero2-gloo": stretto(2, "gloo"),
    "zero3-gloo": stretto(3, "gloo"),
}


def _decoder(setting: Setting) -> Decoder:
    """The decoder with the values that the engine gives it."""
    return fill(Decoder(DECODERS[setting.decoder]), Job.load(setting.job).seed)


def _plain_loop(
    setting: Setting,
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    around: Callable[[], contextlib.AbstractContextManager[None]],
    *,
    autocast: bool = True,
) -> Step:
    """The loop that torch's documentation shows. around: a context for forward and backward."""
    parameters = list(parameters)
    optimizer = adamw(parameters, Job.load(setting.job))
    cast = autocast and setting.precision == "bf16"

    def step(batch: Batch) -> float:
        mine = {name: tensor.chunk(setting.ranks)[setting.rank] for name, tensor in batch.items()}
        with around():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
                loss = mean_loss(model(mine["input_ids"]), mine["shift_labels"])
            loss.backward()
        if setting.clip:
            nn.utils.clip_grad_norm_(parameters, setting.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def adamw(parameters: Iterable[nn.Parameter], job: Job) -> torch.optim.AdamW:
    """The job's optimizer as a plain loop makes it: fused, and only tensors of two or more dims decay."""
    keys, groups = job.optimizer, defaultdict(list)
    for p in parameters:
        groups[p.ndim > 1, isinstance(p, DTensor)].append(p)  # a fused update takes tensors of one kind
    every = [{"params": some, "weight_decay": keys.weight_decay if matrix else 0.0} for (matrix, _), some in groups.items()]
    return torch.optim.AdamW(every, lr=keys.lr, betas=keys.betas, eps=keys.eps, fused=True)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean next-token cross-entropy in fp32. logits: [B, T, V], targets: [B, T]."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def main(variants: Mapping[str, Callable[[Setting], Step]] = VARIANTS) -> None:
    """Build a variant and run steps of it whenever the team is asked to."""
    limit_life()
    named, job, precision, rows, clip = sys.argv[1:]
    variant, _, backend = named.partition("@")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(backend or "gloo", store=dist.FileStore(os.environ["TURNS_MEET"], ranks), rank=rank, world_size=ranks)
    setting = Setting(job, ranks, rank, "bf16" if precision == "bf16" else "fp32", int(rows), float(clip))
    drawn, step, done = batches(setting), variants[variant](setting), 0

    def answer(request: dict[str, Any]) -> Answer:
        nonlocal done
        dist.barrier()
        watch = MemoryWatch() if request["watch"] else None
        clock, losses = [time.monotonic()], []
        with watch or contextlib.nullcontext():
            for _ in range(request["steps"]):
                losses.append(step(drawn[done % len(drawn)]))
                clock.append(time.monotonic())
                done += 1
        seen = {name: getattr(watch, name) for name in ("private_bytes", "share_bytes", "high_water_bytes")} if watch else {}
        return {"clock": clock, "losses": losses, **seen}

    serve(answer)


if __name__ == "__main__":
    main()
