"""Cross-entropy of logits that are cut over the vocabulary: nobody holds, or sends, the logits of all of it.

Each rank has the logits of its own part of the vocabulary for all tokens. Three numbers a token cross: the largest logit, the sum
of exponentials, and the target's logit, which one rank has (Shoeybi et al. 2019, section 3; REFERENCE D2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stretto.comm.crossing import Bridge
from stretto.errors import JobError
from stretto.layout.layout import split

#: Logits looked at together: few enough that what is made of them stays in cache.
CHUNK = 1 << 18


def vocab_cross_entropy(logits: Tensor, targets: Tensor, bridge: Bridge, vocab: int, not_counted: int) -> Tensor:
    """The sum over targets that count of -log softmax(logits)[target], the same on every rank, in fp32 (fp64 for fp64).

    logits: [..., v], columns split(vocab, ranks, rank) of the whole; targets: [...] ids below `vocab`, or `not_counted`.
    The gradient of a rank's logits needs nothing of other ranks. Collective.
    """
    if logits.shape[:-1] != targets.shape:
        raise JobError(f"logits {list(logits.shape)} do not fit targets {list(targets.shape)}")
    if not targets.is_cuda and bool(((targets != not_counted) & ((targets < 0) | (targets >= vocab))).any()):
        raise JobError(f"a target is not below the vocabulary of {vocab} ids; {not_counted} marks one that does not count")
    low, _ = split(vocab, bridge.size, bridge.index)
    total: Tensor = _VocabCrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.reshape(targets.numel(), logits.shape[-1]), targets.reshape(-1), bridge, low, not_counted
    )
    return total


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """That of a sum over the vocabulary, which needs more than 8 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _VocabCrossEntropy(torch.autograd.Function):
    """Keeps the logits, which the head has made anyway, and one number a token."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, bridge: Bridge, low: int, not_counted: int) -> Tensor:
        tokens, part = logits.shape
        exact = exact_dtype(logits.dtype)
        top = logits.amax(-1).to(exact) if part else logits.new_full((tokens,), -torch.inf, dtype=exact)
        bridge.door.group.all_reduce(top, reason="loss, largest logit", op="max", lane="tensor").wait()
        mine, here = own_columns(targets, low, part, not_counted)
        sums = torch.zeros(2, tokens, dtype=exact, device=logits.device)
        for rows in _chunks(tokens, part):
            shifted = logits[rows].to(exact) - top[rows, None]
            if part:
                sums[1, rows] = shifted.gather(1, mine[rows, None])[:, 0] * here[rows]
            sums[0, rows] = shifted.exp_().sum(-1)
        bridge.door.group.all_reduce(sums.view(-1), reason="loss, sums", lane="tensor").wait()
        log_sum = sums[0].log()
        ctx.save_for_backward(logits, targets, top + log_sum)
        ctx.low, ctx.not_counted = low, not_counted
        return (log_sum - sums[1]).mul_(targets != not_counted).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, targets, log_sum = ctx.saved_tensors
        tokens, part = logits.shape
        mine, here = own_columns(targets, ctx.low, part, ctx.not_counted)
        weight = grad * (targets != ctx.not_counted)  # [tokens]
        out = torch.empty_like(logits)
        for rows in _chunks(tokens, part):
            share = (logits[rows].to(log_sum.dtype) - log_sum[rows, None]).exp_().mul_(weight[rows, None])
            if part:
                share.scatter_add_(1, mine[rows, None], -(weight[rows] * here[rows])[:, None])
            out[rows] = share
        return out, None, None, None, None


def own_columns(targets: Tensor, low: int, part: int, not_counted: int) -> tuple[Tensor, Tensor]:
    """Each target's column of this rank's part (0 where it has none), and whether it has one."""
    mine = targets - low
    here = (targets != not_counted) & (mine >= 0) & (mine < part)
    return mine.masked_fill(~here, 0), here


def _chunks(tokens: int, part: int) -> list[slice]:
    step = max(1, CHUNK // max(part, 1))
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]
