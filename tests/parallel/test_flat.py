"""FlatPlan: every element of every tensor has one place, and cuts fall only where the granularity allows."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.layout.layout import Shape
from stretto.layout.mesh import Mesh
from stretto.parallel.flat import ALIGN_BYTES, FlatPlan, Granularity
from stretto.parallel.place import Place

GRANULARITIES: tuple[Granularity, ...] = ("element", "row", "matrix")


def tensors() -> st.SearchStrategy[list[tuple[str, Shape]]]:
    shapes = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), max_size=6)
    return shapes.map(lambda found: [(f"t{i}", shape) for i, shape in enumerate(found)])


def plans() -> st.SearchStrategy[tuple[FlatPlan, int, Granularity]]:
    """(plan, elements that tensors are aligned to, granularity)."""

    def build(named: list[tuple[str, Shape]], parts: int, granularity: Granularity, itemsize: int) -> tuple[FlatPlan, int, Granularity]:
        return FlatPlan.of(named, parts, granularity, itemsize), ALIGN_BYTES // itemsize, granularity

    return st.builds(build, tensors(), st.integers(1, 5), st.sampled_from(GRANULARITIES), st.sampled_from([2, 4, 8]))


@settings(max_examples=40)
@given(plans())
def test_slots_and_gaps_are_the_whole_buffer_once(case: tuple[FlatPlan, int, Granularity]) -> None:
    plan, align, _ = case
    times = np.zeros(plan.total, dtype=int)
    for slot in plan.slots:
        assert slot.start % align == 0
        times[slot.start : slot.stop] += 1
    for start, stop in plan.gaps():
        times[start:stop] += 1
    assert (times == 1).all()
    assert plan.elements == sum(math.prod(slot.shape) for slot in plan.slots)


@settings(max_examples=40)
@given(plans())
def test_padding_is_less_than_a_cache_line_a_tensor_and_one_a_part(case: tuple[FlatPlan, int, Granularity]) -> None:
    plan, align, granularity = case
    parts = len(plan.bounds) - 1
    assert plan.total - plan.elements <= len(plan.slots) * (align - 1) + (align * parts - 1) * (granularity == "element")


@settings(max_examples=40)
@given(plans())
def test_parts_follow_each_other_from_the_first_element_to_the_last(case: tuple[FlatPlan, int, Granularity]) -> None:
    plan, align, granularity = case
    assert (plan.bounds[0], plan.bounds[-1]) == (0, plan.total)
    sizes = [b - a for a, b in pairwise(plan.bounds)]
    assert min(sizes) >= 0
    if granularity == "element":
        assert len(set(sizes)) == 1
        assert sizes[0] % align == 0


@settings(max_examples=40)
@given(plans())
def test_no_row_and_no_matrix_is_cut_that_is_to_stay_whole(case: tuple[FlatPlan, int, Granularity]) -> None:
    plan, _, granularity = case
    for slot in plan.slots:
        rows = slot.shape[0] if len(slot.shape) > 1 else 1
        whole = {"element": 1, "row": slot.elements // rows, "matrix": slot.elements}[granularity]
        assert all((bound - slot.start) % whole == 0 for bound in plan.bounds if slot.start < bound < slot.stop)


@settings(max_examples=40)
@given(plans())
def test_parts_are_as_equal_as_whole_rows_or_matrices_allow(case: tuple[FlatPlan, int, Granularity]) -> None:
    plan, align, granularity = case
    parts = len(plan.bounds) - 1
    whole = [math.prod(slot.shape[1:]) if granularity == "row" and len(slot.shape) > 1 else slot.elements for slot in plan.slots]
    for i, bound in enumerate(plan.bounds):
        assert granularity == "element" or abs(bound - plan.total * i / parts) <= (max(whole, default=0) + align) / 2


@settings(max_examples=40)
@given(plans(), st.data())
def test_pieces_are_what_a_range_holds_of_each_tensor(case: tuple[FlatPlan, int, Granularity], data: st.DataObject) -> None:
    plan, _, _ = case
    low = data.draw(st.integers(0, plan.total))
    high = data.draw(st.integers(low, plan.total))
    owner = [(slot.name, i) for slot in plan.slots for i in range(slot.elements)]
    places = [slot.start + i for slot in plan.slots for i in range(slot.elements)]
    expected = [element for element, place in zip(owner, places, strict=True) if low <= place < high]
    assert [(slot.name, i) for slot, start, stop in plan.pieces(low, high) for i in range(start, stop)] == expected


@settings(max_examples=40)
@given(plans())
def test_the_layout_of_a_tensor_gives_each_rank_its_pieces(case: tuple[FlatPlan, int, Granularity]) -> None:
    plan, _, _ = case
    mesh = Mesh.of(dp=len(plan.bounds) - 1)
    for rank in range(mesh.size):
        pieces = {slot.name: list(range(start, stop)) for slot, start, stop in plan.pieces(plan.bounds[rank], plan.bounds[rank + 1])}
        for slot in plan.slots:
            numbers = np.arange(slot.elements).reshape(slot.shape)
            boxes = Place.whole(slot.shape).flat(plan.flat(slot, ("dp",))).boxes(slot.shape, mesh, rank)
            held = [numbers[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))].ravel() for box in boxes]
            assert [int(i) for piece in held for i in piece] == pieces.get(slot.name, [])


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
def test_an_empty_tensor_has_a_place_without_elements(shape: Shape, granularity: Granularity) -> None:
    plan = FlatPlan.of([("a", (3, 2)), ("empty", shape), ("b", (5,))], 2, granularity)
    assert [slot.elements for slot in plan.slots] == [6, 0, 5]
    assert {slot.name for slot, _, _ in plan.pieces(0, plan.total)} == {"a", "b"}


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("parts", [1, 3])
def test_no_tensors_are_an_empty_buffer(parts: int, granularity: Granularity) -> None:
    plan = FlatPlan.of([], parts, granularity)
    assert (plan.total, plan.bounds, plan.gaps()) == (0, (0,) * (parts + 1), [])


def test_a_matrix_goes_to_the_rank_whose_share_it_fills() -> None:
    plan = FlatPlan.of([("a", (16, 4)), ("b", (16, 2)), ("c", (16, 2)), ("d", (16, 8))], 3, "matrix")
    assert plan.bounds == (0, 96, 128, 256)  # ideal: 85.3 and 170.7, between tensors of 64, 32, 32 and 128
