"""Which piece of a tensor lies on which rank, as boxes; and which piece of which stored box fills a wanted one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stretto.layout.mesh import Mesh

Shape = tuple[int, ...]


def split(n: int, parts: int, i: int) -> tuple[int, int]:
    """[start, stop) of part i when n items are cut as evenly as can be, longer parts first."""
    size, longer = divmod(n, parts)
    start = i * size + min(i, longer)
    return start, start + size + (i < longer)


class Box(NamedTuple):
    """A rectangular piece of a tensor: `offset` and `shape`, one entry a dim."""

    offset: Shape
    shape: Shape

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def meet(self, other: Box) -> Box | None:
        """The part both boxes hold, or None."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        stop = tuple(min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True))
        if any(s <= o for o, s in zip(offset, stop, strict=True)):
            return None
        return Box(offset, tuple(s - o for o, s in zip(offset, stop, strict=True)))


class Read(NamedTuple):
    """Copy `box` (in the tensor's own coordinates) from stored box `stored` of `source` into wanted box `wanted`."""

    source: str
    stored: Box
    wanted: Box
    box: Box


@dataclass(frozen=True)
class Flat:
    """A tensor's place in a flat buffer of `total` elements that is cut along `axes`.

    The tensor fills [start, start + elements). `bounds` are the cut points, one more than there are ranks on `axes`.
    """

    axes: tuple[str, ...]
    start: int
    total: int
    bounds: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How one tensor lies on a mesh.

    cuts: for each dim the axes that cut it, first cut first. Layout((("tp", "dp"), ())): dim 0 cut by tp, each piece by dp.
    partial: axes over which the values are still to be added.
    packed: for each dim the sizes of fused blocks (q|k|v, gate|up), each cut by itself; () where nothing is fused.
    flat: set where what remains after `cuts`, in row-major order, lies in a flat buffer that is cut further, between any elements.
    """

    cuts: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()
    packed: tuple[tuple[int, ...], ...] = ()
    flat: Flat | None = None

    @staticmethod
    def whole(shape: Shape) -> Layout:
        """Every rank holds everything."""
        return Layout(((),) * len(shape))

    def boxes(self, shape: Shape, mesh: Mesh, rank: int) -> tuple[Box, ...]:
        """The boxes of a tensor of this (whole) shape that `rank` holds: one after another, each row by row, they are its memory.

        So a fused inner dim (as in GPT-2's [in, q|k|v]) gives boxes for each row: what lies between them is another rank's.
        """
        boxes = [b for b in _in_memory_order(self.ranges(shape, mesh, rank)) if b.elements]
        if self.flat is None:
            return tuple(boxes)
        index = mesh.index(rank, *self.flat.axes)
        low, high = self.flat.bounds[index] - self.flat.start, self.flat.bounds[index + 1] - self.flat.start
        pieces, at = [], 0
        for box in boxes:
            for piece in flat_boxes(box.shape, max(low - at, 0), min(high - at, box.elements)):
                pieces.append(Box(tuple(o + p for o, p in zip(box.offset, piece.offset, strict=True)), piece.shape))
            at += box.elements
        return tuple(pieces)

    def ranges(self, shape: Shape, mesh: Mesh, rank: int) -> list[list[tuple[int, int]]]:
        """For each dim the ranges [start, stop) that the cuts of dims leave `rank`: one, or one of each fused block."""
        return [self._ranges(dim, size, mesh, rank) for dim, size in enumerate(shape)]

    def local_shape(self, shape: Shape, mesh: Mesh, rank: int) -> Shape:
        """The shape of what the cuts of dims leave `rank`."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges(shape, mesh, rank))

    def place(self, shape: Shape, mesh: Mesh, rank: int) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Pairs (in the whole tensor, in what `rank` holds of it) of slices that together cover what the cuts of dims leave it."""
        pairs: list[tuple[tuple[slice, ...], tuple[slice, ...]]] = [((), ())]
        for ranges in self.ranges(shape, mesh, rank):
            both, at = [], 0
            for start, stop in ranges:
                both.append((slice(start, stop), slice(at, at + stop - start)))
                at += stop - start
            pairs = [((*whole, there), (*mine, here)) for whole, mine in pairs for there, here in both]
        return pairs

    def first_holder(self, mesh: Mesh, rank: int) -> bool:
        """Whether `rank` is the one that speaks for its piece: at 0 along every axis that does not cut it.

        It is the rank that writes a replica to a checkpoint and counts it in a norm.
        """
        cut = {axis for axes in self.cuts for axis in axes} | set(self.flat.axes if self.flat else ())
        shared = {axis.partition("/")[0]: axis.replace("/", "%") for axis in cut if "/" in axis}  # neighbours that share a piece
        return all(mesh.along(rank, shared.get(axis, axis)) == 0 for axis, _ in mesh.axes if axis not in cut)

    def _ranges(self, dim: int, size: int, mesh: Mesh, rank: int) -> list[tuple[int, int]]:
        blocks = self.packed[dim] if dim < len(self.packed) and self.packed[dim] else (size,)
        if sum(blocks) != size:
            raise ValueError(f"packed blocks {blocks} of dim {dim} do not add up to {size}")
        ranges, base = [], 0
        for block in blocks:
            start, stop = base, base + block
            for axis in self.cuts[dim]:
                low, high = split(stop - start, mesh[axis], mesh.along(rank, axis))
                start, stop = start + low, start + high
            ranges.append((start, stop))
            base += block
        return ranges


def _in_memory_order(dims: list[list[tuple[int, int]]]) -> list[Box]:
    """The boxes of a product of ranges, in row-major order of what they hold."""
    fused = [dim for dim, ranges in enumerate(dims) if len(ranges) > 1]
    rows = fused[-1] if fused else 0  # a box is one index of each dim before this one
    boxes = [Box((), ())]
    for dim, ranges in enumerate(dims):
        if dim < rows:
            ranges = [(i, i + 1) for start, stop in ranges for i in range(start, stop)]
        boxes = [Box((*b.offset, start), (*b.shape, stop - start)) for b in boxes for start, stop in ranges]
    return boxes


def flat_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """The range [start, stop) of a tensor's elements in row-major order, as at most 2 * dims - 1 boxes in that order."""
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [Box((start,), (stop - start,))] if shape else [Box((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows are [first, last)
    if first > last:  # inside one row
        return [_under(last, box) for box in flat_boxes(shape[1:], start - last * row, stop - last * row)]
    boxes = [_under(first - 1, box) for box in flat_boxes(shape[1:], start - (first - 1) * row, row)] if start < first * row else []
    if first < last:
        boxes.append(Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if last * row < stop:
        boxes += [_under(last, box) for box in flat_boxes(shape[1:], 0, stop - last * row)]
    return boxes


def _under(index: int, box: Box) -> Box:
    return Box((index, *box.offset), (1, *box.shape))


def reads(wanted: tuple[Box, ...], stored: Mapping[str, tuple[Box, ...]]) -> list[Read]:
    """What to copy from which stored boxes so that every wanted element is filled exactly once.

    Stored boxes may overlap (replicas): the first source that holds an element gives it.
    Raises LookupError if a wanted element is stored nowhere.
    """
    plan: list[Read] = []
    for want in wanted:
        missing = [want]
        for source, boxes in stored.items():
            for box in boxes:
                rest: list[Box] = []
                for piece in missing:
                    common = piece.meet(box)
                    if common is None:
                        rest.append(piece)
                        continue
                    plan.append(Read(source, box, want, common))
                    rest += _minus(piece, common)
                missing = rest
        if any(piece.elements for piece in missing):
            raise LookupError(f"no source holds {missing[0]}")
    return plan


def _minus(box: Box, hole: Box) -> list[Box]:
    """What is left of `box` without `hole` (which lies inside it), as boxes that do not overlap."""
    rest: list[Box] = []
    offset, shape = list(box.offset), list(box.shape)
    for dim in range(len(shape)):
        before = hole.offset[dim] - offset[dim]
        after = offset[dim] + shape[dim] - hole.offset[dim] - hole.shape[dim]
        if before:
            rest.append(Box(tuple(offset), (*shape[:dim], before, *shape[dim + 1 :])))
        if after:
            at = hole.offset[dim] + hole.shape[dim]
            rest.append(Box((*offset[:dim], at, *offset[dim + 1 :]), (*shape[:dim], after, *shape[dim + 1 :])))
        offset[dim], shape[dim] = hole.offset[dim], hole.shape[dim]
    return rest
