"""How a function travels to a rank: pickled, with the import path of this process, in a file without a name."""

from __future__ import annotations

import io
import os
import pickle
import sys
import tempfile
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

import cloudpickle


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # it comes without types
    """cloudpickle, but code keeps its file's name, so that a traceback in the rank shows the user's own lines."""

    dispatch_table = ChainMap({CodeType: lambda code: _with_file(code)}, cloudpickle.CloudPickler.dispatch_table)


def _with_file(code: CodeType) -> tuple[Any, ...]:
    make, args, *rest = cloudpickle.CloudPickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if value == "<dynamic-code>" else value for value in args), *rest


def nameless_file(label: str) -> int:
    """The descriptor of an empty file that no folder lists: it is gone when its last holder is, however that ends."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"stretto-{label}")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def write_whole(file: int, content: bytes) -> None:
    """All of `content` into an open descriptor: one write may take less."""
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]


def read_whole(file: int) -> bytes:
    """All bytes of an open file from its start; the position, which several ranks share, is left alone."""
    size, start, parts = os.fstat(file).st_size, 0, []
    while start < size:
        parts.append(os.pread(file, size - start, start))
        start += len(parts[-1])
    return b"".join(parts)


def pack(function: Callable[..., Any], args: tuple[Any, ...], of: Callable[..., Any]) -> bytes:
    """What a rank runs. Functions of notebooks, scripts and modules that only this process has go by value, others by name.

    of: the function that the user wrote; it decides (`function` itself may be ours, with the user's in `args`).
    """
    with _by_value(getattr(of, "__module__", None)):
        stream = io.BytesIO()
        pickle.dump(list(sys.path), stream)
        _Pickler(stream).dump((function, args))
        return stream.getvalue()


def unpack(content: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and arguments of pack(); sets sys.path to the sender's before it imports anything for them."""
    stream = io.BytesIO(content)
    sys.path[:] = pickle.load(stream)
    function, args = pickle.load(stream)
    return function, args


@contextmanager
def _by_value(name: str | None) -> Iterator[None]:
    """Within it, functions of module `name` are pickled whole if another process could not import that same module."""
    module = sys.modules.get(name or "")
    if module is None or name == "__main__" or _importable(module):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _importable(module: ModuleType) -> bool:
    """Whether another process with this sys.path gets the same file by the module's name (built-ins have none)."""
    file = getattr(module, "__file__", None)
    if file is None:
        return True
    spec = _find(module.__name__)
    return spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)


def _find(name: str) -> ModuleSpec | None:
    """What the import system finds under a dotted name, asked afresh: loaded modules are not looked at."""
    parent, _, _ = name.rpartition(".")
    package = _find(parent) if parent else None
    if parent and package is None:
        return None
    path = package.submodule_search_locations if package else None
    found = (finder.find_spec(name, path, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in found if spec is not None), None)
