"""Checkpoint folders of DeepSpeed's ZeRO, stages 1 to 3, read as they are. (Layout: its own script zero_to_fp32 reads the same files.)

Each rank of N has a file of flat fp32 partitions and moments; rank 0's file of the module tells names, shapes and buffers. At stages 1 and
2 the parameters of a group follow each other in one flat tensor, of which rank r has the r-th part; what stands in the partitions is held
against the module's own values. At stage 3 each parameter is cut by itself in N parts of ceil(n / N) elements, and a rank's parts follow
each other. The files are pickles: nothing that they name is run. Tensor and pipeline parallel folders and experts are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from stretto.checkpoint.load import whole
from stretto.checkpoint.manifest import ITEMSIZE, Entry, Manifest, Scalar, Stored
from stretto.checkpoint.store import Store
from stretto.checkpoint.torchfile import Kept, Named, Record, read_archive, verify
from stretto.errors import Damaged, JobError
from stretto.layout.layout import Shape, flat_boxes

#: The file of the module on rank 0: at stages 1 and 2 the only one, at stage 3 the first of one a rank.
MODULE, MODULE_3 = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
MARKERS = (MODULE, MODULE_3)
#: The file, beside such folders, that names the newest.
LATEST = "latest"
#: How far a value may be from itself in bfloat16.
ROUNDING = 2**-7
#: Beginnings of the names of optimizer files.
PREFIXES = ("", "bf16_", "fp16_")


class Piece(NamedTuple):
    """Elements [at, at + n) of a rank's flat tensors (all groups one after another) are the next of a parameter."""

    rank: int
    at: int
    n: int


class Flat(NamedTuple):
    """A rank's flat tensors of one kind, as if they were one: (file, tensor) each."""

    parts: tuple[tuple[str, Kept], ...]

    def cut(self, at: int, n: int) -> Iterator[tuple[str, int, int]]:
        """(file, first byte, elements) of each run of bytes that elements [at, at + n) are."""
        begins = 0
        for file, kept in self.parts:
            size = torch.Size(kept.shape).numel()
            low, high = max(at, begins), min(at + n, begins + size)
            if low < high:
                yield file, kept.record.start + (kept.first + low - begins) * ITEMSIZE[kept.dtype], high - low
            begins += size


def read_deepspeed(store: Store, folder: str) -> Manifest:
    """The manifest of such a folder: fp32 parameters with their moments, frozen ones and buffers as they are. All that is used is held
    against the checksums of its archives once. Raises JobError for what is not understood, Damaged."""
    path = store.path(folder)
    first = MODULE if store.has(f"{folder}/{MODULE}") else MODULE_3
    if store.has(f"{folder}/mp_rank_01_model_states.pt") or store.has(f"{folder}/zero_pp_rank_0_mp_rank_01_model_states.pt"):
        raise JobError(
            f"{path} was saved with tensor or pipeline parallelism, which is not understood; save it with data parallelism alone"
        )
    module = _load(store, f"{folder}/{first}")
    shapes: list[dict[str, Shape]] = module.get("param_shapes") or []
    if not shapes or not isinstance(module.get("module"), dict):
        raise JobError(f"{store.path(f'{folder}/{first}')} does not tell param_shapes: it is not of ZeRO, or of a version before 0.4")
    ranks = _ranks(store, folder)
    stage = _number(ranks[0][1].get("zero_stage"))
    if stage not in (1, 2, 3):
        raise JobError(f"{path} is of ZeRO stage {stage}, which is not understood; 1, 2 and 3 are")
    known = {name: shape for group in shapes for name, shape in group.items()}
    pieces = _cut_each(known, len(ranks)) if stage == 3 else _cut_flat(shapes, [found for _, found in ranks])
    states = [_states(found, stage) for _, found in ranks]
    values = [
        Flat(tuple((file, kept) for kept in found["fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"]))
        for file, found in ranks
    ]
    kinds = {key for state in states[0] for key, value in state.items() if isinstance(value, Kept) and value.shape}
    shared = module.get("shared_params") or {}
    aliases = _aliases(shared, known)
    tensors: dict[str, Entry] = {}
    for name, shape in known.items():
        tensors[f"model/{name}"] = _entry(name, shape, pieces[name], values, aliases.get(name, ()))
    for key in sorted(kinds):
        flats = [Flat(tuple((file, state[key]) for state in of_rank)) for (file, _), of_rank in zip(ranks, states, strict=True)]
        tensors |= {f"optimizer/{name}/{key}": _entry(name, shape, pieces[name], flats) for name, shape in known.items()}
    tensors |= _module_tensors(store, folder, first, module, {*known, *shared}, len(ranks) if stage == 3 else 1)
    step = _step(ranks[0][1], states[0], module)
    scalars = {f"optimizer/{name}/step": Scalar("F32", float(step)) for name in known} if kinds else {}
    files = {stored.file: store.size(f"{folder}/{stored.file}") for entry in tensors.values() for stored in entry.stored}
    steps = _number(module.get("global_steps")) or step
    state: dict[str, Any] = {"steps": steps, "updates": step, "skips": 0, "scale": None, "loaders": []}
    state["optimizer"] = "AdamW" if kinds == {"exp_avg", "exp_avg_sq"} else None
    notes = {"samples": _number(module.get("global_samples")) or 0, "best": None}
    manifest = Manifest(steps, "", 0, tensors, scalars, files, state, notes, facts={"from": path})
    manifest.check()
    for file, kept in {(file, kept) for flat in values for file, kept in flat.parts}:
        _verify(store, folder, file, kept.record)
    for (file, _), of_rank in zip(ranks, states, strict=True):
        for record in {value.record for group in of_rank for value in group.values() if isinstance(value, Kept)}:
            _verify(store, folder, file, record)
    if stage < 3:
        for name in known:
            _check_like_module(store, folder, manifest, name, _entry_of(first, module["module"].get(name)))
    return manifest


