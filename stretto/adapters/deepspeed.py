"""DeepSpeed: its engine with ZeRO 0-3, over the job's own optimizer."""

from __future__ import annotations

import os
from typing import Any

import torch

from stretto.adapters.loop import groups, plain, prepared
from stretto.adapters.runner import Setting, Told, real
from stretto.data.batch import Batch, count_targets, prepare_labels
from stretto.engine.loss import call_model, next_token_loss
from stretto.engine.optimizer import lr_factor
from stretto.errors import JobError
from stretto.job import Job


def configuration(job: Job) -> dict[str, Any]:
    """The job in DeepSpeed's own words. gradient_clipping is always said: left out, it clips at 1.0."""
    return {
        "train_batch_size": job.rows_per_rank // job.microbatches * job.microbatches * job.shards,
        "train_micro_batch_size_per_gpu": job.rows_per_rank // job.microbatches,
        "gradient_accumulation_steps": job.microbatches,
        "gradient_clipping": job.clip,
        "zero_optimization": {"stage": job.zero.stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": job.precision.compute == "bf16"},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


class DeepSpeed:
    """A step is one backward and one engine.step() a microbatch, of which the last updates."""

    counts_bytes = False

    def __init__(self, setting: Setting) -> None:
        job = setting.job
        os.environ.setdefault("DS_ACCELERATOR", setting.device.type)
        import deepspeed

        # an operator for inference alone, which it would compile now: minutes, and a build that was killed leaves a lock for ever
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

        loaded = setting.loaded()
        if loaded.loss is not None:
            raise JobError("a model that brings a loss of its own is run by stretto alone: only a forward tells how many targets it counts")
        self.setting, self.forward = setting, loaded.forward or call_model
        model = prepared(real(loaded, job.seed, setting.device, torch.float32), job)
        keys = job.optimizer
        parameters = groups(model.parameters(), keys.weight_decay)
        optimizer: torch.optim.Optimizer
        if keys.name == "sgd":
            optimizer = torch.optim.SGD(parameters, lr=keys.lr, momentum=keys.momentum, foreach=True)
        else:
            optimizer = torch.optim.AdamW(parameters, lr=keys.lr, betas=keys.betas, eps=keys.eps, fused=True)
        made: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=configuration(job))
        self.engine: Any = made[0]
        self.total, self.done = job.schedule.steps or job.total_steps() or 1, 0

    def step(self, batch: Batch) -> Told:
        """See Runner. DeepSpeed divides a loss by the number of microbatches, and gradients by the ranks."""
        whole, job = prepare_labels(batch), self.setting.job
        count = count_targets(whole)
        told = torch.zeros((), dtype=torch.float64, device=self.setting.device)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = job.optimizer.lr * lr_factor(job.schedule, self.done, self.total)
        for rows in self.setting.rows(whole).microbatches(job.microbatches):
            total, _ = next_token_loss(self.forward(self.engine, rows), rows)
            self.engine.backward(total * (self.setting.shards * job.microbatches / max(count, 1)))
            told += plain(total.detach())
            self.engine.step()
        self.done += 1
        norm = self.engine.get_global_grad_norm() if job.clip else None
        return Told(told.item() / max(count, 1), None if norm is None else float(norm))

    def close(self) -> None:
        """Nothing to end."""


def build(setting: Setting) -> DeepSpeed:
    """See Build."""
    return DeepSpeed(setting)
