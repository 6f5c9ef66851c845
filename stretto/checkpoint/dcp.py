"""Folders of torch.distributed.checkpoint (DCP), as FSDP2 scripts and torchtitan write them: read as they are, and written.

Such a folder has a pickle, .metadata, that says which box of which tensor is which archive of torch.save in which file. So it is a
Manifest in other words, and any mesh loads it as it loads our own. Nothing that a pickle names is run.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.checkpoint.manifest import Entry, Manifest, Scalar, Stored
from stretto.checkpoint.parts import DTYPES, NAMES
from stretto.checkpoint.store import Store, fill
from stretto.checkpoint.torchfile import Kept, Named, read_archive, read_pickle
from stretto.errors import Damaged, JobError
from stretto.layout.layout import Box, Shape

METADATA = ".metadata"
#: What a script may call the part of its state that has the model, and the part that has the optimizer.
MODEL = re.compile(r"model|state_dict|module")
OPTIMIZER = re.compile(r"optim(izers?)?(_\d+)?")
#: Which optimizer has state of these names.
OPTIMIZERS: Mapping[frozenset[str], str] = MappingProxyType(
    {frozenset({"step", "exp_avg", "exp_avg_sq"}): "AdamW", frozenset({"momentum_buffer"}): "SGD"}
)
FILE = "__0_0.distcp"
#: Keys of nested dicts and positions in lists.
Path = tuple[str | int, ...]


class Item(NamedTuple):
    """A value of the folder: of a tensor its dtype, shape and boxes; else where its archive lies (the first of `stored`)."""

    dtype: str
    shape: Shape
    stored: tuple[Stored, ...]


# -- reading -----------------------------------------------------------------------------------------------------------


def read_dcp(store: Store, folder: str) -> Manifest:
    """The manifest of a folder of DCP: parameters and buffers as model/NAME (it does not say which is which), the optimizer's state,
    and its count of steps. What it holds beside these is listed in facts["left"]. Raises JobError, Damaged."""
    items, paths = read_items(store, folder)
    names = sort_out({key: paths.get(key, (key,)) for key in items})
    tensors: dict[str, Entry] = {}
    scalars: dict[str, Scalar] = {}
    for key, name in names.items():
        item = items[key]
        if name.startswith("optimizer/") and not item.shape:
            value = _scalar(store, folder, item)
            if value is not None:
                scalars[name] = value
        elif item.dtype:
            tensors[name] = Entry(item.shape, item.dtype, item.stored)
    if not tensors:
        raise JobError(f"{store.path(folder)} holds no tensors of a model; its keys are {', '.join([*items][:5])} ({len(items)} in all)")
    of_optimizer = [name.removeprefix("optimizer/").rpartition("/") for name in (*tensors, *scalars) if name.startswith("optimizer/")]
    kinds, stateful = {key for _, _, key in of_optimizer}, {f"model/{parameter}" for parameter, _, _ in of_optimizer}
    tensors = {name: replace(entry, trainable=not stateful or name in stateful) for name, entry in tensors.items()}
    steps = [int(scalar.value) for name, scalar in scalars.items() if name.endswith("/step")]
    step = max(steps, default=0)
    state: dict[str, Any] = {
        "steps": step,
        "updates": step,
        "skips": 0,
        "scale": None,
        "loaders": [],
        "optimizer": OPTIMIZERS.get(frozenset(kinds)),
    }
    groups, options = _groups_there(store, folder, items, paths)
    left = [key for key in items if key not in names and key not in options]
    facts = {"left": left, "groups": groups, "from": store.path(folder)}
    files = {stored.file: store.size(f"{folder}/{stored.file}") for entry in tensors.values() for stored in entry.stored}
    manifest = Manifest(step, "", 0, tensors, scalars, files, state, {"samples": 0, "best": None}, facts=facts)
    manifest.check()
    return manifest


def read_items(store: Store, folder: str) -> tuple[dict[str, Item], dict[str, tuple[str, ...]]]:
    """What the folder's metadata lists, and under which path of nested dicts each key was saved; its files are there. Raises JobError,
    Damaged."""
    path = store.path(f"{folder}/{METADATA}")
    items, paths = _items(read_pickle(store.read(f"{folder}/{METADATA}"), path), path)
    _check_files(store, folder, items)
    return items, paths


def _items(metadata: Any, path: str) -> tuple[dict[str, Item], dict[str, tuple[str, ...]]]:
    try:
        where = {(at.fqn, tuple(getattr(at, "offset", None) or ())): info for at, info in metadata.storage_data.items()}
        items = {}
        for key, about in metadata.state_dict_metadata.items():
            if not hasattr(about, "chunks"):
                items[key] = Item("", (), (_stored(where[key, ()], Box((), ()), path),))
                continue
            dtype = NAMES[about.properties.state[0]]
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in about.chunks]
            stored = tuple(_stored(where[key, box.offset], box, path) for box in boxes if box.elements)
            items[key] = Item(dtype, tuple(about.size), stored)
        named = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        return items, {key: tuple(str(word) for word in words) for key, words in named.items()}
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        words = f"{type(error).__name__}: {error}"
        raise Damaged(f"{path} is no metadata of torch.distributed.checkpoint that is understood ({words})") from None


def _stored(info: Named, box: Box, path: str) -> Stored:
    about: Any = info
    if getattr(about, "transform_descriptors", None):
        raise JobError(f"{path}: {about.relative_path} was written through {about.transform_descriptors}; write it without extensions")
    return Stored(box, about.relative_path, about.offset, (), about.length)


def _check_files(store: Store, folder: str, items: Mapping[str, Item]) -> None:
    ends: dict[str, int] = {}
    for item in items.values():
        for stored in item.stored:
            ends[stored.file] = max(ends.get(stored.file, 0), stored.start + stored.packed)
    for file, end in ends.items():
        here = store.path(f"{folder}/{file}")
        try:
            found = store.size(f"{folder}/{file}")
        except OSError:
            raise Damaged(f"{here} is missing, and the checkpoint needs it") from None
        if found < end:
            raise Damaged(f"{here} has {found} bytes, and {METADATA} says {end}: it was cut short")


def _plain_value(store: Store, folder: str, item: Item) -> Any:
    """What an archive holds; a tensor as a Kept."""
    (stored,) = item.stored
    with store.open(f"{folder}/{stored.file}") as file:
        return read_archive(file, stored.start, stored.packed, store.path(f"{folder}/{stored.file}"))


def _scalar(store: Store, folder: str, item: Item) -> Scalar | None:
    """A number of the optimizer's, a tensor of no dims or a plain one; None for what is no number."""
    value = _plain_value(store, folder, item)
    if not isinstance(value, Kept):
        return Scalar("", value) if isinstance(value, int | float) else None
    file = f"{folder}/{item.stored[0].file}"
    path = store.path(file)
    with store.open(file) as opened:
        size = DTYPES[value.dtype].itemsize
        held = bytearray(size)
        fill(opened, value.record.start + value.first * size, memoryview(held), path)
    return Scalar(value.dtype, torch.frombuffer(held, dtype=DTYPES[value.dtype]).item())


