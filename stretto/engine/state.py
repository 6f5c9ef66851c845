"""What of an engine belongs to a checkpoint, as named parts that no mesh knows of; and how it is put back."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stretto.checkpoint.manifest import Entry, Manifest, Scalar
from stretto.checkpoint.names import alias_table
from stretto.checkpoint.parts import DTYPES, NAMES, HostCopy, Part, share_out
from stretto.comm.group import Group
from stretto.errors import JobError
from stretto.layout.layout import Layout, Shape
from stretto.layout.zero import REPLICATE_AXES, SHARD_AXES
from stretto.parallel.sharded import Piece, ShardedGroup

if TYPE_CHECKING:
    from stretto.engine.engine import Engine

#: Along these axes ranks that hold the same have it at the same places, so that they share the work of writing and reading it.
COPY_AXES = (*REPLICATE_AXES, *SHARD_AXES)
#: Along these they may cut their flat buffers otherwise (where other tensors are cut unevenly), so the first one writes all of it.
MODEL_AXES = ("ep", "tp")
#: State of an optimizer, as torch keeps it: name of a parameter -> name of a value -> tensor or number.
States = Mapping[str, Mapping[str, Any]]


class Whole(NamedTuple):
    """A tensor of the model, whole: its shape, whether it is a parameter that is trained, other names of it (tied weights)."""

    shape: Shape
    trained: bool
    aliases: tuple[str, ...]


class EngineState:
    """The named parts of one engine.

    Names: model/PARAMETER (the master copy; of a frozen one what there is), optimizer/PARAMETER/STATE, buffer/NAME, rng/RANK/STREAM.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.mesh, self.rank = engine.mesh, engine.world.rank
        self.stages = Group(engine.world, engine.mesh, ("pp",), engine.ledger)
        self.options = [_options(group) for group in engine.optimizer.param_groups] if engine.optimizer else []

    # -- what there is ---------------------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """Everything that goes to a file."""
        return self.model_parts() + self.optimizer_parts(self.states()) + self.random_parts()

    def model_parts(self) -> list[Part]:
        """Parameters and persistent buffers."""
        parallel, found = self.engine.parallel, []
        for group in self._groups():
            layouts, values, cut = group.layouts(), group.values(), group.cuts("optim")
            low, high = (group.low, group.high) if cut else (0, group.plan.total)
            for slot in group.plan.slots:
                start, stop = max(slot.start, low), min(slot.stop, high)
                mine = values[start - low : max(stop, start) - low]
                part = self._part(f"model/{slot.name}", group.places[slot.name].shape, layouts[slot.name], mine)
                aliases = tuple(name for name in parallel.aliases[slot.name] if name != slot.name)
                speaks = part.speaks and not group.copied
                found.append(replace(part, speaks=speaks, trainable=group.trainable, aliases=aliases))
        for stage in parallel.stages:
            buffers = dict(stage.model.named_buffers())
            for name in parallel.buffers[stage.number]:
                shape = tuple(buffers[name].shape)
                found.append(self._part(f"buffer/{name}", shape, Layout.whole(shape), buffers[name]))
        return found

    def states(self) -> States:
        """The optimizer's state of each parameter of which a piece is here. Raises JobError for state that is of no parameter."""
        optimizer = self.engine.optimizer
        if optimizer is None:
            return {}
        names: dict[Any, str] = {piece.value: piece.name for piece in self._pieces()}
        known = {piece.value for group in self.engine.parallel.groups for piece in group.pieces}
        for key in optimizer.state:
            if key not in known:
                raise JobError(f"{type(optimizer).__name__} keeps state that is of no parameter ({key!r}), which no other mesh could read")
        return {names[param]: values for param, values in optimizer.state.items() if param in names}

    def optimizer_parts(self, states: States) -> list[Part]:
        """State tensors: those shaped as their parameter's piece are cut as it is, others belong to a parameter that is whole here."""
        found = []
        for group, piece, shape, layout in self._pieces_with_layouts():
            for key, value in states.get(piece.name, {}).items():
                if not isinstance(value, Tensor) or value.dim() == 0:
                    continue
                name = f"optimizer/{piece.name}/{key}"
                if value.shape == piece.value.shape:
                    part = self._part(name, shape, layout, value)
                else:
                    self._check_whole(piece, layout, name, tuple(value.shape))
                    part = self._part(name, tuple(value.shape), Layout.whole(tuple(value.shape)), value, held_as=layout)
                found.append(replace(part, speaks=part.speaks and not group.copied))
        return found

    def scalars(self, states: States) -> dict[str, Scalar]:
        """State that is one number, of the pieces with which a tensor begins; and what the optimizer itself changed in its options."""
        found: dict[str, Scalar] = {}
        for piece in self._pieces():
            for key, value in states.get(piece.name, {}).items() if piece.start == 0 else ():
                if isinstance(value, Tensor) and value.dim() == 0:
                    found[f"optimizer/{piece.name}/{key}"] = Scalar(NAMES[value.dtype], value.item())
                elif isinstance(value, int | float):
                    found[f"optimizer/{piece.name}/{key}"] = Scalar("", value)
        optimizer = self.engine.optimizer
        names = {piece.value: piece.name for group in self.engine.parallel.groups for piece in group.pieces}
        for group, first in zip(optimizer.param_groups if optimizer else (), self.options, strict=True):
            for key, value in _options(group).items():
                if key != "lr" and value != first.get(key) and isinstance(value, int | float):
                    found |= {f"option/{names[param]}/{key}": Scalar("", value) for param in group["params"]}
        return found

    def random_parts(self) -> list[Part]:
        """This rank's random streams: torch's on the CPU and on its GPU, Python's, NumPy's."""
        found = []
        for name, state in random_streams(self.engine.world.device).items():
            shape = tuple(state.shape)
            boxes = Layout.whole(shape).boxes(shape, self.mesh, self.rank)
            found.append(Part(f"rng/{self.rank}/{name}", shape, boxes, state, (0, len(state))))
        return found

    def counters(self) -> dict[str, Any]:
        """What is the same on all ranks."""
        engine = self.engine
        return {
            "steps": engine.steps,
            "updates": engine.updates,
            "skips": engine.skips,
            "scale": [engine.scale.scale, engine.scale.good] if engine.scale else None,
            "loaders": [loader.state() for loader in engine.loaders],
            "optimizer": type(engine.optimizer).__name__ if engine.optimizer else None,
        }

    # -- what is wanted --------------------------------------------------------------------------------------------

    def named(self) -> dict[str, Whole]:
        """The model's tensors, on all its stages, as "model/NAME" and "buffer/NAME". Collective."""
        mine = {
            part.name: Whole(part.shape, part.trainable and part.name.startswith("model/"), part.aliases) for part in self.model_parts()
        }
        return {name: found for names in self.stages.objects(mine, reason="load") for name, found in names.items()}

    def wanted(self, manifest: Manifest, named: Mapping[str, Whole]) -> dict[str, Shape]:
        """Names and whole shapes of all tensors that the model with these tensors needs from a checkpoint."""
        wanted = {name: one.shape for name, one in named.items()}
        there = state_keys(manifest)
        for name, (shape, trainable, _) in named.items():
            if not trainable or not there:
                continue
            parameter = name.removeprefix("model/")
            for key in there.get(parameter, ()):
                full = f"optimizer/{parameter}/{key}"
                if full in manifest.tensors:
                    wanted[full] = manifest.tensors[full].shape
            was = manifest.tensors.get(name)
            if parameter not in there and (was is None or not was.trainable):
                wanted[f"optimizer/{parameter}/*"] = shape  # it was frozen then, or was not there
        return wanted

    def fresh_states(self, manifest: Manifest) -> dict[str, dict[str, Any]]:
        """State for each piece here as the checkpoint has it, scalars filled in, tensors still to be filled: those that the optimizer has
        now, where they fit. Raises JobError."""
        states: dict[str, dict[str, Any]] = {}
        present: Mapping[Any, Mapping[str, Any]] = self.engine.optimizer.state if self.engine.optimizer else {}
        there = state_keys(manifest)
        groups = self.engine.optimizer.param_groups if self.engine.optimizer else []
        on_device = {param for group in groups if group.get("fused") or group.get("capturable") for param in group["params"]}
        for _, piece, shape, layout in self._pieces_with_layouts():
            for key in there.get(piece.name, ()):
                name, device = f"optimizer/{piece.name}/{key}", piece.value.device
                if name in manifest.scalars:
                    dtype, number = manifest.scalars[name]
                    where = device if key != "step" or piece.value in on_device else torch.device("cpu")
                    value: Any = torch.tensor(number, dtype=DTYPES[dtype], device=where) if dtype else number
                else:
                    entry = manifest.tensors[name]
                    dtype_ = self._dtype_now(piece, entry, manifest)
                    there_now = present.get(piece.value, {}).get(key)
                    if entry.shape == shape and _fits(there_now, piece.value, dtype_):
                        value = there_now
                    elif entry.shape == shape:
                        value = torch.zeros_like(piece.value, dtype=dtype_, requires_grad=False)
                    else:
                        self._check_whole(piece, layout, name, entry.shape)
                        value = torch.zeros(entry.shape, dtype=dtype_, device=device)
                states.setdefault(piece.name, {})[key] = value
        return states

    def kept_streams(self, manifest: Manifest) -> list[Part]:
        """Random streams that go on where they were: on the same mesh. On another, ranks have rows of others, and streams begin anew."""
        if manifest.mesh != str(self.mesh) or manifest.ranks != self.mesh.size:
            return []
        return [part for part in self.random_parts() if (e := manifest.tensors.get(part.name)) and e.shape == part.shape]

    # -- putting back ----------------------------------------------------------------------------------------------

    def put(self, manifest: Manifest, host: HostCopy, states: States) -> None:
        """Take over what the host copy holds: shares of all copies are brought together, and every rank has its parameters. Collective."""
        engine, aliases = self.engine, alias_table(manifest)
        for place in sorted(host.places, key=lambda place: place.part.name):  # one order on all ranks
            part = place.part
            if part.name in manifest.tensors or part.name in aliases:
                self._join(part, host.flat(place))
        for copied, original in self._doubles():
            copied.master.copy_(original.master)
        for group in engine.parallel.groups:
            group.publish()
        for group in engine.parallel.groups:
            group.wait_published()
        if engine.optimizer is not None:
            engine.optimizer.state.clear()
            for piece in self._pieces():
                if piece.name in states:
                    engine.optimizer.state[piece.value] = dict(states[piece.name])
            for copied, original in self._doubles():
                for piece, other in zip(copied.pieces, original.pieces, strict=True):
                    kept = engine.optimizer.state.get(other.value, {})
                    engine.optimizer.state[piece.value] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in kept.items()}
            self._put_options(manifest)
        streams = {place.part.name.rpartition("/")[2]: place.part.values for place in host.places if place.part.name.startswith("rng/")}
        restore_streams(streams, engine.world.device)

    def put_counters(self, state: Mapping[str, Any]) -> None:
        engine = self.engine
        engine.steps, engine.updates, engine.skips = state["steps"], state["updates"], state["skips"]
        if engine.scale and state["scale"]:
            engine.scale.scale, engine.scale.good = state["scale"]
        for loader, position in zip(engine.loaders, state["loaders"], strict=False):
            loader.load_state(position)

    def _put_options(self, manifest: Manifest) -> None:
        assert self.engine.optimizer is not None
        names = {piece.value: piece.name for group in self.engine.parallel.groups for piece in group.pieces}
        for group in self.engine.optimizer.param_groups:
            begins = f"option/{names[group['params'][0]]}/"
            group |= {name.removeprefix(begins): scalar.value for name, scalar in manifest.scalars.items() if name.startswith(begins)}

    def _join(self, part: Part, mine: Tensor) -> None:
        """Put a share into the part's values, with those of the other copies."""
        values = part.values.detach()
        flat = values.view(-1) if values.is_contiguous() else torch.empty(values.numel(), dtype=values.dtype, device=values.device)
        start, stop = part.share
        flat[start:stop].copy_(mine)
        copies = Group(self.engine.world, self.mesh, part.axes, self.engine.ledger)
        if copies.size > 1:
            size = flat.element_size()
            copies.all_gather(flat.view(torch.uint8), [n * size for n in part.bounds], reason=f"load {part.name}", lane="user").wait()
        if flat.data_ptr() != values.data_ptr():
            values.copy_(flat.view(values.shape))

    # -- pieces ----------------------------------------------------------------------------------------------------

    def _doubles(self) -> list[tuple[ShardedGroup, ShardedGroup]]:
        """Of a tied weight with both its ends on this rank, the copy and the original."""
        tied = [group for stage in self.engine.parallel.stages for group in stage.tied]
        return [(copy, one) for copy in tied if copy.copied for one in tied if not one.copied and one.names == copy.names]

    def _groups(self) -> list[ShardedGroup]:
        """All groups, each name once."""
        doubles = [copy for copy, _ in self._doubles()]
        return [group for group in self.engine.parallel.groups if group not in doubles]

    def _pieces(self) -> list[Piece]:
        return [piece for group in self._groups() for piece in group.pieces]

    def _pieces_with_layouts(self) -> Iterator[tuple[ShardedGroup, Piece, Shape, Layout]]:
        """Each piece, with the shape of the whole tensor and where that lies."""
        for group in self._groups():
            layouts = group.layouts()
            yield from ((group, piece, group.places[piece.name].shape, layouts[piece.name]) for piece in group.pieces)

    def _part(self, name: str, shape: Shape, layout: Layout, values: Tensor, held_as: Layout | None = None) -> Part:
        """held_as: the layout that says which ranks have it, where that is not its own."""
        holders = held_as or layout
        cut = {axis for axes in holders.cuts for axis in axes} | set(holders.flat.axes if holders.flat else ())
        axes = tuple(axis for axis in COPY_AXES if axis not in cut)
        alike = {axis.partition("/")[0]: axis.replace("/", "%") for axis in cut if "/" in axis}  # neighbours that share a piece
        boxes = layout.boxes(shape, self.mesh, self.rank)
        assert sum(box.elements for box in boxes) == values.numel(), f"{name}: the layout and the memory of rank {self.rank} differ"
        bounds = share_out(name, values.numel(), values.element_size(), self.mesh.extent(*axes))
        speaks = all(self.mesh.along(self.rank, alike.get(axis, axis)) == 0 for axis in MODEL_AXES if axis not in cut)
        return Part(name, shape, boxes, values, bounds, self.mesh.index(self.rank, *axes), axes, speaks)

    def _check_whole(self, piece: Piece, layout: Layout, name: str, shape: Shape) -> None:
        if piece.value.shape != piece.shape or any(layout.cuts):
            raise JobError(
                f"{name} is {list(shape)}, its parameter {list(piece.shape)}: it belongs to the whole, of which this rank has a part; "
                'write zero.granularity="matrix"'
            )

    def _dtype_now(self, piece: Piece, entry: Entry, manifest: Manifest) -> torch.dtype:
        """State that had its parameter's own dtype follows it; other state (8 bits, counts) keeps its own."""
        parameter = manifest.tensors.get(f"model/{piece.name}")
        follows = parameter is not None and entry.dtype == parameter.dtype
        return piece.value.dtype if follows else DTYPES[entry.dtype]


