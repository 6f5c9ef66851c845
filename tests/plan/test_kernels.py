"""Operators against published operator benchmarks and what must hold whatever the numbers are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.plan.devices import device_of
from stretto.plan.kernels import Kernels, filled

A100 = Kernels(device_of("a100-pcie"), "bf16", 2)
H100 = Kernels(device_of("h100"), "bf16", 2)

#: SimuMax @ 4dcaae513b, configs/system/a100_pcie.json: m, k, n and share of 312 tera flops.
PRODUCTS = [
    (4096, 5120, 8192, 0.72092),
    (4096, 8192, 8192, 0.73871),
    (4096, 8192, 14336, 0.75348),
    (4096, 24576, 5120, 0.78435),
    (4096, 2560, 8192, 0.69648),
    (4096, 512, 32768, 0.61758),
    (4096, 5120, 576, 0.4968),
]


@pytest.mark.parametrize(("m", "k", "n", "share"), PRODUCTS)
def test_products_are_near_published_ones(m: int, k: int, n: int, share: float) -> None:
    assert 2 * m * k * n / A100.product(m, k, n) / 312e12 == pytest.approx(share, rel=0.17)


#: The same source: heads, forward and backward shares of 312 tera flops, rows of 4096, heads of 128, masked half included.
ATTENTION = [(64, 1.187, 1.005), (32, 1.119, 0.966), (16, 0.988, 0.888)]


@pytest.mark.parametrize(("heads", "forward", "backward"), ATTENTION)
def test_flash_attention_is_near_published(heads: int, forward: float, backward: float) -> None:
    flops = 2 * heads * 128 * 2 * 4096 * 4096 / 2
    there, back = A100.flash(flops, heads * 4096, 4096, "portable")
    assert 2 * flops / there / 312e12 == pytest.approx(forward, rel=0.2)
    assert 2 * 2.5 * flops / back / 312e12 == pytest.approx(backward, rel=0.2)


sizes = st.integers(1, 20000)


@given(m=sizes, k=sizes, n=sizes)
def test_no_product_beats_the_peak_or_the_memory(m: int, k: int, n: int) -> None:
    seconds = H100.product(m, k, n)
    assert seconds > 2 * m * k * n / H100.device.peak("bf16")
    assert seconds > 2 * (m * k + k * n + m * n) / H100.device.bandwidth


@given(m=sizes, n=sizes, count=st.integers(1, 64))
def test_units_are_never_more_than_full(m: int, n: int, count: int) -> None:
    assert 0 < filled(m, n, count, 108) <= 1


def test_a_tile_more_than_the_units_hold_starts_another_round() -> None:
    """108 tiles of 128 x 256 fill an A100 once; with one more, halves of them (at 0.92 of the rate) take three rounds of 108."""
    assert filled(128 * 108, 256, 1, 108) == 1
    assert filled(128 * 109, 256, 1, 108) == pytest.approx(0.92 * 218 / 324)


def test_heads_whose_width_tensor_units_cannot_read_are_slow() -> None:
    plain, odd = (A100.scores(2048, width, width, 64, True)[0] for width in (112, 108))
    assert odd > 3 * plain


def test_eight_bit_products_are_faster_and_four_bit_ones_need_the_units() -> None:
    assert Kernels(device_of("h100"), "fp8", 2).product(8192, 8192, 8192) < H100.product(8192, 8192, 8192)
