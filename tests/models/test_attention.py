"""Attention and rotary positions against their definitions, written out."""

from __future__ import annotations

import pytest
import torch

from stretto.models.attention import attention, rotate, rotation


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_the_softmax_of_the_scores_with_kv_heads_shared(heads: int, kv_heads: int, causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, 7, 6, dtype=torch.float64) for n in (heads, kv_heads, kv_heads))
    scores = torch.stack([q[:, n] @ k[:, n * kv_heads // heads].transpose(1, 2) for n in range(heads)], 1) / 6**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(7, 7).triu(1).bool(), float("-inf"))
    wanted = torch.stack([scores[:, n].softmax(-1) @ v[:, n * kv_heads // heads] for n in range(heads)], 1)
    torch.testing.assert_close(attention(q, k, v, causal=causal), wanted, rtol=1e-12, atol=1e-12)


def test_rotate_multiplies_pairs_by_a_complex_phase() -> None:
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 3, 100, 0, 9]])
    pairs = torch.complex(x[..., :4], x[..., 4:])
    phase = positions[:, :, None, None] * 1e4 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = pairs * torch.polar(torch.ones_like(phase), phase)
    wanted = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(rotate(x, *rotation(positions, 8, 1e4, x.dtype)), wanted, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_rotate_is_right() -> None:
    x = torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    turn = rotation(torch.arange(3), 4, 1e4, x.dtype)
    assert torch.autograd.gradcheck(lambda x: rotate(x, *turn), (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_values_are_turned_by_exact_angles_and_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(1, 4, 2, 8).to(dtype)
    positions = torch.tensor([30_000, 30_001, 30_002, 30_003])
    cos, sin = rotation(positions, 8, 1e4, dtype)
    assert cos.dtype == sin.dtype == torch.float32
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin).to(dtype))
