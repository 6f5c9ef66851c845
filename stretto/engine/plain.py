"""The one-process side of `check`: a plain training loop of torch alone, with no part of the engine.

The whole batch at once, the model's own forward, torch.optim, torch's clipping; whoever can read this can judge the rest.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stretto.job import Job

#: fp16's gradients need a scale even here; a power of two, so that undoing it is exact.
FP16_SCALE = 1024.0


class PlainStep(NamedTuple):
    """What one step gave. gradients: before clipping. parameters: after the update. Both by name, whole."""

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def plain_steps(
    model: nn.Module,
    batches: Sequence[Any],
    job: Job,
    forward: Callable[[nn.Module, Any], Any],
    loss: Callable[[Any, Any], tuple[Tensor, Any]],
    *,
    compute: torch.dtype,
    master: torch.dtype,
) -> Iterator[PlainStep]:
    """Train `model` on these batches as `job` says, in one process, yielding each step.

    The optimizer holds the parameters in `master`; forward and backward run on a copy in `compute`.
    """
    model = model.to(master)
    work = copy.deepcopy(model).to(compute)
    for (_, kept), (_, buffer) in zip(work.named_buffers(), model.named_buffers(), strict=True):
        if compute != torch.float64:
            kept.data = buffer.data.to(torch.float32) if buffer.is_floating_point() else buffer.data.clone()
    pairs = {name: (param, dict(work.named_parameters())[name]) for name, param in model.named_parameters() if param.requires_grad}
    keys = job.optimizer
    groups = [
        {"params": [p for p, _ in pairs.values() if p.ndim > 1], "weight_decay": keys.weight_decay},
        {"params": [p for p, _ in pairs.values() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if keys.name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=keys.lr, momentum=keys.momentum)
    else:
        optimizer = torch.optim.AdamW(groups, lr=keys.lr, betas=keys.betas, eps=keys.eps, foreach=False)
    scale = FP16_SCALE if compute == torch.float16 else 1.0
    for number, batch in enumerate(batches):
        with torch.no_grad():
            for whole, copied in pairs.values():
                copied.copy_(whole)
                copied.grad = None
        total, count = loss(forward(work, batch), batch)
        mean = total / float(count)
        (mean * scale).backward()
        gradients = {}
        for name, (whole, copied) in pairs.items():
            whole.grad = torch.zeros_like(whole) if copied.grad is None else copied.grad.to(master) / scale
            gradients[name] = whole.grad.clone()
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        if job.clip:
            torch.nn.utils.clip_grad_norm_([whole for whole, _ in pairs.values()], job.clip)
        for group in optimizer.param_groups:
            group["lr"] = keys.lr * _schedule(job, number)
        optimizer.step()
        parameters = {name: param.detach().clone() for name, param in model.named_parameters()}
        yield PlainStep(float(mean.detach()), float(norm), gradients, parameters)


def _schedule(job: Job, number: int) -> float:
    """Share of the learning rate at step `number`, written out once more so that it can disagree."""
    keys, total = job.schedule, job.schedule.steps or job.total_steps() or 1
    warmup = keys.warmup if isinstance(keys.warmup, int) else round(keys.warmup * total)
    if number + 1 <= warmup:
        return (number + 1) / warmup
    if keys.shape == "constant":
        return 1.0
    progress = min(1.0, (number - warmup) / max(1, total - warmup))
    if keys.shape == "linear":
        return 1.0 + (keys.min_ratio - 1.0) * progress
    return keys.min_ratio + (1.0 - keys.min_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0
