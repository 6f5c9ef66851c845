"""What was saved, as another format: any folder that is understood becomes a checkpoint, a Hugging Face folder or one of DCP.

Bytes are moved, never changed; one tensor is held at a time.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from stretto.checkpoint.dcp import write_dcp
from stretto.checkpoint.huggingface import Listed, clear, write_folder
from stretto.checkpoint.kinds import FACT, Told, find, inspect
from stretto.checkpoint.load import whole
from stretto.checkpoint.manifest import BLOCK, Entry, Manifest, Stored
from stretto.checkpoint.store import Store, place_of
from stretto.checkpoint.tensorfile import header
from stretto.errors import JobError
from stretto.layout.layout import Box
from stretto.models.pretrained import name_there

To = Literal["checkpoint", "huggingface", "dcp", "torchtitan"]


def convert(source: str, target: str, to: To | None = None) -> Told:
    """What is at `source` as a new folder. to: None is a Hugging Face folder of a checkpoint, and a checkpoint of anything else.

    Raises JobError, Damaged.
    """
    found = find(source)
    there, called = place_of(target)
    if called in there.folders():
        raise JobError(f"{target} is there already; write a folder that does not exist")
    manifest = found.manifest()
    writer = WRITERS[to or ("huggingface" if found.kind == "checkpoint" else "checkpoint")]
    writer(manifest, lambda name: whole(found.store, found.name, manifest, name), found.store.path(found.name), there, called)
    return inspect(target)


#: (manifest, what gives a tensor of it, where it is, store and name of the new folder)
Writer = Callable[[Manifest, Callable[[str], Tensor], str, Store, str], None]


def to_huggingface(manifest: Manifest, value: Callable[[str], Tensor], path: str, there: Store, called: str) -> None:
    """The parameters and buffers, as they are; tied weights once."""
    config = manifest.facts.get(FACT)
    if manifest.facts.get("frozen"):
        raise JobError(f"{path} holds what was trained, and no frozen weights; load it in an engine and call save_pretrained")
    if not isinstance(config, dict):
        raise JobError(f"{path} cannot be a Hugging Face folder: {config or 'nothing says which model it is'}")
    chosen = [key for key in manifest.tensors if key.startswith(("model/", "buffer/"))]
    listed = [Listed(name_there(key.partition("/")[2], config), manifest.tensors[key].dtype, manifest.tensors[key].shape) for key in chosen]
    write_folder(there, called, config, listed, map(value, chosen))


def to_checkpoint(manifest: Manifest, value: Callable[[str], Tensor], path: str, there: Store, called: str) -> None:
    """A checkpoint, in one file, of all that is understood of it."""
    file = "rank-00000.safetensors"
    head = header([(key, entry.dtype, entry.shape) for key, entry in manifest.tensors.items()], {"format": "pt"})
    tensors: dict[str, Entry] = {}
    at = len(head)

    def chunks() -> Iterator[memoryview]:
        nonlocal at
        yield memoryview(head)
        for key, entry in manifest.tensors.items():
            view = memoryview(value(key).reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            sums = tuple(zlib.crc32(view[start : start + BLOCK]) for start in range(0, len(view), BLOCK))
            stored = (Stored(Box((0,) * len(entry.shape), entry.shape), file, at, sums),) if sums else ()
            tensors[key] = Entry(entry.shape, entry.dtype, stored, entry.aliases, entry.trainable)
            at += len(view)
            yield view

    def write(temporary: str) -> None:
        there.write(f"{temporary}/{file}", chunks())
        told = (manifest.state, manifest.notes, manifest.job, manifest.facts)
        made = Manifest(manifest.step, manifest.mesh or "dp=1", 1, tensors, manifest.scalars, {file: at}, *told)
        made.check()
        there.commit(temporary, called, made.to_json().encode())

    _whole_or_nothing(there, called, write)


def to_dcp(manifest: Manifest, value: Callable[[str], Tensor], path: str, there: Store, called: str, nested: bool = True) -> None:
    _whole_or_nothing(there, called, lambda temporary: write_dcp(there, temporary, called, manifest, value, nested))


def to_torchtitan(manifest: Manifest, value: Callable[[str], Tensor], path: str, there: Store, called: str) -> None:
    to_dcp(manifest, value, path, there, called, nested=False)


def _whole_or_nothing(there: Store, called: str, write: Callable[[str], None]) -> None:
    """Write and commit a folder under a temporary name; of one that fails nothing is left."""
    temporary = there.temporary(called, uuid.uuid4().hex[:8])
    try:
        write(temporary)
    except BaseException:
        clear(there, temporary)
        raise


WRITERS: Mapping[To, Writer] = MappingProxyType(
    {"checkpoint": to_checkpoint, "huggingface": to_huggingface, "dcp": to_dcp, "torchtitan": to_torchtitan}
)
