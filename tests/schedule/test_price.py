"""Seconds of a program are those of the closed forms, over links of one speed and of two."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, floor, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.schedule.algorithms import program
from stretto.schedule.price import Link, Links, seconds, traffic

#: (p, a, b, c) -> seconds: p ranks, a seconds a message, b seconds for the whole buffer on a link, c for adding the whole of it.
Form = Callable[[int, float, float, float], float]


def lg(p: int) -> int:
    return ceil(log2(p))


def halving_doubling(p: int, a: float, b: float, c: float) -> float:
    power = 2 ** floor(log2(p))
    inner = 2 * lg(power) * a + 2 * (power - 1) / power * b + (power - 1) / power * c
    return inner if p == power else inner + (a + b + c) + (a + b)


CHAIN = 7  # pieces
#: The table of REFERENCE A2.
FORMS: dict[tuple[str, str], Form] = {
    ("reduce_scatter", "ring"): lambda p, a, b, c: (p - 1) * a + (p - 1) / p * (b + c),
    ("all_gather", "ring"): lambda p, a, b, c: (p - 1) * a + (p - 1) / p * b,
    ("all_reduce", "ring"): lambda p, a, b, c: 2 * (p - 1) * a + 2 * (p - 1) / p * b + (p - 1) / p * c,
    ("all_reduce", "direct"): lambda p, a, b, c: 2 * (p - 1) * a + 2 * (p - 1) / p * b + (p - 1) / p * c,
    ("all_reduce", "halving-doubling"): halving_doubling,
    ("all_gather", "bruck"): lambda p, a, b, c: lg(p) * a + (p - 1) / p * b,
    ("reduce_scatter", "bruck"): lambda p, a, b, c: lg(p) * a + (p - 1) / p * (b + c),
    ("all_reduce", "bruck"): lambda p, a, b, c: 2 * lg(p) * a + 2 * (p - 1) / p * b + (p - 1) / p * c,
    ("broadcast", "bruck"): lambda p, a, b, c: lg(p) * (a + b),
    ("reduce", "bruck"): lambda p, a, b, c: lg(p) * (a + b + c),
    ("gather", "bruck"): lambda p, a, b, c: lg(p) * a + (p - 1) / p * b,
    ("scatter", "bruck"): lambda p, a, b, c: lg(p) * a + (p - 1) / p * b,
    ("all_to_all", "direct"): lambda p, a, b, c: (p - 1) * a + (p - 1) / p * b,
    ("all_reduce", "naive"): lambda p, a, b, c: (p - 1) * (2 * a + 2 * b + c),
    ("all_to_all", "ring"): lambda p, a, b, c: (p - 1) * a + (p - 1) / 2 * b,
    ("barrier", "bruck"): lambda p, a, b, c: lg(p) * a + (p - 1) / p * b,
}
SMALL = st.floats(1e-7, 1e-4)


@pytest.mark.parametrize("names", FORMS, ids=" ".join)
@settings(max_examples=20, deadline=None)
@given(st.integers(1, 33), SMALL, st.floats(1e8, 1e12), st.floats(0, 1e-10), st.integers(1, 2**30))
def test_seconds_are_those_of_the_closed_form(names, p: int, latency: float, bandwidth: float, add: float, size: int) -> None:
    form = FORMS[names](p, latency, size / bandwidth, size * add)
    assert seconds(program(*names, p), size, Links.alike(latency, bandwidth, add)) == pytest.approx(form, rel=1e-9, abs=1e-15)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 33), st.integers(1, 40), SMALL, st.integers(1, 2**30))
def test_a_chain_of_pieces_costs_what_its_closed_form_says(p: int, pieces: int, latency: float, size: int) -> None:
    one = program("broadcast", "ring", p, pieces=pieces)
    form = (p - 2 + pieces) * (latency + size / 1e10 / pieces)
    assert seconds(one, size, Links.alike(latency, 1e10)) == pytest.approx(form)


@pytest.mark.parametrize("j", range(6))
def test_bruck_s_all_to_all_sends_half_of_everything_in_each_round(j: int) -> None:
    one = program("all_to_all", "bruck", 2**j)
    assert seconds(one, 1e6, Links.alike(1e-5, 1e9)) == pytest.approx(j * (1e-5 + 0.5e6 / 1e9))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), SMALL, SMALL, st.integers(1, 2**30))
def test_hierarchical_all_reduce_costs_its_three_steps(nodes: int, size: int, near: float, far: float, bytes_: int) -> None:
    links = Links(Link(near, 3e11), Link(far, 4e10), size, add=1e-12)
    inside = 2 * (size - 1) * near + 2 * (size - 1) / size * bytes_ / 3e11
    across = 2 * (nodes - 1) * far + 2 * (nodes - 1) / nodes * bytes_ / size / 4e10
    p = nodes * size
    adding = (p - 1) / p * bytes_ * 1e-12
    one = program("all_reduce", "hierarchical", p, nodes=nodes)
    assert seconds(one, bytes_, links) == pytest.approx(inside + across + adding)


@pytest.mark.parametrize("side", [2, 3, 4, 5])
def test_a_torus_whose_rows_and_columns_are_different_links_halves_the_time_of_one_dimension_at_a_time(side: int) -> None:
    p, link = side * side, Link(1e-6, 1e10)
    one = program("all_reduce", "torus", p, nodes=side)
    time = seconds(one, 1e8, Links(link, link, side))
    assert time == pytest.approx(4 * (side - 1) * 1e-6 + 2 * (p - 1) / p * 1e8 / 1e10 / 2)


def test_values_that_were_computed_elsewhere() -> None:
    links = Links.alike(10e-6, 40e9)  # REFERENCE R: 64 ranks, 10 us, 40 GB/s
    found = [seconds(program("all_reduce", way, 64), size, links) for size in (2**30, 2**20) for way in ("ring", "halving-doubling")]
    assert [round(time * 1e3, 3) for time in found] == [54.108, 52.968, 1.312, 0.172]
    two = Links(Link(5e-6, 300e9), Link(15e-6, 40e9), 8)
    assert round(seconds(program("all_reduce", "hierarchical", 64, nodes=8), 2**30, two) * 1e3, 2) == 12.42


def test_a_ring_across_nodes_runs_at_the_speed_of_its_slowest_link() -> None:
    links = Links(Link(1e-6, 1e12), Link(1e-5, 1e10), 4)
    assert seconds(program("all_gather", "ring", 8), 8e6, links) == pytest.approx(7 * (1e-5 + 1e6 / 1e10))


def test_a_large_buffer_goes_faster_across_nodes_by_the_hierarchical_way_and_a_small_one_too() -> None:
    links = Links(Link(5e-6, 3e11), Link(15e-6, 4e10), 8)
    for size in (2**12, 2**30):
        flat, layered = program("all_reduce", "ring", 64), program("all_reduce", "hierarchical", 64, nodes=8)
        assert seconds(layered, size, links) < seconds(flat, size, links) / 2


@pytest.mark.parametrize("algorithm", ["ring", "tree", "double-tree", "torus"])
def test_what_is_sent_is_received_and_one_rank_costs_nothing(algorithm: str) -> None:
    ranks = traffic(program("all_reduce", algorithm, 6), 600.0)
    assert sum(rank.sent for rank in ranks) == pytest.approx(sum(rank.received for rank in ranks))
    assert sum(rank.added for rank in ranks) == pytest.approx(5 * 600.0)  # n contributions are added by n - 1 additions
    alone = program("all_reduce", algorithm, 1)
    assert traffic(alone, 1.0) == [(0, 0.0, 0.0, 0.0)] and seconds(alone, 1e9, Links.alike(1.0, 1.0)) == 0
