"""A model is cut in pipeline stages: each runs the model's own forward, with PassThrough in place of what others have.

Names stay those of the whole model: a list of blocks keeps its length, so no index shifts, and what a model does by index
(a kind of attention, a table of layer types) it does to the right block.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stretto.errors import JobError
from stretto.layout.stages import Split


class PassThrough(nn.Module):
    """Stands where another stage has its module: what comes first goes on as it came."""

    def forward(self, x: Any = None, *_: Any, **__: Any) -> Any:
        return x


@dataclass(frozen=True)
class StageModel:
    """A stage's part of the model. tied: parameters of which another stage has a copy, by the name that the whole model keeps."""

    number: int
    module: nn.Module
    tied: Mapping[str, nn.Parameter]


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


def stage_model(model: nn.Module, split: Split, stage: int, homes: Mapping[str, Sequence[int]]) -> StageModel:
    """Stage number `stage` of the model. It shares the modules that it has with `model`; what stands around them is its own.

    A tied weight is the model's own parameter in the first stage that has it, and a parameter of its own in the others.
    """
    mine = {item.name for item in split.parts(stage)}
    own = _Own(model)
    for item in split.items:
        if item.name not in mine:
            own.put(item.name, PassThrough())
    kept = {id(param): name for name, param in model.named_parameters()}
    tied: dict[str, nn.Parameter] = {}
    for place, param in model.named_parameters(remove_duplicate=False):
        name, module = kept[id(param)], place.rpartition(".")[0]
        if len(homes[name]) < 2 or not any(module == part or module.startswith(f"{part}.") for part in mine):
            continue
        if name not in tied:
            tied[name] = param if homes[name][0] == stage else nn.Parameter(param.data, requires_grad=param.requires_grad)
        if tied[name] is not param:
            own.put_parameter(place, tied[name])
    return StageModel(stage, own.module(), tied)


class _Own:
    """A model of which some modules are replaced: the modules around those are copies, all others are the model's own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.copies: dict[str, nn.Module] = {}

    def module(self) -> nn.Module:
        return self.copies.get("", self.model)

    def put(self, place: str, module: nn.Module) -> None:
        parent, _, leaf = place.rpartition(".")
        self._copied(parent)._modules[leaf] = module

    def put_parameter(self, place: str, param: nn.Parameter) -> None:
        parent, _, leaf = place.rpartition(".")
        self._copied(parent)._parameters[leaf] = param

    def _copied(self, place: str) -> nn.Module:
        if place not in self.copies:
            module = copy.copy(self.model.get_submodule(place))
            for name, value in vars(module).items():
                if isinstance(value, dict):  # of modules, parameters, buffers and hooks
                    module.__dict__[name] = copy.copy(value)
            self.copies[place] = module
            if place:
                parent, _, leaf = place.rpartition(".")
                self._copied(parent)._modules[leaf] = module
        return self.copies[place]


def let_go(model: nn.Module, held: Sequence[nn.Parameter]) -> None:
    """Parameters that no stage of this rank has give their memory back: whoever looks at one sees NaN."""
    mine = {id(param) for param in held}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            if id(param) not in mine:
                param.data = _nothing(param)


def _nothing(param: Tensor) -> Tensor:
    return param.data.new_full((), float("nan")).expand(param.shape) if not param.is_meta else param.data
