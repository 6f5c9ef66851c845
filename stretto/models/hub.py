"""A causal language model of transformers, from a folder or by its id on the hub: the one file that asks transformers for a model.

Where a folder's safetensors hold the model's tensors as they are, the model comes without memory (parameters on the meta device,
buffers real), with word of where each tensor lies. Where only transformers can make one of the other (experts that files hold one by
one, other formats), it comes whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from stretto.errors import JobError

VALUES = ("model*.safetensors", "pytorch_model*.bin")
# Beside a config.json they say that values were meant to be here: a copy stopped half way.
SIGNS_OF_VALUES = ("*.index.json", "tokenizer*", "vocab.json", "merges.txt", "special_tokens_map.json", "*.model")
COMPLETE = "complete the folder, or write model.weights=random"
CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"


class StoredValues(NamedTuple):
    """Where a model's values lie: names of parameters, each with the name of its tensor in the folder's safetensors files."""

    folder: str
    names: Mapping[str, str]


class Opened(NamedTuple):
    """model: with its values, or (stored) without. about: where they come from, in words."""

    model: nn.Module
    stored: StoredValues | None
    about: str


def open_model(spec: str, weights: str, seeded: Callable[[Callable[[], Any]], Any]) -> Opened:
    """The model of a folder or id. seeded: runs a function with torch's generator at the seed of random values. Raises JobError."""
    try:
        import transformers  # here: seconds to import, and an extra to install
    except ImportError as problem:
        raise JobError(f'model=hf:{spec} needs transformers ({problem}); install "stretto[hf]"') from None
    pretrained = wants_values(spec, weights)
    models: Any = transformers.AutoModelForCausalLM
    report: Mapping[str, Any] = {}
    transformers.utils.logging.disable_progress_bar()  # one a rank, over each other
    local = Path(spec).is_dir()
    try:
        config = transformers.AutoConfig.from_pretrained(spec, local_files_only=local, trust_remote_code=False)
        config.use_cache = False
        # fp32 whatever the files hold: exact for narrower ones, and the engine casts to what the job computes in
        if pretrained and local and (found := _without_values(config, Path(spec))) is not None:
            return found
        if pretrained:
            model, report = models.from_pretrained(
                spec, config=config, dtype=torch.float32, local_files_only=local, trust_remote_code=False, output_loading_info=True
            )
        else:
            model = seeded(lambda: models.from_config(config, dtype=torch.float32))
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as problem:
        why = " ".join(str(problem).split())[:300]
        where = "is the folder whole?" if local else "give a folder, or see that the hub can be reached (HF_HOME, HF_HUB_OFFLINE)"
        raise JobError(f"model=hf:{spec} cannot be loaded: {why}; {where}") from None
    if report.get("missing_keys"):
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise JobError(f"model=hf:{spec}: the files hold no values for {missing}; write model.weights=random for random values everywhere")
    return Opened(model.train(), None, _about(len(report.get("unexpected_keys", ())), ", read whole") if pretrained else "")


def _about(unused: int, how: str = "") -> str:
    return f"pretrained values{how}" + (f", {unused} tensors of the files unused" if unused else "")


# -- what a folder holds -----------------------------------------------------------------------------------------------


def wants_values(spec: str, weights: str) -> bool:
    """Whether stored values are to be read: never guessed where a folder looks like half a model. Raises JobError."""
    folder = Path(spec)
    if not folder.is_dir():
        if folder.is_absolute() or spec.startswith((".", "~")) or spec.count("/") > 1 or not spec:
            raise JobError(f"model=hf:{spec}: there is no such folder; write one with a config.json, or an id of the hub (owner/name)")
        return weights != "random"
    names = sorted(path.name for path in folder.iterdir())
    if CONFIG not in names:
        raise JobError(f"model=hf:{spec}: the folder holds no config.json; write a folder that save_pretrained wrote")
    if weights == "random":
        return False
    absent = _absent(folder)
    if absent:
        raise JobError(f"model=hf:{spec}: {absent[0]} is named by the index but absent ({len(absent)} in all); {COMPLETE}")
    if any(fnmatch(name, pattern) for name in names for pattern in VALUES):
        return True
    if weights == "pretrained":
        raise JobError(f"model.weights=pretrained: {spec} holds no {' or '.join(VALUES)}; {COMPLETE}")
    signs = [name for name in names if any(fnmatch(name, pattern) for pattern in SIGNS_OF_VALUES)]
    if signs:
        raise JobError(f"model=hf:{spec} holds {signs[0]} but no {' or '.join(VALUES)}; {COMPLETE}")
    return False


def _absent(folder: Path) -> list[str]:
    """Files of values that an index names and the folder lacks."""
    named: set[str] = set()
    for index in folder.glob("*.index.json"):
        named.update(_indexed(index).values())
    return sorted(name for name in named if not (folder / name).exists())


