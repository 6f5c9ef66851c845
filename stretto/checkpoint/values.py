"""First values out of a Hugging Face folder: any part of any tensor, of which only the bytes that are asked for are read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import IO

import torch
from torch import Tensor

from stretto.checkpoint.huggingface import read_folder
from stretto.checkpoint.parts import DTYPES
from stretto.checkpoint.store import fill, place_of
from stretto.checkpoint.tensorfile import Item
from stretto.errors import JobError
from stretto.layout.layout import Box, Shape

#: Bytes read at a time.
SCRATCH = 1 << 22
#: Parts of rows shorter than this many bytes are not worth a call each: whole rows are read, and cut.
SHORT = 1 << 10


class FolderValues:
    """A Fill of named tensors, and of boxes of them, from the safetensors files of a folder. names: of the model -> of the files.

    bytes_read: counted. What is asked for is read from the system's cache where another rank of the machine has read it before.
    """

    def __init__(self, folder: str, names: Mapping[str, str]) -> None:
        self.store, self.name = place_of(folder)
        self.names = names
        self.tensors = read_folder(self.store, self.name).tensors
        absent = [name for name, stored in names.items() if stored not in self.tensors]
        if absent:
            raise JobError(f"{folder} holds no values for {', '.join(absent[:3])} ({len(absent)} in all); complete the folder")
        self.bytes_read = 0

    def __call__(self, name: str, start: int, out: Tensor) -> None:
        """Elements [start, start + out.numel()) of a tensor taken flat, converted to out's dtype. out: contiguous."""
        file, item = self.tensors[self.names[name]]
        step = SCRATCH // DTYPES[item.dtype].itemsize
        with self.store.open(f"{self.name}/{file}") as opened:
            for low in range(0, out.numel(), step):
                part = out.view(-1)[low : low + step]
                self._read(opened, file, item, [start + low], part.numel(), part)

    def box(self, name: str, box: Box, out: Tensor) -> None:
        """A box of a tensor. out: contiguous, of the box's shape."""
        file, item = self.tensors[self.names[name]]
        partial = [d for d, (n, whole) in enumerate(zip(box.shape, item.shape, strict=True)) if n != whole]
        outer = max(partial, default=0)  # what lies in the dims from here on is one range of the file
        run = math.prod(box.shape[outer:])
        with self.store.open(f"{self.name}/{file}") as opened:
            if outer and run * DTYPES[item.dtype].itemsize < SHORT:
                self._whole_rows(opened, file, item, box, out)
                return
            rows = itertools.product(*(range(o, o + n) for o, n in zip(box.offset[:outer], box.shape[:outer], strict=True)))
            starts = [_flat((*row, *box.offset[outer:]), item.shape) for row in rows]
            self._read(opened, file, item, starts, run, out.view(-1))

    def _whole_rows(self, opened: IO[bytes], file: str, item: Item, box: Box, out: Tensor) -> None:
        row = math.prod(item.shape[1:])
        step = max(1, SCRATCH // (row * DTYPES[item.dtype].itemsize))
        inner = tuple(slice(o, o + n) for o, n in zip(box.offset[1:], box.shape[1:], strict=True))
        for first in range(0, box.shape[0], step):
            rows = min(step, box.shape[0] - first)
            whole = torch.empty(rows * row, dtype=out.dtype)
            self._read(opened, file, item, [(box.offset[0] + first) * row], whole.numel(), whole)
            out[first : first + rows].copy_(whole.view(rows, *item.shape[1:])[(slice(None), *inner)])

    def _read(self, opened: IO[bytes], file: str, item: Item, starts: Sequence[int], run: int, out: Tensor) -> None:
        """Runs of `run` elements of a tensor, which begin at these, one after another to `out` [len(starts) * run]."""
        dtype, path = DTYPES[item.dtype], self.store.path(f"{self.name}/{file}")
        straight = out.dtype == dtype and out.device.type == "cpu"
        target = out if straight else torch.empty(out.numel(), dtype=dtype)
        view, size = memoryview(target.view(torch.uint8).numpy()), run * dtype.itemsize  # type: ignore[arg-type]
        for number, start in enumerate(starts):
            fill(opened, item.start + start * dtype.itemsize, view[number * size : (number + 1) * size], path)
        self.bytes_read += len(view)
        if not straight:
            out.copy_(target)


def _flat(index: Shape, shape: Shape) -> int:
    return sum(i * math.prod(shape[d + 1 :]) for d, i in enumerate(index))
