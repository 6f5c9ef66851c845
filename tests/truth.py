"""Small models, seeded batches, and the one-process training loop they are held against. No part of the engine."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 17


class Block(nn.Module):
    """A residual block with a norm, a matrix with a bias and one without."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Small(nn.Module):
    """An embedding, three blocks, a head; odd sizes, so that nothing divides evenly."""

    def __init__(self, width: int = 10, blocks: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


_ONE_STREAM = threading.Lock()  # ranks as threads share torch's random stream


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> Any:
    """make() with torch's random stream at `seed`; the stream is put back after."""
    with _ONE_STREAM, torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def small(seed: int = 0, **sizes: Any) -> Small:
    return seeded(lambda: Small(**sizes), seed)


def tokens(steps: int, rows: int, length: int = 6, counted: Callable[[int], Tensor] | None = None) -> list[dict[str, Tensor]]:
    """Batches with labels; counted(step) -> [rows, length] bool says which labels are counted."""
    made = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(100 + step)
        ids = torch.randint(0, VOCAB, (rows, length), generator=draw)
        mask = counted(step) if counted else torch.rand(rows, length, generator=draw) < torch.rand(rows, 1, generator=draw)
        made.append({"input_ids": ids, "labels": torch.where(mask, ids, -100)})
    return made


def token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    """Sum of next-token losses of one whole batch, and how many there are; written out position by position."""
    logits, labels = model(batch["input_ids"]), batch["labels"]
    total, count = logits.sum() * 0.0, 0
    for row in range(labels.shape[0]):
        for at in range(labels.shape[1] - 1):
            target = int(labels[row, at + 1])
            if target != -100:
                total = total - torch.log_softmax(logits[row, at], -1)[target]
                count += 1
    return total, count


def train(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], tuple[Tensor, int]] = token_loss,
    *,
    lr: float = 1e-2,
    decay: float = 0.1,
    clip: float = 1.0,
    make: Callable[[Sequence[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    rates: Sequence[float] | None = None,
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """(loss, gradient norm) of each step and the parameters at the end, by one process in float64."""
    model = copy.deepcopy(model).double()
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = make(groups) if make else torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    seen = []
    for number, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = lr * (rates[number] if rates else 1.0)
        optimizer.zero_grad()
        total, count = loss(model, batch)
        if count == 0:
            seen.append((0.0, 0.0))
            continue
        (total / count).backward()
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norm = torch.sqrt(sum((p.grad**2).sum() for p in params))
        if clip and norm > clip:
            for p in params:
                p.grad *= clip / (norm + 1e-6)
        optimizer.step()
        seen.append((float(total.detach() / count), float(norm)))
    return seen, {name: p.detach() for name, p in model.named_parameters()}


def apart(mine: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """The largest relative error of any tensor; infinite if one is missing."""
    if set(mine) != set(truth):
        return float("inf")
    return max(float((mine[n].double() - truth[n]).norm() / truth[n].norm().clamp_min(1e-30)) for n in truth)
