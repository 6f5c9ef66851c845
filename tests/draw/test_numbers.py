import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.draw.numbers import bytes_, count, duration, measure, ticks


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (7, "7"), (999, "999"), (999.9, "1k"), (1000, "1k"), (12345, "12.3k"), (310e6, "310M"), (2.5e12, "2.5T")]
)
def test_a_count_is_three_digits_and_a_prefix(value, shown):
    assert count(value) == shown


@given(st.floats(1, 1e14))
def test_a_count_says_its_value_within_half_a_percent(value):
    shown = count(value)
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(shown[-1], 1.0)
    assert float(shown.rstrip("kMGT")) * scale == pytest.approx(value, rel=5.1e-3)


@pytest.mark.parametrize(("value", "shown"), [(512, "512 B"), (310e6, "310 MB"), (1.5e9, "1.5 GB")])
def test_bytes_are_in_powers_of_a_thousand(value, shown):
    assert bytes_(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"), [(0.04, "0.0 s"), (2.44, "2.4 s"), (9.96, "0:10"), (75, "1:15"), (3599.6, "1:00:00"), (3723, "1:02:03")]
)
def test_a_duration_reads_as_a_clock(value, shown):
    assert duration(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(2.30712, "2.307"), (0.0003, "3.00e-04"), (0, "0"), (math.nan, "nan"), (5.8e9, "5.80e+09")])
def test_a_measure_has_four_digits(value, shown):
    assert measure(value) == shown


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 9))
def test_ticks_lie_in_the_range_at_even_steps_and_are_not_too_many(low, spread, most):
    found = ticks(low, low + spread, most)
    assert len(found) <= most
    assert all(low - 1e-6 * spread <= tick <= low + spread * (1 + 1e-6) for tick in found)
    steps = [b - a for a, b in pairwise(found)]
    assert not steps or max(steps) - min(steps) <= 1e-6 * spread
