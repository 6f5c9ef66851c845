"""Checkpoints as Hugging Face folders, and back; and what either holds. Bytes are moved, never changed; one tensor is held at a time."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.checkpoint.huggingface import CONFIG, Listed, clear, read_folder, write_folder
from stretto.checkpoint.load import fetch, read_manifest
from stretto.checkpoint.manifest import BLOCK, NAME, Entry, Manifest, Stored
from stretto.checkpoint.parts import DTYPES, HostCopy, Part
from stretto.checkpoint.shelf import Shelf, name_of
from stretto.checkpoint.store import Store, fill, open_store, place_of
from stretto.checkpoint.tensorfile import header
from stretto.errors import JobError
from stretto.layout.layout import Box
from stretto.models.pretrained import kinds, name_here, name_there

FACT = "huggingface"  # the fact of a checkpoint that is the config.json of its model


class Told(NamedTuple):
    """What a folder holds. tensors: their number; about: lines for a person; more: for a program."""

    kind: str
    tensors: int
    bytes_: int
    files: Mapping[str, int]
    about: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        files = [{"name": name, "bytes": size} for name, size in self.files.items()]
        return {"kind": self.kind, "tensors": self.tensors, "bytes": self.bytes_, "files": files, **self.about}


def find(place: str) -> tuple[str, Store, str]:
    """("checkpoint" or "huggingface", store, folder) at a place: itself, or the newest checkpoint of a run folder. Raises JobError."""
    store, name = place_of(place)
    for kind, file in (("checkpoint", NAME), ("huggingface", CONFIG)):
        try:
            store.size(f"{name}/{file}")
            return kind, store, name
        except OSError:
            continue
    for inside in (f"{place}/checkpoints", place):
        shelf = Shelf(open_store(inside))
        if steps := shelf.steps():
            return "checkpoint", shelf.store, name_of(steps[0])
    raise JobError(f"{place} is no checkpoint ({NAME}), no Hugging Face folder ({CONFIG}) and no run folder with checkpoints; give one")


def inspect(place: str, verify: bool = False) -> Told:
    """What the checkpoint or Hugging Face folder at a place holds, and that its files are there, as long as they were.

    verify: also read all of a checkpoint, against its checksums. Raises JobError, Damaged.
    """
    kind, store, name = find(place)
    if kind == "huggingface":
        folder = read_folder(store, name)
        bytes_ = sum(item.stop - item.start for _, item in folder.tensors.values())
        about: dict[str, Any] = {"path": store.path(name), "model": ", ".join(folder.config.get("architectures") or ["?"])}
        return Told(kind, len(folder.tensors), bytes_, folder.files, about)
    manifest = read_manifest(store, name)
    if verify:
        for key in manifest.tensors:
            _whole(store, name, manifest, key)
    by_kind: dict[str, int] = {}
    for tensor, entry in manifest.tensors.items():
        group = tensor.partition("/")[0]
        by_kind[group] = by_kind.get(group, 0) + entry.bytes_
    model = manifest.job.get("model", {}).get("name", "?")
    about = {
        "path": store.path(name),
        "step": manifest.step,
        "mesh": manifest.mesh,
        "ranks": manifest.ranks,
        "model": model,
        "kinds": by_kind,
    }
    return Told(kind, len(manifest.tensors), sum(by_kind.values()), manifest.files, about)


def convert(source: str, target: str) -> Told:
    """A checkpoint's model as a new Hugging Face folder, or such a folder as a new checkpoint. Raises JobError, Damaged."""
    kind, store, name = find(source)
    there, called = place_of(target)
    if called in there.folders():
        raise JobError(f"{target} is there already; write a folder that does not exist")
    (to_huggingface if kind == "checkpoint" else from_huggingface)(store, name, there, called)
    return inspect(target)


