"""Tensor parallelism: cuts a module's weights as its rules say and lets its activations cross, the module itself unchanged.

A cut layer stays what it was, a Linear with fewer rows or columns; hooks around it do the rest. (Shoeybi et al. 2019, "Megatron-LM";
Korthikanti et al. 2022 for the cut stream.)
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from stretto.comm.crossing import Bridge, cross
from stretto.comm.group import Group
from stretto.errors import JobError
from stretto.layout.layout import split
from stretto.layout.mesh import Mesh
from stretto.parallel.place import Place
from stretto.parallel.rules import Rule, Rules
from stretto.parallel.stream import Stream


@dataclass(frozen=True)
class Tensors:
    """A model's tensor parallelism: its group, the stream, where each parameter lies (by the first of its names), and the size of
    the vocabulary if its head gives logits of a part of it."""

    group: Group
    stream: Stream
    places: Mapping[str, Place]
    vocab: int | None = None


def cut(model: nn.Module, rules: Rules, mesh: Mesh, group: Group, *, gathers_again: bool) -> Tensors:
    """Cut `model` in place, which may be on the meta device; parameters that are cut lose their values.

    gathers_again: whether what was gathered for column-parallel layers is kept as the rank's part only, see stream.Gathered.
    """
    bridge = Bridge.of(group)
    stream = Stream(bridge, rules.sequence and group.size > 1, gathers_again=gathers_again)
    places = _places(model, rules)
    _cut_parameters(model, places, mesh, group.world.rank)
    for name, attributes in rules.local.items():
        _localise(name, model.get_submodule(name), attributes, group.size)
    vocab = None
    seen: set[int] = set()
    kept = {name: first for first, names in _names(model).items() for name in names}
    for name, module in model.named_modules(remove_duplicate=False):
        rule = rules.modules.get(name)
        if rule is None or id(module) in seen:
            continue
        seen.add(id(module))
        weight = f"{name}.weight"
        whole = places[kept[weight]].shape if weight in kept else ()
        around = Around(name, module, rule, stream, bridge, whole)
        around.hook()
        if rule.leaves == "head":
            vocab = around.outputs
    for name, change, after in ((rules.begins, stream.begin, False), (rules.ends, stream.end, True)):
        if name:
            _hook_end(model.get_submodule(name), name, change, after)
    return Tensors(group, stream, places, vocab)


# -- parameters --------------------------------------------------------------------------------------------------------


def _names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by the first of them."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(first.setdefault(id(param), name), []).append(name)
    return names


def _places(model: nn.Module, rules: Rules) -> dict[str, Place]:
    params = dict(model.named_parameters(remove_duplicate=False))
    places = {}
    for kept, names in _names(model).items():
        found = {_place(name, params[name], rules) for name in names}
        if len({place.layout for place in found}) > 1:
            raise JobError(f"{' and '.join(names)} are one weight, and their rules cut it differently; write rules that cut both by rows")
        # a weight that is used in two places is summed if one of them says so
        places[kept] = max(found, key=lambda place: place.summed)
    return places


def _place(name: str, param: nn.Parameter, rules: Rules) -> Place:
    module, _, leaf = name.rpartition(".")
    shape = tuple(param.shape)
    rule = rules.params.get(name) or rules.modules.get(module)
    if rule is None:
        return Place.whole(shape)
    layout = rule.params.get(name) or rule.params.get(leaf)
    if layout is None:
        return Place.whole(shape, rule.summed)
    axis = next(axis for axes in layout.cuts for axis in axes)
    return Place(shape, layout, axis.replace("/", "%") if "/" in axis else "")


def _cut_parameters(model: nn.Module, places: Mapping[str, Place], mesh: Mesh, rank: int) -> None:
    """Parameters of this rank's shape, without memory, in place of those that are cut."""
    params = dict(model.named_parameters())
    smaller: dict[int, nn.Parameter] = {}
    for name, place in places.items():
        if place.axis:
            whole = params[name]
            shape = place.local_shape(mesh, rank)
            empty = torch.zeros((), dtype=whole.dtype, device=whole.device).expand(shape)
            smaller[id(whole)] = nn.Parameter(empty, requires_grad=whole.requires_grad)
    for module in model.modules():
        for leaf, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) in smaller:
                module._parameters[leaf] = smaller[id(param)]


