"""A model is cut in pipeline stages: each runs the model's own forward on the batch, and computes its own blocks of it.

[Note: a stage's forward] Every stage is called with the whole microbatch, so that masks, positions and rotary tables come to its
blocks as the model makes them. A later stage enters at its first block: there what the stage before made takes the place of what
was handed over. It leaves at the first block that it lacks: what would be handed to that one is what it made, and the rest of the
forward is not run. The blocks before its own pass on NaN. Names stay those of the whole model: a list of blocks keeps its
length, so no index shifts, and what a model does by index (a table of layer types) it does to the right block.

[Note: what a stage lacks is NaN] What stands before the blocks (an embedding) still runs in every stage, so that shapes are right,
with NaN for weights; a block that the stage lacks makes NaN in the shape of what it gets. All that is thrown away where the stage
enters. If a model uses it in another way as well, in a later block or behind the last one, that is refused at the first forward, and
could not go unnoticed later.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stretto.errors import JobError, RunError
from stretto.layout.stages import Split
from stretto.parallel.stream import Stream

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StageModel:
    """A stage's part of the model, and the way of a forward through it. tied: parameters of which another stage has a copy, by the
    name that the whole model keeps."""

    number: int
    module: nn.Module
    tied: Mapping[str, nn.Parameter]
    passage: Passage


def homes(model: nn.Module, split: Split) -> dict[str, tuple[int, ...]]:
    """Which stages use each parameter, under the name that the model keeps. Raises JobError for one that is in no part."""
    stage_of = {item.name: stage for stage in range(split.stages) for item in split.parts(stage)}
    kept: dict[int, str] = {}
    found: dict[str, set[int]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        words = name.split(".")
        place = next((p for n in range(len(words), 0, -1) if (p := ".".join(words[:n])) in stage_of), None)
        if place is None and split.stages > 1:
            raise JobError(f"{name} lies in no part that a pipeline stage has ({split}); write a mesh without pp")
        found.setdefault(kept.setdefault(id(param), name), set()).add(0 if place is None else stage_of[place])
    return {name: tuple(sorted(stages)) for name, stages in found.items()}


def tied_stages(homes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """The stages that hold a copy of one weight (tied embeddings: the first and the last); () if none does. Raises JobError for
    weights that are shared among different stages."""
    shared = {name: tuple(stages) for name, stages in homes.items() if len(stages) > 1}
    if len(set(shared.values())) > 1:
        names = ", ".join(f"{name} by stages {' and '.join(map(str, stages))}" for name, stages in sorted(shared.items())[:3])
        raise JobError(f"weights are shared among different pipeline stages ({names}); write a mesh without pp, or pipeline.split")
    return next(iter(shared.values()), ())


# -- the way of a forward ----------------------------------------------------------------------------------------------


class Left(Exception):
    """The forward has come to what the stage lacks. An exception, so that nothing of the rest runs."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x


