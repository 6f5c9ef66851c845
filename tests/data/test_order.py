"""The order of samples: a permutation each epoch, the same however it is cut."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data.order import Shuffle, rows_of, samples, samples_at


@given(st.integers(0, 2**40), st.integers(0, 99), st.integers(1, 700))
def test_an_epoch_is_a_permutation(seed: int, epoch: int, total: int) -> None:
    shuffle = Shuffle.of(seed, epoch, total)
    assert sorted(shuffle.at(p) for p in range(total)) == list(range(total))


@given(st.integers(1, 2**50), st.data())
def test_distant_positions_of_a_huge_epoch_differ(total: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, total - 1), unique=True, max_size=20))
    found = [Shuffle.of(3, 1, total).at(p) for p in positions]
    assert len(set(found)) == len(found)
    assert all(0 <= i < total for i in found)


def test_all_orders_of_five_samples_are_about_equally_likely() -> None:
    seen = Counter(tuple(samples(seed, 0, 5, 5)) for seed in range(6000))
    chi_square = sum((n - 50) ** 2 / 50 for n in seen.values()) + 50 * (120 - len(seen))
    assert len(seen) == 120
    assert chi_square < 119 + 4 * (2 * 119) ** 0.5  # mean + 4 standard deviations for 119 degrees of freedom


def test_neighbours_in_an_epoch_are_strangers() -> None:
    order = samples(0, 0, 4000, 4000)
    n = len(order)
    mean = (n - 1) / 2
    correlation = sum((a - mean) * (b - mean) for a, b in pairwise(order)) / (n * (n * n - 1) / 12)
    assert abs(correlation) < 4 / n**0.5
    assert sum(p == i for p, i in enumerate(order)) < 8  # fixed points of a random permutation: 1 on average


@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 12))
def test_steps_run_through_epochs_without_a_gap(seed: int, total: int, size: int) -> None:
    epochs = 3
    steps = -(-epochs * total // size)
    stream = [i for step in range(steps) for i in samples(seed, step, size, total)]
    for epoch in range(epochs):
        assert sorted(stream[epoch * total : (epoch + 1) * total]) == list(range(total))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(samples(seed, epoch, 50, 50)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16


@settings(max_examples=30)
@given(st.integers(0, 90), st.integers(0, 50), st.integers(1, 30))
def test_any_range_of_positions_is_a_cut_of_the_same_order(start: int, length: int, total: int) -> None:
    whole = samples_at(5, range(0, 150), total)
    assert samples_at(5, range(start, start + length), total) == whole[start : start + length]


@given(st.integers(0, 40), st.integers(1, 9))
def test_parts_joined_are_the_step(size: int, parts: int) -> None:
    ids = [random.Random(size).randrange(99) for _ in range(size)]
    cut = [rows_of(ids, parts, i) for i in range(parts)]
    assert [i for part in cut for i in part] == ids
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


def test_resuming_on_other_rank_counts_gives_the_uninterrupted_sequence() -> None:
    size, total, steps = 5, 11, 7
    whole = [samples(1, step, size, total) for step in range(steps)]
    for stop in range(steps):
        for parts in (1, 2, 3):
            again = [[rows_of(samples(1, step, size, total), parts, i) for i in range(parts)] for step in range(stop, steps)]
            assert [[i for part in step for i in part] for step in again] == whole[stop:]


def test_order_and_source_are_imported_without_torch_or_numpy() -> None:
    code = "import sys, stretto.data.order, stretto.data.source; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
