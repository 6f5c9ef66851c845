"""How a model can be cut in pipeline stages: its parts, in the order in which a forward runs them, and the work of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from stretto.anatomy import Anatomy, Recompute
from stretto.anatomy.part import Scores
from stretto.errors import JobError
from stretto.layout.balance import Item
from stretto.models.decoder import Decoder


def block_list(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The model's blocks: the ModuleList that holds the most parameters (of nested ones the outer), with its name. ('', []) if none."""
    best: tuple[int, str, list[nn.Module]] = (0, "", [])
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module):
            held = sum(p.numel() for p in module.parameters())
            if held > best[0]:
                best = (held, name, list(module))
    return best[1], best[2]


def stage_items(
    model: nn.Module, seq_len: int, recompute: Recompute = "none", order: Sequence[str] = (), bytes_per_element: int = 4
) -> tuple[Item, ...]:
    """The parts of `model` that stages share, in the order in which they run; every parameter lies in one.

    bytes_per_element: of what a forward keeps. order: names of modules and parameters outside the blocks, and of the list of blocks
    among them, as one says; by default that of our own decoder, of a published plan, or of the model's definition. Raises JobError for
    a model that cannot be cut.
    """
    if isinstance(model, Decoder) and not order:
        shape = model.shape.with_({"blocks": len(model.layers)})
        return tuple(Item(*part) for part in Anatomy.of_decoder(shape).work(seq_len, recompute, bytes_per_element))
    blocks, found = block_list(model)
    if not found and order:
        return _as_said(model, seq_len, recompute, order, bytes_per_element)
    if not found:
        raise JobError(
            f"{type(model).__name__} has no nn.ModuleList, of which pipeline stages could have a part each; put its blocks in one, say in "
            'which order its modules run with stages=["first", "second", ...], or write a mesh without pp'
        )
    names = list(order) or published_order(model) or _defined(model, blocks)
    if blocks not in names:
        raise JobError(f"stages={names} leaves out {blocks}, the model's blocks; write it between what runs before and after them")
    items: list[Item] = []
    for name in names:
        if name == blocks:
            for i, block in enumerate(found):
                work = _work(model, block, seq_len, recompute, i)
                items.append(Item(f"{blocks}.{i}", work, True, _elements(block), _saved(block, recompute, bytes_per_element)))
        else:
            part = _part(model, name)
            elements = model.get_parameter(name).numel() if part is None else _elements(part)
            items.append(Item(name, _work(model, part, seq_len), False, elements, _saved(part, "none", bytes_per_element)))
    _all_there(model, items)
    return tuple(items)


def _as_said(model: nn.Module, seq_len: int, recompute: Recompute, order: Sequence[str], bytes_per_element: int) -> tuple[Item, ...]:
    """The parts of a model without a list of blocks: those that are named, each as good as a block."""
    items = []
    for i, name in enumerate(order):
        part = _part(model, name)
        if part is None:
            raise JobError(f"stages: {name} is a parameter, and no stage can begin with one; name modules, the one that uses it among them")
        items.append(
            Item(name, _work(model, part, seq_len, recompute, i), True, _elements(part), _saved(part, recompute, bytes_per_element))
        )
    _all_there(model, items)
    return tuple(items)


def _elements(part: nn.Module) -> int:
    return sum(param.numel() for param in part.parameters())


def _saved(part: nn.Module | None, recompute: Recompute, bytes_per_element: int) -> float:
    """About what a token's forward keeps of a part: what goes into each matrix and what comes out of it; with full recompute what goes
    into the part alone. Pieces of a module without matrices keep next to nothing."""
    sizes = [
        tuple(weight.shape)
        for module in (part.modules() if part is not None else ())
        if isinstance(weight := getattr(module, "weight", None), Tensor) and weight.ndim == 2 and not isinstance(module, nn.Embedding)
    ]
    if not sizes:
        return 0.0
    return float(bytes_per_element * (min(sizes[0]) if recompute == "full" else sum(sum(size) for size in sizes)))