def _check_like_module(store: Store, folder: str, manifest: Manifest, name: str, other: Entry | None) -> None:
    """The partitions' values of a parameter are, rounded, those of the module: else they lie otherwise than is understood here."""
    if other is None:
        return
    held = whole(store, folder, replace(manifest, tensors={name: other}), name).float()
    if held.numel() and not torch.allclose(whole(store, folder, manifest, f"model/{name}"), held, rtol=ROUNDING, atol=1e-6):
        raise JobError(f"{store.path(folder)}: the partitions' values of {name} are not those of the module: their order is not understood")


def _ranks(store: Store, folder: str) -> list[tuple[str, dict[str, Any]]]:
    """(file, what ZeRO's optimizer has saved) of each rank."""
    prefix = next((one for one in PREFIXES if store.has(f"{folder}/{one}zero_pp_rank_0_mp_rank_00_optim_states.pt")), None)
    if prefix is None:
        raise JobError(
            f"{store.path(folder)} has no zero_pp_rank_0_mp_rank_00_optim_states.pt: it was not saved with ZeRO; give one that was"
        )
    found: list[tuple[str, dict[str, Any]]] = []
    count = 1
    while len(found) < count:
        file = f"{prefix}zero_pp_rank_{len(found)}_mp_rank_00_optim_states.pt"
        saved = _load(store, f"{folder}/{file}").get("optimizer_state_dict")
        if not isinstance(saved, dict) or "partition_count" not in saved:
            raise JobError(
                f"{store.path(f'{folder}/{file}')} does not tell partition_count: this optimizer's way of saving is not understood"
            )
        counts = saved["partition_count"]
        if isinstance(counts, list) and len(set(counts)) > 1:
            raise JobError(f"{store.path(folder)} has experts (groups of {counts} ranks), which are not understood")
        count = counts[0] if isinstance(counts, list) else counts
        found.append((file, saved))
    return found


def _cut_flat(shapes: Sequence[Mapping[str, Shape]], ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[Piece]]:
    """Stages 1 and 2: where the pieces of each parameter lie."""
    pieces: dict[str, list[Piece]] = {name: [] for group in shapes for name in group}
    sizes = [[torch.Size(kept.shape).numel() for kept in found["single_partition_of_fp32_groups"]] for found in ranks]
    for number, group in enumerate(shapes):
        at = 0
        for rank, of_rank in enumerate(sizes):
            before, begins = sum(of_rank[:number]), 0
            for name, shape in group.items():
                size = torch.Size(shape).numel()
                low, high = max(begins, at), min(begins + size, at + of_rank[number])
                if low < high:
                    pieces[name].append(Piece(rank, before + low - at, high - low))
                begins += size
            at += of_rank[number]
    return pieces


