"""Place: where a parameter lies over tp, and whose gradients must meet there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from stretto.layout.layout import Box, Flat, Layout, Shape
from stretto.layout.mesh import Mesh

#: Writes values [start, start + len(out)) of a named tensor, taken flat, to `out`.
Fill = Callable[[str, int, Tensor], None]


@runtime_checkable
class FillsBoxes(Protocol):
    """A Fill that can write a box of a tensor without making what lies around it."""

    def __call__(self, name: str, start: int, out: Tensor) -> None: ...

    def box(self, name: str, box: Box, out: Tensor) -> None: ...


#: Values of a tensor cut along an inner dim come by rows of the whole, this many elements at a time.
FILL_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Place:
    """A parameter over tp: `shape` is that of the whole, `layout` says which part of it each tp rank holds.

    summed: the axis over which its gradient is still to be added once dp is done: "tp" where every rank has seen some of the
    tokens or heads only, "tp%2" where two neighbours share a piece; "" where each rank's gradient is complete.
    """

    shape: Shape
    layout: Layout
    summed: str = ""

    @staticmethod
    def whole(shape: Shape, summed: str = "") -> Place:
        """The same on every tp rank."""
        return Place(shape, Layout.whole(shape), summed)

    @property
    def axis(self) -> str:
        """The axis that cuts it: "tp", "tp/2" where neighbours share pieces, "" where it is whole."""
        return next((axis for axes in self.layout.cuts for axis in axes), "")

    def local_shape(self, mesh: Mesh, rank: int) -> Shape:
        """The shape of what `rank` holds before ZeRO."""
        return self.layout.local_shape(self.shape, mesh, rank)

    def room(self, mesh: Mesh) -> int:
        """Elements of the largest part: all tp ranks leave room for it, so that what follows lies at the same place on each."""
        return max(math.prod(self.local_shape(mesh, rank)) for rank in mesh.group(0, "tp"))

    def counts(self, mesh: Mesh, rank: int) -> bool:
        """Whether `rank` is the one, of the tp ranks that hold the same, that counts it in a norm."""
        copies = {"": "tp", "tp": ""}.get(self.axis, self.axis.replace("/", "%"))
        return not copies or mesh.along(rank, copies) == 0

    def flat(self, flat: Flat) -> Layout:
        """Where it lies when the flat buffer that holds this rank's part is cut further."""
        return replace(self.layout, flat=flat)


def fill_parts(fill: Fill, places: Mapping[str, Place], mesh: Mesh, rank: int) -> Fill:
    """A Fill of what `rank` holds of each tensor, out of one that knows whole tensors.

    Where an inner dim is cut, whole rows are made and cut, FILL_ELEMENTS (or one row) at a time, unless `fill` makes boxes too:
    nobody holds more of the whole.
    """

    def part(name: str, start: int, out: Tensor) -> None:
        place = places.get(name)
        if place is None or not place.axis:
            fill(name, start, out)
            return
        width, row = math.prod(place.shape[1:]), math.prod(place.local_shape(mesh, rank)[1:])
        stop, at = start + out.numel(), 0
        for low, high in place.layout.ranges(place.shape, mesh, rank)[0]:  # rows of the whole; `at`: where they begin in mine
            begin, end = max(start, at), min(stop, at + (high - low) * row)
            if begin < end:
                piece = out[begin - start : end - start]
                if width == row:
                    fill(name, low * row + begin - at, piece)
                else:
                    _fill_cut_rows(fill, name, place, mesh, rank, low, begin - at, piece)
            at += (high - low) * row

    return part


def _fill_cut_rows(fill: Fill, name: str, place: Place, mesh: Mesh, rank: int, low: int, skip: int, out: Tensor) -> None:
    """out: what follows the first `skip` elements that `rank` holds of the rows from `low` on."""
    inner = replace(place.layout, cuts=((), *place.layout.cuts[1:]), packed=((), *place.layout.packed[1:]))
    width, row = math.prod(place.shape[1:]), math.prod(place.local_shape(mesh, rank)[1:])
    step, done = max(1, FILL_ELEMENTS // width), 0
    for first in range(skip // row, -(-(skip + out.numel()) // row), step):
        rows = (min(step, -(-(skip + out.numel()) // row) - first), *place.shape[1:])
        mine = torch.empty(inner.local_shape(rows, mesh, rank), dtype=out.dtype, device=out.device)
        if isinstance(fill, FillsBoxes):
            for there, here in inner.place(rows, mesh, rank):
                offset, shape = (low + first, *(cut.start for cut in there[1:])), tuple(cut.stop - cut.start for cut in there)
                piece = torch.empty(shape, dtype=out.dtype, device=out.device)
                fill.box(name, Box(offset, shape), piece)
                mine[here].copy_(piece)
        else:
            whole = torch.empty(math.prod(rows), dtype=out.dtype, device=out.device)
            fill(name, (low + first) * width, whole)
            for there, here in inner.place(rows, mesh, rank):
                mine[here].copy_(whole.view(rows)[there])
        wanted = mine.view(-1)[max(skip - first * row, 0) :][: out.numel() - done]
        out[done : done + wanted.numel()].copy_(wanted)
        done += wanted.numel()