def published_order(model: nn.Module) -> list[str]:
    """The modules that a transformers model names in its pipeline plan, and its head; [] where there is no plan, or not of these names."""
    config: Any = getattr(model, "config", None)
    plan = getattr(config, "base_model_pp_plan", None)
    base = getattr(model, str(getattr(model, "base_model_prefix", "")), None)
    if not plan or not isinstance(base, nn.Module):
        return []
    names = {id(module): name for name, module in model.named_modules()}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    found = [module for module in (*(getattr(base, name, None) for name in plan), head) if isinstance(module, nn.Module)]
    order = [names[id(module)] for module in found if _holds(module)]
    return order if _covers(model, order) else []


def _defined(model: nn.Module, blocks: str) -> list[str]:
    """All that has parameters, in the order of the definition: what stands before the blocks, the blocks, what stands after them.
    Parameters of the modules around the blocks themselves come first: they are mostly positions, or a first token."""
    before: list[str] = []
    after: list[str] = []
    here, path = model, ""
    for leaf in blocks.split("."):
        children = [name for name, child in here.named_children() if name == leaf or _holds(child)]
        at = children.index(leaf)
        before += [path + name for name in (*(name for name, _ in here.named_parameters(recurse=False)), *children[:at])]
        after = [path + name for name in children[at + 1 :]] + after
        here, path = here.get_submodule(leaf), f"{path}{leaf}."
    return [*before, blocks, *after]


def _holds(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _part(model: nn.Module, name: str) -> nn.Module | None:
    """The module of that name; None for a parameter. Raises JobError for neither."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if name not in modules and name not in dict(model.named_parameters(remove_duplicate=False)):
        raise JobError(f"stages: {type(model).__name__} has no module or parameter {name}; write names as named_modules gives them")
    return modules.get(name)


def _covers(model: nn.Module, names: Sequence[str]) -> bool:
    return not list(_left_out(model, names))


def _left_out(model: nn.Module, names: Sequence[str]) -> Iterator[str]:
    for param, _ in model.named_parameters(remove_duplicate=False):
        if not any(f"{param}.".startswith(f"{name}.") for name in names):
            yield param


def _all_there(model: nn.Module, items: Sequence[Item]) -> None:
    missing = list(_left_out(model, [item.name for item in items]))
    if missing:
        raise JobError(f"stages: {missing[0]} lies in none of the parts ({len(missing)} parameters in all); name the module that holds it")


def _work(model: nn.Module, part: nn.Module | None, seq_len: int, recompute: Recompute = "none", block: int | None = None) -> int:
    """Training flops of one token: 6 an element of each matrix that it is multiplied with (8 with full recompute), and attention where
    a config says its heads. Of experts, as many as a token is given to."""
    if part is None:
        return 0
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else None
    experts = _number(config, "num_local_experts", "num_experts", "n_routed_experts")
    forward = 0.0
    for module in part.modules():
        if not isinstance(module, nn.Embedding):
            for param in module.parameters(recurse=False):
                if param.ndim > 1:
                    routed = param.ndim > 2 and experts > 0 and param.shape[0] == experts
                    share = _number(config, "num_experts_per_tok") / experts if routed else 1.0
                    forward += 2.0 * param.numel() * share
    heads = _number(config, "num_attention_heads")
    if block is not None and heads:
        width = _number(config, "head_dim") or _number(config, "hidden_size") // heads
        kinds = getattr(config, "layer_types", None) or ()
        sliding = kinds[block] == "sliding_attention" if block < len(kinds) else True
        scores = Scores(heads, heads, width, width, _number(config, "sliding_window") if sliding else 0)
        forward += scores.flops_per_key * scores.keys(seq_len)
    return round(forward * (4 if recompute == "full" and block is not None else 3))


def _number(config: Any, *names: str) -> int:
    """The first of these numbers that a config has; 0 if none."""
    return next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)
