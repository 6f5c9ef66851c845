"""Collectives on tensors of a rank's own: through slots in shared memory, in pieces that stay in cache.

Sums are taken in the group's order, and large ones by one rank for all, so they have the same bits on every rank and in
every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from stretto.comm.combine import CODES
from stretto.comm.line import Line, signature
from stretto.comm.recipe import INTO, MEMBER, Act, Activity, Combine, Copy, Place, Recipe, X, nothing

#: Up to this many bytes everybody adds up everything: one wait less, more additions.
SMALL = 1 << 15


def all_reduce(line: Line, elements: int, dtype: torch.dtype, op: str) -> Recipe:
    """Everybody's x combined, in place."""
    asked, bytes_ = signature("all_reduce", elements, dtype, (CODES[op],)), elements * dtype.itemsize
    pieces = max(1, -(-bytes_ // line.slot))
    # of two ranks each takes as many bytes from the other either way, and this has one wait less
    how = _all_for_oneself if line.size == 2 or bytes_ <= min(SMALL, line.slot) else _a_part_for_all
    return Recipe(line, asked, how(line, elements, dtype), line.others, pieces, dtype=dtype, op=op, slots=True, fills=True)


def _all_for_oneself(line: Line, elements: int, dtype: torch.dtype) -> tuple[Activity, ...]:
    """Every rank leaves its x in its slot and combines all that the others left."""
    index, itemsize, most = line.index, dtype.itemsize, line.slot // dtype.itemsize

    def write(piece: int) -> Sequence[Act]:
        first = piece * most
        return [Copy(Place(MEMBER + index, 0), Place(X, first * itemsize), min(most, elements - first) * itemsize)]

    def add_up(piece: int) -> Sequence[Act]:
        mine = Place(X, piece * most * itemsize)
        parts = [Place(MEMBER + i, 0) if i != index else mine for i in range(line.size)]
        return [Combine(mine, tuple(parts), min(most, elements - piece * most))]

    return write, add_up


def _a_part_for_all(line: Line, elements: int, dtype: torch.dtype) -> tuple[Activity, ...]:
    """Of each piece every rank combines one part. In its slot it leaves the others' parts of its x, then its part of the result."""
    size, index, itemsize, most = line.size, line.index, dtype.itemsize, line.slot // dtype.itemsize

    def bounds(piece: int) -> list[int]:
        length = min(most, elements - piece * most)
        return [length * i // size * itemsize for i in range(size + 1)]

    def write(piece: int) -> Sequence[Act]:
        cuts, start = bounds(piece), piece * most * itemsize
        below = Copy(Place(MEMBER + index, 0), Place(X, start), cuts[index])
        above = cuts[index + 1]
        return [below, Copy(Place(MEMBER + index, above), Place(X, start + above), cuts[-1] - above)]

    def add_up(piece: int) -> Sequence[Act]:
        cuts, start = bounds(piece), piece * most * itemsize
        low, bytes_ = cuts[index], cuts[index + 1] - cuts[index]
        mine, result = Place(X, start + low), Place(MEMBER + index, low)
        parts = [Place(MEMBER + i, low) if i != index else mine for i in range(size)]
        return [Combine(result, tuple(parts), bytes_ // itemsize), Copy(mine, result, bytes_)]

    def read(piece: int) -> Sequence[Act]:
        cuts, start = bounds(piece), piece * most * itemsize
        return [Copy(Place(X, start + cuts[i]), Place(MEMBER + i, cuts[i]), cuts[i + 1] - cuts[i]) for i in line.others]

    return write, add_up, read


def reduce_scatter(line: Line, bounds: tuple[int, ...], dtype: torch.dtype, accumulate: bool, op: str) -> Recipe:
    """Everybody's x combined; my slice of it written or added to `into`. A slot holds a stretch of every rank's slice."""
    size, index, itemsize = line.size, line.index, dtype.itemsize
    stretch = line.slot // itemsize // size
    start, mine = bounds[index], bounds[index + 1] - bounds[index]

    def write(piece: int) -> Sequence[Act]:
        acts = []
        for i in line.others:
            low, high = _stretch(bounds, i, piece, stretch)
            acts.append(Copy(Place(MEMBER + index, i * stretch * itemsize), Place(X, low * itemsize), (high - low) * itemsize))
        return acts

    def add_up(piece: int) -> Sequence[Act]:
        low, high = piece * stretch, min((piece + 1) * stretch, mine)
        if low >= high:
            return ()
        here, own = Place(X, (start + low) * itemsize), index * stretch * itemsize
        parts = tuple(Place(MEMBER + i, own) if i != index else here for i in range(size))
        return [Combine(Place(INTO, low * itemsize), parts, high - low, accumulate)]

    asked = signature("reduce_scatter", bounds[-1], dtype, (*bounds, CODES[op]))
    pieces = _pieces(bounds, stretch)
    return Recipe(line, asked, (write, add_up), line.others, pieces, dtype=dtype, op=op, slots=True, fills=True)


def all_gather(line: Line, bounds: tuple[int, ...], dtype: torch.dtype) -> Recipe:
    """Everybody's slice of x, in place."""
    index, itemsize = line.index, dtype.itemsize
    most = line.slot // itemsize

    def write(piece: int) -> Sequence[Act]:
        low, high = _stretch(bounds, index, piece, most)
        return [Copy(Place(MEMBER + index, 0), Place(X, low * itemsize), (high - low) * itemsize)]

    def read(piece: int) -> Sequence[Act]:
        stretches = [(i, *_stretch(bounds, i, piece, most)) for i in line.others]
        return [Copy(Place(X, low * itemsize), Place(MEMBER + i, 0), (high - low) * itemsize) for i, low, high in stretches]

    asked = signature("all_gather", bounds[-1], dtype, bounds)
    return Recipe(line, asked, (write, read), line.others, _pieces(bounds, most), slots=True, fills=True)


def broadcast(line: Line, elements: int, dtype: torch.dtype, source: int, kind: str = "broadcast") -> Recipe:
    """x of the group's member `source`, in place on the others. The source waits only for slots to be free."""
    bytes_, asked = elements * dtype.itemsize, signature(kind, elements, dtype, (source,))
    pieces, left = max(1, -(-bytes_ // line.slot)), Place(MEMBER + source, 0)

    def write(piece: int) -> Sequence[Act]:
        offset = piece * line.slot
        return [Copy(left, Place(X, offset), min(line.slot, bytes_ - offset))]

    def read(piece: int) -> Sequence[Act]:
        offset = piece * line.slot
        return [Copy(Place(X, offset), left, min(line.slot, bytes_ - offset))]

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