def _groups_there(
    store: Store, folder: str, items: Mapping[str, Item], paths: Mapping[str, tuple[str, ...]]
) -> tuple[list[dict[str, Any]], set[str]]:
    """The optimizer's parameter groups with their options, where they are saved option by option, and the keys that said so."""
    groups: dict[str, dict[str, Any]] = {}
    keys: set[str] = set()
    for key, words in paths.items():
        where = next((i for i, word in enumerate(words[:-1]) if OPTIMIZER.fullmatch(word)), None)
        found = re.fullmatch(r"param_groups\.(.+)\.([^.]+)", ".".join(words[where + 1 :])) if where is not None else None
        if found is None or key not in items or items[key].shape:
            continue
        scalar = _scalar(store, folder, items[key]) if items[key].dtype else None
        value = scalar.value if scalar else _plain_value(store, folder, items[key])
        of = groups.setdefault(found[1], {} if found[1].isdecimal() else {"params": [_plain(found[1])]})
        of[found[2]] = [_plain(name) for name in value] if isinstance(value, list) and found[2] == "params" else value
        keys.add(key)
    joined: dict[str, dict[str, Any]] = {}  # flattened, each parameter tells the options of its group
    for group in groups.values():
        options = {key: value for key, value in group.items() if key != "params"}
        joined.setdefault(repr(options), {"params": [], **options})["params"] += group.get("params", [])
    return list(joined.values()), keys


