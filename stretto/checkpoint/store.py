"""Store: where checkpoints lie. A folder of this machine or of its network, or an object store behind fsspec.

Names are paths below the store's root, with / between their parts. What is written is on the medium when `write` returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, Protocol

from stretto.checkpoint.claim import hold
from stretto.checkpoint.manifest import NAME
from stretto.errors import Damaged, JobError

#: Bytes handed to the system at a time.
CHUNK = 1 << 24


SYNC_FILE_RANGE_WRITE = 2  # <linux/fs.h>


class Store(Protocol):
    """What a checkpoint needs of the place where it lies."""

    where: str

    def temporary(self, name: str, token: str) -> str:
        """The name under which a folder that is to be called `name` is written; no two attempts (tokens) share one."""

    def commit(self, temporary: str, name: str, manifest: bytes, last: str = NAME) -> None:
        """The folder is complete: give it its last file, the manifest, and its name, in one step that happens or does not."""

    def write(self, name: str, chunks: Iterable[memoryview]) -> None: ...

    def read(self, name: str) -> bytes: ...

    def open(self, name: str) -> IO[bytes]:
        """A file to read from, without a buffer; see fill."""

    def size(self, name: str) -> int: ...

    def has(self, name: str) -> bool:
        """Whether there is a file of that name."""

    def folders(self) -> list[str]:
        """Names of the folders directly below the root, temporary ones too."""

    def complete(self, name: str) -> bool:
        """Whether the folder is there and has its manifest."""

    def rename(self, name: str, to: str) -> None: ...

    def remove(self, name: str) -> None:
        """Take a folder away. Whatever happens meanwhile, what is left of it does not count as complete."""

    def free(self) -> int | None:
        """Bytes that can still be written; None: nobody knows."""

    def claim(self) -> Callable[[], None]:
        """Make sure that it can be written, and that no other run writes there; what gives the claim up again.

        Raises JobError, OSError. Where nobody can tell of others, it is not told.
        """

    def path(self, name: str) -> str:
        """How a user would name it."""


class Disk:
    """What changes something on a local file system, each call a moment at which the machine may die: tests do so at every one."""

    def make(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def write(self, file: int, view: memoryview) -> int:
        return os.write(file, view)

    def hurry(self, file: int, start: int, length: int) -> None:
        """Let the system begin to bring these bytes to the medium, while more are made; else it begins at `sync`. Promises nothing."""
        begin = _sync_file_range()
        if begin is not None:
            begin(file, start, length, SYNC_FILE_RANGE_WRITE)

    def sync(self, file: int) -> None:
        os.fsync(file)

    def rename(self, path: Path, to: Path) -> None:
        os.rename(path, to)

    def remove(self, path: Path) -> None:
        if path.is_symlink():  # somebody keeps that checkpoint elsewhere
            path.unlink()
        else:
            shutil.rmtree(path)


class LocalStore:
    """A folder. What is not complete has a name that begins with a dot and ends in .tmp."""

    def __init__(self, root: Path, disk: Disk | None = None) -> None:
        self.root, self.disk = root, disk or Disk()
        self.where = str(root)

    def temporary(self, name: str, token: str) -> str:
        return f".{name}.{token}.tmp"

    def commit(self, temporary: str, name: str, manifest: bytes, last: str = NAME) -> None:
        self.write(f"{temporary}/{last}", [memoryview(manifest)])
        self._sync_folder(self.root / temporary)
        self.disk.rename(self.root / temporary, self.root / name)
        self._sync_folder(self.root)

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        path = self.root / name
        self.disk.make(path.parent)
        file = self.disk.create(path)
        try:
            written = 0
            for chunk in chunks:
                at = 0
                while at < len(chunk):
                    at += self.disk.write(file, chunk[at : at + CHUNK])
                self.disk.hurry(file, written, len(chunk))
                written += len(chunk)
            self.disk.sync(file)
        finally:
            os.close(file)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def open(self, name: str) -> IO[bytes]:
        return open(self.root / name, "rb", buffering=0)

    def size(self, name: str) -> int:
        return (self.root / name).stat().st_size

    def has(self, name: str) -> bool:
        return (self.root / name).is_file()

    def folders(self) -> list[str]:
        if not self.root.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self.root) if entry.is_dir())

    def complete(self, name: str) -> bool:
        return (self.root / name / NAME).is_file()

    def rename(self, name: str, to: str) -> None:
        self.disk.rename(self.root / name, self.root / to)
        self._sync_folder(self.root)

    def remove(self, name: str) -> None:
        if not name.endswith(".tmp"):
            going = self.temporary(name, "old")
            with contextlib.suppress(FileNotFoundError):
                self.disk.remove(self.root / going)
            self.rename(name, going)
            name = going
        self.disk.remove(self.root / name)

    def free(self) -> int | None:
        there = next((path for path in (self.root, *self.root.absolute().parents) if path.is_dir()), None)
        return None if there is None else shutil.disk_usage(there).free

    def claim(self) -> Callable[[], None]:
        self.disk.make(self.root)
        probe = self.root / self.temporary("probe", uuid.uuid4().hex[:8])
        probe.mkdir()
        probe.rmdir()
        return hold(
            self.root, f"{self.where}: another run saves its checkpoints there now; wait for its end, or write checkpoint.folder=DIR"
        )

    def path(self, name: str) -> str:
        return str(self.root / name)

    def _sync_folder(self, path: Path) -> None:
        file = os.open(path, os.O_RDONLY)
        try:
            self.disk.sync(file)
        finally:
            os.close(file)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], object] | None:
    """The call of Linux that begins to write a part of a file to its medium; None elsewhere."""
    found: Any = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform == "linux" else None
    if found is None:
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    begin: Callable[[int, int, int, int], object] = found
    return begin


class ObjectStore:
    """A place behind fsspec, such as s3://bucket/run. There is no rename: a folder is complete once it has its manifest, written last."""

    def __init__(self, files: Any, root: str, where: str) -> None:
        self.files, self.root, self.where = files, root.rstrip("/"), where.rstrip("/")

    def temporary(self, name: str, token: str) -> str:
        return name

    def commit(self, temporary: str, name: str, manifest: bytes, last: str = NAME) -> None:
        self.write(f"{name}/{last}", [memoryview(manifest)])

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        self.files.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)
        with self.files.open(self._at(name), "wb") as file:
            for chunk in chunks:
                for at in range(0, len(chunk), CHUNK):
                    file.write(chunk[at : at + CHUNK])

    def read(self, name: str) -> bytes:
        content: bytes = self.files.cat_file(self._at(name))
        return content

    def open(self, name: str) -> IO[bytes]:
        opened: IO[bytes] = self.files.open(self._at(name), "rb", cache_type="none")
        return opened

    def size(self, name: str) -> int:
        return int(self.files.size(self._at(name)))

    def has(self, name: str) -> bool:
        return bool(self.files.isfile(self._at(name)))

    def folders(self) -> list[str]:
        if not self.files.isdir(self.root):
            return []
        found = self.files.ls(self.root, detail=True)
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory")

    def complete(self, name: str) -> bool:
        return bool(self.files.exists(self._at(f"{name}/{NAME}")))

    def rename(self, name: str, to: str) -> None:
        self.files.mv(self._at(name), self._at(to), recursive=True)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.files.rm_file(self._at(f"{name}/{NAME}"))  # first: what is left is not complete
        with contextlib.suppress(FileNotFoundError):
            self.files.rm(self._at(name), recursive=True)

    def free(self) -> int | None:
        return None

    def claim(self) -> Callable[[], None]:
        return lambda: None

    def path(self, name: str) -> str:
        return f"{self.where}/{name}"

    def _at(self, name: str) -> str:
        return f"{self.root}/{name}"


