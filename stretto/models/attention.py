"""Causal attention and rotary positions: the one place where tokens of a sequence meet.

Everything else in a decoder treats each token alone, so a sequence cut over ranks needs a change here only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: Drops some of [B, heads, T, T] probabilities.
Drop = Callable[[Tensor], Tensor]


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, drop: Drop | None = None) -> Tensor:
    """Scaled dot-product attention; each kv head serves heads / kv_heads query heads.

    q: [B, heads, T, head_dim], k and v: [B, kv_heads, T, head_dim]. Result: as q.
    Keeps q, k, v, the result and one log-sum-exp a head and token for backward, not the T x T scores; with `drop`, which must see
    them, also those.
    """
    if drop is not None:
        return written_out(q, k, v, causal_bias(q, k) if causal else None, q.shape[-1] ** -0.5, drop)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def causal_bias(q: Tensor, k: Tensor) -> Tensor:
    """Where each token may look, [T, T] bool: at itself and before."""
    return torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()


def written_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, drop: Drop) -> Tensor:
    """Attention step by step, its probabilities dropped. bias: added to the scores, or (bool) where to look."""
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = q @ k.transpose(-2, -1) * scale
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    return drop(scores.softmax(-1, dtype=exact).to(q.dtype)) @ v


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin by which `rotate` turns each pair of a head, once for all blocks of a forward.

    positions: [T] or [B, T] integers. Result: cos [..., T, 1, head_dim], sin [..., T, 1, head_dim / 2], in fp32, or in
    fp64 when `dtype`, in which the model computes, is fp64: a position of thousands times a frequency is not exact in
    less. (Su et al. 2021, "RoFormer"; halves paired as in Llama.)
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    pairs = torch.arange(0, head_dim, 2, dtype=exact, device=positions.device)
    angles = positions[..., None, None].to(exact) * (1.0 / theta ** (pairs / head_dim))
    cos = angles.cos()
    return torch.cat((cos, cos), dim=-1), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, T, n, head_dim] with each pair (i, i + head_dim / 2) turned by its angle; `rotation` gives cos and sin."""
    turned: Tensor = _Rotate.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return turned


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Turn by +angle (sign 1) or -angle (sign -1): three passes, where the textbook form takes six."""
    first, second = x.chunk(2, dim=-1)
    out = x * cos
    out_first, out_second = out.chunk(2, dim=-1)
    out_first.addcmul_(second, sin, value=-sign)
    out_second.addcmul_(first, sin, value=sign)
    return out.to(x.dtype)


class _Rotate(torch.autograd.Function):
    """A turn is linear and its backward is the turn back, so no activation is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1.0), None, None
