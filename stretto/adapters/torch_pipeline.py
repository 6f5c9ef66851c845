"""torch.distributed.pipelining: the model in stages, microbatches through them by one of torch's schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from stretto.adapters.catalog import TORCH_SCHEDULES
from stretto.adapters.fsdp2 import mesh_of, shard
from stretto.adapters.loop import clip_all, dtype_of, optimizer_of, prepared, set_rates
from stretto.adapters.runner import Setting, Told, real
from stretto.data.batch import Batch, count_targets, prepare_labels
from stretto.engine.loss import next_token_loss
from stretto.layout.stages import split_model
from stretto.models.attention import rotation
from stretto.models.decoder import Decoder
from stretto.models.stages import stage_items
from stretto.schedule.pipelines import pipeline


class _Stage(nn.Module):
    """Some parts of a decoder, by the names that the whole has, called as torch calls a stage: with tokens, or what came before."""

    def __init__(self, decoder: Decoder, names: Sequence[str], cast: torch.device | None) -> None:
        super().__init__()
        self.shape, self.cast = decoder.shape, cast
        self.embed = decoder.embed if "embed" in names else None
        self.positions = decoder.positions if "embed" in names else None
        self.layers = nn.ModuleList(block for i, block in enumerate(decoder.layers) if f"layers.{i}" in names)
        self.norm = decoder.norm if "norm" in names else None
        self.head = decoder.head if "head" in names else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, T] token ids in the first stage, [B, T, hidden] in others. Result: [B, T, hidden], or logits from the last."""
        numbers = torch.arange(x.shape[1], device=x.device)
        with torch.autocast(self.cast.type if self.cast else "cpu", dtype=torch.bfloat16, enabled=self.cast is not None):
            if self.embed is not None:
                x = self.embed(x)
                x = x if self.positions is None else x + self.positions(numbers)
            turn = rotation(numbers, self.shape.head_dim, self.shape.rope_theta, x.dtype) if self.shape.position == "rope" else ()
            for layer in self.layers:
                x = layer(x, *turn)
            x = x if self.norm is None else self.norm(x)
            return x if self.head is None else self.head(x)


class Pipelined:
    """Stages cut where stretto cuts them; within a stage, fully_shard over dp."""

    counts_bytes = False

    def __init__(self, setting: Setting) -> None:
        self.setting, job = setting, setting.job
        mesh, keys = mesh_of(setting), job.pipeline
        whole = real(setting.loaded(), job.seed, setting.device, dtype_of(job))
        assert isinstance(whole, Decoder), "refused by the catalog"
        order = pipeline(keys.schedule, setting.mesh["pp"], job.microbatches, keys.chunks)
        split = split_model(stage_items(whole, job.batch.seq_len, job.recompute), order.rank_of, keys.split, job.balance(order.held))
        group, me = mesh["pp"].get_group(), setting.mesh.index(setting.rank, "pp")
        mine = [stage for stage, rank in enumerate(order.rank_of) if rank == me]
        shards = setting.mesh.extent("dp", "dp_replicate") > 1
        cast = setting.device if job.precision.compute == "bf16" and not shards else None
        parts = [prepared(_Stage(whole, [item.name for item in split.parts(stage)], cast), job) for stage in mine]
        for part in parts:
            if shards:
                shard(part, mesh, setting)
        self.parameters = [p for part in parts for p in part.parameters()]
        stages = [PipelineStage(part, stage, split.stages, setting.device, group=group) for part, stage in zip(parts, mine, strict=True)]
        kind: Any = getattr(pipelining, TORCH_SCHEDULES[keys.schedule])
        single = issubclass(kind, pipelining.schedules.PipelineScheduleSingle)
        self.schedule = kind(stages[0] if single else stages, job.microbatches, loss_fn=self._loss, scale_grads=False)
        self.optimizer = optimizer_of(self.parameters, job)
        self.rates = [one["lr"] for one in self.optimizer.param_groups]
        self.total, self.done, self.count = job.schedule.steps or job.total_steps() or 1, 0, 1
        self.first, self.last, self.group = 0 in mine, split.stages - 1 in mine, group

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        total, _ = next_token_loss(output, Batch({"shift_labels": target}, len(target)))
        return total * (self.setting.shards / max(self.count, 1))

    def step(self, batch: Batch) -> Told:
        """See Runner."""
        whole, job = prepare_labels(batch), self.setting.job
        self.count = count_targets(whole)
        rows, losses = self.setting.rows(whole), list[Tensor]()
        given = (rows["input_ids"],) if self.first else ()
        wanted = {"target": rows["shift_labels"], "losses": losses} if self.last else {}
        self.schedule.step(*given, **wanted, return_outputs=False)
        norm = clip_all(self.parameters, job.clip, self._across) if job.clip else None
        set_rates(self.optimizer, self.rates, job, self.done, self.total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return Told(sum(float(loss) for loss in losses) / self.setting.shards, norm)

    def _across(self, squares: Tensor) -> Tensor:
        dist.all_reduce(squares, group=self.group)
        return squares

    def close(self) -> None:
        """Nothing to end."""


def build(setting: Setting) -> Pipelined:
    """See Build."""
    return Pipelined(setting)
