"""A safetensors file: a header in JSON, then the bytes of tensors without a gap. (github.com/huggingface/safetensors, "Format".)"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stretto.checkpoint.manifest import ITEMSIZE
from stretto.layout.layout import Box, Shape

LENGTH = struct.Struct("<Q")
#: A longer header is taken for nonsense, as safetensors' own reader does.
LONGEST = 100_000_000


class Item(NamedTuple):
    """A tensor of a file: bytes [start, stop) of the file."""

    dtype: str
    shape: Shape
    start: int
    stop: int


def key_of(name: str, shape: Shape, box: Box) -> str:
    """A box's name in its file: that of the tensor, and which part of it: model/norm.weight, model/head.weight[0:8,0:64]."""
    if box.shape == shape:
        return name
    return f"{name}[{','.join(f'{o}:{o + n}' for o, n in zip(box.offset, box.shape, strict=True))}]"


def header(tensors: Sequence[tuple[str, str, Shape]], about: Mapping[str, str]) -> bytes:
    """The first bytes of a file with these (key, dtype, shape), one after another; padded so that the tensors begin at a multiple of 64."""
    listed: dict[str, object] = {"__metadata__": dict(about)} if about else {}
    at = 0
    for key, dtype, shape in tensors:
        size = ITEMSIZE[dtype]
        for n in shape:
            size *= n
        listed[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(listed, ensure_ascii=False, separators=(",", ":")).encode()
    padded = -(-(LENGTH.size + len(text)) // 64) * 64
    return LENGTH.pack(padded - LENGTH.size) + text.ljust(padded - LENGTH.size)


def parse(text: bytes, begins: int) -> tuple[dict[str, Item], dict[str, str]]:
    """What a header (without its length) lists, and its metadata; `begins`: where the bytes of tensors begin. Raises ValueError."""
    listed = json.loads(text)
    about = listed.pop("__metadata__", {})
    items = {}
    for key, item in listed.items():
        low, high = item["data_offsets"]
        items[key] = Item(item["dtype"], tuple(item["shape"]), begins + low, begins + high)
    return items, about
