"""The training loop of torch's own documentation, which most frameworks here put their wrapper in."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from stretto.adapters.runner import Setting, Told
from stretto.data.batch import Batch, count_targets, prepare_labels
from stretto.engine.loss import Forward, Loss, call_model, next_token_loss
from stretto.engine.optimizer import lr_factor
from stretto.errors import JobError
from stretto.job import Job
from stretto.models.library import Loaded
from stretto.models.stages import block_list
from stretto.parallel import recompute

#: A context for the forward and backward of one microbatch, given whether it is the step's last.
Around = Callable[[bool], contextlib.AbstractContextManager[Any]]
#: The norm of the whole gradient, all ranks together, before it is clipped to a largest norm.
Clip = Callable[[float], float]


def nothing(last: bool) -> contextlib.AbstractContextManager[None]:
    """No context."""
    return contextlib.nullcontext()


class Loop:
    """Microbatches forward and backward, then clip, learning rate, update.

    model: called as the framework wrapped it. The framework averages gradients over the dp ranks; the sum of losses is divided by the
    targets of the whole step and multiplied with the number of dp ranks, so that what it averages is the gradient of the step's loss.
    """

    counts_bytes = False

    def __init__(
        self,
        setting: Setting,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loaded: Loaded,
        *,
        around: Around = nothing,
        clip: Clip | None = None,
        backward: Callable[[Tensor], Any] = Tensor.backward,
        update: Callable[[], Any] | None = None,
        autocast: bool = True,
        loss: Loss = next_token_loss,
    ) -> None:
        if loaded.loss is not None:
            raise JobError("a model that brings a loss of its own is run by stretto alone: only a forward tells how many targets it counts")
        self.setting, self.model, self.optimizer, self.around = setting, model, optimizer, around
        self.forward: Forward = loaded.forward or call_model
        self.loss = loss
        self.clip = clip or (lambda norm: clip_all([p for group in optimizer.param_groups for p in group["params"]], norm))
        self.backward, self.update = backward, update or self._update
        self.cast = autocast and setting.job.precision.compute == "bf16"
        self.rates = [group["lr"] for group in optimizer.param_groups]
        self.total = setting.job.schedule.steps or setting.job.total_steps() or 1
        self.done = 0

    def step(self, batch: Batch) -> Told:
        """See Runner."""
        whole = prepare_labels(batch)
        count = count_targets(whole)
        setting = self.setting
        micro = setting.rows(whole).microbatches(setting.job.microbatches)
        told = torch.zeros((), dtype=torch.float64, device=setting.device)
        for i, rows in enumerate(micro):
            with self.around(i == len(micro) - 1):
                with torch.autocast(setting.device.type, dtype=torch.bfloat16, enabled=self.cast):
                    total, _ = self.loss(self.forward(self.model, rows), rows)
                self.backward(total * (setting.shards / max(count, 1)))
                told += plain(total.detach())
        norm = self.clip(setting.job.clip) if setting.job.clip else None
        set_rates(self.optimizer, self.rates, setting.job, self.done, self.total)
        self.update()
        self.done += 1
        return Told(told.item() / max(count, 1) if setting.counts_loss else 0.0, norm)

    def close(self) -> None:
        """Nothing to end."""

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float], job: Job, done: int, total: int) -> None:
    """The learning rates of update number `done` (from 0)."""
    factor = lr_factor(job.schedule, done, total)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor


def plain(x: Tensor) -> Tensor:
    """A DTensor's whole value; any other tensor itself."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def optimizer_of(parameters: Iterable[nn.Parameter], job: Job) -> torch.optim.Optimizer:
    """The job's optimizer in one process: torch's, fused where it can be; only tensors of two or more dims decay."""
    keys = job.optimizer
    if keys.name == "sgd":
        return torch.optim.SGD(groups(parameters, keys.weight_decay), lr=keys.lr, momentum=keys.momentum, foreach=True)
    return torch.optim.AdamW(groups(parameters, keys.weight_decay), lr=keys.lr, betas=keys.betas, eps=keys.eps, fused=True)


def groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups by whether they decay and where they lie: a fused update takes tensors of one kind."""
    sorted_: dict[tuple[bool, Any], list[nn.Parameter]] = defaultdict(list)
    for p in parameters:
        if p.requires_grad:
            sorted_[p.ndim > 1, p.device_mesh if isinstance(p, DTensor) else None].append(p)
    return [{"params": some, "weight_decay": weight_decay if matrix else 0.0} for (matrix, _), some in sorted_.items()]


def clip_all(parameters: Sequence[nn.Parameter], most: float, across: Callable[[Tensor], Tensor] = lambda squares: squares) -> float:
    """torch's clipping of the global norm, also of parameters that lie on different meshes; returns the norm before.

    across: adds squared norms over ranks that hold other parameters.
    """
    kinds: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for p in parameters:
        if p.grad is not None:
            kinds[p.grad.device_mesh if isinstance(p.grad, DTensor) else None].append(p)
    norms = [plain(nn.utils.get_total_norm([p.grad for p in some if p.grad is not None])) for some in kinds.values()]
    squares = torch.stack(norms).to(torch.float64).square().sum() if norms else torch.zeros((), dtype=torch.float64)
    norm = across(squares).sqrt()
    for some in kinds.values():
        nn.utils.clip_grads_with_norm_(some, most, norm.to(torch.float32))
    return float(norm)


def prepared(model: nn.Module, job: Job) -> nn.Module:
    """The model with its blocks recomputed and compiled as the job says."""
    blocks = block_list(model)[1]
    recompute.apply(blocks, job.recompute, True, compiled=job.compile.mode == "block")
    if job.compile.mode == "block":
        for block in blocks:
            block.compile(backend=job.compile.backend)
    return model


def dtype_of(job: Job) -> torch.dtype:
    """Of the parameters that the optimizer updates."""
    return torch.float64 if job.precision.master == "fp64" else torch.float32
