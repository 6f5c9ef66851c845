"""A Hugging Face folder: config.json, and safetensors files, one or several with an index; written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.checkpoint.manifest import ITEMSIZE
from stretto.checkpoint.store import Store, fill
from stretto.checkpoint.tensorfile import LENGTH, LONGEST, Item, header, parse
from stretto.errors import Damaged, JobError
from stretto.layout.layout import Shape

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
#: Bytes of tensors a file has at most (if it has two): what transformers chooses itself.
SHARD = 5 * 10**9
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Listed(NamedTuple):
    """A tensor that is to be written; dtype: safetensors' name."""

    name: str
    dtype: str
    shape: Shape

    @property
    def bytes_(self) -> int:
        return torch.Size(self.shape).numel() * ITEMSIZE[self.dtype]


def write_folder(
    store: Store, name: str, config: Mapping[str, Any], listed: Sequence[Listed], values: Iterable[Tensor], shard: int = SHARD
) -> dict[str, int]:
    """Write a folder with these tensors, whose values come in the same order; returns the bytes of each file. One tensor is held at a
    time. Raises JobError if there is something of that name already."""
    if name in store.folders():
        raise JobError(f"{store.path(name)} is there already; write a folder that does not exist")
    temporary = store.temporary(name, uuid.uuid4().hex[:8])
    try:
        sizes = _write_all(store, temporary, listed, values, shard)
        dtype = max(DTYPES.keys() & {tensor.dtype for tensor in listed}, key=lambda one: ITEMSIZE[one], default=None)
        text = _json({**config, "dtype": DTYPES[dtype]} if dtype else config)
        store.commit(temporary, name, text, last=CONFIG)
    except BaseException:
        clear(store, temporary)
        raise
    return {**sizes, CONFIG: len(text)}


def _write_all(store: Store, folder: str, listed: Sequence[Listed], values: Iterable[Tensor], shard: int) -> dict[str, int]:
    """The files of tensors, and their index if there are several; the bytes of each."""
    files = _shared_out(listed, shard)
    coming = iter(values)
    sizes: dict[str, int] = {}
    for file, tensors in files.items():
        head = header(tensors, {"format": "pt"})
        store.write(f"{folder}/{file}", _chunks(head, tensors, coming))
        sizes[file] = len(head) + sum(tensor.bytes_ for tensor in tensors)
    if len(files) > 1:
        where = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
        index = {"metadata": {"total_size": sum(tensor.bytes_ for tensor in listed)}, "weight_map": where}
        sizes[INDEX] = _write(store, f"{folder}/{INDEX}", index)
    return sizes


def clear(store: Store, folder: str) -> None:
    """Remove what there is of a folder that will not be complete; not being able to is no second error."""
    with contextlib.suppress(OSError):
        if folder in store.folders():
            store.remove(folder)


def _shared_out(listed: Sequence[Listed], shard: int) -> dict[str, list[Listed]]:
    """Which file has which tensors: in their order, each file as full as it may be."""
    parts: list[list[Listed]] = [[]]
    room = shard
    for tensor in listed:
        if parts[-1] and tensor.bytes_ > room:
            parts.append([])
            room = shard
        parts[-1].append(tensor)
        room -= tensor.bytes_
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": part for number, part in enumerate(parts, 1)}


def _chunks(head: bytes, tensors: Sequence[Listed], coming: Iterator[Tensor]) -> Iterator[memoryview]:
    yield memoryview(head)
    for tensor in tensors:
        value = next(coming).detach().cpu().contiguous()
        assert tuple(value.shape) == tensor.shape and value.element_size() == ITEMSIZE[tensor.dtype], f"{tensor}, and it is {value.shape}"
        yield memoryview(value.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _write(store: Store, name: str, value: Any) -> int:
    text = _json(value)
    store.write(name, [memoryview(text)])
    return len(text)


class Folder(NamedTuple):
    """What a folder holds: tensor -> (file, where in it)."""

    config: dict[str, Any]
    tensors: dict[str, tuple[str, Item]]
    files: dict[str, int]


def read_folder(store: Store, name: str) -> Folder:
    """What is in a folder; no values are read. Raises JobError for what is no such folder, Damaged for one that is not whole."""
    config: dict[str, Any] = json.loads(store.read(f"{name}/{CONFIG}"))
    try:
        named = json.loads(store.read(f"{name}/{INDEX}"))["weight_map"]
    except FileNotFoundError:
        named = {}
    tensors: dict[str, tuple[str, Item]] = {}
    files: dict[str, int] = {}
    for file in dict.fromkeys(named.values()) or (SINGLE,):
        path = store.path(f"{name}/{file}")
        try:
            files[file] = size = store.size(f"{name}/{file}")
        except FileNotFoundError:
            raise JobError(f"{path} is not there; complete the folder: it needs {SINGLE}, or {INDEX} and the files that it names") from None
        with store.open(f"{name}/{file}") as opened:
            begins = bytearray(LENGTH.size)
            fill(opened, 0, memoryview(begins), path)
            (length,) = LENGTH.unpack(begins)
            if length > min(LONGEST, size):
                raise Damaged(f"{path} is no safetensors file, or was cut short: its header would have {length} bytes")
            text = bytearray(length)
            fill(opened, LENGTH.size, memoryview(text), path)
        items, _ = parse(bytes(text), LENGTH.size + length)
        for key, item in items.items():
            if item.stop > size:
                raise Damaged(f"{path} was cut short: {key} ends at byte {item.stop} of {size}")
            tensors[key] = (file, item)
    absent = [key for key in named if key not in tensors]
    if absent:
        raise Damaged(f"{store.path(name)}: {absent[0]} is in {INDEX} and in no file ({len(absent)} such tensors)")
    return Folder(config, tensors, files)
