"""Kinds of folders that hold a model: which one lies at a place, and its manifest, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from stretto.checkpoint.dcp import METADATA, read_dcp
from stretto.checkpoint.deepspeed import LATEST, MARKERS, read_deepspeed
from stretto.checkpoint.huggingface import CONFIG, read_folder
from stretto.checkpoint.load import read_manifest, whole
from stretto.checkpoint.manifest import NAME, Entry, Manifest, Stored
from stretto.checkpoint.megatron import COMMON, read_megatron
from stretto.checkpoint.megatron import LATEST as LATEST_ITERATION
from stretto.checkpoint.shelf import Shelf, name_of
from stretto.checkpoint.store import Store, open_store, place_of
from stretto.errors import JobError
from stretto.layout.layout import Box
from stretto.models.pretrained import kinds, name_here

FACT = "huggingface"  # the fact of a checkpoint that is the config.json of its model


class Kind(NamedTuple):
    """what: for messages; markers: files of which only such a folder has one; read: gives its manifest."""

    name: str
    what: str
    markers: tuple[str, ...]
    read: Callable[[Store, str], Manifest]


class Found(NamedTuple):
    """A folder at a place."""

    kind: str
    store: Store
    name: str

    def manifest(self) -> Manifest:
        """Where what lies. Raises JobError, Damaged."""
        return next(kind for kind in KINDS if kind.name == self.kind).read(self.store, self.name)


class Told(NamedTuple):
    """What a folder holds. tensors: their number; about: lines for a person and keys for a program."""

    kind: str
    tensors: int
    bytes_: int
    files: Mapping[str, int]
    about: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        files = [{"name": name, "bytes": size} for name, size in self.files.items()]
        return {"kind": self.kind, "tensors": self.tensors, "bytes": self.bytes_, "files": files, **self.about}


def kind_of(store: Store, name: str) -> Kind | None:
    """The kind of a folder; None if it is none that is known."""
    for kind in KINDS:
        if any(store.has(f"{name}/{marker}") for marker in kind.markers):
            return kind
    return None


def manifest_at(store: Store, name: str) -> Manifest:
    """The manifest of a folder of any kind. Raises JobError, Damaged."""
    kind = kind_of(store, name)
    return kind.read(store, name) if kind else read_manifest(store, name)


def find(place: str) -> Found:
    """What is at a place: itself, or the newest checkpoint of a run folder, ours, DeepSpeed's or Megatron's. Raises JobError."""
    store, name = place_of(place)
    kind = kind_of(store, name)
    if kind is not None:
        return Found(kind.name, store, name)
    if store.has(f"{name}/{LATEST}"):
        return find(f"{place}/{store.read(f'{name}/{LATEST}').decode().strip()}")
    if store.has(f"{name}/{LATEST_ITERATION}"):
        number = store.read(f"{name}/{LATEST_ITERATION}").decode().strip()
        return find(f"{place}/{f'iter_{int(number):07d}' if number.isdecimal() else number}")
    for inside in (f"{place}/checkpoints", place):
        shelf = Shelf(open_store(inside))
        if steps := shelf.steps():
            return Found("checkpoint", shelf.store, name_of(steps[0]))
    known = ", ".join(f"no {kind.what} ({kind.markers[0]})" for kind in KINDS)
    raise JobError(f"{place} is {known} and no run folder with checkpoints; give one")


def inspect(place: str, verify: bool = False) -> Told:
    """What the folder at a place holds, and that its files are there, as long as they were.

    verify: also read all of it, against its checksums where it has some. Raises JobError, Damaged.
    """
    kind, store, name = found = find(place)
    if kind == "huggingface":
        folder = read_folder(store, name)
        bytes_ = sum(item.stop - item.start for _, item in folder.tensors.values())
        about: dict[str, Any] = {"path": store.path(name), "model": ", ".join(folder.config.get("architectures") or ["?"])}
        return Told(kind, len(folder.tensors), bytes_, folder.files, about)
    manifest = found.manifest()
    if verify:
        for key in manifest.tensors:
            whole(store, name, manifest, key)
    by_kind: dict[str, int] = {}
    for tensor, entry in manifest.tensors.items():
        group = tensor.partition("/")[0]
        by_kind[group] = by_kind.get(group, 0) + entry.bytes_
    about = {"path": store.path(name), "step": manifest.step}
    if kind == "checkpoint":
        about |= {"mesh": manifest.mesh, "ranks": manifest.ranks, "model": manifest.job.get("model", {}).get("name", "?")}
        if manifest.facts.get("frozen"):
            about["holds"] = f"trained tensors only; {len(manifest.facts['frozen'])} frozen ones are left out"
    elif manifest.facts.get("left"):
        about["not taken"] = ", ".join(manifest.facts["left"])
    return Told(kind, len(manifest.tensors), sum(by_kind.values()), manifest.files, {**about, "kinds": by_kind})


def read_huggingface(store: Store, name: str) -> Manifest:
    """A Hugging Face folder as a checkpoint of step 0 without an optimizer. Its files have no checksums."""
    folder = read_folder(store, name)
    tied, buffers = kinds(folder.config)
    named = {name_here(key, folder.config): key for key in folder.tensors}
    missing = [key for key, others in tied.items() if not {key, *others} & named.keys()]
    if missing:
        raise JobError(f"{store.path(name)} holds no values for {', '.join(missing[:3])} ({len(missing)} in all); complete the folder")
    first = {other: key for key, others in tied.items() for other in others}
    tensors: dict[str, Entry] = {}
    for key, source in named.items():
        own = first.get(key, key)
        if own != key and own in named:
            continue  # of a tied weight written twice, one
        file, item = folder.tensors[source]
        stored = Stored(Box((0,) * len(item.shape), item.shape), file, item.start, ())
        tensors[f"{'buffer' if own in buffers else 'model'}/{own}"] = Entry(item.shape, item.dtype, (stored,), tied.get(own, ()))
    state: dict[str, Any] = {"steps": 0, "updates": 0, "skips": 0, "scale": None, "loaders": [], "optimizer": None}
    facts = {FACT: folder.config, "from": store.path(name)}
    manifest = Manifest(0, "", 0, tensors, files=folder.files, state=state, notes={"samples": 0, "best": None}, facts=facts)
    manifest.check()
    return manifest


KINDS = (
    Kind("checkpoint", "checkpoint", (NAME,), read_manifest),
    Kind("huggingface", "Hugging Face folder", (CONFIG,), read_huggingface),
    Kind("megatron", "checkpoint of Megatron", (COMMON,), read_megatron),  # before DCP, in whose words it is written
    Kind("dcp", "folder of torch.distributed.checkpoint", (METADATA,), read_dcp),
    Kind("deepspeed", "folder of DeepSpeed's ZeRO", MARKERS, read_deepspeed),
)
