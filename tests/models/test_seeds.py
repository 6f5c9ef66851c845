"""First values: the same however a tensor is cut, and normal."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.models.seeds import BLOCK, fill, generator

TOTAL = 2 * BLOCK + 77


def drawn(start: int, stop: int, name: str = "w", seed: int = 0, std: float = 0.02, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.empty(stop - start, dtype=dtype)
    fill(out, name, start, seed, std)
    return out


@settings(deadline=None, max_examples=30)
@given(cuts=st.lists(st.integers(0, TOTAL), max_size=5))
def test_any_cut_gives_the_values_of_the_whole_bit_for_bit(cuts: list[int]) -> None:
    edges = sorted({0, TOTAL, *cuts})
    parts = [drawn(a, b) for a, b in pairwise(edges)]
    assert torch.equal(torch.cat(parts), drawn(0, TOTAL))


def test_the_length_of_the_tensor_and_its_dtype_change_no_value() -> None:
    whole = drawn(0, TOTAL)
    assert torch.equal(drawn(0, 10), whole[:10])
    assert torch.equal(drawn(0, TOTAL, dtype=torch.bfloat16), whole.bfloat16())
    assert torch.equal(drawn(0, TOTAL, dtype=torch.float64), whole.double())


def test_values_are_normal_and_differ_by_name_seed_and_block() -> None:
    whole = drawn(0, TOTAL, std=2.0)
    assert abs(whole.mean()) < 0.03 and abs(whole.std() - 2.0) < 0.03
    others = [drawn(0, BLOCK, "v", std=2.0), drawn(0, BLOCK, seed=1, std=2.0), whole[BLOCK : 2 * BLOCK]]
    for other in others:
        assert abs(torch.corrcoef(torch.stack((whole[:BLOCK], other)))[0, 1]) < 0.03


def test_filling_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    drawn(0, 5)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_generator_depends_on_its_names_alone_and_not_on_how_they_join() -> None:
    def first(*names: object) -> float:
        return torch.rand((), generator=generator(0, *names)).item()

    assert first("a", 1) == first("a", 1)
    assert len({first("a", 1), first("a", 2), first("a1"), first("b", 1), first()}) == 5


def test_an_empty_range_is_no_special_case() -> None:
    assert drawn(BLOCK, BLOCK).numel() == 0