def open_store(place: str | os.PathLike[str]) -> Store:
    """The store at a path, or at a URL that fsspec knows (s3://, gs://, memory://). Raises JobError for a URL that it does not."""
    text = os.fspath(place)
    if "://" not in text:
        return LocalStore(Path(text))
    scheme = text.partition("://")[0]
    try:
        import fsspec

        files, root = fsspec.core.url_to_fs(text)
    except ImportError as error:
        raise JobError(f"{text}: {error}; install what {scheme}:// needs, or write a local folder") from None
    except ValueError as error:
        raise JobError(f"{text}: {error}; write a local folder, or a URL that fsspec knows") from None
    return ObjectStore(files, root, text)


def place_of(folder: str | os.PathLike[str]) -> tuple[Store, str]:
    """A checkpoint's folder as the store that holds it and its name there."""
    text = os.fspath(folder)
    if "://" not in text:
        text = os.path.abspath(text)
    parent, _, name = text.rstrip("/").rpartition("/")
    if not name or parent.endswith(":/"):
        raise JobError(f"{text} cannot be a checkpoint's folder; write a folder that can be made inside another")
    return open_store(parent or "/"), name


def fill(file: IO[bytes], start: int, view: memoryview, path: str) -> None:
    """Fill `view` with the bytes of an open file from `start` on. Raises Damaged if it ends before. path: for the message."""
    file.seek(start)
    at = 0
    while at < len(view):
        n = file.readinto(view[at:])  # type: ignore[attr-defined]
        if not n:
            raise Damaged(f"{path} was cut short: {len(view) - at} bytes of what the manifest says are not there")
        at += n
