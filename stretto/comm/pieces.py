"""Collectives on tensors of a rank's own: through slots in shared memory, in pieces that stay in cache.

Sums are taken in the group's order, and large ones by one rank for all, so they have the same bits on every rank and in
every run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from stretto.comm.combine import CODES, combine
from stretto.comm.line import Line, signature
from stretto.comm.recipe import Activity, Recipe, nothing

#: Up to this many bytes everybody adds up everything: one wait less, more additions.
SMALL = 1 << 15
#: Copies bytes (to, from, number) between addresses: for small pieces half the price of making tensors of them first.
copy = ctypes.memmove


def all_reduce(line: Line, elements: int, dtype: torch.dtype, op: str) -> Recipe:
    """Everybody's x combined, in place."""
    asked, bytes_ = signature("all_reduce", elements, dtype, (CODES[op],)), elements * dtype.itemsize
    pieces = max(1, -(-bytes_ // line.slot))
    # of two ranks each takes as many bytes from the other either way, and this has one wait less
    how = _all_for_oneself if line.size == 2 or bytes_ <= min(SMALL, line.slot) else _a_part_for_all
    return Recipe(line, asked, how(line, elements, dtype, op), line.others, pieces, slots=True, fills=True)


def _all_for_oneself(line: Line, elements: int, dtype: torch.dtype, op: str) -> tuple[Activity, ...]:
    """Every rank leaves its x in its slot and combines all that the others left."""
    index, itemsize, most = line.index, dtype.itemsize, line.slot // dtype.itemsize

    def write(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
        first = piece * most
        copy(line.address(index, slot), x.data_ptr() + first * itemsize, min(most, elements - first) * itemsize)

    def add_up(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
        mine = x if elements <= most else x[piece * most : (piece + 1) * most]
        parts = line.parts(slot, dtype, 0, len(mine))
        # with x at its place in the order; from three ranks on x is written before it would be read there, so its copy is
        combine([*parts[:index], mine, *parts[index + 1 :]] if len(parts) == 2 else parts, mine, op, spare=lambda: mine)

    return write, add_up


def _a_part_for_all(line: Line, elements: int, dtype: torch.dtype, op: str) -> tuple[Activity, ...]:
    """Of each piece every rank combines one part. In its slot it leaves the others' parts of its x, then its part of the result."""
    size, index, itemsize, most = line.size, line.index, dtype.itemsize, line.slot // dtype.itemsize

    def bounds(piece: int) -> list[int]:
        length = min(most, elements - piece * most)
        return [length * i // size for i in range(size + 1)]

    def write(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
        cuts, to, source = bounds(piece), line.address(index, slot), x.data_ptr() + piece * most * itemsize
        copy(to, source, cuts[index] * itemsize)
        above = cuts[index + 1] * itemsize
        copy(to + above, source + above, cuts[-1] * itemsize - above)

    def add_up(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
        cuts = bounds(piece)
        low, high = cuts[index], cuts[index + 1]
        parts = line.parts(slot, dtype, low, high)
        result = parts[index]
        mine = x[piece * most + low : piece * most + high]
        combine([*parts[:index], mine, *parts[index + 1 :]], result, op, spare=lambda: result)
        copy(mine.data_ptr(), result.data_ptr(), (high - low) * itemsize)

    def read(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
        cuts, to = bounds(piece), x.data_ptr() + piece * most * itemsize
        for i in line.others:
            copy(to + cuts[i] * itemsize, line.address(i, slot) + cuts[i] * itemsize, (cuts[i + 1] - cuts[i]) * itemsize)

    return write, add_up, read


def reduce_scatter(line: Line, bounds: tuple[int, ...], dtype: torch.dtype, accumulate: bool, op: str) -> Recipe:
    """Everybody's x combined; my slice of it written or added to `into`. A slot holds a stretch of every rank's slice."""
    size, index, itemsize = line.size, line.index, dtype.itemsize
    stretch = line.slot // itemsize // size
    start, mine = bounds[index], bounds[index + 1] - bounds[index]
    pieces = _pieces(bounds, stretch)
    # to make a tensor of my slice of x takes longer than to copy it into the slot, where tensors are kept
    copied = pieces == 1 and mine * itemsize <= SMALL

    def write(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
        to, source = line.address(index, slot), x.data_ptr()
        for i in range(size) if copied else line.others:
            low, high = _stretch(bounds, i, piece, stretch)
            copy(to + i * stretch * itemsize, source + low * itemsize, (high - low) * itemsize)

    def add_up(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
        low, high = piece * stretch, min((piece + 1) * stretch, mine)
        if low >= high:
            return
        parts = line.parts(slot, dtype, index * stretch, index * stretch + high - low)
        if copied:
            combine(parts, into, op, accumulate)
        else:
            combine([*parts[:index], x[start + low : start + high], *parts[index + 1 :]], into[low:high], op, accumulate)

    asked = signature("reduce_scatter", bounds[-1], dtype, (*bounds, CODES[op]))
    return Recipe(line, asked, (write, add_up), line.others, pieces, slots=True, fills=True)


def all_gather(line: Line, bounds: tuple[int, ...], dtype: torch.dtype) -> Recipe:
    """Everybody's slice of x, in place."""
    index, itemsize = line.index, dtype.itemsize
    most = line.slot // itemsize

    def write(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
        low, high = _stretch(bounds, index, piece, most)
        copy(line.address(index, slot), x.data_ptr() + low * itemsize, (high - low) * itemsize)

    def read(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
        to = x.data_ptr()
        for i in line.others:
            low, high = _stretch(bounds, i, piece, most)
            copy(to + low * itemsize, line.address(i, slot), (high - low) * itemsize)

    asked = signature("all_gather", bounds[-1], dtype, bounds)
    return Recipe(line, asked, (write, read), line.others, _pieces(bounds, most), slots=True, fills=True)


def broadcast(line: Line, elements: int, dtype: torch.dtype, source: int, kind: str = "broadcast") -> Recipe:
    """x of the group's member `source`, in place on the others. The source waits only for slots to be free."""
    bytes_, asked = elements * dtype.itemsize, signature(kind, elements, dtype, (source,))
    pieces = max(1, -(-bytes_ // line.slot))

    def write(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
        offset = piece * line.slot
        copy(line.address(source, slot), x.data_ptr() + offset, min(line.slot, bytes_ - offset))

    def read(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
        offset = piece * line.slot
        copy(x.data_ptr() + offset, line.address(source, slot), min(line.slot, bytes_ - offset))

    if line.index == source:
        return Recipe(line, asked, (write, nothing), (), pieces, slots=True, fills=True)
    return Recipe(line, asked, (nothing, read), (source,), pieces, slots=True)


def _stretch(bounds: Sequence[int], i: int, piece: int, elements: int) -> tuple[int, int]:
    """Where the piece of slice i lies when each slice is cut every `elements`; empty beyond the slice's end."""
    stop = bounds[i + 1]
    low = min(bounds[i] + piece * elements, stop)
    return low, min(low + elements, stop)


def _pieces(bounds: Sequence[int], elements: int) -> int:
    """Pieces of the longest slice; of empty ones one, since every call is at least one activity."""
    return max(1, max(-(-(high - low) // elements) for low, high in pairwise(bounds)))