class Passage:
    """One forward after the other through a stage: where it enters, in which order blocks run, where it leaves.

    blocks: names of the stage's own, in order. enters, leaves: names of its first part and of the first that it lacks; "" for the
    model's own beginning and end. [Note: a stage's forward] stream: of the model's tensor parallelism. What cannot be is a RunError.
    """

    def __init__(self, number: int, blocks: Sequence[str], enters: str, leaves: str, stream: Stream) -> None:
        self.number, self.blocks, self.enters, self.leaves, self.stream = number, tuple(blocks), enters, leaves, stream
        self._given: Tensor | None = None
        self._entered = not enters
        self._ran = 0
        self._lost = False  # whether what goes from block to block is NaN already
        self._looked = not (enters or leaves)
        #: Whether the stage's own weights are finite, for whoever has to find out where NaN comes from.
        self.sound: Callable[[], bool] = lambda: True

    def run(self, call: Callable[[], Any], given: Tensor | None) -> Any:
        """call() is the model's forward; given: what the stage before made. Result: what this stage made, the model's output if it is
        the last."""
        self._given, self._entered, self._ran, self._lost = given, not self.enters, 0, False
        try:
            output = call()
        except Left as left:
            output = left.x
        except Exception as problem:
            if self._entered and self.enters:
                problem.add_note(f"in pipeline stage {self.number}, where modules that run before {self.enters} make only NaN")
            if self._entered or isinstance(problem, RunError):
                raise
            what = f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
            raise self._error(f"the forward fails before {self.enters}, where modules of other stages are missing ({what})") from problem
        finally:
            self._given = None
        if not self._entered or self._ran < len(self.blocks):
            raise self._error(f"{self._next} did not run", ORDER)
        self._look(output, given)
        return output

    def begins(self, name: str, x: Tensor, others: Sequence[Any]) -> Tensor:
        """The stage's first part is called. Result: what the stage before made, in place of x."""
        if self._entered or self._given is None:
            raise self._error(f"{name} runs twice in one forward", ORDER)
        if not self._looked and any(bool(other.isnan().any()) for other in _floats(others)):
            raise self._error(f"{name} is given a value made with weights of another stage, besides what the block before it made", ONE)
        self._entered = True
        self.stream.tokens, self.stream.region = tuple(x.shape[:-1]), self.stream.between
        return self._given

    def block(self, name: str) -> None:
        """A block of the stage is called."""
        if name != self._next:
            raise self._error(f"{name} runs where {self._next or 'no block'} should", ORDER)
        self._ran += 1

    def before(self, name: str, x: Any, others: Sequence[Any]) -> Any:
        """A part of an earlier stage is called, and makes NaN in the shape of what it gets: what it would make is not known here."""
        if self._entered:
            raise self._error(f"{name}, which an earlier stage has, runs after {self.enters}", ORDER)
        if self._lost or not isinstance(x, Tensor):
            return x
        self._lost = True
        return torch.full_like(x, float("nan"), dtype=x.dtype if x.is_floating_point() else torch.get_default_dtype())

    def ends(self, name: str, x: Any, others: Sequence[Any]) -> None:
        """A part of a later stage is called: the forward leaves."""
        if name != self._next:
            raise self._error(f"{name} runs where {self._next} should", ORDER)
        if not isinstance(x, Tensor):
            raise self._error(f"{name} is given a {type(x).__name__} first", ONE)
        if any(other.requires_grad for other in _floats(others)):
            raise self._error(f"{name} is given a second value with a gradient", ONE)
        raise Left(x)

    @property
    def _next(self) -> str:
        """What has to run next."""
        return [*self.blocks, self.leaves][self._ran] if self._entered else self.enters

    def _look(self, output: Any, given: Tensor | None) -> None:
        """Once: whether NaN came out though none went in. [Note: what a stage lacks is NaN]"""
        if self._looked:
            return
        self._looked = True
        nan = any(bool(x.isnan().any()) for x in _floats([output])) and not (given is not None and bool(given.isnan().any()))
        if nan and self.sound():
            raise self._error(
                "it made NaN of finite weights and values: it uses what only another stage has, besides what the block before it made (a "
                "weight in two places, or a residual sum outside the blocks)",
                "say in which order the parts run with stages=[...], or write a mesh without pp",
            )

    def _error(self, what: str, way: str = "write a mesh without pp") -> RunError:
        return RunError(f"pipeline stage {self.number}: {what}; {way}")


ORDER = (
    "in stages each block runs once a forward, in the order of the list; say the order of the other parts with stages=[...], "
    "or write a mesh without pp"
)
ONE = "one tensor goes from stage to stage, and what the batch alone decides; write a mesh without pp"


def _floats(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


# -- the part of a model -----------------------------------------------------------------------------------------------

#: NaN in the shape of a whole parameter, by its name, without memory.
Nothing = Callable[[str], Tensor]


def stage_model(
    model: nn.Module, split: Split, stage: int, homes: Mapping[str, Sequence[int]], stream: Stream, nothing: Nothing
) -> StageModel:
    """Stage number `stage` of the model. It shares the modules that it has with `model`; what stands around them is its own.

    A tied weight is the model's own parameter in the first stage that has it, and a parameter of its own in the others.
    """
    kept = {id(param): name for name, param in model.named_parameters()}
    first_block = next((i for i, item in enumerate(split.items) if item.block), 0)
    low, high = split.bounds[stage], split.bounds[stage + 1]
    names = [item.name for item in split.items]
    mine = names[low:high]
    blocks = [item.name for item in split.parts(stage) if item.block]
    passage = Passage(stage, blocks, names[low] if stage else "", names[high] if high < len(names) else "", stream)
    own = _Own(model, lambda param: nothing(kept[id(param)]))
    for i, name in enumerate(names):
        if not low <= i < high:
            own.lack(name, None if i < first_block else passage.before if i < low else passage.ends)
    for name in blocks:
        _watch(model.get_submodule(name), name, passage)
    if passage.enters:
        _enter(_module(model, passage.enters), passage)
    tied: dict[str, nn.Parameter] = {}
    for place, param in model.named_parameters(remove_duplicate=False):
        name = kept[id(param)]
        if len(homes[name]) < 2 or not any(f"{place}.".startswith(f"{part}.") for part in mine):
            continue
        if name not in tied:
            tied[name] = param if homes[name][0] == stage else nn.Parameter(param.data, requires_grad=param.requires_grad)
        if tied[name] is not param:
            own.put_parameter(place, tied[name])
    return StageModel(stage, own.module(), tied, passage)


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise JobError(f"no pipeline stage can begin with {name}, which is no module; name one of the blocks in pipeline.split") from None


def _watch(block: nn.Module, name: str, passage: Passage) -> None:
    block.register_forward_pre_hook(lambda *_: passage.block(name), prepend=True)


def _enter(part: nn.Module, passage: Passage) -> None:
    """Before all other hooks of the part: they are to see what the stage was given."""
    key = _first_name(part)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, others = _first(args, kwargs, key)
        given = passage.begins(passage.enters, x, others)
        return ((given, *args[1:]), kwargs) if args else (args, kwargs | {key: given})

    part.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)


