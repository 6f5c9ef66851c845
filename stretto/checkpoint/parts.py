"""Part: what one rank holds of a named tensor; and the one host copy through which parts go to files and come from them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.checkpoint.manifest import ITEMSIZE
from stretto.layout.layout import Box, Shape, flat_boxes, split

#: torch's dtype -> safetensors' name of it.
NAMES = MappingProxyType(
    {
        torch.float64: "F64",
        torch.int64: "I64",
        torch.float32: "F32",
        torch.int32: "I32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
    }
)
DTYPES = MappingProxyType({name: dtype for dtype, name in NAMES.items()})
#: Copies of fewer bytes than this are not shared out among those who hold them: one of them does it.
WORTH_SHARING = 1 << 16


@dataclass(frozen=True)
class Part:
    """What this rank holds of one named tensor of `shape`.

    values: of any shape; its elements, in order, are those of `boxes`, one box after another. bounds: where these elements are
    shared out among the ranks that hold the very same (copies), of which this is number `index`: each writes, and reads, only
    its share. axes: along which these copies stand. speaks: whether shares of this rank are written at all (else other ranks,
    that cut the tensor otherwise, do it).
    """

    name: str
    shape: Shape
    boxes: tuple[Box, ...]
    values: Tensor
    bounds: tuple[int, ...]
    index: int = 0
    axes: tuple[str, ...] = ()
    speaks: bool = True
    trainable: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        return NAMES[self.values.dtype]

    @property
    def share(self) -> tuple[int, int]:
        """[start, stop) of my elements that are my share."""
        return self.bounds[self.index], self.bounds[self.index + 1]

    def shared_boxes(self) -> tuple[Box, ...]:
        """The boxes of my share, in its order."""
        start, stop = self.share
        found, at = [], 0
        for box in self.boxes:
            low, high = max(start - at, 0), min(stop - at, box.elements)
            for piece in flat_boxes(box.shape, low, high):
                found.append(Box(tuple(a + b for a, b in zip(box.offset, piece.offset, strict=True)), piece.shape))
            at += box.elements
        return tuple(found)


def share_out(name: str, elements: int, itemsize: int, copies: int) -> tuple[int, ...]:
    """Where `elements` that `copies` ranks hold alike are cut: evenly, or, if they are few, all to one, a tensor's name says which."""
    if elements * itemsize >= WORTH_SHARING:
        return (*(split(elements, copies, i)[0] for i in range(copies)), elements)
    owner = zlib.crc32(name.encode()) % copies
    return (0,) * (owner + 1) + (elements,) * (copies - owner)


class Place(NamedTuple):
    """Where a part's share lies in the host copy, in bytes: its boxes one after another."""

    part: Part
    boxes: tuple[Box, ...]
    start: int
    stop: int


class HostCopy:
    """Memory for the shares of all parts of this rank, allocated once and used for every save (and load).

    It is laid out as the file will be: what is written first, and tensors of wider elements before those of narrower ones, so
    that each is aligned without a gap. On a GPU the memory is pinned.
    """

    def __init__(self, parts: Sequence[Part], pinned: bool) -> None:
        order = sorted(parts, key=lambda part: (not part.speaks, -ITEMSIZE[part.dtype]))
        self.places: list[Place] = []
        at = self.written = 0
        for part in order:
            start, stop = part.share
            bytes_ = (stop - start) * ITEMSIZE[part.dtype]
            at = at if part.speaks else -(-at // 8) * 8
            self.places.append(Place(part, part.shared_boxes(), at, at + bytes_))
            at += bytes_
            self.written = at if part.speaks else self.written
        self.buffer = torch.zeros(at, dtype=torch.uint8, pin_memory=pinned)  # zeros: the pages are there before the first step stalls
        self.pinned = pinned
        self._shape = _shape_of(parts)

    def fits(self, parts: Sequence[Part]) -> bool:
        """Whether these parts have the shapes that this memory was laid out for."""
        return self._shape == _shape_of(parts)

    def renew(self, parts: Sequence[Part]) -> None:
        """From now on the places are those of these parts, which fit."""
        named = {part.name: part for part in parts}
        self.places = [place._replace(part=named[place.part.name]) for place in self.places]

    def flat(self, place: Place) -> Tensor:
        """The host's values of a place, 1-D."""
        return self.buffer[place.start : place.stop].view(place.part.values.dtype)

    def take(self) -> None:
        """Copy every part's share in. The only thing for which a training step has to wait."""
        for place in self.places:
            start, stop = place.part.share
            if start < stop:
                self.flat(place).copy_(place.part.values.detach().reshape(-1)[start:stop], non_blocking=self.pinned)
        if self.pinned:
            torch.cuda.synchronize()


def _shape_of(parts: Sequence[Part]) -> list[tuple[object, ...]]:
    return [(part.name, part.shape, part.boxes, part.dtype, part.bounds, part.index, part.speaks) for part in parts]
