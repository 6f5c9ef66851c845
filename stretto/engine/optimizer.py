"""The update: which optimizer over this rank's pieces, and by which learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from stretto.parallel.sharded import Piece
from stretto.sections import Optimizer as OptimizerKeys
from stretto.sections import Schedule as ScheduleKeys

#: Makes an optimizer from parameter groups: each a dict with `params`, a list of (name, parameter), and `weight_decay`.
MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def parameter_groups(pieces: Iterable[Piece], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: tensors of two or more dims, which decay, and the others (norm scales, biases), which do not.

    The dims are those of the whole tensor; the piece of it that lies here may be flat.
    """
    decayed: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for piece in pieces:
        (decayed if len(piece.shape) > 1 else others).append((piece.name, piece.value))
    groups = ({"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def make_optimizer(keys: OptimizerKeys) -> MakeOptimizer:
    """The job's own choice, by torch.optim."""

    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        if keys.name == "sgd":
            return torch.optim.SGD(groups, lr=keys.lr, momentum=keys.momentum, foreach=True)
        return torch.optim.AdamW(groups, lr=keys.lr, betas=keys.betas, eps=keys.eps, fused=True)

    return make


def lr_factor(keys: ScheduleKeys, update: int, total: int) -> float:
    """What the learning rate is multiplied with at update number `update` (from 0) of `total`.

    Warm-up rises evenly and reaches 1 at its last step; then constant, linear or cosine down to min_ratio (REFERENCE I4).
    Updates are counted, not ranks or attempts: a skipped step does not advance it.
    """
    warmup = keys.warmup_steps(total)
    if update < warmup:
        return (update + 1) / warmup
    if keys.shape == "constant":
        return 1.0
    done = min((update - warmup) / max(total - warmup, 1), 1.0)
    fall = 0.5 * (1 + math.cos(math.pi * done)) if keys.shape == "cosine" else 1 - done
    return keys.min_ratio + (1 - keys.min_ratio) * fall
