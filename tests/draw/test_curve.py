import json
import math
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.draw.curve import Series, svg_curve, text_curve, thin

FALLING = [(float(step), 5.0 * math.exp(-step / 40) + 2.0) for step in range(1, 201)]


def coordinates(svg, style):
    line = next(node for node in ElementTree.fromstring(svg).iter("polyline") if node.get("class") == style)
    return [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]


def test_a_falling_loss_goes_down_the_picture_and_stays_in_it():
    points = coordinates(svg_curve([Series.of("loss", FALLING)], title="loss", size=(800, 300)), "main")
    assert all(0 <= x <= 800 and 0 <= y <= 300 for x, y in points)
    assert [y for _, y in points] == sorted(y for _, y in points) and [x for x, _ in points] == sorted(x for x, _ in points)


def test_the_dashed_level_lies_where_a_curve_of_that_value_would():
    flat = Series.of("flat", [(0, 2.45), (200, 2.45)], "flat")
    svg = svg_curve([Series.of("loss", FALLING), flat], title="loss", level=(2.45, "entropy"))
    level = next(node for node in ElementTree.fromstring(svg).iter("line") if node.get("class") == "level")
    assert {y for _, y in coordinates(svg, "flat")} == {float(level.get("y1"))}


def test_steps_without_a_finite_value_are_left_out():
    series = Series.of("loss", [(1, 2.0), (2, None), (3, math.nan), (4, math.inf), (None, 1.0), (5, 1.0)])
    assert series.points == ((1.0, 2.0), (5.0, 1.0))


@pytest.mark.parametrize("points", [[], [(1, 2.0)], [(1, 2.0), (2, 2.0)], [(3, 0.0), (3, 0.0)]])
def test_a_short_or_flat_run_has_a_picture_too(points):
    ElementTree.fromstring(svg_curve([Series.of("loss", points)], title="a < b"))
    assert bool(text_curve(points)) == bool(points)


def test_names_cannot_break_the_page():
    svg = svg_curve([Series.of('"><script>', FALLING)], title='"><script>', level=(3.0, "<b>"))
    chart = ElementTree.fromstring(svg)
    assert "<script>" not in svg and json.loads(chart.get("data-chart"))["series"][0][0] == '"><script>'


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=3000))
def test_thinning_keeps_the_ends_the_extremes_and_the_order(values):
    points = list(enumerate(values))
    kept = thin(points, 100)
    assert len(kept) <= 102 and kept[0] == points[0] and kept[-1] == points[-1]
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert min(y for _, y in kept) == min(values) and max(y for _, y in kept) == max(values)


def test_a_running_mean_of_a_constant_is_that_constant_from_its_first_point():
    series = Series.of("loss", [(step, 3.0) for step in range(20)]).smoothed(0.9, "mean", "main")
    assert [y for _, y in series.points] == pytest.approx([3.0] * 20)


@pytest.mark.parametrize("braille", [True, False])
def test_the_curve_in_a_terminal_has_its_size_and_falls_from_left_to_right(braille):
    lines = text_curve(FALLING, width=40, height=8, braille=braille).splitlines()
    assert len(lines) == 10 and max(map(len, lines)) <= 40 + 7
    assert lines[0].startswith("6.877") and lines[7].lstrip().startswith("2.034")
    plots = [line.split("│" if braille else "|")[1] for line in lines[:8]]
    assert len(plots[0]) < 6 and len(plots[-1]) == 40
    assert "\u2800" not in "".join(lines)


def test_where_the_terminal_has_no_braille_the_curve_is_ascii():
    text_curve(FALLING, braille=False).encode("ascii")
