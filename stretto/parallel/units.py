"""Which parameters are gathered and reduced together: a block each, and the rest of the model around the blocks."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from stretto.errors import JobError
from stretto.models.stages import block_list

#: The unit of parameters that are nowhere known to run once, and that of those which another stage has a copy of.
REST, TIED = "rest", "tied"


@dataclass(frozen=True)
class Unit:
    """Modules whose parameters are gathered and reduced together.

    regular: each of its modules runs at most once in a forward, after those of earlier units, and its parameters are used
    nowhere else; they can be freed after it. Otherwise they are kept from their first gather to the end of the backward.
    """

    name: str
    modules: tuple[nn.Module, ...]
    params: tuple[tuple[str, nn.Parameter], ...]
    regular: bool


def units_of(model: nn.Module, *, regular: Sequence[str] = (), keep: Sequence[str] = (), tied: Collection[nn.Parameter] = ()) -> list[Unit]:
    """Cut the model's parameters into units, those that are kept first, then in the order in which they run.

    regular: names of modules outside the blocks that are known to run exactly once a forward, in order; neighbours share a
    unit. keep: patterns of module or parameter names; all parameters inside are kept. A parameter that several units share
    (tied weights, a module that stands in several places; found by identity) is kept. tied: parameters of which another stage
    has a copy; they are a unit of their own, so that both are cut alike, and are kept.
    """
    apart = {id(param) for param in tied}
    regions = _regions(model, set(regular))
    homes = {place: name for name, modules in regions.items() for place in modules}
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    names: dict[nn.Parameter, str] = {}
    units_of_param: dict[nn.Parameter, set[str]] = {}
    idle = set(keep)
    for place, module in model.named_modules(remove_duplicate=False):
        for leaf, param in module.named_parameters(recurse=False, remove_duplicate=False):
            around = _around(f"{place}.{leaf}" if place else leaf)
            matching = {pattern for pattern in keep for name in around if fnmatch.fnmatch(name, pattern)}
            idle -= matching
            unit = TIED if id(param) in apart else REST if matching else next((homes[name] for name in around if name in homes), REST)
            owners.setdefault(param, []).append(module)
            names.setdefault(param, around[0])
            units_of_param.setdefault(param, set()).add(unit)
    if idle:
        near = list(regions) or [name.rpartition(".")[0] or name for name in names.values()]
        raise JobError(f'zero.keep="{min(idle)}" matches no module or parameter; write a name or a pattern, as zero.keep=["{near[0]}"]')
    members: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for param, name in names.items():
        found = units_of_param[param]
        members.setdefault(REST if len(found) > 1 else found.pop(), []).append((name, param))
    units = []
    for kept in (REST, TIED):
        if kept in members:
            users = tuple(dict.fromkeys(owner for _, param in members[kept] for owner in owners[param]))
            units.append(Unit(kept, users, tuple(members[kept]), regular=False))
    return units + [
        Unit(name, tuple(modules.values()), tuple(members[name]), regular=True) for name, modules in regions.items() if name in members
    ]


def _regions(model: nn.Module, regular: set[str]) -> dict[str, dict[str, nn.Module]]:
    """Modules that run once a forward, by their own name, by the name of the first: each block one region, and neighbouring
    regular modules one, in the order in which the model holds them. Names are of places: a shared module has several."""
    prefix, blocks = block_list(model)
    inside = {f"{prefix}.{i}" if prefix else str(i) for i in range(len(blocks))}
    regions: dict[str, dict[str, nn.Module]] = {}
    open_region: dict[str, nn.Module] | None = None
    for name, module in model.named_modules(remove_duplicate=False):
        if name in inside:
            regions[name] = {name: module}
            open_region = None
        elif name in regular and any(True for _ in module.parameters()):
            if open_region is None:
                open_region = regions.setdefault(name, {})
            open_region[name] = module
    return regions


def _around(name: str) -> list[str]:
    """'a.b.c' -> ['a.b.c', 'a.b', 'a']: itself, then the modules that hold it, innermost first."""
    words = name.split(".")
    return [".".join(words[:n]) for n in range(len(words), 0, -1)]
