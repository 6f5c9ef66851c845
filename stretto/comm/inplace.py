"""Collectives on tensors that lie in memory which peers can read: they are read where they lie.

peers: x as the other ranks of the group have it, in group order; at my own place an empty tensor (the caller's x stands there).
place: what must be the same on all ranks for that to be true, part of what each call asks for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.comm.combine import CODES
from stretto.comm.line import Line, signature
from stretto.comm.recipe import INTO, MEMBER, Act, Combine, Copy, Place, Recipe, X, barrier, nothing

#: Bytes that are combined before they are copied on to the others: they are still in cache then.
STRETCH = 1 << 18


def all_reduce(line: Line, elements: int, peers: Sequence[Tensor], dtype: torch.dtype, op: str, place: tuple[int, ...]) -> Recipe:
    """Everybody's x combined, in place: each rank combines one slice and writes it to all."""
    itemsize, most = dtype.itemsize, STRETCH // dtype.itemsize
    low, high = elements * line.index // line.size, elements * (line.index + 1) // line.size

    def add_up(piece: int) -> Sequence[Act]:
        acts: list[Act] = []
        for start in range(low, high, most):
            length, offset = min(most, high - start), start * itemsize
            acts.append(Combine(Place(X, offset), _every(line, offset), length))
            acts += [Copy(Place(MEMBER + i, offset), Place(X, offset), length * itemsize) for i in line.others]
        return acts

    asked = signature("all_reduce", elements, dtype, (*place, CODES[op]))
    # the third activity waits for the second of all: until then others write my x
    return Recipe(line, asked, (nothing, add_up, nothing), line.others, dtype=dtype, op=op, peers=peers)


def reduce_scatter(
    line: Line, bounds: tuple[int, ...], peers: Sequence[Tensor], dtype: torch.dtype, accumulate: bool, op: str, place: tuple[int, ...]
) -> Recipe:
    """My slice of everybody's x combined, written or added to `into`."""
    low, high = bounds[line.index], bounds[line.index + 1]

    def add_up(piece: int) -> Sequence[Act]:
        return [Combine(Place(INTO, 0), _every(line, low * dtype.itemsize), high - low, accumulate)] if high > low else ()

    asked = signature("reduce_scatter", bounds[-1], dtype, (*bounds, *place, CODES[op]))
    return Recipe(line, asked, (nothing, add_up), line.others, dtype=dtype, op=op, peers=peers, kept=True)


def all_gather(line: Line, bounds: tuple[int, ...], peers: Sequence[Tensor], dtype: torch.dtype, place: tuple[int, ...]) -> Recipe:
    """Everybody's slice of x, in place. No peers: all ranks have one x, and it is there once all say so."""
    asked = signature("all_gather", bounds[-1], dtype, (*bounds, *place))
    if not peers:
        return barrier(line, line.others, asked)

    def read(piece: int) -> Sequence[Act]:
        slices = [(i, bounds[i] * dtype.itemsize, (bounds[i + 1] - bounds[i]) * dtype.itemsize) for i in line.others]
        return [Copy(Place(X, offset), Place(MEMBER + i, offset), bytes_) for i, offset, bytes_ in slices]

    return Recipe(line, asked, (nothing, read), line.others, peers=peers, kept=True)


def broadcast(line: Line, elements: int, peers: Sequence[Tensor], dtype: torch.dtype, source: int, place: tuple[int, ...]) -> Recipe:
    """x of the group's member `source`, in place on the others."""
    asked, after = signature("broadcast", elements, dtype, (source, *place)), () if line.index == source else (source,)
    if not peers or line.index == source:
        return Recipe(line, asked, (nothing, nothing), after, kept=bool(peers))

    def read(piece: int) -> Sequence[Act]:
        return [Copy(Place(X, 0), Place(MEMBER + source, 0), elements * dtype.itemsize)]

    return Recipe(line, asked, (nothing, read), after, peers=peers, kept=True)


def _every(line: Line, offset: int) -> tuple[Place, ...]:
    """What begins at this offset of every member's x."""
    return tuple(Place(MEMBER + i, offset) if i != line.index else Place(X, offset) for i in range(line.size))
