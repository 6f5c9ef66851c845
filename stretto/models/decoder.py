"""A small decoder, Llama-like or GPT-like by its shape: the model of the built-in jobs.

Plain modules with the names of `Anatomy.of_decoder`, in the order in which they run. It is written for few passes over
memory: at these sizes a pass costs as much as its arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.anatomy import DecoderShape
from stretto.errors import JobError
from stretto.models import seeds
from stretto.models.attention import attention, rotate, rotation


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim (Zhang and Sennrich 2019), statistics in fp32 (fp64 for fp64).

    torch's own costs ten times as much in backward on a CPU and keeps fp32 copies of a 16-bit x.
    """

    def __init__(self, hidden: int, eps: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _RMSNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return y


class _RMSNorm(torch.autograd.Function):
    """Keeps x, which the residual sum shares, and one number a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact)
        rstd = (norm * norm / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        y: Tensor = x * rstd
        return y.mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        """grad_x = rstd (g w - x rstd^2 mean(g w x)); both sums over elements are matrix-vector products of g x."""
        x, weight, rstd = ctx.saved_tensors
        hidden = x.shape[-1]
        x_, rstd_ = x.reshape(-1, hidden).to(rstd.dtype), rstd.reshape(-1, 1)
        grad_, weight_ = grad.reshape(-1, hidden).to(rstd.dtype), weight.to(rstd.dtype)
        products = grad_ * x_
        pull = (products @ weight_)[:, None] * rstd_.pow(3) / -hidden
        grad_weight = products.t() @ rstd_[:, 0]
        # into the products' memory, which nobody reads any more: a fresh buffer costs more than the arithmetic
        grad_x = torch.mul(grad_, weight_, out=products).mul_(rstd_).addcmul_(x_, pull)
        return grad_x.to(x.dtype).view_as(x), grad_weight.to(weight.dtype), None


def _norm(shape: DecoderShape, device: torch.device | str | None) -> nn.Module:
    if shape.norm == "rms":
        return RMSNorm(shape.hidden, shape.norm_eps, device)
    return nn.LayerNorm(shape.hidden, shape.norm_eps, bias=shape.bias, device=device)


class Attention(nn.Module):
    """Queries, keys and values of each token, attention among the tokens, and the way back to hidden."""

    def __init__(self, shape: DecoderShape, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = nn.Linear(shape.hidden, queries, bias=shape.bias, device=device)
        self.k = nn.Linear(shape.hidden, keys, bias=shape.bias, device=device)
        self.v = nn.Linear(shape.hidden, keys, bias=shape.bias, device=device)
        self.o = nn.Linear(queries, shape.hidden, bias=shape.bias, device=device)
        self.drop = nn.Dropout(shape.attention_dropout)

    def forward(self, x: Tensor, *turn: Tensor) -> Tensor:
        """x: [B, T, hidden]; turn: cos and sin of `rotation`, or nothing where positions were added to x."""
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.q, self.k, self.v))  # [B, T, heads, head_dim]
        if turn:
            q, k = rotate(q, *turn), rotate(k, *turn)
        drop = self.drop if self.training and self.drop.p else None
        mixed = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), drop=drop)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x) (Shazeer 2020)."""

    def __init__(self, shape: DecoderShape, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=shape.bias, device=device)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=shape.bias, device=device)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.bias, device=device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class GELU(nn.Module):
    """down(gelu(up x)), the exact gelu."""

    def __init__(self, shape: DecoderShape, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=shape.bias, device=device)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=shape.bias, device=device)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x)))
        return out


class Block(nn.Module):
    """x + attention(norm1 x), then + mlp(norm2 of that). All blocks run one code: no index, so one compile serves all."""

    def __init__(self, shape: DecoderShape, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.norm1 = _norm(shape, device)
        self.attn = Attention(shape, device)
        self.norm2 = _norm(shape, device)
        self.mlp: nn.Module = SwiGLU(shape, device) if shape.mlp == "swiglu" else GELU(shape, device)
        self.drop1, self.drop2 = nn.Dropout(shape.dropout), nn.Dropout(shape.dropout)

    def forward(self, x: Tensor, *turn: Tensor) -> Tensor:
        # not in place: selective recompute keeps the projections that these sums read
        x = x + self.drop1(self.attn(self.norm1(x), *turn))
        out: Tensor = x + self.drop2(self.mlp(self.norm2(x)))
        return out


class Decoder(nn.Module):
    """Token ids in, logits out. `initial` gives its parameters their values; the constructor's are torch's defaults."""

    def __init__(self, shape: DecoderShape, device: torch.device | str | None = None) -> None:
        super().__init__()
        if shape.planned_only:
            raise JobError(f"a decoder with {shape.planned_only} can be planned but not built in this version; leave that out")
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.hidden, device=device)
        self.positions = nn.Embedding(shape.positions, shape.hidden, device=device) if shape.position == "learned" else None
        self.drop = nn.Dropout(shape.dropout)
        self.layers = nn.ModuleList(Block(shape, device) for _ in range(shape.blocks))
        self.norm = _norm(shape, device)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False, device=device)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """input_ids: [B, T] ids; position_ids: [T] or [B, T], by default 0, 1, ... T - 1. Result: [B, T, vocab]."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.embed(input_ids)
        if self.positions is not None:
            x = x + self.positions(position_ids)
        x = self.drop(x)
        turn: tuple[Tensor, ...] = ()
        if self.shape.position == "rope":
            turn = rotation(position_ids, self.shape.head_dim, self.shape.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer(x, *turn)
        logits: Tensor = self.head(self.norm(x))
        return logits


def initial(model: nn.Module, name: str, out: Tensor, start: int, seed: int) -> None:
    """Write the first values of elements [start, start + out.numel()) of parameter `name` into `out`.

    Norm weights are 1, biases 0, matrices normal(0, init_std) by their name: no rank needs more than its own range.
    model: a Decoder, also on the meta device or cut already; name: as named_parameters gives it. out: contiguous.
    """
    assert isinstance(model, Decoder)
    module, kind = name.split(".")[-2:]
    if kind == "bias":
        out.detach().zero_()
    elif module.startswith("norm"):
        out.detach().fill_(1.0)
    else:
        seeds.fill(out, name, start, seed, model.shape.init_std)


def fill(model: Decoder, seed: int) -> Decoder:
    """Give every parameter of a real model its first values; returns the model."""
    for name, parameter in model.named_parameters():
        initial(model, name, parameter.data, 0, seed)
    return model
