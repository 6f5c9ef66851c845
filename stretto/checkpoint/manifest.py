"""Manifest: what a checkpoint holds, and which box of which tensor lies where in which file. JSON; no torch.

A checkpoint is a folder of safetensors files with a manifest.json. Tensors have their whole shape and a name that no mesh knows
of; what a file holds are boxes of them. So a reader on any other mesh can tell which bytes fill its own boxes.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from stretto.errors import Damaged, JobError
from stretto.layout.layout import Box, Shape, reads

NAME = "manifest.json"
#: Schema of the file; a later stretto that writes what this one cannot read counts up.
VERSION = 1
#: Bytes under one checksum where this stretto writes: a reader of a part of a box reads, and checks, whole blocks.
BLOCK = 1 << 20
#: safetensors' names of dtypes -> bytes an element.
ITEMSIZE: Mapping[str, int] = MappingProxyType(
    {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
)


class Stored(NamedTuple):
    """A box of a tensor in a file: its bytes are [start, start + bytes_) of `file`; sums: CRC-32 of each BLOCK of them, if there are any.

    packed: 0, or (in folders of others) the bytes of an archive of torch.save that begins there and holds the box.
    """

    box: Box
    file: str
    start: int
    sums: tuple[int, ...]
    packed: int = 0


class Scalar(NamedTuple):
    """A tensor of no dims (an optimizer's count of steps), or a plain number (dtype ""): kept in the manifest itself."""

    dtype: str
    value: float | int | bool


@dataclass(frozen=True)
class Entry:
    """A whole tensor: its shape, dtype (safetensors' name) and where its boxes lie. aliases: other names of it (tied weights).

    trainable: of a parameter, whether it was trained.
    """

    shape: Shape
    dtype: str
    stored: tuple[Stored, ...]
    aliases: tuple[str, ...] = ()
    trainable: bool = True

    @property
    def bytes_(self) -> int:
        return math.prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """Everything a checkpoint holds.

    tensors: "model/NAME", "optimizer/NAME/STATE", "buffer/NAME", "rng/RANK/STREAM". scalars: by the same names. state: counters
    and the like. notes: what whoever saved wanted back. job: the resolved job. files: bytes of each. block: bytes under a checksum.
    """

    step: int
    mesh: str
    ranks: int
    tensors: Mapping[str, Entry]
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    files: Mapping[str, int] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    block: int = BLOCK

    def check(self) -> None:
        """Every element of every tensor is stored exactly once. Raises Damaged."""
        for name, entry in self.tensors.items():
            boxes = tuple(stored.box for stored in entry.stored)
            whole = Box((0,) * len(entry.shape), entry.shape)
            held = sum(box.elements for box in boxes)
            if held != whole.elements:
                raise Damaged(f"{name}: {held} of its {whole.elements} elements would be stored")
            try:
                reads((whole,) if whole.elements else (), {"": boxes})
            except LookupError as error:
                raise Damaged(f"{name} would not be stored whole: {error}") from None

    def to_json(self) -> str:
        """A line a tensor; last a checksum over all that stands before it."""
        names = {file: number for number, file in enumerate(self.files)}
        tensors = {
            name: {
                "shape": entry.shape,
                "dtype": entry.dtype,
                **({"aliases": entry.aliases} if entry.aliases else {}),
                **({} if entry.trainable else {"trainable": False}),
                "boxes": [[names[s.file], s.start, s.box.offset, s.box.shape, [f"{crc:08x}" for crc in s.sums]] for s in entry.stored],
            }
            for name, entry in self.tensors.items()
        }
        head = {
            "format": "stretto checkpoint",
            "version": VERSION,
            "step": self.step,
            "mesh": self.mesh,
            "ranks": self.ranks,
            "block": self.block,
            "files": dict(self.files),
            "boxes are": "[number of the file, first byte in it, offset, shape, CRC-32 of each block of bytes]",
        }
        tail = {"scalars": self.scalars, "state": self.state, "notes": self.notes, "job": self.job, "facts": self.facts}
        lines = [f"{_text(key)}: {_text(value)}" for key, value in head.items()]
        lines.append('"tensors": {\n  ' + ",\n  ".join(f"{_text(name)}: {_text(value)}" for name, value in tensors.items()) + "\n }")
        lines += [f"{_text(key)}: {_text(value)}" for key, value in tail.items()]
        body = "{\n " + ",\n ".join(lines)
        return f'{body},\n "crc32": "{zlib.crc32(body.encode()):08x}"\n}}\n'

    @staticmethod
    def from_json(text: str, where: str) -> Manifest:
        """The manifest in `text`, found at `where` (for messages). Raises JobError for a schema not known here, Damaged for the rest."""
        try:
            read = json.loads(text)
            version, format_ = read["version"], read["format"]
        except (ValueError, KeyError, TypeError):
            raise Damaged(f"{where} cannot be read: it is no manifest of a checkpoint, or was cut short") from None
        if format_ != "stretto checkpoint":
            raise JobError(f"{where} is not the manifest of a stretto checkpoint (format {format_!r}); give the folder of one")
        if version != VERSION:
            raise JobError(f"{where} has schema version {version}, and this stretto reads version {VERSION}; install a newer stretto")
        body = text[: text.rindex(',\n "crc32"')] if ',\n "crc32"' in text else ""
        if f"{zlib.crc32(body.encode()):08x}" != read.get("crc32"):
            raise Damaged(f"{where} is damaged: its own checksum does not hold")
        names = list(read["files"])

        def stored(box: list[Any]) -> Stored:
            number, start, offset, shape, sums = box
            return Stored(Box(tuple(offset), tuple(shape)), names[number], start, tuple(int(crc, 16) for crc in sums))

        tensors = {
            name: Entry(
                tuple(entry["shape"]),
                entry["dtype"],
                tuple(stored(box) for box in entry["boxes"]),
                tuple(entry.get("aliases", ())),
                entry.get("trainable", True),
            )
            for name, entry in read["tensors"].items()
        }
        scalars = {name: Scalar(*value) for name, value in read["scalars"].items()}
        state, notes, job, facts = (read[key] for key in ("state", "notes", "job", "facts"))
        return Manifest(read["step"], read["mesh"], read["ranks"], tensors, scalars, read["files"], state, notes, job, facts, read["block"])


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
