"""Head and loss together, some tokens at a time: logits of all tokens never exist, neither forward nor backward.

[Note: loss inside the head] The loss is taken in the head's own forward, and stands where the logits would: there the head's weight is
gathered (ZeRO 3), and the gradient of what the module gives brings it back. Backward makes each piece of logits again, one product
of the head more in a step. What the model does to logits afterwards would go unnoticed, so its output must be the very tensor that
the head gave.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.comm.crossing import Bridge
from stretto.data.batch import NOT_COUNTED
from stretto.errors import JobError, RunError
from stretto.layout.layout import split
from stretto.parallel.vocab import exact_dtype, own_columns
from stretto.parallel.weights import Direct, Sink


class HeadLoss:
    """The forward of a head that gives the loss where it has targets, and logits where not.

    chunk: tokens at a time. vocab: columns of the whole head, of which this rank of `bridge` has its part. targets: [B, T] of the forward
    under way, NOT_COUNTED where none counts.
    """

    def __init__(self, head: nn.Module, bridge: Bridge, vocab: int, chunk: int) -> None:
        self.head, self.bridge, self.chunk = head, bridge, chunk
        self.vocab = vocab
        self.targets: Tensor | None = None
        self._made: Tensor | None = None
        self.usual = head.forward
        self.sink = self.usual.sink if isinstance(self.usual, Direct) else None
        if type(head).forward is not nn.Linear.forward:
            raise JobError(f"loss_chunk needs a head that is an nn.Linear, and the model's is a {type(head).__name__}; write loss_chunk=0")
        head.forward = self

    def __call__(self, x: Tensor) -> Any:
        if self.targets is None:
            return self.usual(x)
        targets = self.targets
        if x.shape[:-1] != targets.shape:
            raise JobError(f"the head is given {list(x.shape)} for targets {list(targets.shape)}; write loss_chunk=0")
        if targets.device.type == "cpu" and bool(((targets != NOT_COUNTED) & ((targets < 0) | (targets >= self.vocab))).any()):
            raise JobError(f"a target is not below the vocabulary of {self.vocab} ids; {NOT_COUNTED} marks one that does not count")
        made: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            x.reshape(targets.numel(), x.shape[-1]), self.head.weight, self.head.bias, targets.reshape(-1), self
        )
        self._made = made
        return made

    def take(self, output: Tensor) -> Tensor:
        """The loss, out of the model's output. Raises RunError if that is not what the head gave."""
        made, self._made = self._made, None
        if output is not made:
            raise RunError(
                "the model changes logits after its head (a scale, a soft cap), which loss_chunk would leave out; write loss_chunk=0"
            )
        return output

    def pieces(self, tokens: int) -> list[slice]:
        return [slice(at, min(at + self.chunk, tokens)) for at in range(0, tokens, self.chunk)]


class _HeadLoss(torch.autograd.Function):
    """x: [tokens, H], weight: [v, H], this rank's rows. Result: the sum over targets of -log softmax, the same on every rank.

    Keeps x and a number a token. The sums over the vocabulary are those of parallel/vocab.py.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, loss: HeadLoss) -> Tensor:
        tokens, part, group = len(x), len(weight), loss.bridge.door.group
        mine, here = own_columns(targets, split(loss.vocab, loss.bridge.size, loss.bridge.index)[0], part, NOT_COUNTED)
        top = torch.full((tokens,), -torch.inf, dtype=exact_dtype(x.dtype), device=x.device)
        sums = torch.zeros(2, tokens, dtype=top.dtype, device=x.device)
        for rows in loss.pieces(tokens) if part else ():
            logits = F.linear(x[rows], weight, bias).to(top.dtype)
            top[rows] = logits.amax(-1)
            sums[1, rows] = logits.gather(1, mine[rows, None])[:, 0]
            sums[0, rows] = logits.sub_(top[rows, None]).exp_().sum(-1)
        local = top.clone()
        group.all_reduce(top, reason="loss, largest logit", op="max", lane="tensor").wait()
        sums[0] *= (local - top).exp_()
        sums[1] = torch.where(here, sums[1] - top, 0.0)
        group.all_reduce(sums.view(-1), reason="loss, sums", lane="tensor").wait()
        log_sum = sums[0].log()
        ctx.save_for_backward(x, weight, bias, targets, mine, here, top + log_sum)
        ctx.loss = loss
        return (log_sum - sums[1]).mul_(targets != NOT_COUNTED).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (grad,) = grads
        x, weight, bias, targets, mine, here, log_sum = ctx.saved_tensors
        loss: HeadLoss = ctx.loss
        weighs = grad * (targets != NOT_COUNTED)  # [tokens]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        sink: Sink | None = loss.sink if needs_weight else None
        straight = sink is not None and sink.walk.phase == "backward" and sink.group.postponed is None
        of_x = torch.zeros_like(x) if needs_x else None
        of_weight = torch.zeros_like(weight) if needs_weight and not straight else None
        of_bias = torch.zeros_like(bias) if needs_bias else None
        for rows in loss.pieces(len(x)) if len(weight) else ():
            share = F.linear(x[rows], weight, bias).to(log_sum.dtype).sub_(log_sum[rows, None]).exp_().mul_(weighs[rows, None])
            share.scatter_add_(1, mine[rows, None], -(weighs[rows] * here[rows])[:, None])
            share = share.to(x.dtype)
            if of_x is not None:
                torch.mm(share, weight, out=of_x[rows])
            if straight and sink is not None:
                sink.group.add_product(sink.parameter, share.t(), x[rows])
            elif of_weight is not None:
                of_weight.addmm_(share.t(), x[rows])
            if of_bias is not None:
                of_bias += share.sum(0)
        return of_x, of_weight, of_bias, None, None