def _fits(value: Any, like: Tensor, dtype: torch.dtype) -> bool:
    """Whether a state can take values of `like`'s shape in this dtype."""
    return isinstance(value, Tensor) and (value.shape, value.dtype, value.device) == (like.shape, dtype, like.device)


def state_keys(manifest: Manifest) -> dict[str, list[str]]:
    """Of which parameters the checkpoint has optimizer state, and the names of it."""
    found: dict[str, list[str]] = {}
    for name in (*manifest.tensors, *manifest.scalars):
        if name.startswith("optimizer/"):
            parameter, _, key = name.removeprefix("optimizer/").rpartition("/")
            found.setdefault(parameter, []).append(key)
    return found


def random_streams(device: torch.device) -> dict[str, Tensor]:
    """The state of every global random stream that a model or a dataset may draw from, each as one 1-D tensor."""
    version, words, gauss = random.getstate()
    kept: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, cached = kept
    streams = {
        "torch": torch.get_rng_state(),
        # 32-bit words are exact in float64, and so is the normal number that both keep for later
        "python": torch.tensor([version, *words, gauss is not None, gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss, cached], dtype=torch.float64),
    }
    if device.type == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state(device)
    return streams


def restore_streams(streams: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the global random streams that are given."""
    if "torch" in streams:
        torch.set_rng_state(streams["torch"])
    if "cuda" in streams and device.type == "cuda":
        torch.cuda.set_rng_state(streams["cuda"], device)
    if "python" in streams:
        version, *words, has_gauss, gauss = streams["python"].tolist()
        random.setstate((int(version), tuple(int(word) for word in words), gauss if has_gauss else None))
    if "numpy" in streams:
        *keys, position, has_gauss, cached = streams["numpy"].tolist()
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), int(position), int(has_gauss), cached))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