def _first_name(module: nn.Module) -> str:
    """How a module calls its first argument."""
    return next(iter(inspect.signature(module.forward).parameters), "")


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any], key: str) -> tuple[Any, list[Any]]:
    """The first argument and the others, however they are given."""
    if args:
        return args[0], [*args[1:], *kwargs.values()]
    return kwargs.get(key), [value for name, value in kwargs.items() if name != key]


class _Own:
    """A model of which some modules are replaced: the modules around those are copies, all others are the model's own."""

    def __init__(self, model: nn.Module, nothing: Callable[[nn.Parameter], Tensor]) -> None:
        self.model, self.nothing = model, nothing
        self.copies: dict[str, nn.Module] = {}

    def module(self) -> nn.Module:
        return self.copies.get("", self.model)

    def lack(self, place: str, called: Callable[[str, Any, Sequence[Any]], Any] | None) -> None:
        """Take the module or parameter at `place` away. called(place, first argument, others): what its forward does instead; None: it
        runs with NaN for weights. [Note: what a stage lacks is NaN]"""
        parent, _, leaf = place.rpartition(".")
        around = self._copied(parent)
        module = around._modules.get(leaf)
        if module is None:
            self._without(around, leaf)
        elif called is None:
            around._modules[leaf] = self._with_nothing(module)
        else:
            around._modules[leaf] = _hollow(module, place, called)

    def put_parameter(self, place: str, param: nn.Parameter) -> None:
        parent, _, leaf = place.rpartition(".")
        self._copied(parent)._parameters[leaf] = param

    def _copied(self, place: str) -> nn.Module:
        if place not in self.copies:
            self.copies[place] = module = _copy(self.model.get_submodule(place))
            if place:
                parent, _, leaf = place.rpartition(".")
                self._copied(parent)._modules[leaf] = module
        return self.copies[place]

    def _without(self, module: nn.Module, leaf: str) -> None:
        """NaN under the parameter's name, where nobody looks for parameters."""
        param = module._parameters.pop(leaf)
        module.__dict__[leaf] = param if param is None else self.nothing(param)

    def _with_nothing(self, module: nn.Module) -> nn.Module:
        bare = _bare(module)
        for leaf in list(bare._parameters):
            self._without(bare, leaf)
        for leaf, buffer in bare._buffers.items():
            bare._buffers[leaf] = None if buffer is None else buffer.clone()  # statistics of NaN stay here
        for leaf, child in bare._modules.items():
            bare._modules[leaf] = None if child is None else self._with_nothing(child)
        return bare


def _copy(module: nn.Module) -> nn.Module:
    """The same module, with lists of modules, parameters, buffers and hooks of its own."""
    copied = copy.copy(module)
    for name, value in vars(copied).items():
        if isinstance(value, dict):
            copied.__dict__[name] = copy.copy(value)
    return copied


def _bare(module: nn.Module) -> nn.Module:
    """A copy without what was hung on it: hooks, and a forward in place of that of its class."""
    bare = _copy(module)
    bare.__dict__.pop("forward", None)
    for name, value in vars(bare).items():
        if isinstance(value, dict) and name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            value.clear()
    return bare


def _hollow(module: nn.Module, place: str, called: Callable[[str, Any, Sequence[Any]], Any]) -> nn.Module:
    """What stands where another stage has `module`: of its class and with its attributes, for models that ask a block for them, but
    with nothing in it."""
    key, hollow, kind = _first_name(module), _bare(module), type(module)
    for held in (hollow._parameters, hollow._buffers, hollow._modules):
        held.clear()

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return called(place, *_first(args, kwargs, key))

    hollow.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return hollow


def let_go(model: nn.Module, held: Sequence[nn.Parameter]) -> None:
    """Parameters that no stage of this rank has give their memory back: whoever looks at one sees NaN."""
    mine = {id(param) for param in held}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if id(param) not in mine:
                param.data = _nothing(param)


def _nothing(param: Tensor) -> Tensor:
    return param.data.new_full((), float("nan")).expand(param.shape) if not param.is_meta else param.data
