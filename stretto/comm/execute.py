"""Carrying out a recipe, step by step: in Python, or by comm/steps.c, which does the same at a tenth of the price for each step.

Either may serve any rank of a group: what ranks see of each other are counts and bytes. The compiled part is built when stretto is
installed, if there is a C compiler; without it everything works, slower for small tensors and for large ones in pieces.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.comm.combine import combine
from stretto.comm.line import State
from stretto.comm.recipe import INTO, MEMBER, Combine, Place, Recipe, X

#: (recipe, x, into, looks) -> whether it has come to its end. looks: at what a step waits for, before it is given up for now.
Carrier = Callable[[Recipe, Tensor, Tensor, int], bool]
#: Copies bytes (to, from, number) between addresses: for small pieces half the price of making tensors of them first.
copy = ctypes.memmove
#: What steps.c combines, in the order of its enums.
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32)
OPERATIONS = ("sum", "avg", "max", "min")
DONE, MISMATCH = 0, 2


def carrier(recipe: Recipe, compiled: bool) -> Carrier:
    """What carries this recipe out. compiled: whether steps.c may be used."""
    combines = any(isinstance(act, Combine) for step in recipe.steps for act in step.acts)
    known = recipe.dtype in DTYPES and recipe.op in OPERATIONS
    return _compiled(recipe) if compiled and (known or not combines) else interpret


# -- in Python ---------------------------------------------------------------------------------------------------------


def interpret(recipe: Recipe, x: Tensor, into: Tensor, looks: int) -> bool:
    """Go on as far as peers allow. Raises Mismatch if one of them asked for something else."""
    line, state = recipe.line, recipe.line.state
    if state.step < 0:
        line.begin(recipe.asked, recipe.pieces if recipe.slots else 0)
    while state.step < len(recipe.steps):
        step = recipe.steps[state.step]
        need = recipe.need()
        look = 0
        while not line.reached(need):
            look += 1
            if look > looks:
                return False
        if step.stage and not state.agreed:
            line.agree(recipe.after)
            state.agreed = 1
        slot = line.slot_of(step.piece)
        for act in step.acts:
            if isinstance(act, Combine):
                _combine(recipe, act, x, into, slot)
            else:
                copy(_address(recipe, act.to, x, into, slot), _address(recipe, act.source, x, into, slot), act.bytes_)
        line.tick()
        if recipe.slots and step.stage == recipe.last:
            state.free[slot] = state.count
        state.step += 1
    state.step = -1
    return True


def _address(recipe: Recipe, place: Place, x: Tensor, into: Tensor, slot: int) -> int:
    if place.where == X:
        return x.data_ptr() + place.offset
    if place.where == INTO:
        return into.data_ptr() + place.offset
    member = place.where - MEMBER
    start = recipe.peers[member].data_ptr() if recipe.peers else recipe.line.address(member, slot)
    return start + place.offset


def _values(recipe: Recipe, place: Place, elements: int, x: Tensor, into: Tensor, slot: int) -> Tensor:
    low = place.offset // recipe.dtype.itemsize
    if place.where == X:
        whole = x
    elif place.where == INTO:
        whole = into
    elif recipe.peers:
        whole = recipe.peers[place.where - MEMBER]
    else:
        return recipe.line.parts(slot, recipe.dtype, low, low + elements)[place.where - MEMBER]
    return whole if low == 0 and elements == len(whole) else whole[low : low + elements]


def _combine(recipe: Recipe, act: Combine, x: Tensor, into: Tensor, slot: int) -> None:
    """In stretches, so that what lies in between stays in cache and its memory is small."""
    line, dtype = recipe.line, recipe.dtype
    most = line.slot // dtype.itemsize
    to = _values(recipe, act.to, act.elements, x, into, slot)
    parts = [_values(recipe, part, act.elements, x, into, slot) for part in act.parts]
    for low in range(0, act.elements, most):
        some = [part[low : low + most] for part in parts] if act.elements > most else parts
        out = to[low : low + most] if act.elements > most else to
        combine(some, out, recipe.op, act.accumulate, lambda: line.spare(dtype, len(out)))  # noqa: B023  (called at once)


# -- compiled ----------------------------------------------------------------------------------------------------------


class _Recipe(ctypes.Structure):
    """Recipe of steps.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("steps", "acts", "places", "peers", "after")),
        *((name, ctypes.c_int64) for name in ("length", "pieces", "slots", "fills", "last", "dtype", "op", "afters")),
        ("asked", ctypes.c_uint64),
    ]


@cache
def library() -> Any:
    """The compiled steps, or None if they were not built."""
    for path in sorted(Path(__file__).parent.glob("_steps*.so")):
        try:
            found = ctypes.CDLL(str(path))
        except OSError:  # built for another machine
            continue
        found.advance.argtypes = [ctypes.POINTER(State), ctypes.POINTER(_Recipe), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        found.advance.restype = ctypes.c_int64
        return found
    return None


def _compiled(recipe: Recipe) -> Carrier:
    """The recipe as steps.c reads it: arrays of 8-byte words."""
    steps: list[tuple[int, ...]] = []
    acts: list[tuple[int, ...]] = []
    places: list[Place] = []
    for step in recipe.steps:
        steps.append((step.stage, step.piece, step.previous, len(acts), len(step.acts)))
        for act in step.acts:
            if isinstance(act, Combine):
                acts.append((1, act.elements, int(act.accumulate), *act.to, len(places), len(act.parts)))
                places += act.parts
            else:
                acts.append((0, act.bytes_, 0, *act.to, len(places), 1))
                places.append(act.source)
    peers = [peer.data_ptr() for peer in recipe.peers] if recipe.peers else None
    held = [_words(rows) for rows in (steps, acts, places, peers or [], recipe.after)]
    start = [array.ctypes.data for array in held]
    as_c = _Recipe(
        *(*start[:3], start[3] if peers else None, start[4], len(steps), recipe.pieces, recipe.slots, recipe.fills, recipe.last),
        *(DTYPES.index(recipe.dtype) if recipe.dtype in DTYPES else 0, OPERATIONS.index(recipe.op) if recipe.op in OPERATIONS else 0),
        *(len(recipe.after), recipe.asked),
    )
    advance, state, given = library().advance, ctypes.byref(recipe.line.state), ctypes.byref(as_c)

    def carry(recipe: Recipe, x: Tensor, into: Tensor, looks: int, held: object = (held, as_c)) -> bool:
        answer = advance(state, given, x.data_ptr(), into.data_ptr(), looks)
        if answer == MISMATCH:
            recipe.line.agree(recipe.after)
        return bool(answer == DONE)

    return carry


def _words(rows: Sequence[Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(np.array(rows, dtype=np.int64))
