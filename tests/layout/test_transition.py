"""TRANSITIONS: the backward collective of each row gives the gradient of one process."""

from __future__ import annotations

import numpy as np
import pytest

from stretto.layout.transition import TRANSITIONS, Collective, Have, Want

Ranks = list[np.ndarray]


def run(collective: Collective, values: Ranks) -> Ranks:
    """The collective on every rank's value, written down from its definition."""
    n, total = len(values), np.sum(values, axis=0)
    table = {
        "none": lambda: values,
        "all_reduce": lambda: [total] * n,
        "reduce_scatter": lambda: np.split(total, n),
        "all_gather": lambda: [np.concatenate(values)] * n,
        "slice": lambda: [np.split(value, n)[rank] for rank, value in enumerate(values)],
    }
    return table[collective]()


def lay(have: Have | Want, value: np.ndarray, n: int, rng: np.random.Generator) -> Ranks:
    """A true value as it lies on n ranks."""
    if have in ("same", "alike"):
        return [value] * n
    if have == "cut":
        return np.split(value, n)
    parts = [rng.integers(-9, 9, value.shape) for _ in range(n - 1)]
    return [*parts, value - np.sum(parts, axis=0, initial=0)]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(("have", "want"), TRANSITIONS)
def test_a_transition_keeps_the_value_and_brings_back_the_true_gradient(have: Have, want: Want, n: int) -> None:
    rng = np.random.default_rng(n)
    value, gradient = rng.integers(-9, 9, 6), rng.integers(-9, 9, 6)
    forward, backward = TRANSITIONS[have, want]
    arrived = run(forward, lay(have, value, n, rng))
    assert all((a == b).all() for a, b in zip(arrived, lay(want, value, n, rng), strict=True))
    # What enters a column-parallel layer is used by each rank for its own columns: its gradient there is a summand.
    # What leaves a row-parallel layer is used by all ranks alike: its gradient is whole on each. (REFERENCE D1)
    upstream: Have = "cut" if want == "cut" else "same" if have == "sum" or want == "alike" else "sum"
    arrived = run(backward, lay(upstream, gradient, n, rng))
    home: Have = "cut" if have == "cut" else "same"  # the derivative by each summand of a sum is that by the sum
    assert all((a == b).all() for a, b in zip(arrived, lay(home, gradient, n, rng), strict=True))


def test_every_way_a_value_lies_has_a_row_to_every_way_it_is_wanted() -> None:
    assert set(TRANSITIONS) == {(have, want) for have in ("same", "cut", "sum") for want in ("same", "cut")} | {("cut", "alike")}