def _indexed(index: Path) -> dict[str, str]:
    """Tensor -> file, as an index has it."""
    try:
        found: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return dict(found)
    except (ValueError, KeyError, TypeError) as problem:
        raise JobError(f"model=hf:{index.parent}: {index.name} is not an index of weights ({problem!r}); copy it again") from None


def shapes_in(folder: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a folder's safetensors; {} where it has none under the usual names. No values are read."""
    from safetensors import SafetensorError, safe_open  # comes with transformers

    if (folder / INDEX).is_file():
        files = sorted(set(_indexed(folder / INDEX).values()))
    else:
        files = [SINGLE] if (folder / SINGLE).is_file() else []
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(folder / file, framework="pt") as opened:
                shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 (it is no mapping)
        except SafetensorError as problem:
            raise JobError(f"model=hf:{folder}: {file} cannot be read ({problem}); copy it again") from None
    return shapes


def names_in_files(model: Any, names: Sequence[str]) -> dict[str, str]:
    """The names that transformers gives tensors of a model where it writes them, by their names in the model; those that it would take
    apart keep theirs, under which it opens them too."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightRenaming, rename_source_key
    except ImportError:
        return {name: name for name in names}
    rules = [rule for rule in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(rule, PrefixChange)]
    back = [rule.reverse_transform() for rule in reversed(rules)]
    renamings = [rule for rule in back if isinstance(rule, WeightRenaming)]
    converters: Any = [rule for rule in back if not isinstance(rule, WeightRenaming)]
    found = {}
    for name in names:
        there, converter = rename_source_key(name, renamings, converters, reverse=True)
        found[name] = there if converter is None else name
    return found


# -- a model without memory --------------------------------------------------------------------------------------------


class _OnMeta(TorchFunctionMode):
    """Inside, what is made empty, to be given its values later, has no memory; all else (tables of rotations) is real."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        options = dict(kwargs or {})
        if func is torch.empty and options.get("device") is None:
            options["device"] = "meta"
        return func(*args, **options)


def _without_values(config: Any, folder: Path) -> Opened | None:
    """The model without memory, if its tensors are in the folder's files under names that say so, shaped as they are; else None."""
    import transformers

    shapes = shapes_in(folder)
    if not shapes:
        return None
    with _OnMeta():
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _let_go(model)
    held = dict(_renamed(model, shapes))
    kept = set(model.state_dict())
    names, missing = {}, []
    for name, others in _names(model):
        found = {held[one] for one in others if one in held}
        if len(found) > 1:
            return None  # a tied weight that is there twice: transformers looks whether they are equal
        if found:
            names[name] = found.pop()
        else:
            missing.append(name)
    buffers = {name: held[name] for name, _ in model.named_buffers() if name in kept and name in held}
    wanted = {**names, **buffers}
    whole = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if missing or _meta_buffers(model):
        return None
    other = [name for name, there in wanted.items() if shapes[there] != whole[name].shape]
    if other:
        told = ", ".join(f"{name} is {list(shapes[wanted[name]])} there, {list(whole[name].shape)} by config.json" for name in other[:3])
        raise JobError(f"model=hf:{folder}: {len(other)} tensors have other shapes ({told}); is config.json that of these files?")
    with torch.no_grad():
        for name, tensor in _read(folder, buffers):
            whole[name].copy_(tensor)
    unused = len(shapes.keys() - wanted.values())
    return Opened(model.train(), StoredValues(str(folder), names), _about(unused))


def _let_go(model: nn.Module) -> None:
    """All parameters on the meta device: also those that were made with values, norms and the like."""
    without: dict[int, nn.Parameter] = {}  # by identity: tied weights stay one
    for module in model.modules():
        for leaf, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(param) not in without:
                without[id(param)] = param if param.is_meta else nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            module._parameters[leaf] = without[id(param)]


def _meta_buffers(model: nn.Module) -> bool:
    return any(buffer.is_meta for buffer in model.buffers())


def _names(model: nn.Module) -> list[tuple[str, list[str]]]:
    """All names of each parameter, with the first of them."""
    found: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), []).append(name)
    return [(names[0], names) for names in found.values()]


def _renamed(model: Any, held: Sequence[str] | Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name in the model, name in the files) of the tensors that transformers takes as they are, perhaps under another name."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:  # another transformers: names as they are
        yield from ((name, name) for name in held)
        return
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters: Any = [rule for rule in rules if not isinstance(rule, WeightRenaming)]
    state = model.state_dict()
    for name in held:
        here, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if converter is None:
            yield here, name


def _read(folder: Path, names: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors of a folder, one at a time: (key of `names`, tensor)."""
    from safetensors import safe_open

    where = _indexed(folder / INDEX) if (folder / INDEX).is_file() else {}
    for name, stored in names.items():
        with safe_open(folder / where.get(stored, SINGLE), framework="pt") as opened:
            yield name, opened.get_tensor(stored)
