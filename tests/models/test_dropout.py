"""Masks that follow from names: the same in any cut, another for each name, and as random as they should be."""

from __future__ import annotations

import math
from hashlib import blake2b

import pytest
import torch

from stretto.models.dropout import Draws, drop, lines_of_samples, lines_of_tokens

CPU = torch.device("cpu")


def draws(step: int = 0, first: int = 0, seed: int = 0) -> Draws:
    made = Draws(seed)
    made.begin(step, first, (4, 6))
    return made


def mask(shape, name="a", p=0.3, step=0, first=0, seed=0):
    shape = torch.Size(shape)
    return draws(step, first, seed).mask(name, p, shape, lines_of_samples(shape, CPU, shape[-1]))


def by_hand(seed, step, name, p, row, number):
    """The same decision in whole numbers of Python."""
    low = (1 << 32) - 1

    def mix(x, key=0):
        x ^= x >> 16
        x = (x * 0x7FEB352D + key) & low
        x ^= x >> 15
        x = x * 0x846CA68B & low
        return x ^ x >> 16

    words = blake2b("\x1f".join(map(str, (seed, step, name, 0))).encode(), digest_size=8).digest()
    one, two = (int.from_bytes(words[i : i + 4], "little") for i in (0, 4))
    high = number >> 32
    drawn = mix((number & low) ^ mix(row ^ one), mix(((row + high * 0x7FEB352D) & low) ^ two))
    signed = drawn - (1 << 32) if drawn >> 31 else drawn
    return signed >= round(p * (1 << 32)) - (1 << 31)


def test_a_mask_is_what_the_formula_says():
    found = mask((3, 5, 7), p=0.3, step=4, first=9, seed=11)
    assert all(
        bool(found[row, line, i]) is by_hand(11, 4, "a", 0.3, 9 + row, line * 7 + i)
        for row in range(3)
        for line in range(5)
        for i in range(7)
    )


def test_elements_beyond_32_bits_have_numbers_of_their_own():
    rows, starts = torch.zeros(3, dtype=torch.int64), torch.tensor([5, (1 << 32) + 5, (3 << 32) - 2])
    found = draws().mask("a", 0.5, torch.Size((3, 2)), type(lines_of_samples(torch.Size((1, 1)), CPU, 1))(rows, starts))
    for line, start in enumerate(starts.tolist()):
        assert bool(found[line, 0]) is by_hand(0, 0, "a", 0.5, 0, start)


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_in_every_row_and_column(p):
    found = (~mask((8, 64, 256), p=p)).double()
    for dims, n in (((1, 2), 64 * 256), ((0, 2), 8 * 256), ((0, 1), 8 * 64), ((0, 1, 2), 8 * 64 * 256)):
        assert ((found.mean(dims) - p).abs() < 5 * math.sqrt(p * (1 - p) / n)).all()


def test_neighbours_names_steps_samples_and_seeds_are_independent():
    a = mask((8, 64, 256), p=0.5)
    others = {
        "name": mask((8, 64, 256), "b", 0.5), "step": mask((8, 64, 256), p=0.5, step=1), "seed": mask((8, 64, 256), p=0.5, seed=1),
        "feature": a.roll(1, 2), "token": a.roll(1, 1), "sample": a.roll(1, 0), "power of two": a.roll(128, 2),
    }  # fmt: skip
    for what, other in others.items():
        agree = (a == other).double().mean()
        assert abs(agree - 0.5) < 5 * 0.5 / math.sqrt(a.numel()), what


def test_a_second_use_of_one_name_in_a_forward_draws_anew_and_a_block_that_runs_again_does_not():
    made, shape = draws(), torch.Size((2, 3, 8))
    lines = lines_of_samples(shape, CPU, 8)
    recall = made.remember()
    first, second = made.mask("a", 0.5, shape, lines), made.mask("a", 0.5, shape, lines)
    assert not torch.equal(first, second)
    made.begin(7, 5, (1, 1))
    recall()
    assert torch.equal(made.mask("a", 0.5, shape, lines), first) and torch.equal(made.mask("a", 0.5, shape, lines), second)


def test_any_part_of_the_rows_tokens_or_features_has_its_part_of_the_mask():
    whole = mask((4, 6, 10))
    assert torch.equal(mask((3, 6, 10), first=1), whole[1:])
    flat = whole.view(24, 10)
    part = draws().mask("a", 0.3, torch.Size((1, 7, 10)), lines_of_tokens(9, 16, 6, 10, CPU))
    assert torch.equal(part[0], flat[9:16])
    shape = torch.Size((4, 6, 3))
    assert torch.equal(draws().mask("a", 0.3, shape, lines_of_samples(shape, CPU, 10), offset=4), whole[..., 4:7])
    heads = mask((4, 5, 6, 6))
    shape = torch.Size((4, 2, 6, 6))
    assert torch.equal(draws().mask("a", 0.3, shape, lines_of_samples(shape, CPU, 6, 3 * 36)), heads[:, 3:])


def test_what_is_kept_is_scaled_to_the_same_mean_and_so_is_its_gradient():
    x = torch.randn(4, 6, 10, dtype=torch.float64, requires_grad=True)
    kept = mask((4, 6, 10), p=0.25)
    y = drop(x, kept, 0.25)
    assert torch.equal(y, torch.where(kept, x / 0.75, 0.0)) or torch.allclose(y, torch.where(kept, x / 0.75, 0.0), rtol=1e-15)
    assert torch.autograd.gradcheck(lambda x: drop(x, kept, 0.25), x)
    assert not drop(x, mask((4, 6, 10), p=1.0), 1.0).any()
