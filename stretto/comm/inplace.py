"""Collectives on tensors that lie in memory which peers can read: they are read where they lie.

peers: x as the other ranks of the group have it, in group order; at my own place an empty tensor (the caller's x stands there).
place: what must be the same on all ranks for that to be true, part of what each call asks for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.comm.combine import CODES, combine
from stretto.comm.line import Line, signature
from stretto.comm.pieces import copy
from stretto.comm.recipe import Recipe, barrier, nothing

Place = tuple[int, ...]


def all_reduce(line: Line, elements: int, peers: Sequence[Tensor], dtype: torch.dtype, op: str, place: Place) -> Recipe:
    """Everybody's x combined, in place: each rank combines one slice and writes it to all."""
    index, most = line.index, line.slot // dtype.itemsize
    low, high = elements * index // line.size, elements * (index + 1) // line.size

    def add_up(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
        every = [*peers[:index], x, *peers[index + 1 :]]
        for start in range(low, high, most):
            stop = min(start + most, high)
            parts = [part[start:stop] for part in every]
            result = parts[index]
            combine(parts, result, op, spare=lambda: line.spare(dtype, len(result)))  # noqa: B023  (called at once)
            for i in line.others:
                copy(parts[i].data_ptr(), result.data_ptr(), (stop - start) * dtype.itemsize)

    # the third activity waits for the second of all: until then others write my x
    return Recipe(line, signature("all_reduce", elements, dtype, (*place, CODES[op])), (nothing, add_up, nothing), line.others)


def reduce_scatter(
    line: Line, bounds: tuple[int, ...], peers: Sequence[Tensor], dtype: torch.dtype, accumulate: bool, op: str, place: Place
) -> Recipe:
    """My slice of everybody's x combined, written or added to `into`."""
    index, most = line.index, line.slot // dtype.itemsize
    low, high = bounds[index], bounds[index + 1]

    def add_up(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
        every = [*peers[:index], x, *peers[index + 1 :]]
        for start in range(low, high, most):
            stop = min(start + most, high)
            out = into[start - low : stop - low]
            combine([part[start:stop] for part in every], out, op, accumulate, lambda: line.spare(dtype, len(out)))  # noqa: B023

    asked = signature("reduce_scatter", bounds[-1], dtype, (*bounds, *place, CODES[op]))
    return Recipe(line, asked, (nothing, add_up), line.others, kept=True)


def all_gather(line: Line, bounds: tuple[int, ...], peers: Sequence[Tensor], dtype: torch.dtype, place: Place) -> Recipe:
    """Everybody's slice of x, in place. No peers: all ranks have one x, and it is there once all say so."""
    asked = signature("all_gather", bounds[-1], dtype, (*bounds, *place))
    if not peers:
        return barrier(line, line.others, asked)

    def read(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
        for i in line.others:
            offset = bounds[i] * dtype.itemsize
            copy(x.data_ptr() + offset, peers[i].data_ptr() + offset, (bounds[i + 1] - bounds[i]) * dtype.itemsize)

    return Recipe(line, asked, (nothing, read), line.others, kept=True)


def broadcast(line: Line, elements: int, peers: Sequence[Tensor], dtype: torch.dtype, source: int, place: Place) -> Recipe:
    """x of the group's member `source`, in place on the others."""
    asked, after = signature("broadcast", elements, dtype, (source, *place)), () if line.index == source else (source,)
    if not peers or line.index == source:
        return Recipe(line, asked, (nothing, nothing), after, kept=bool(peers))

    def read(x: Tensor, into: Tensor, piece: int, slot: int) -> None:
        x.copy_(peers[source])

    return Recipe(line, asked, (nothing, read), after, kept=True)
