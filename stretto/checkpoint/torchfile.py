"""Files of torch.save, read without running what they say.

Such a file is a zip archive, stored and not compressed: `data.pkl`, a pickle of everything but the values, and `data/KEY`, the bytes of
each storage (PyTorch, "Serialization semantics"). A pickle can name any function to be called. Here it can build plain values and tell
where tensors lie; an object of any other class becomes a Named, which only remembers what it was given.
"""

from __future__ import annotations

import argparse
import collections
import io
import math
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import IO, Any, NamedTuple

import torch

from stretto.checkpoint.parts import DTYPES, NAMES
from stretto.checkpoint.store import CHUNK, fill
from stretto.errors import Damaged, JobError
from stretto.layout.layout import Shape

#: Bytes of a zip's local header before the file's name; the lengths of name and extra field are its last two numbers.
LOCAL_HEADER = 30
#: torch's names of typed storages. (Newer dtypes have untyped ones, and say their dtype with the tensor.)
STORAGES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "DoubleStorage": torch.float64,
        "FloatStorage": torch.float32,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "LongStorage": torch.int64,
        "IntStorage": torch.int32,
        "ShortStorage": torch.int16,
        "CharStorage": torch.int8,
        "ByteStorage": torch.uint8,
        "BoolStorage": torch.bool,
    }
)


class Named:
    """Stands for an object of a class that a file names: nothing of that class is loaded or run."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Named:
        made = super().__new__(cls)
        made.args, made.state, made.items = args, None, []
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args: tuple[Any, ...]
        self.state: Any
        self.items: list[Any]

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            self.__dict__.update(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        self.items.append(value)

    def extend(self, values: Any) -> None:
        self.items.extend(values)


class Record(NamedTuple):
    """Bytes [start, start + bytes_) of a file, and the CRC-32 that its archive has of them."""

    start: int
    bytes_: int
    crc: int


class Kept(NamedTuple):
    """A tensor in a file: elements from number `first` of a record, row by row. dtype: safetensors' name."""

    dtype: str
    shape: Shape
    record: Record
    first: int

    @property
    def whole(self) -> bool:
        """Whether it is all of its record, so that the record's checksum is its own."""
        return self.first == 0 and self.record.bytes_ == math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Window(io.RawIOBase):
    """Bytes [start, start + length) of an open file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self.file, self.start, self.length, self.at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.length)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(self.length - self.at, 0)]
        self.file.seek(self.start + self.at)
        n: int = self.file.readinto(view) if len(view) else 0  # type: ignore[attr-defined]
        self.at += n
        return n


def read_archive(file: IO[bytes], start: int, length: int, path: str) -> Any:
    """What was saved at bytes [start, start + length) of an open file; each tensor as a Kept. path: for messages.

    Raises Damaged, JobError.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(Window(file, start, length), 1 << 16)) as archive:
            listed = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if "data.pkl" not in listed:
                raise JobError(f"{path} is an archive, and not one of torch.save: it has no data.pkl")
            if "byteorder" in listed and archive.read(listed["byteorder"]) != b"little":
                raise JobError(f"{path} was written on a machine of another byte order; save it on a little-endian one")
            text = archive.read(listed["data.pkl"])
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise Damaged(f"{path} is no archive of torch.save, or is damaged or cut short ({error})") from None

    def record(key: str) -> Record:
        info = listed.get(f"data/{key}")
        if info is None or info.compress_type != zipfile.ZIP_STORED:
            raise Damaged(f"{path}: its archive does not hold data/{key} as it is")
        head = memoryview(bytearray(LOCAL_HEADER))
        at = start + info.header_offset
        fill(file, at, head, path)
        names = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        return Record(at + LOCAL_HEADER + names, info.file_size, info.CRC)

    return read_pickle(text, path, record)


def read_pickle(text: bytes, path: str, record: Any = None) -> Any:
    """What a pickle says. record: from the key of a storage to its Record. Raises Damaged."""
    try:
        return _Reader(text, record).load()
    except (JobError, Damaged):
        raise
    except Exception as error:  # a broken pickle may raise anything
        raise Damaged(f"{path} cannot be read: {type(error).__name__}: {error}") from None


def verify(file: IO[bytes], record: Record, path: str) -> None:
    """Read all of a record of an open file, against its archive's checksum. Raises Damaged."""
    view, crc = memoryview(bytearray(min(CHUNK, record.bytes_))), 0
    for at in range(0, record.bytes_, CHUNK):
        part = view[: min(CHUNK, record.bytes_ - at)]
        fill(file, record.start + at, part, path)
        crc = zlib.crc32(part, crc)
    if crc != record.crc:
        raise Damaged(f"{path} is damaged: bytes {record.start} to {record.start + record.bytes_} do not have their archive's checksum")


class _Storage(NamedTuple):
    dtype: torch.dtype | None
    record: Record


class _Reader(pickle.Unpickler):
    """An unpickler to which all names mean plain values, tensors or Named."""

    def __init__(self, text: bytes, record: Any) -> None:
        super().__init__(io.BytesIO(text))
        self.record = record

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module in ("torch", "torch.storage"):
            if name in STORAGES:
                return STORAGES[name]
            if isinstance(getattr(torch, name, None), torch.dtype):
                return getattr(torch, name)
        return type(name, (Named,), {"__module__": module})

    def persistent_load(self, pid: Any) -> _Storage:
        _, kind, key, _, _ = pid
        return _Storage(kind if isinstance(kind, torch.dtype) else None, self.record(key))


def _tensor(storage: _Storage, first: int, shape: Any, strides: Any, *others: Any) -> Kept:
    given = others[2] if len(others) > 2 and isinstance(others[2], torch.dtype) else storage.dtype
    if given is None or given not in NAMES:
        raise JobError(f"a tensor of dtype {given} is not understood")
    expected, step = [], 1
    for n in reversed(shape):
        expected.append(step)
        step *= n
    same = all(n == 1 or a == b for n, a, b in zip(shape, strides, reversed(expected), strict=True))
    if not same and math.prod(shape):
        raise JobError(f"a tensor of shape {list(shape)} with strides {list(strides)} does not lie row by row; save it .contiguous()")
    return Kept(NAMES[given], tuple(shape), storage.record, first)


_KNOWN: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        ("torch._utils", "_rebuild_tensor_v2"): _tensor,
        ("torch._utils", "_rebuild_tensor_v3"): _tensor,
        ("torch._utils", "_rebuild_parameter"): lambda tensor, *others: tensor,
        ("torch._utils", "_rebuild_parameter_with_state"): lambda tensor, *others: tensor,
        ("torch._tensor", "_rebuild_from_type_v2"): lambda make, kind, args, state: make(*args),  # with attributes, or of a subclass
        ("torch", "Size"): tuple,
        ("collections", "OrderedDict"): collections.OrderedDict,  # a state_dict has an attribute, which a dict cannot
        ("collections", "defaultdict"): lambda *args: collections.defaultdict(),
        ("builtins", "set"): set,
        ("argparse", "Namespace"): argparse.Namespace,
    }
)
