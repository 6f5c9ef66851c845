"""Names: which tensor of a checkpoint is which of a model, and what is missing on either side."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stretto.checkpoint.manifest import Entry, Manifest
from stretto.errors import JobError
from stretto.layout.layout import Shape

#: The fact of a checkpoint that says what its model computes, beside what names and shapes of tensors tell.
COMPUTES = "computes"
#: Names told of many in a message.
TOLD = 5
#: What is the same for two tensors that were stored alike and are equal.
Prints = list[tuple[object, ...]]


def compare(manifest: Manifest, path: str, wanted: Mapping[str, Shape], allow: Iterable[str]) -> None:
    """Whether the checkpoint is of these tensors: names and whole shapes. allow: patterns of names that may be missing or unknown.

    Only kinds (model/, optimizer/, buffer/) of which any tensor is wanted are compared. Raises JobError listing what differs.
    """
    patterns = tuple(allow)

    def allowed(name: str) -> bool:
        return any(fnmatch.fnmatch(name, p) or fnmatch.fnmatch(name.partition("/")[2], p) for p in patterns)

    kinds = {name.partition("/")[0] for name in wanted}
    stored = {name: entry.shape for name, entry in manifest.tensors.items() if name.partition("/")[0] in kinds}
    known = alias_table(manifest)
    missing = [name for name in wanted if name not in stored and name not in known and not allowed(name)]
    unknown = [name for name in stored if name not in wanted and not allowed(name)]
    there = {name: stored.get(known.get(name, name)) for name in wanted}
    other = [f"{n} is {list(t)} there and {list(wanted[n])} here" for n, t in there.items() if t is not None and t != wanted[n]]
    lines = [f"{len(names)} {what}: {_few(names)}" for what, names in (("not in it", missing), ("not in the model", unknown)) if names]
    lines += [f"other shapes: {_few(other, ', ')}"] if other else []
    if lines:
        left_out = "write --allow-missing PATTERN for names that may be left out"
        possible = left_out if missing or unknown else "give a checkpoint of this model"
        raise JobError(f"{path} is the checkpoint of another model: {'; '.join(lines)}; {possible}")


def compare_computing(manifest: Manifest, path: str, now: Mapping[str, Any], allow: Iterable[str]) -> None:
    """Whether the checkpoint's tensors were trained in a model that computes the same. now: of this model, key -> value.

    What only one side tells is not compared. allow: patterns; config/KEY lets a key differ. Raises JobError.
    """
    was: Mapping[str, Any] = manifest.facts.get(COMPUTES) or {}
    now = json.loads(json.dumps(now))  # as it comes back from a file
    other = [key for key in was if key in now and was[key] != now[key]]
    other = [key for key in other if not any(fnmatch.fnmatch(f"config/{key}", pattern) for pattern in allow)]
    if other:
        told = ", ".join(f"{key} is {was[key]} there and {now[key]} here" for key in other[:TOLD])
        raise JobError(
            f"{path} is of a model that computes otherwise with the same tensors: {told}; leave the model as it was, or write "
            f"--allow-missing 'config/{other[0]}' to change it"
        )


def alias_table(manifest: Manifest) -> dict[str, str]:
    """Other name of a tied weight -> the name under which it is stored, both with their kind."""
    return {f"model/{alias}": name for name, entry in manifest.tensors.items() for alias in entry.aliases}


def suited(manifest: Manifest, path: str, kinds: Mapping[str, tuple[str, ...]], prints: Callable[[str], Prints]) -> Manifest:
    """The manifest under the names that a model has. kinds: "model/NAME" or "buffer/NAME" -> other names of it (tied weights).

    Folders of others do not tell parameters from buffers, and hold a tied weight under each of its names: if all are the same, one
    counts. Raises JobError if they differ, Damaged.
    """
    first = {other: name for name, others in kinds.items() for other in others}
    mine = {name.partition("/")[2]: name for name in kinds}
    tensors: dict[str, Entry] = {}
    stored_as: dict[str, str] = {}
    scalars = dict(manifest.scalars)
    for name, entry in manifest.tensors.items():
        kind, _, rest = name.partition("/")
        if kind in ("model", "buffer"):
            known = first.get(rest) or mine.get(rest) or name
        elif kind == "optimizer":
            parameter, _, key = rest.rpartition("/")
            known = f"optimizer/{first.get(parameter, f'model/{parameter}').partition('/')[2]}/{key}"
        else:
            known = name
        twin, _ = tensors.setdefault(known, entry), stored_as.setdefault(known, name)
        if twin is not entry and prints(stored_as[known]) != prints(name):
            raise JobError(
                f"{path}: {name.partition('/')[2]} and {known.partition('/')[2]} are one tied weight of this model, "
                "and have different values there; untie them in the model"
            )
    for name in manifest.scalars:
        kind, _, rest = name.partition("/")
        parameter, _, key = rest.rpartition("/")
        if parameter in first:
            scalars.setdefault(f"{kind}/{first[parameter].partition('/')[2]}/{key}", scalars.pop(name))
    return replace(manifest, tensors=tensors, scalars=scalars)


def _few(names: Sequence[str], between: str = " ") -> str:
    return between.join(sorted(names)[:TOLD]) + (f" and {len(names) - TOLD} more" if len(names) > TOLD else "")