def _localise(name: str, module: nn.Module, attributes: tuple[str, ...], tp: int) -> None:
    """Bring what a module remembers of its size after its part: "heads" is divided by tp, "groups=1" set; "config.heads" in a copy
    of its config, which others have too."""
    for attribute in attributes:
        path, _, value = attribute.partition("=")
        *above, leaf = path.split(".")
        owner: Any = module
        for word in above:
            if not hasattr(owner, word):
                break
            mine = copy.copy(getattr(owner, word))
            setattr(owner, word, mine)
            owner = mine
        whole = getattr(owner, leaf, None)
        if not isinstance(whole, int):
            raise JobError(f'rules: "local:{attribute}" of {name}: {type(module).__name__} has no whole number {path}')
        if not value and whole % tp:
            raise JobError(f"tp={tp} does not divide {path}={whole} of {name}; use a tp that does")
        setattr(owner, leaf, int(value) if value else whole // tp)


# -- hooks -------------------------------------------------------------------------------------------------------------


class Around:
    """What happens on entering and leaving one module."""

    def __init__(self, name: str, module: nn.Module, rule: Rule, stream: Stream, bridge: Bridge, whole: tuple[int, ...]) -> None:
        self.name, self.module, self.rule, self.stream, self.bridge = name, module, rule, stream, bridge
        self.columns = 1 if type(module).__name__ == "Conv1D" else 0
        self.outputs = whole[self.columns] if len(whole) == 2 else 0  # of the whole module
        self.vocab = whole[0] if whole else 0
        self.outside: Tensor | None = None
        self.saved: torch.autograd.graph.saved_tensors_hooks | None = None

    def hook(self) -> None:
        """Register what the rule asks for."""
        module, rule = self.module, self.rule
        if "weight" in rule.params:
            self._fit()
        if rule.leaves in ("stream", "sum") and module._parameters.get("bias") is not None:
            _hide_bias(module)
        if rule.enters:
            module.register_forward_pre_hook(_on_first_argument(module, lambda x: ENTER[rule.enters](self, x)), with_kwargs=True)
        if rule.leaves:
            module.register_forward_hook(lambda _, __, out: LEAVE[rule.leaves](self, out))
        if any(True for _ in rule.params) and rule.leaves != "stream" and self.stream.cut and self.stream.gathers_again:
            module.register_forward_pre_hook(lambda *_: self._keep_parts())
            module.register_forward_hook(lambda *_: self._stop_keeping(), always_call=True)

    def _fit(self) -> None:
        """Bring what the module remembers of its weight after the weight that it has now."""
        module: Any = self.module
        if type(module).__name__ == "Conv1D":  # it views its result by them
            module.nx, module.nf = module.weight.shape
        elif isinstance(module, nn.Embedding) and module.padding_idx is not None:  # its row gets no gradient
            low, high = split(self.vocab, self.bridge.size, self.bridge.index)
            module.padding_idx = module.padding_idx - low if low <= module.padding_idx < high else None

    def _keep_parts(self) -> None:
        gathered = self.stream.gathered
        if gathered is not None and torch.is_grad_enabled():
            self.saved = torch.autograd.graph.saved_tensors_hooks(gathered.pack, gathered.unpack)
            self.saved.__enter__()

    def _stop_keeping(self) -> None:
        if self.saved is not None:
            self.saved.__exit__()
            self.saved = None

    # entering

    def enter_stream(self, x: Tensor) -> Tensor:
        return self.stream.enter(x, self.stream.form, f"enters {self.name}")

    def enter_alike(self, x: Tensor) -> Tensor:
        return self.stream.enter(x, "same", f"enters {self.name}")

    def enter_ids(self, ids: Tensor) -> Tensor:
        low, high = split(self.vocab, self.bridge.size, self.bridge.index)
        mine = ids - low
        self.outside = (mine < 0) | (mine >= high - low)
        return mine.masked_fill(self.outside, 0)

    def enter_tokens(self, ids: Tensor) -> Tensor:
        return self.stream.ids(ids, f"enters {self.name}")

    def enter_split(self, x: Tensor) -> Tensor:
        self.stream.region = "part"
        return cross(x, self.bridge, "same", "cut", x.shape, reason=f"enters {self.name}", dim="features")

    # leaving

    def leave_to_stream(self, out: Tensor) -> Tensor:
        begins = self.outside is not None
        return self._with_bias(self.stream.leave(self._looked_up(out), f"leaves {self.name}", begins))

    def leave_summed(self, out: Tensor) -> Tensor:
        out = self._looked_up(out)
        self.stream.region = "alike"
        return self._with_bias(cross(out, self.bridge, "sum", "same", out.shape, reason=f"leaves {self.name}"))

    def leave_joined(self, out: Tensor) -> Tensor:
        whole = (*out.shape[:-1], self.outputs)
        self.stream.region = "alike"
        return cross(out, self.bridge, "cut", "alike", whole, reason=f"leaves {self.name}", dim="features")

    def leave_head(self, out: Tensor) -> Tensor:
        return out if self.stream.cuts_logits else self.leave_joined(out)

    def _looked_up(self, out: Tensor) -> Tensor:
        """Of an embedding: zero where another rank has the row."""
        if self.outside is None:
            return out
        outside, self.outside = self.outside, None
        return out.masked_fill(outside.unsqueeze(-1), 0)

    def _with_bias(self, out: Tensor) -> Tensor:
        bias = self.module._parameters.get("bias")
        return out if bias is None else out + bias


ENTER: Mapping[str, Callable[[Around, Tensor], Tensor]] = MappingProxyType(
    {
        "stream": Around.enter_stream,
        "alike": Around.enter_alike,
        "ids": Around.enter_ids,
        "tokens": Around.enter_tokens,
        "split": Around.enter_split,
    }
)
LEAVE: Mapping[str, Callable[[Around, Tensor], Tensor]] = MappingProxyType(
    {"stream": Around.leave_to_stream, "sum": Around.leave_summed, "join": Around.leave_joined, "head": Around.leave_head}
)


def _on_first_argument(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """A pre-hook that changes the module's first argument, however it is given."""
    name = next(iter(inspect.signature(module.forward).parameters))

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {name: change(kwargs[name])}

    return hook


def _hook_end(block: nn.Module, name: str, change: Callable[[Tensor, str], Tensor], after: bool) -> None:
    """The stream begins with a block's input, or ends with its output."""
    if not after:
        block.register_forward_pre_hook(_on_first_argument(block, lambda x: change(x, f"enters {name}")), with_kwargs=True)
        return

    def leave(_: nn.Module, __: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            return (change(out[0], f"leaves {name}"), *out[1:])
        return change(out, f"leaves {name}")

    block.register_forward_hook(leave)


def _hide_bias(module: nn.Module) -> None:
    """Let the module's own forward see no bias: it would be added on every rank, once too often on all but one.

    The parameter stays where it is, under its name; a subclass of the module's class answers for the attribute.
    """
    kind = type(module)
    nothing = torch.zeros(()) if kind.__name__ == "Conv1D" else None

    def bias(self: nn.Module) -> Tensor | None:
        weight = self._parameters["weight"]
        return nothing if nothing is None or weight is None else nothing.to(weight)

    module.__class__ = type(kind.__name__, (kind,), {"bias": property(bias), "__module__": kind.__module__})