def sort_out(paths: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Our name of each key that is the model's or the state of the optimizer: from the path of dicts under which it was saved.

    {"model": ..., "optimizer": ...} is what torch's get_state_dict leads to, inside another dict or not, the optimizer's state nested or
    flattened; torchtitan has the model's names at the top.
    """
    found: dict[str, str] = {}
    at_top: dict[str, str] = {}
    wrapped = False
    for key, words in paths.items():
        kind = next((i for i, word in enumerate(words[:-1]) if MODEL.fullmatch(word) or OPTIMIZER.fullmatch(word)), None)
        if kind is None:
            if len(words) == 1:
                at_top[key] = f"model/{_plain(key)}"
            continue
        rest = ".".join(words[kind + 1 :])
        if MODEL.fullmatch(words[kind]):
            found[key], wrapped = f"model/{_plain(rest)}", True
        elif state := re.fullmatch(r"(?:\d+\.)?state\.(.+)\.([^.]+)", rest):
            found[key] = f"optimizer/{_plain(state[1])}/{state[2]}"
    return found if wrapped else {**at_top, **found}


def _plain(name: str) -> str:
    """Without what wrappers of torch put between."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


# -- writing -----------------------------------------------------------------------------------------------------------


def write_dcp(store: Store, temporary: str, called: str, manifest: Manifest, value: Callable[[str], Tensor], nested: bool) -> None:
    """A folder of DCP with what a manifest lists: parameters and buffers (a tied weight under each of its names), the optimizer's state and
    groups. It is whole once it has its name. value: gives the tensor of a name; one is held at a time.

    nested: {"model": {...}, "optimizer": {...}}, as of get_state_dict; else as torchtitan has it, the model's names at the top and the
    optimizer flattened.
    """
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    listed: dict[str, Any] = {}
    where: dict[Any, Any] = {}
    paths: dict[str, Path] = {}
    at = 0

    def chunks() -> Iterator[memoryview]:
        nonlocal at
        for names, get in _values(manifest, value, nested):
            content, packed = get(), io.BytesIO()
            torch.save(content, packed)
            for words in names:
                key = ".".join(map(str, words))
                paths[key] = words
                if isinstance(content, Tensor):
                    none = (0,) * content.dim()
                    chunk = ChunkStorageMetadata(torch.Size(none), content.shape)
                    listed[key] = TensorStorageMetadata(TensorProperties(content.dtype), content.shape, [chunk])
                    index = MetadataIndex(key, none)
                else:
                    listed[key], index = BytesStorageMetadata(), MetadataIndex(key)
                where[index] = _StorageInfo(FILE, at, packed.tell())
            at += packed.tell()
            yield packed.getbuffer()

    store.write(f"{temporary}/{FILE}", chunks())
    metadata = Metadata(listed, paths, where, version=CURRENT_DCP_VERSION)
    store.commit(temporary, called, pickle.dumps(metadata), last=METADATA)


def _values(manifest: Manifest, value: Callable[[str], Tensor], nested: bool) -> Iterator[tuple[list[Path], Callable[[], Any]]]:
    """(paths under which it is known, what gives it) of everything that is to be written."""
    for name, entry in manifest.tensors.items():
        kind, _, rest = name.partition("/")
        if kind in ("model", "buffer"):
            names = [rest, *entry.aliases]
            yield [("model", one) if nested else (one,) for one in names], lambda name=name: value(name)  # type: ignore[misc]
        elif kind == "optimizer":
            yield [_state(rest, nested)], lambda name=name: value(name)  # type: ignore[misc]
    for name, scalar in manifest.scalars.items():
        if name.startswith("optimizer/"):
            number = torch.tensor(scalar.value, dtype=DTYPES[scalar.dtype]) if scalar.dtype else scalar.value
            yield [_state(name.partition("/")[2], nested)], lambda number=number: number  # type: ignore[misc]
    for number, group in enumerate(_groups(manifest)):
        for option, given in group.items():
            if nested:
                yield [("optimizer", "param_groups", number, option)], lambda given=given: given  # type: ignore[misc]
            elif option != "params":
                yield [("optimizer", f"param_groups.{name}.{option}") for name in group["params"]], lambda given=given: given  # type: ignore[misc]


def _state(name: str, nested: bool) -> Path:
    parameter, _, key = name.rpartition("/")
    return ("optimizer", "state", parameter, key) if nested else ("optimizer", f"state.{parameter}.{key}")


def _groups(manifest: Manifest) -> Iterable[dict[str, Any]]:
    """The optimizer's parameter groups as the engine makes them, with the options that the job has and the rest as torch has them."""
    known = manifest.facts.get("groups")
    if known:
        yield from known
        return
    states = [name.removeprefix("optimizer/") for name in (*manifest.tensors, *manifest.scalars) if name.startswith("optimizer/")]
    stateful = {name.rpartition("/")[0] for name in states}
    if not stateful:
        return
    if manifest.facts.get("own optimizer") or not manifest.job:
        raise JobError(
            "the options of an optimizer of one's own (lr, weight decay) are not in its checkpoint, and a folder of DCP needs them; "
            "write --to huggingface for the model alone"
        )
    keys = manifest.job["optimizer"]
    decay = keys.get("weight_decay", 0.0)
    shapes = {key.removeprefix("model/"): entry.shape for key, entry in manifest.tensors.items() if key.startswith("model/")}
    for decays in (True, False):
        names = [name for name, shape in shapes.items() if name in stateful and (len(shape) > 1) is decays]
        if not names:
            continue
        given: dict[str, Any] = {"lr": keys.get("lr", 1e-3), "weight_decay": decay if decays else 0.0}
        one = [torch.zeros(1)]
        if manifest.state.get("optimizer") == "SGD":
            made: torch.optim.Optimizer = torch.optim.SGD(one, momentum=keys.get("momentum", 0.0), **given)
        else:
            made = torch.optim.AdamW(one, betas=tuple(keys.get("betas", (0.9, 0.999))), eps=keys.get("eps", 1e-8), **given)
        options = {key: option for key, option in made.param_groups[0].items() if key != "params"}
        yield {"params": names, **options, "initial_lr": given["lr"]}
