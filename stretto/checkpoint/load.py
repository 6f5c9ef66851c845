"""Loading: which bytes of which files fill this rank's boxes; only these are read, and none is used before its checksum held."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO, NamedTuple

import torch
from torch import Tensor

from stretto.checkpoint.manifest import BLOCK, ITEMSIZE, NAME, Manifest, Stored
from stretto.checkpoint.names import Prints, alias_table
from stretto.checkpoint.parts import DTYPES, HostCopy, Part
from stretto.checkpoint.store import Store, fill
from stretto.checkpoint.torchfile import Kept, read_archive
from stretto.errors import Damaged, JobError
from stretto.layout.layout import Box, Read, Shape, reads

#: Bytes read at a time where they do not go straight to their place; a row of a tensor that is longer is read whole.
SLAB = 1 << 25


def read_manifest(store: Store, name: str) -> Manifest:
    """The manifest of a checkpoint, and that its files are there, as long as they were. Raises JobError, Damaged."""
    path = store.path(f"{name}/{NAME}")
    try:
        text = store.read(f"{name}/{NAME}").decode(errors="replace")
    except FileNotFoundError:
        raise JobError(f"{store.path(name)} holds no checkpoint ({NAME} is not there); give the folder of one, as step-00000050") from None
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error.strerror or error}") from None
    manifest = Manifest.from_json(text, path)
    for file, length in manifest.files.items():
        here = store.path(f"{name}/{file}")
        try:
            found = store.size(f"{name}/{file}")
        except OSError:
            raise Damaged(f"{here} is missing, and the checkpoint needs it") from None
        if found != length:
            raise Damaged(f"{here} has {found} bytes, and the manifest says {length}: it was cut short or changed")
    return manifest


def prints(store: Store, folder: str, manifest: Manifest, name: str) -> Prints:
    """What is the same for two tensors that were stored alike and are equal: boxes and checksums."""
    entry = manifest.tensors[name]
    found: Prints = []
    for stored in sorted(entry.stored):
        sums = stored.sums
        if stored.packed:
            path = store.path(f"{folder}/{stored.file}")
            with store.open(f"{folder}/{stored.file}") as file:
                kept = open_archive(file, stored, name, entry.dtype, path)
                sums = (kept.record.crc,) if kept.whole else ()
        found.append((entry.shape, entry.dtype, stored.box, sums or name))
    return found


def whole(store: Store, folder: str, manifest: Manifest, name: str) -> Tensor:
    """A tensor of a checkpoint, from all its boxes. Raises Damaged."""
    entry = manifest.tensors[name]
    boxes = (Box((0,) * len(entry.shape), entry.shape),)
    part = Part(name, entry.shape, boxes, torch.empty(0, dtype=DTYPES[entry.dtype]), (0, torch.Size(entry.shape).numel()))
    host = HostCopy([part], pinned=False)
    fetch(store, folder, manifest, host)
    return host.flat(host.places[0]).view(entry.shape)


def fetch(store: Store, folder: str, manifest: Manifest, host: HostCopy) -> int:
    """Fill the host copy: every place whose part the checkpoint has. Returns the bytes read. Raises Damaged naming tensor and file."""
    aliases = alias_table(manifest)
    jobs: list[Copy] = []
    for place in host.places:
        name = place.part.name if place.part.name in manifest.tensors else aliases.get(place.part.name, "")
        entry = manifest.tensors.get(name)
        if entry is None:
            continue
        flat = host.flat(place)
        sources = {str(i): (stored.box,) for i, stored in enumerate(entry.stored)}
        start = 0
        into: dict[Box, Tensor] = {}
        for box in place.boxes:
            into[box] = flat[start : start + box.elements]
            start += box.elements
        for read in reads(place.boxes, sources):
            jobs.append(Copy(name, entry.dtype, manifest.block, entry.stored[int(read.source)], read, into[read.wanted]))
    jobs.sort(key=lambda job: (job.stored.file, job.stored.start))
    total = 0
    scratch = torch.empty(0, dtype=torch.uint8)
    with ExitStack() as opened:
        files: dict[str, IO[bytes]] = {}
        for job in jobs:
            if job.stored.file not in files:
                files[job.stored.file] = opened.enter_context(store.open(f"{folder}/{job.stored.file}"))
            path = store.path(f"{folder}/{job.stored.file}")
            if job.stored.packed:
                job = job.unpacked(files[job.stored.file], path)
            for slab in job.slabs():
                size = slab.high - slab.low
                if slab.straight is None and len(scratch) < size:
                    scratch = torch.empty(size, dtype=torch.uint8)
                target = scratch[:size] if slab.straight is None else slab.straight
                view = memoryview(target.numpy())  # type: ignore[arg-type]
                fill(files[job.stored.file], job.stored.start + slab.low, view, path)
                _check(job, slab.low, view, path)
                if slab.straight is None:
                    slab.copy(target)
                total += size
    return total


class Slab(NamedTuple):
    """Bytes [low, high) of a stored box, whole blocks. straight: the memory that is to hold just these; None: `copy` takes from them."""

    low: int
    high: int
    straight: Tensor | None
    copy: Take


class Copy(NamedTuple):
    """One Read of one stored box into `into`, the 1-D memory of the whole wanted box."""

    name: str
    dtype: str
    block: int
    stored: Stored
    read: Read
    into: Tensor

    def unpacked(self, file: IO[bytes], path: str) -> Copy:
        """The same, from where the box's bytes lie in its archive, with the archive's checksum of them. Raises Damaged."""
        kept = open_archive(file, self.stored, self.name, self.dtype, path)
        start = kept.record.start + kept.first * ITEMSIZE[self.dtype]
        stored = Stored(self.stored.box, self.stored.file, start, ())
        if kept.whole:
            return self._replace(stored=stored._replace(sums=(kept.record.crc,)), block=max(kept.record.bytes_, 1))
        return self._replace(stored=stored, block=BLOCK)

    def slabs(self) -> Iterator[Slab]:
        """The read in pieces that fit in a buffer, split along the first dim of the stored box that is longer than 1."""
        box, wanted, common = (Box(b.offset or (0,), b.shape or (1,)) for b in (self.stored.box, self.read.wanted, self.read.box))
        along = next((d for d, n in enumerate(box.shape) if n > 1), len(box.shape) - 1)
        there = tuple(c - b for c, b in zip(common.offset, box.offset, strict=True))
        here = tuple(c - w for c, w in zip(common.offset, wanted.offset, strict=True))
        if common.shape[along + 1 :] == box.shape[along + 1 :] == wanted.shape[along + 1 :]:
            row = math.prod(box.shape[along + 1 :])
            start = sum(i * math.prod(wanted.shape[d + 1 :]) for d, i in enumerate(here))
            return self._range(there[along] * row, common.elements, self.into[start : start + common.elements])
        return self._rows(box, common, along, there, self.into.view(wanted.shape)[_slices(here, common.shape)])

    def _range(self, start: int, elements: int, target: Tensor) -> Iterator[Slab]:
        """Elements of the box that follow each other, to `target` [elements]: whole blocks go straight there, the ends by a buffer."""
        size, whole = ITEMSIZE[self.dtype], self.stored.box.elements * ITEMSIZE[self.dtype]
        at, stop = start * size, (start + elements) * size
        while at < stop:
            low = at // self.block * self.block
            inside = at == low and min(low + self.block, whole) <= stop
            most = max(self.block, SLAB // self.block * self.block)
            last = stop if stop == whole else stop // self.block * self.block
            high = min(low + most, last) if inside else min(low + self.block, whole)
            end = min(high, stop)
            goal = target[at // size - start : end // size - start]
            straight = inside and DTYPES[self.dtype] == goal.dtype
            yield Slab(low, high, goal.view(torch.uint8) if straight else None, Take(at - low, end - low, self.dtype, (-1,), (), goal))
            at = end

    def _rows(self, box: Box, common: Box, along: int, there: Shape, target: Tensor) -> Iterator[Slab]:
        """A part of each of some rows of the box, by a buffer that holds whole rows."""
        size, shape = ITEMSIZE[self.dtype], box.shape[along + 1 :]
        row, whole = math.prod(shape) * size, box.elements * size
        inner = _slices(there[along + 1 :], common.shape[along + 1 :])
        step = max(1, max(SLAB, self.block) // row)
        for first in range(0, common.shape[along], step):
            rows = min(step, common.shape[along] - first)
            start, stop = (there[along] + first) * row, (there[along] + first + rows) * row
            low, high = start // self.block * self.block, min(-(-stop // self.block) * self.block, whole)
            goal = target.narrow(along, first, rows)
            yield Slab(low, high, None, Take(start - low, stop - low, self.dtype, (rows, *shape), inner, goal))


class Take(NamedTuple):
    """Bytes [start, stop) of a buffer are elements of `dtype`, in `shape`; of each row the part `inner` goes to `goal`."""

    start: int
    stop: int
    dtype: str
    shape: Shape
    inner: tuple[slice, ...]
    goal: Tensor

    def __call__(self, data: Tensor) -> None:
        found = data[self.start : self.stop].view(DTYPES[self.dtype]).view(self.shape)[(slice(None), *self.inner)]
        self.goal.copy_(found.reshape(self.goal.shape))


def _slices(offset: Shape, shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))


def open_archive(file: IO[bytes], stored: Stored, name: str, dtype: str, path: str) -> Kept:
    """The tensor in the archive at `stored`, which is to have the box's shape and this dtype. Raises Damaged."""
    kept = read_archive(file, stored.start, stored.packed, path)
    if not isinstance(kept, Kept) or kept.dtype != dtype or math.prod(kept.shape) != stored.box.elements:
        found = f"{kept.dtype} {list(kept.shape)}" if isinstance(kept, Kept) else "no tensor"
        raise Damaged(f"{name}: {path} has {found} at byte {stored.start}, and {dtype} {list(stored.box.shape)} is to be there")
    return kept


def _check(job: Copy, low: int, view: memoryview, path: str) -> None:
    if not job.stored.sums:
        return
    for at in range(0, len(view), job.block):
        if zlib.crc32(view[at : at + job.block]) != job.stored.sums[(low + at) // job.block]:
            raise Damaged(f"{job.name} is damaged: its bytes in {path} do not have the checksum with which they were written")
