"""A name becomes a model: a built-in decoder, a transformers model (`hf:`), or what your function returns (`python:`).

Our decoders come without memory (meta device) and fill any range of any parameter on demand; others come real.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from stretto.anatomy import DECODERS, Anatomy
from stretto.errors import JobError
from stretto.models.decoder import Decoder, initial
from stretto.models.hub import CONFIG, StoredValues, open_model, wants_values
from stretto.models.plans import Plan, decoder_plan, transformers_plan
from stretto.models.pretrained import OURS, decoder_of, name_there

OTHERS = "hf:FOLDER_OR_ID or python:package.module:function"  # how models that are not built in are written
Initial = Callable[[nn.Module, str, Tensor, int, int], None]  # (model, parameter name, out, start, seed)


@dataclass(frozen=True)
class Task:
    """What a `python:` function may return instead of a bare module: the module and how it is trained.

    forward(model, batch) -> output; loss(output, batch) -> (sum, count); batches: an iterable of mappings of tensors; stages: what
    pipeline stages share, in the order in which it runs. What is None, or empty, is as for any module.
    """

    model: nn.Module
    forward: Callable[[nn.Module, Any], Any] | None = None
    loss: Callable[[Any, Any], tuple[Tensor, Any]] | None = None
    batches: Any = None
    stages: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """A model and what is known about it.

    initial: writes any flat range of a named parameter's first values. stored: where the values of a model on the meta device lie.
    Neither: the module's values are real already.
    describe: one line for the user: what it is, how large, and where its values come from.
    vocab, positions: token ids lie below vocab, sequences are no longer than positions; None: not known, or no limit.
    regular: modules outside the list of blocks that are known to run exactly once in each forward, in that order. stages: as in Task.
    """

    model: nn.Module
    initial: Initial | None
    describe: str
    vocab: int | None = None
    positions: int | None = None
    forward: Callable[[nn.Module, Any], Any] | None = None
    loss: Callable[[Any, Any], tuple[Tensor, Any]] | None = None
    batches: Any = None
    regular: tuple[str, ...] = ()
    stored: StoredValues | None = None
    stages: tuple[str, ...] = ()


def load(name: str, *, weights: str = "auto", seed: int = 0, overrides: Mapping[str, object] | None = None) -> Loaded:
    """The model that `name` means; what cannot be had raises JobError.

    weights: "auto", "pretrained" or "random". seed: of random values, the same on every rank.
    overrides: sizes of a built-in decoder to change, None = its own.
    """
    if weights not in ("auto", "pretrained", "random"):
        raise JobError(f"model.weights={weights!r}: use auto, pretrained or random")
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    source, colon, rest = name.partition(":")
    if not colon:
        return _decoder(name, weights, seed, given)
    if source not in SOURCES:
        raise JobError(f"model={name!r}: {source}: is no source of models; write {OTHERS}, or one of {_names()}")
    if given:
        raise JobError(f"model.{min(given)} changes built-in decoders only ({_names()}); {name} brings its own sizes")
    return SOURCES[source](rest, weights, seed)


# --- built-in decoders ----------------------------------------------------------------------------


def _names() -> str:
    return ", ".join(DECODERS)


def _decoder(name: str, weights: str, seed: int, overrides: Mapping[str, object]) -> Loaded:
    if name not in DECODERS:
        near = difflib.get_close_matches(name, DECODERS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise JobError(f"model={name!r} is unknown; {hint}built in are {_names()}; others are written {OTHERS}")
    if weights == "pretrained":
        raise JobError(f"model.weights=pretrained: {name} has none; write model.weights=random, or a model hf:FOLDER_OR_ID")
    shape = DECODERS[name].with_(overrides)
    model = Decoder(shape, device="meta")
    return Loaded(
        model=model,
        initial=initial,
        describe=f"{name}: decoder, {_count(Anatomy.of_decoder(shape).parameters())} parameters, seeded random values (seed {seed})",
        vocab=shape.vocab,
        positions=shape.positions or None,
        regular=regular_modules(model),
    )


def _count(parameters: int) -> str:
    """1234567 -> "1.2M"."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.1f}{unit}"
    return str(parameters)


def _size(model: nn.Module) -> str:
    return f"{_count(sum(parameter.numel() for parameter in model.parameters()))} parameters"


# --- transformers ---------------------------------------------------------------------------------

# Models that publish no order of their modules.
REGULAR: Mapping[str, tuple[str, ...]] = MappingProxyType({"gpt2": ("transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head")})


def _huggingface(spec: str, weights: str, seed: int) -> Loaded:
    """A causal language model of transformers, from a folder or by its id on the hub; our own decoder from a folder of its values."""
    ours = _own_config(Path(spec))
    if ours is not None and weights != "random":
        return _stored_decoder(spec, ours)
    found = open_model(spec, weights, lambda make: _seeded(seed, make))
    model: Any = found.model
    text = model.config.get_text_config()
    return Loaded(
        model=model,
        initial=None,
        describe=f"hf:{spec}: {type(model).__name__}, {_size(model)}, {found.about or f'seeded random values (seed {seed})'}",
        vocab=getattr(text, "vocab_size", None),
        positions=getattr(text, "max_position_embeddings", None),
        regular=regular_modules(model),
        stored=found.stored,
    )


