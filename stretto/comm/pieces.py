"""Collectives over a Line, each as a program: what a rank does, and before each activity whom it waits for.

A program is a generator. It yields needs ([Note: one counter a rank] in comm/line.py) and goes on once they are met, so that
whoever waits can do its part in all programs under way, in its own thread. Sums are taken in the group's order, so they have
the same bits on every rank and in every run.

There are two roads. Tensors of a rank's own go through slots, in pieces that stay in cache (`through_*`). Tensors that lie in
memory which peers can read are read where they lie (`shared_*`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

from torch import Tensor

from stretto.comm.combine import combine
from stretto.comm.line import AHEAD, SLOTS, Line, Need

Program = Iterator[Need]
#: Up to this many bytes everybody adds up everything: one wait less, more additions.
SMALL = 1 << 15
#: Copies bytes (to, from, number) between addresses: for small pieces half the price of making tensors of them first.
_copy = ctypes.memmove


def fold(line: Line, parts: Sequence[Tensor], out: Tensor, op: str, accumulate: bool = False) -> None:
    """combine(), with memory of the line for what lies in between. At most a slot of bytes."""
    combine(parts, out, op, accumulate, lambda: line.spare(parts[0].dtype, parts[0].numel()))


def piped(line: Line, pieces: int, *activities: Callable[[int, int], None], writes: bool = True, after: tuple[int, ...]) -> Program:
    """`pieces` pieces through the slots, each in turn through `activities`(piece, slot), the first of which writes into the slot.

    Later activities wait until those in `after` have done the one before on this piece. They follow AHEAD pieces behind, so
    that a rank has something to do while others are still writing.
    """
    first, last, counts = line.turn, len(activities) - 1, [0] * pieces
    line.turn += pieces
    agreed = False
    for step in range(pieces + last * AHEAD):
        for stage, activity in enumerate(activities):
            piece = step - stage * AHEAD
            if not 0 <= piece < pieces:
                continue
            slot = (first + piece) % SLOTS
            if stage:
                yield after, counts[piece]
                if not agreed:
                    line.agree(after)
                    agreed = True
            elif writes:
                yield line.others, line.free[slot]
            activity(piece, slot)
            counts[piece] = line.tick()
            if stage == last:
                line.free[slot] = counts[piece]


# -- tensors of a rank's own, in pieces through slots ------------------------------------------------------------------


def through_all_reduce(line: Line, x: Tensor, op: str) -> Program:
    """Everybody's x combined, in place."""
    address, bytes_ = x.data_ptr(), x.numel() * x.dtype.itemsize
    chunks = _chunks(x, line.slot // x.dtype.itemsize)

    def write(piece: int, slot: int) -> None:
        _copy(line.address(line.index, slot), address + piece * line.slot, min(line.slot, bytes_ - piece * line.slot))

    def add_up(piece: int, slot: int) -> None:
        chunk = chunks[piece]
        fold(line, line.parts(slot, chunk.dtype, chunk.numel()), chunk, op)

    if line.size == 2 or bytes_ <= SMALL:
        return piped(line, len(chunks), write, add_up, after=line.others)

    def add_up_mine(piece: int, slot: int) -> None:
        size = chunks[piece].numel()
        low, high = size * line.index // line.size, size * (line.index + 1) // line.size
        parts = [part[low:high] for part in line.parts(slot, x.dtype, size)]
        fold(line, parts, parts[line.index], op)

    def read(piece: int, slot: int) -> None:
        size, itemsize = chunks[piece].numel(), x.dtype.itemsize
        for i in range(line.size):
            low, high = size * i // line.size * itemsize, size * (i + 1) // line.size * itemsize
            _copy(address + piece * line.slot + low, line.address(i, slot) + low, high - low)

    return piped(line, len(chunks), write, add_up_mine, read, after=line.others)


def through_reduce_scatter(line: Line, x: Tensor, bounds: Sequence[int], into: Tensor, accumulate: bool, op: str) -> Program:
    """Everybody's x combined; my slice of it in `into`. A slot holds a stretch of the slice of every other rank."""
    address, itemsize, index = x.data_ptr(), x.dtype.itemsize, line.index
    stretch = line.slot // itemsize // max(line.size - 1, 1)
    mine, targets = _chunks(x[bounds[index] : bounds[index + 1]], stretch), _chunks(into, stretch)

    def write(piece: int, slot: int) -> None:
        place = line.address(index, slot)
        for i in line.others:
            low, high = _stretch(bounds, i, piece, stretch)
            _copy(place, address + low * itemsize, (high - low) * itemsize)
            place += stretch * itemsize

    def add_up(piece: int, slot: int) -> None:
        if piece < len(mine):
            parts = line.parts(slot, x.dtype, mine[piece].numel(), stretch)
            fold(line, [*parts[:index], mine[piece], *parts[index + 1 :]], targets[piece], op, accumulate)

    return piped(line, _pieces(bounds, stretch), write, add_up, after=line.others)


def through_all_gather(line: Line, x: Tensor, bounds: Sequence[int]) -> Program:
    """Everybody's slice of x, in place."""
    address, itemsize = x.data_ptr(), x.dtype.itemsize
    most = line.slot // itemsize

    def write(piece: int, slot: int) -> None:
        low, high = _stretch(bounds, line.index, piece, most)
        _copy(line.address(line.index, slot), address + low * itemsize, (high - low) * itemsize)

    def read(piece: int, slot: int) -> None:
        for i in line.others:
            low, high = _stretch(bounds, i, piece, most)
            _copy(address + low * itemsize, line.address(i, slot), (high - low) * itemsize)

    return piped(line, _pieces(bounds, most), write, read, after=line.others)


def through_broadcast(line: Line, x: Tensor, source: int) -> Program:
    """x of the group's member `source`, in place on the others. The source waits only for slots to be free."""
    address, bytes_ = x.data_ptr(), x.numel() * x.dtype.itemsize
    pieces = max(1, -(-bytes_ // line.slot))

    def write(piece: int, slot: int) -> None:
        _copy(line.address(source, slot), address + piece * line.slot, min(line.slot, bytes_ - piece * line.slot))

    def read(piece: int, slot: int) -> None:
        _copy(address + piece * line.slot, line.address(source, slot), min(line.slot, bytes_ - piece * line.slot))

    if line.index == source:
        return piped(line, pieces, write, _nothing, after=())
    return piped(line, pieces, _nothing, read, writes=False, after=(source,))


def _chunks(x: Tensor, most: int) -> Sequence[Tensor]:
    """x cut every `most` elements; of an empty x one piece, since every call is at least one activity."""
    return (x,) if x.numel() <= most else x.split(most)


def _stretch(bounds: Sequence[int], i: int, piece: int, elements: int) -> tuple[int, int]:
    """Where the piece of slice i lies when each slice is cut every `elements`; empty beyond the slice's end."""
    stop = bounds[i + 1]
    low = min(bounds[i] + piece * elements, stop)
    return low, min(low + elements, stop)


def _pieces(bounds: Sequence[int], elements: int) -> int:
    """Pieces of the longest slice."""
    return max(1, max(-(-(high - low) // elements) for low, high in pairwise(bounds)))


def _nothing(piece: int, slot: int) -> None:
    """Here another rank is at work."""


# -- tensors that peers can read where they lie --------------------------------------------------------------------------


def _shown(line: Line, after: tuple[int, ...]) -> Program:
    """My part of x is written; wait until that of those in `after` is."""
    yield after, line.tick()
    line.agree(after)


def shared_all_reduce(line: Line, copies: Sequence[Tensor], op: str) -> Program:
    """Everybody's x combined, in place: each rank combines one slice and writes it to all. copies: x of every rank."""
    yield from _shown(line, line.others)
    size, most = copies[0].numel(), line.slot // copies[0].dtype.itemsize
    low, high = size * line.index // line.size, size * (line.index + 1) // line.size
    for parts in zip(*(_chunks(copy[low:high], most) for copy in copies), strict=True):
        result = parts[line.index]
        fold(line, parts, result, op)
        for i in line.others:
            _copy(parts[i].data_ptr(), result.data_ptr(), result.numel() * result.dtype.itemsize)
    yield line.others, line.tick()


def shared_reduce_scatter(line: Line, parts: Sequence[Tensor], into: Tensor, accumulate: bool, op: str) -> Program:
    """My slice of everybody's x combined, written or added to `into`. parts: my slice of every rank's x."""
    yield from _shown(line, line.others)
    most = line.slot // into.dtype.itemsize
    for out, *chunks in zip(_chunks(into, most), *(_chunks(part, most) for part in parts), strict=True):
        fold(line, chunks, out, op, accumulate)
    line.tick()


def shared_all_gather(line: Line, copies: Sequence[Tensor], bounds: Sequence[int]) -> Program:
    """Everybody's slice of x, in place. copies: x of every rank."""
    yield from _shown(line, line.others)
    addresses, itemsize = [copy.data_ptr() for copy in copies], copies[0].dtype.itemsize
    for i in line.others:
        offset = bounds[i] * itemsize
        _copy(addresses[line.index] + offset, addresses[i] + offset, (bounds[i + 1] - bounds[i]) * itemsize)
    line.tick()


def shared_broadcast(line: Line, copies: Sequence[Tensor], source: int) -> Program:
    """x of the group's member `source`, in place on the others."""
    if line.index == source:
        line.tick()
    else:
        yield from _shown(line, (source,))
        copies[line.index].copy_(copies[source])
    line.tick()


def one_memory(line: Line, after: tuple[int, ...]) -> Program:
    """All ranks have one x: what they wrote is there once those in `after` say so."""
    yield from _shown(line, after)
