"""Frozen parameters that a checkpoint leaves out: a number for each tells whether those here are those it was trained with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from stretto.checkpoint.manifest import Manifest
from stretto.checkpoint.parts import DTYPES, Part
from stretto.errors import JobError
from stretto.layout.layout import Box, Shape

#: The fact of a checkpoint that holds trained tensors only: name of each frozen parameter -> [dtype, shape, number].
FACT = "frozen"
#: Elements looked at together.
PIECE = 1 << 20
BITS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})
#: Odd, and its bits look like noise (2**64 divided by the golden ratio; Knuth, volume 3, section 6.4).
SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
WORD = (1 << 64) - 1


def is_frozen(part: Part) -> bool:
    return part.name.startswith("model/") and not part.trainable


def numbers(parts: Sequence[Part], join: Callable[[dict[str, int]], list[dict[str, int]]], dtypes: Mapping[str, str]) -> dict[str, int]:
    """A number for each of these tensors that is the same however it is cut: the sum over its elements of bits times place, mod 2**64.

    dtypes: in which each is looked at, if not its own. join: hands every rank's numbers to all of them. Collective.
    """
    mine: dict[str, int] = {}
    for part in parts:
        dtype, total = DTYPES[dtypes.get(part.name, part.dtype)], 0
        start, stop = part.share if part.speaks else (0, 0)
        flat = part.values.detach().reshape(-1)
        for low in range(start, stop, PIECE):
            high, at = min(low + PIECE, stop), low
            for box in replace(part, bounds=(low, high), index=0).shared_boxes():
                bits = flat[at : at + box.elements].to("cpu", dtype).contiguous().view(BITS[dtype.itemsize]).to(torch.int64)
                total += int((bits * ((2 * _places(part.shape, box) + 1) * SPREAD)).sum())
                at += box.elements
        mine[part.name] = total & WORD
    found: dict[str, int] = {}
    for of_rank in join(mine):
        for name, number in of_rank.items():
            found[name] = (found.get(name, 0) + number) & WORD
    return found


def fact(parts: Sequence[Part], join: Callable[[Any], list[Any]]) -> dict[str, list[Any]]:
    """What a checkpoint without these frozen parameters says of them, on all stages. Collective."""
    found = numbers(parts, join, {})
    about = {part.name: (part.dtype, list(part.shape)) for part in parts}
    known = {name: told for of_rank in join(about) for name, told in of_rank.items()}
    return {name: [*known[name], number] for name, number in found.items()}


def left_out(manifest: Manifest, named: Mapping[str, tuple[Shape, bool]]) -> dict[str, str]:
    """Frozen parameters of the model that the checkpoint has left out, with their dtype there. named: shape of each tensor of the model
    and whether it is trained."""
    told = manifest.facts.get(FACT) or {}
    return {
        name: dtype for name, (dtype, shape, _) in told.items() if name in named and not named[name][1] and tuple(shape) == named[name][0]
    }


def check_same(manifest: Manifest, path: str, parts: Sequence[Part], names: Mapping[str, str], join: Callable[[Any], list[Any]]) -> None:
    """JobError if frozen parameters here are not those with which the rest was trained. Collective.

    What is held in fewer bits here than there cannot be told apart, and is let through.
    """
    chosen = [part for part in parts if part.name in names and DTYPES[part.dtype].itemsize >= DTYPES[names[part.name]].itemsize]
    found = numbers(chosen, join, names)
    other = sorted(name for name, number in found.items() if number != manifest.facts[FACT][name][2])
    if other:
        raise JobError(
            f"{path} holds what was trained, and the frozen weights of this model are not those it was trained with: "
            f"{other[0]} differs ({len(other)} in all); load the model that it began with, then this"
        )


def _places(shape: Shape, box: Box) -> Tensor:
    """Row-major number in the whole tensor of each element of a box, in its order."""
    found, stride = torch.zeros(1, dtype=torch.int64), 1
    for offset, n, whole in zip(reversed(box.offset), reversed(box.shape), reversed(shape), strict=True):
        found = (torch.arange(offset, offset + n, dtype=torch.int64)[:, None] * stride + found[None, :]).reshape(-1)
        stride *= whole
    return found