def _own_config(folder: Path) -> Mapping[str, Any] | None:
    """The config.json of a folder that holds the values of our own decoder."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) and OURS in config else None


def _stored_decoder(spec: str, config: Mapping[str, Any]) -> Loaded:
    """Our decoder with the values of a folder that engine.save_pretrained or convert wrote: a Llama to transformers, and ours to us."""
    wants_values(spec, "pretrained")
    shape = decoder_of(config)
    model = Decoder(shape, device="meta")
    return Loaded(
        model=model,
        initial=None,
        describe=f"hf:{spec}: decoder, {_count(Anatomy.of_decoder(shape).parameters())} parameters, pretrained values",
        vocab=shape.vocab,
        positions=shape.positions or None,
        regular=regular_modules(model),
        stored=StoredValues(spec, {name: name_there(name, config) for name, _ in model.named_parameters()}),
    )


def regular_modules(model: nn.Module) -> tuple[str, ...]:
    """Modules outside the list of blocks that run exactly once a forward, in order: of our decoder, and of a transformers model
    by its pipeline plan; () where nothing is known."""
    if isinstance(model, Decoder):
        return ("embed", "positions", "norm", "head") if model.positions is not None else ("embed", "norm", "head")
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "model_type") or not hasattr(model, "base_model_prefix"):
        return ()
    if config.model_type in REGULAR:
        return REGULAR[config.model_type]
    names = {id(module): name for name, module in model.named_modules()}
    base: Any = getattr(model, str(model.base_model_prefix), None)
    ends = [getattr(base, key, None) for key in getattr(config, "base_model_pp_plan", None) or ()]
    if not ends:
        return ()
    head = model.get_output_embeddings()  # type: ignore[operator]
    return tuple(names[id(end)] for end in (*ends, head) if isinstance(end, nn.Module) and not isinstance(end, nn.ModuleList))


def head_of(model: nn.Module) -> str:
    """The name of the layer that makes logits; "" where nothing says which."""
    if isinstance(model, Decoder):
        return "head"
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    return next((name for name, module in model.named_modules() if module is head), "")


def tensor_plan(model: nn.Module, tp: int) -> Plan:
    """How a model that brings its plan is cut over tp; nothing where the caller has to say."""
    if isinstance(model, Decoder):
        return decoder_plan(model.shape)
    published = hasattr(model, "base_model_prefix") and hasattr(getattr(model, "config", None), "get_text_config")
    return transformers_plan(model, tp) if published and tp > 1 else {}


# --- your own function ----------------------------------------------------------------------------


def _python(spec: str, weights: str, seed: int) -> Loaded:
    """What package.module:function returns: an nn.Module, or a Task. It is called without arguments, seeded."""
    if weights != "auto":
        raise JobError(f"model.weights={weights}: the values of python:{spec} are what its function makes; leave model.weights=auto")
    made = _seeded(seed, function_of("model", spec))
    task = Task(made) if isinstance(made, nn.Module) else made
    if not isinstance(task, Task) or not isinstance(task.model, nn.Module):
        raise JobError(f"model=python:{spec} returned {type(made).__name__}; return a torch.nn.Module or a stretto.Task")
    for name, tensor in (*task.model.named_parameters(), *task.model.named_buffers()):
        if tensor.is_meta:
            raise JobError(f"model=python:{spec}: {name} is on the meta device and has no values; build it on the CPU")
    return Loaded(
        model=task.model,
        initial=None,
        describe=f"python:{spec}: {type(task.model).__name__}, {_size(task.model)}, values of its own function (seed {seed})",
        forward=task.forward,
        loss=task.loss,
        batches=task.batches,
        stages=tuple(task.stages),
    )


def function_of(key: str, spec: str) -> Callable[[], Any]:
    """The function that `package.module:function` names; what the module itself raises goes through.

    key: the job's key that asked for it, for the message.
    """
    module_name, colon, function_name = spec.partition(":")
    if not (module_name and colon and function_name):
        raise JobError(f"{key}=python:{spec}: write python:package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not (module_name + ".").startswith(problem.name + "."):
            raise  # found, but it imports something that is not there
        raise JobError(f"{key}=python:{spec}: there is no module {problem.name}; start beside it, or set PYTHONPATH") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise JobError(f"{key}=python:{spec}: {module_name} has no function {function_name}")
    found: Callable[[], Any] = function
    return found


def _seeded(seed: int, make: Callable[[], Any]) -> Any:
    """make() under torch's CPU generator at `seed`, so that all ranks make the same; the generator is put back after."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed: it would seed the devices too, and leave them so
        return make()


SOURCES: Mapping[str, Callable[[str, str, int], Loaded]] = MappingProxyType({"hf": _huggingface, "python": _python})