def to_huggingface(store: Store, name: str, there: Store, called: str) -> None:
    """The parameters and buffers of a checkpoint, as it has them; tied weights once."""
    manifest = read_manifest(store, name)
    config = manifest.facts.get(FACT)
    if not isinstance(config, dict):
        raise JobError(f"{store.path(name)} cannot be a Hugging Face folder: {config or 'nothing says which model it is'}")
    chosen = [key for key in manifest.tensors if key.startswith(("model/", "buffer/"))]
    listed = [Listed(name_there(key.partition("/")[2], config), manifest.tensors[key].dtype, manifest.tensors[key].shape) for key in chosen]

    def values() -> Iterator[Tensor]:
        for key in chosen:
            yield _whole(store, name, manifest, key)

    write_folder(there, called, config, listed, values())


def _whole(store: Store, name: str, manifest: Manifest, key: str) -> Tensor:
    """A tensor of a checkpoint, from all its boxes. Raises Damaged."""
    entry = manifest.tensors[key]
    boxes = (Box((0,) * len(entry.shape), entry.shape),)
    part = Part(key, entry.shape, boxes, torch.empty(0, dtype=DTYPES[entry.dtype]), (0, torch.Size(entry.shape).numel()))
    host = HostCopy([part], pinned=False)
    fetch(store, name, manifest, host)
    return host.flat(host.places[0]).view(entry.shape)


def from_huggingface(store: Store, name: str, there: Store, called: str) -> None:
    """A checkpoint of step 0 with the values of a folder, and no optimizer."""
    folder = read_folder(store, name)
    tied, buffers = kinds(folder.config)
    named = {name_here(key, folder.config): key for key in folder.tensors}
    missing = [key for key, others in tied.items() if not {key, *others} & named.keys()]
    if missing:
        raise JobError(f"{store.path(name)} holds no values for {', '.join(missing[:3])} ({len(missing)} in all); complete the folder")
    first = {other: key for key, others in tied.items() for other in others}
    kept = {key: source for key, source in named.items() if first.get(key) not in named}  # of a tied weight written twice, one
    file = "rank-00000.safetensors"
    entries: dict[str, tuple[str, list[int]]] = {}
    listed = []
    for key, source in kept.items():
        own = first.get(key, key)
        full = f"{'buffer' if own in buffers else 'model'}/{own}"
        entries[full] = (source, [])
        item = folder.tensors[source][1]
        listed.append((full, item.dtype, item.shape))
    head = header(listed, {"format": "pt"})

    def chunks() -> Iterator[memoryview]:
        yield memoryview(head)
        for source, sums in entries.values():
            held, item = folder.tensors[source]
            path = store.path(f"{name}/{held}")
            with store.open(f"{name}/{held}") as opened:
                for start in range(item.start, item.stop, BLOCK):
                    view = memoryview(bytearray(min(BLOCK, item.stop - start)))
                    fill(opened, start, view, path)
                    sums.append(zlib.crc32(view))
                    yield view

    temporary = there.temporary(called, uuid.uuid4().hex[:8])
    try:
        there.write(f"{temporary}/{file}", chunks())
    except BaseException:
        clear(there, temporary)
        raise
    tensors, at = {}, len(head)
    for full, (source, sums) in entries.items():
        item = folder.tensors[source][1]
        stored = Stored(Box((0,) * len(item.shape), item.shape), file, at, tuple(sums))
        tensors[full] = Entry(item.shape, item.dtype, (stored,), tied.get(full.partition("/")[2], ()))
        at += item.stop - item.start
    state: dict[str, Any] = {"steps": 0, "updates": 0, "skips": 0, "scale": None, "loaders": [], "optimizer": None}
    facts = {FACT: folder.config, "from": store.path(name)}
    manifest = Manifest(0, "dp=1", 1, tensors, files={file: at}, state=state, notes={"samples": 0, "best": None}, facts=facts)
    manifest.check()
    there.commit(temporary, called, manifest.to_json().encode())