def _cut_each(shapes: Mapping[str, Shape], ranks: int) -> dict[str, list[Piece]]:
    """Stage 3: each parameter is cut by itself."""
    pieces: dict[str, list[Piece]] = {}
    at = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        each = -(-size // ranks)
        pieces[name] = [Piece(rank, at, min(each, size - rank * each)) for rank in range(ranks) if rank * each < size]
        at += each
    return pieces


def _entry(name: str, shape: Shape, pieces: Sequence[Piece], flats: Sequence[Flat], aliases: tuple[str, ...] = ()) -> Entry:
    dtype = flats[0].parts[0][1].dtype
    stored = []
    at = 0
    for rank, begins, n in pieces:
        for file, start, elements in flats[rank].cut(begins, n):
            for box in flat_boxes(shape, at, at + elements):
                stored.append(Stored(box, file, start, ()))
                start += box.elements * ITEMSIZE[dtype]
            at += elements
    if at != torch.Size(shape).numel():
        raise Damaged(f"{name}: {at} of its {torch.Size(shape).numel()} elements are in the partitions")
    return Entry(shape, dtype, tuple(stored), aliases)


def _entry_of(file: str, kept: Any) -> Entry | None:
    """A tensor that lies whole in one file."""
    if not isinstance(kept, Kept):
        return None
    return _entry(file, kept.shape, [Piece(0, 0, torch.Size(kept.shape).numel())], [Flat(((file, kept),))])


def _states(found: Mapping[str, Any], stage: int) -> list[dict[str, Any]]:
    """The state of each flat tensor of a rank, in their order."""
    saved = found["optimizer_state_dict"] if stage == 3 else found.get("base_optimizer_state")
    if isinstance(saved, list):  # "elastic": group by group, without padding
        return [dict(state) for state in saved]
    states = (saved or {}).get("state") or {}
    return [states[number] for number in sorted(states)]


def _step(found: Mapping[str, Any], states: Sequence[Mapping[str, Any]], module: Mapping[str, Any]) -> int:
    """Updates of the optimizer: from its state, or its groups, or the engine's counters."""
    for state in states:
        if isinstance(state.get("step"), int):
            return int(state["step"])
    saved = found.get("optimizer_state_dict") or found.get("base_optimizer_state")
    groups = saved.get("param_groups", []) if isinstance(saved, dict) else []
    for group in groups:
        if isinstance(group.get("step"), int):
            return int(group["step"])
    return (_number(module.get("global_steps")) or 0) - (_number(module.get("skipped_steps")) or 0)


def _module_tensors(store: Store, folder: str, first: str, module: Mapping[str, Any], known: Iterable[str], ranks: int) -> dict[str, Entry]:
    """Buffers, from rank 0, and frozen parameters: whole, or (stage 3) a part in each rank's file."""
    found: dict[str, Entry] = {}
    for name in module.get("buffer_names") or ():
        if entry := _entry_of(first, module["module"].get(name)):
            found[f"buffer/{name}"] = entry
    frozen: Mapping[str, Shape] = module.get("frozen_param_shapes") or {}
    if ranks == 1:  # some of its optimizers list no frozen parameters, and the module has them all
        for name, kept in module["module"].items():
            entry = _entry_of(first, kept)
            if entry and name not in known and f"buffer/{name}" not in found:
                found[f"model/{name}"] = replace(entry, trainable=False)
    for name in (*found,):
        _verify(store, folder, first, module["module"][name.partition("/")[2]].record)
    if not frozen or ranks == 1:
        return found
    files = [first, *(first.replace("rank_0_", f"rank_{rank}_", 1) for rank in range(1, ranks))]
    fragments = [
        module.get("frozen_param_fragments") or {},
        *(_load(store, f"{folder}/{file}")["frozen_param_fragments"] for file in files[1:]),
    ]
    for name, shape in frozen.items():
        flats = [Flat(((file, parts[name]),)) for file, parts in zip(files, fragments, strict=True)]
        pieces = [piece._replace(at=0) for piece in _cut_each({name: shape}, ranks)[name]]
        found[f"model/{name}"] = replace(_entry(name, shape, pieces, flats), trainable=False)
        for flat in flats:
            _verify(store, folder, flat.parts[0][0], flat.parts[0][1].record)
    return found


def _aliases(shared: Any, known: Mapping[str, Shape]) -> dict[str, tuple[str, ...]]:
    """Other names of tied weights, by the name that has the values."""
    found: dict[str, tuple[str, ...]] = {}
    for other, name in dict(shared).items():
        if name in known:
            found[name] = (*found.get(name, ()), other)
    return found


def _number(value: Any) -> int | None:
    """A number, or an enumeration's."""
    value = value.args[0] if isinstance(value, Named) and len(value.args) == 1 else value
    return value if isinstance(value, int) else None


def _load(store: Store, name: str) -> dict[str, Any]:
    path = store.path(name)
    if not store.has(name):
        raise Damaged(f"{path} is missing, and the checkpoint needs it")
    with store.open(name) as file:
        found = read_archive(file, 0, store.size(name), path)
    if not isinstance(found, dict):
        raise JobError(f"{path} holds no dict, and is not understood")
    return found


def _verify(store: Store, folder: str, file: str, record: Record) -> None:
    with store.open(f"{folder}/{file}") as opened:
        verify(opened, record, store.path(f"{folder}/{file}"))
