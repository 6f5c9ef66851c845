"""Layout: who holds which elements, however a tensor is cut; and reads between any two ways of cutting it."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stretto.layout.layout import Box, Flat, Layout, Shape, flat_boxes, reads, split
from stretto.layout.mesh import Mesh

CUTTING = ("dp", "cp", "tp")


def shapes(largest: int = 6) -> st.SearchStrategy[Shape]:
    return st.lists(st.integers(0, largest), max_size=4).map(tuple)


def meshes() -> st.SearchStrategy[Mesh]:
    return st.builds(lambda **sizes: Mesh.of(**sizes), **{axis: st.integers(1, 3) for axis in CUTTING}, dp_replicate=st.integers(1, 2))


@st.composite
def dim_layouts(draw: st.DrawFn, shape: Shape) -> Layout:
    """Each axis cuts at most one dim; the axes of a dim in any order; any dim may be packed out of up to 3 blocks."""
    axes = draw(st.lists(st.sampled_from(CUTTING), unique=True)) if shape else []
    cuts: list[list[str]] = [[] for _ in shape]
    for axis in axes:
        cuts[draw(st.integers(0, len(shape) - 1))].append(axis)
    blocks: list[tuple[int, ...]] = []
    for size in shape:
        points = sorted(draw(st.lists(st.integers(0, size), max_size=2))) if draw(st.booleans()) else []
        blocks.append(tuple(b - a for a, b in pairwise([0, *points, size])) if points else ())
    return Layout(tuple(map(tuple, cuts)), packed=tuple(blocks) if any(blocks) else ())


@st.composite
def flat_layouts(draw: st.DrawFn, shape: Shape, mesh: Mesh) -> Layout:
    """Cut along dims by some axes, and what remains along a flat buffer, at any points, by the others."""
    dims = draw(dim_layouts(shape))
    used = {axis for axes in dims.cuts for axis in axes}
    axes = tuple(axis for axis in CUTTING if axis not in used)
    start = draw(st.integers(0, 5))
    total = start + math.prod(shape) + draw(st.integers(0, 5))
    points = sorted(draw(st.lists(st.integers(0, total), min_size=mesh.extent(*axes) - 1, max_size=mesh.extent(*axes) - 1)))
    return Layout(dims.cuts, packed=dims.packed, flat=Flat(axes, start, total, (0, *points, total)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, Mesh, Layout]:
    shape, mesh = draw(shapes()), draw(meshes())
    return shape, mesh, draw(st.one_of(dim_layouts(shape), flat_layouts(shape, mesh)))


def at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """`box` in the coordinates of `outer`, which holds it."""
    return tuple(slice(o - p, o - p + n) for o, p, n in zip(box.offset, outer.offset, box.shape, strict=True))


@settings(max_examples=40)
@given(st.integers(0, 40), st.integers(1, 9))
def test_split_cuts_as_numpy_does(n: int, parts: int) -> None:
    pieces = [list(range(*split(n, parts, i))) for i in range(parts)]
    assert pieces == [list(piece) for piece in np.array_split(np.arange(n), parts)]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_first_holders_hold_every_element_exactly_once(case: tuple[Shape, Mesh, Layout]) -> None:
    shape, mesh, layout = case
    counts = np.zeros(shape, dtype=int)
    for rank in range(mesh.size):
        mine = np.zeros(shape, dtype=int)
        for box in layout.boxes(shape, mesh, rank):
            assert box.elements > 0
            mine[at(box)] += 1
        assert mine.size == 0 or mine.max() <= 1
        counts += mine * layout.first_holder(mesh, rank)
    assert (counts == 1).all()


@settings(max_examples=30, deadline=None)
@given(cases())
def test_ranks_along_an_axis_that_does_not_cut_hold_the_same(case: tuple[Shape, Mesh, Layout]) -> None:
    shape, mesh, layout = case
    cutting = {axis for axes in layout.cuts for axis in axes} | set(layout.flat.axes if layout.flat else ())
    idle = [name for name, _ in mesh.axes if name not in cutting]
    for rank in range(mesh.size):
        first = mesh.group(rank, *idle)[0]
        assert layout.boxes(shape, mesh, rank) == layout.boxes(shape, mesh, first)
        assert layout.first_holder(mesh, rank) == (rank == first)


@settings(max_examples=30, deadline=None)
@given(st.data(), shapes(), meshes())
def test_a_rank_holds_what_repeated_array_splits_leave_of_each_block(data: st.DataObject, shape: Shape, mesh: Mesh) -> None:
    layout = data.draw(dim_layouts(shape))
    rank = data.draw(st.integers(0, mesh.size - 1))
    kept = []
    for dim, size in enumerate(shape):
        blocks = layout.packed[dim] if layout.packed and layout.packed[dim] else (size,)
        parts = np.split(np.arange(size), np.cumsum(blocks)[:-1])
        for axis in layout.cuts[dim]:
            parts = [np.array_split(part, mesh[axis])[mesh.at(rank)[axis]] for part in parts]
        kept.append(np.concatenate(parts))
    mask = np.zeros(shape, dtype=bool)
    for box in layout.boxes(shape, mesh, rank):
        mask[at(box)] = True
    expected = np.zeros(shape, dtype=bool)
    expected[np.ix_(*kept)] = True
    assert (mask == expected).all()


def test_a_fused_qkv_weight_is_cut_block_by_block() -> None:
    layout = Layout((("tp",), ()), packed=((8, 4, 4), ()))
    rows = [[box.offset[0] for box in layout.boxes((16, 3), Mesh.of(tp=2), rank)] for rank in range(2)]
    assert rows == [[0, 8, 12], [4, 10, 14]]


def test_the_first_axis_named_cuts_first() -> None:
    mesh = Mesh.of(dp=2, tp=2)
    held = [Layout((axes,)).boxes((8,), mesh, mesh.rank(dp=1, tp=0)) for axes in (("tp", "dp"), ("dp", "tp"))]
    assert held == [(Box((2,), (2,)),), (Box((4,), (2,)),)]


def test_packed_blocks_must_add_up() -> None:
    with pytest.raises(ValueError, match="do not add up to 16"):
        Layout((("tp",), ()), packed=((8, 4), ())).boxes((16, 3), Mesh.of(tp=2), 0)


@settings(max_examples=60, deadline=None)
@given(cases(), st.data())
def test_boxes_one_after_another_are_the_memory_of_what_the_cuts_of_dims_leave(
    case: tuple[Shape, Mesh, Layout], data: st.DataObject
) -> None:
    shape, mesh, layout = case
    rank = data.draw(st.integers(0, mesh.size - 1))
    values = np.arange(math.prod(shape)).reshape(shape)
    local = np.zeros(layout.local_shape(shape, mesh, rank), dtype=int)
    for whole, mine in layout.place(shape, mesh, rank):
        local[mine] = values[whole]
    memory = local.ravel()
    if layout.flat is not None:
        index = mesh.index(rank, *layout.flat.axes)
        low, high = (max(bound - layout.flat.start, 0) for bound in layout.flat.bounds[index : index + 2])
        memory = memory[low:high]
    assert [int(v) for box in layout.boxes(shape, mesh, rank) for v in values[at(box)].ravel()] == memory.tolist()


def test_neighbours_share_a_piece_where_there_are_fewer_pieces_than_ranks() -> None:
    """Two kv heads of 3 rows on tp=4: ranks 0 and 1 hold the first, 2 and 3 the second; 0 and 2 speak for them."""
    layout, mesh = Layout((("tp/2",), ())), Mesh.of(dp=2, tp=4)
    assert [layout.boxes((6, 5), mesh, rank) for rank in range(4)] == [(Box((0, 0), (3, 5)),)] * 2 + [(Box((3, 0), (3, 5)),)] * 2
    assert [rank for rank in range(8) if layout.first_holder(mesh, rank)] == [0, 2]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 5), max_size=4).map(tuple), st.data())
@example((), None)
def test_a_flat_range_is_few_boxes_that_hold_exactly_its_elements(shape: Shape, data: st.DataObject | None) -> None:
    elements = math.prod(shape)
    start = data.draw(st.integers(0, elements)) if data else 0
    stop = data.draw(st.integers(start, elements)) if data else elements
    boxes = flat_boxes(shape, start, stop)
    values = np.arange(elements).reshape(shape)
    assert [int(v) for box in boxes for v in values[at(box)].ravel()] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@settings(max_examples=30)
@given(st.data(), shapes(4))
def test_two_boxes_meet_in_the_elements_they_share(data: st.DataObject, shape: Shape) -> None:
    masks, boxes = [], []
    for _ in range(2):
        spans = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
        boxes.append(Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans)))
        masks.append(np.zeros(shape, dtype=bool))
        masks[-1][at(boxes[-1])] = True
    common = boxes[0].meet(boxes[1])
    shared = np.zeros(shape, dtype=bool)
    if common is not None:
        shared[at(common)] = True
    assert (shared == masks[0] & masks[1]).all()
    assert common == boxes[1].meet(boxes[0])


@st.composite
def two_ways(draw: st.DrawFn) -> tuple[Shape, tuple[Mesh, Layout], tuple[Mesh, Layout]]:
    shape = draw(shapes())
    ways = []
    for _ in range(2):
        mesh = draw(meshes())
        ways.append((mesh, draw(st.one_of(dim_layouts(shape), flat_layouts(shape, mesh)))))
    return shape, ways[0], ways[1]


@settings(max_examples=50, deadline=None)
@given(two_ways(), st.booleans())
def test_what_lies_one_way_fills_any_other_way(case: tuple[Shape, tuple[Mesh, Layout], tuple[Mesh, Layout]], replicas: bool) -> None:
    shape, (mesh, layout), (other, wanted) = case
    values = np.arange(math.prod(shape)).reshape(shape)
    holders = [rank for rank in range(mesh.size) if replicas or layout.first_holder(mesh, rank)]
    stored = {f"rank{rank}": layout.boxes(shape, mesh, rank) for rank in holders}
    memory = {(source, box): values[at(box)].copy() for source, boxes in stored.items() for box in boxes}
    for rank in range(other.size):
        boxes = wanted.boxes(shape, other, rank)
        filled = {box: np.zeros(box.shape, dtype=int) for box in boxes}
        times = {box: np.zeros(box.shape, dtype=int) for box in boxes}
        for read in reads(boxes, stored):
            filled[read.wanted][within(read.box, read.wanted)] = memory[read.source, read.stored][within(read.box, read.stored)]
            times[read.wanted][within(read.box, read.wanted)] += 1
        for box in boxes:
            assert (times[box] == 1).all()
            assert (filled[box] == values[at(box)]).all()


def test_the_first_source_that_holds_an_element_gives_it() -> None:
    left, right = Box((0,), (4,)), Box((2,), (6,))
    plan = reads((Box((1,), (5,)),), {"near": (left,), "far": (right,)})
    assert [(read.source, read.box) for read in plan] == [("near", Box((1,), (3,))), ("far", Box((4,), (2,)))]


def test_an_element_that_is_stored_nowhere_is_named() -> None:
    with pytest.raises(LookupError, match=r"offset=\(4, 0\), shape=\(1, 2\)"):
        reads((Box((0, 0), (5, 2)),), {"rank0": (Box((0, 0), (4, 2)),)})


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (4, 5)])
def test_whole_is_everything_on_every_rank(shape: Shape) -> None:
    mesh = Mesh.of(dp=3, tp=2)
    everything = (Box((0,) * len(shape), shape),) if math.prod(shape) else ()
    assert {Layout.whole(shape).boxes(shape, mesh, rank) for rank in range(6)} == {everything}
