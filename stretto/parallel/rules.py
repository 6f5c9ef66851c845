"""Rules: from names of modules and the styles asked for them to how each parameter lies over tp and what crosses where.

A style is a word, as transformers' published plans use them ("colwise", "rowwise" ...), some with sizes behind a colon
("colwise:8": cut between 8 heads). What no rule names is never guessed: it is listed, with what to write.

"local:heads,groups=1" says what a module remembers of its own size: `heads` is divided by tp, `groups` set.

[Note: the stream] Between the layers that are cut, every token is treated alone: norms, sums, dropout. What runs there is the
stream. With sequence parallelism each tp rank has only its part of the tokens in it (Korthikanti et al. 2022), without it all
ranks have all. A layer that needs all tokens gathers them as it is entered, once for all that read the same.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from torch import nn

from stretto.errors import JobError
from stretto.layout.layout import Layout
from stretto.models.stages import block_list

#: What happens to a module's first argument. stream: out of the stream, to be used by each rank for its own part. alike: the
#: same, from what all ranks have outside the stream. ids: token ids, of which a rank looks up those it has rows for.
#: tokens: ids, of this rank's tokens only. split: this rank's part of the features.
Enters = Literal["", "stream", "alike", "ids", "tokens", "split"]
#: What happens to its result. stream: a summand, added on the way into the stream. sum: a summand, wanted whole. join: features
#: of all ranks, side by side. head: the same, unless the loss takes them cut.
Leaves = Literal["", "stream", "sum", "join", "head"]


@dataclass(frozen=True)
class Rule:
    """What tensor parallelism does to one module: how its own parameters lie (those not named are whole on every rank), over
    which axis the gradients of whole ones are summed, and what crosses."""

    style: str
    params: Mapping[str, Layout] = field(default_factory=dict)
    summed: str = ""
    enters: Enters = ""
    leaves: Leaves = ""


@dataclass(frozen=True)
class Rules:
    """Rules by the path of a module, and by name of parameters that have one of their own.

    sequence: whether the stream is cut. begins, ends: the blocks with whose input and output it does where nothing around the
    blocks is on it. local: what modules remember of their size, as `local:` has it.
    """

    modules: Mapping[str, Rule]
    params: Mapping[str, Rule]
    sequence: bool
    begins: str = ""
    ends: str = ""
    local: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """One module that a style is asked for. sizes: what stood behind the colon, heads: the 4 of a "4*8" there. inside: it lies in a
    module that is entered as a whole. on_stream: what it reads or gives is on the stream; sequence: and the stream is cut."""

    name: str
    module: nn.Module
    style: str
    sizes: tuple[int, ...]
    heads: tuple[int, ...]
    tp: int
    inside: bool
    on_stream: bool
    sequence: bool

    @property
    def out(self) -> int:
        """The dim of a weight that goes over its outputs: transformers' Conv1D has them last."""
        return 1 if type(self.module).__name__ == "Conv1D" else 0

    def cut(self, axis: str = "tp", packed: tuple[int, ...] = ()) -> dict[str, Layout]:
        """Weight and bias cut along the outputs."""
        return {
            name: _cut(param.ndim, min(self.out, param.ndim - 1), axis, packed)
            for name, param in self.module.named_parameters(recurse=False)
        }

    def enters(self) -> Enters:
        return "" if self.inside else "stream" if self.on_stream else "alike"

    def leaves(self) -> Leaves:
        return "stream" if self.on_stream else "sum"

    def summed(self) -> str:
        """Over what to sum the gradient of a parameter that meets the tokens of the stream."""
        return "tp" if self.sequence and self.on_stream else ""


def _cut(dims: int, dim: int, axis: str, packed: tuple[int, ...] = ()) -> Layout:
    return Layout(
        tuple((axis,) if d == dim else () for d in range(dims)),
        packed=tuple(packed if d == dim else () for d in range(dims)) if packed else (),
    )


def axis_of(name: str, units: int, tp: int, shared: bool) -> str:
    """The axis that cuts between `units` equal pieces: "tp", or "tp/r" where r neighbours may share one. Raises JobError."""
    if units % tp == 0:
        return "tp"
    if shared and tp % units == 0:
        return f"tp/{tp // units}"
    fits = [n for n in range(1, units + 1) if units % n == 0]
    also = f" or a multiple of {units}" if shared else ""
    raise JobError(f"tp={tp} cannot cut {name} between its {units} heads; use tp in {{{', '.join(map(str, fits))}}}{also}")


# -- styles ------------------------------------------------------------------------------------------------------------


def _colwise(asked: Asked) -> Rule:
    axis = axis_of(asked.name, asked.sizes[0], asked.tp, False) if asked.sizes else "tp"
    return Rule(asked.style, asked.cut(axis), enters=asked.enters())


def _shared_colwise(asked: Asked) -> Rule:
    if not asked.sizes:
        raise JobError(f'{asked.name}: shared_colwise needs the number of heads; write "shared_colwise:2" for 2')
    return Rule(asked.style, asked.cut(axis_of(asked.name, asked.sizes[0], asked.tp, True)), enters=asked.enters())


def _packed_colwise(asked: Asked) -> Rule:
    out = next(asked.module.parameters(recurse=False)).shape[asked.out]
    packed = asked.sizes or (out // 2, out - out // 2)
    if sum(packed) != out:
        raise JobError(f"{asked.name}: packed_colwise blocks {list(packed)} do not add up to its {out} outputs")
    for heads in asked.heads:
        axis_of(asked.name, heads, asked.tp, False)
    return Rule(asked.style, asked.cut("tp", packed), enters=asked.enters())


def _rowwise(asked: Asked) -> Rule:
    """The bias is whole, and added once, by every rank to its own tokens after the sum."""
    params = {"weight": _cut(2, 1 - asked.out, "tp", asked.sizes)}
    return Rule(asked.style, params, summed=asked.summed(), leaves=asked.leaves())


def _rowwise_split_input(asked: Asked) -> Rule:
    return replace(_rowwise(asked), enters="split")


def _colwise_gather_output(asked: Asked) -> Rule:
    return Rule(asked.style, asked.cut(), enters=asked.enters(), leaves="join")


def _head(asked: Asked) -> Rule:
    return Rule(asked.style, asked.cut(), enters=asked.enters(), leaves="head")


def _embedding_rowwise(asked: Asked) -> Rule:
    return Rule(asked.style, {"weight": _cut(2, 0, "tp")}, enters="ids", leaves="sum")


def _embedding_to_stream(asked: Asked) -> Rule:
    return Rule(asked.style, {"weight": _cut(2, 0, "tp")}, enters="ids", leaves="stream")


def _positions(asked: Asked) -> Rule:
    return Rule(asked.style, summed=asked.summed(), enters="tokens")


def _on_stream(asked: Asked) -> Rule:
    return Rule(asked.style, summed=asked.summed())


def _on_own_part(asked: Asked) -> Rule:
    """Whole, but each rank applies it to its own heads (or to what only its own heads go on to use)."""
    return Rule(asked.style, summed="tp")


def _alike(asked: Asked) -> Rule:
    return Rule(asked.style)


#: style -> the rule it makes. Those with a counterpart in transformers have its name.
STYLES: Mapping[str, Callable[[Asked], Rule]] = MappingProxyType(
    {
        "colwise": _colwise,
        "shared_colwise": _shared_colwise,
        "packed_colwise": _packed_colwise,
        "rowwise": _rowwise,
        "rowwise_split_input": _rowwise_split_input,
        "colwise_gather_output": _colwise_gather_output,
        "head": _head,
        "embedding_rowwise": _embedding_rowwise,
        "embedding_to_stream": _embedding_to_stream,
        "positions": _positions,
        "sequence_parallel": _on_stream,
        "replicated_with_grad_allreduce": _on_own_part,
        "replicated": _alike,
        "alike": _alike,
    }
)
#: Says what a module remembers of its size; its layers have styles of their own.
LOCAL = "local"
COLUMNS = ("colwise", "shared_colwise", "packed_colwise", "colwise_gather_output")
ROWS = ("rowwise", "rowwise_split_input")
#: Styles of modules around the blocks that the stream starts with, and that it reaches where a norm behind the blocks is on it.
AT_THE_START, AT_THE_END = ("embedding_to_stream", "positions"), ("sequence_parallel", "head")
#: Styles of what lies inside a module that is entered as a whole. alike: whole, and every rank does the same with it.
INSIDE = (*COLUMNS, *ROWS, "replicated_with_grad_allreduce", "alike")


# -- resolving ---------------------------------------------------------------------------------------------------------


def resolve(model: nn.Module, plan: Mapping[str, str], tp: int, sequence: bool | None) -> Rules:
    """The rules that `plan` (patterns of module or parameter names -> styles; * stands for one part of a name) makes for `model`.

    sequence: whether the stream is cut; None: where every cut layer is entered as a whole, so that nothing of the user's code
    sees a cut stream's shape. Raises JobError for what has no rule, for patterns that match nothing, and sizes tp cannot cut.
    """
    local, _ = _matches(model, {pattern: style for pattern, style in plan.items() if _word(style) == LOCAL})
    styles, named = _matches(model, {pattern: style for pattern, style in plan.items() if _word(style) != LOCAL})
    _refuse_unruled(model, styles, named, tp)
    prefix, blocks = block_list(model)
    entered = _entered(model, styles, named, {f"{prefix}.{i}" for i in range(len(blocks))})
    inner = {name for name in styles if prefix and _under(name, {prefix})}
    loose = [name for name in inner if _word(styles[name]) in COLUMNS and not _under(name, entered)]
    cut = bool(inner) and not loose if sequence is None else sequence
    if cut and not inner:
        raise JobError("tensor.sequence=true needs a list of blocks between which tokens can be cut; write tensor.sequence=false")
    around = {_word(style) for name, style in styles.items() if name not in inner}
    to_end = "sequence_parallel" in around
    modules = dict(model.named_modules(remove_duplicate=False))
    rules = {name: Rule("entered", enters="stream" if _under(name, {prefix}) else "alike") for name in entered}
    for name, style in styles.items():
        word = _word(style)
        if word == "replicated" and name in inner:
            word = "sequence_parallel"  # in a block, and in no layer that is entered: it meets the tokens of the stream
        on_stream = name in inner or word in AT_THE_START or (to_end and word in AT_THE_END)
        asked = Asked(name, modules[name], style, _sizes(name, style), _heads(style), tp, _under(name, entered), on_stream, cut)
        rules[name] = STYLES[word](asked)
    own = {name: _of_parameter(model, name, style, tp) for name, style in named.items()}
    begins = f"{prefix}.0" if cut and "embedding_to_stream" not in around else ""
    ends = f"{prefix}.{len(blocks) - 1}" if cut and not to_end else ""
    return Rules(rules, own, cut, begins, ends, {name: _behind(style) for name, style in local.items()})


def _word(style: str) -> str:
    return style.partition(":")[0]


def _sizes(name: str, style: str) -> tuple[int, ...]:
    try:
        return tuple(math.prod(map(int, size.split("*"))) for size in _behind(style))
    except ValueError:
        shown = '"colwise:8" or "packed_colwise:4*8,2*8,2*8"'
        raise JobError(f'rules: "{style}" of {name}: behind the colon stand whole numbers, as {shown}') from None


def _heads(style: str) -> tuple[int, ...]:
    """The 4 of each "4*8" behind the colon."""
    return tuple(int(size.partition("*")[0]) for size in _behind(style) if "*" in size)


def _behind(style: str) -> tuple[str, ...]:
    text = style.partition(":")[2]
    return tuple(text.split(",")) if text else ()


def _matches(model: nn.Module, plan: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The style of each module and parameter that a pattern names, the last pattern deciding."""
    modules = {name: name.split(".") for name, _ in model.named_modules(remove_duplicate=False) if name}
    params = {name: name.split(".") for name, _ in model.named_parameters(remove_duplicate=False)}
    styles: dict[str, str] = {}
    named: dict[str, str] = {}
    for pattern, style in plan.items():
        if _word(style) not in (*STYLES, LOCAL):
            raise JobError(f'rules: "{style}" of {pattern} is not a style; they are {", ".join(STYLES)}')
        words, found = pattern.split("."), False
        for names, out in ((modules, styles), (params, named)):
            for name, parts in names.items():
                if len(parts) == len(words) and all(map(fnmatch.fnmatchcase, parts, words)):
                    out[name], found = style, True
        if not found:
            near = next((_pattern(name) for name in modules if name.endswith(words[-1])), _pattern(next(iter(modules), "layers.0.up")))
            raise JobError(f'rules: "{pattern}" matches no module or parameter; write a name as the model has it, such as "{near}"')
    return styles, named


def _under(name: str, places: set[str]) -> bool:
    """Whether `name` is one of the places or lies in one."""
    words = name.split(".")
    return any(".".join(words[:n]) in places for n in range(1, len(words) + 1))


def _entered(model: nn.Module, styles: Mapping[str, str], named: Mapping[str, str], blocks: set[str]) -> set[str]:
    """Modules between whose first and last layer everything is cut by heads or features: the parents of column-parallel layers
    that hold a row-parallel one too and nothing that belongs to the stream. They are entered as a whole."""
    holders = {name.rpartition(".")[0] for name, _ in model.named_parameters(remove_duplicate=False) if name not in named}
    columns = {name.rpartition(".")[0] for name, style in styles.items() if _word(style) in COLUMNS}
    found = set()
    for parent in columns - blocks - {""}:
        words = {_word(styles.get(holder, "")) for holder in holders if _under(holder, {parent})}
        if words & set(ROWS) and words <= set(INSIDE) and not any(_under(block, {parent}) for block in blocks):
            found.add(parent)
    return {name for name in found if not _under(name.rpartition(".")[0], found)}


def _refuse_unruled(model: nn.Module, styles: Mapping[str, str], named: Mapping[str, str], tp: int) -> None:
    unruled = [
        name for name, _ in model.named_parameters(remove_duplicate=False) if name not in named and name.rpartition(".")[0] not in styles
    ]
    if not unruled:
        return
    patterns = list(dict.fromkeys(_pattern(name.rpartition(".")[0] or name) for name in unruled))
    listed = ", ".join(patterns[:12]) + (f" and {len(patterns) - 12} more" if len(patterns) > 12 else "")
    raise JobError(
        f'tp={tp}: no rule says how to cut {listed}; write rules={{"{patterns[0]}": "colwise", ...}} with colwise (cut by outputs), '
        "rowwise (cut by inputs, the sum follows), embedding_rowwise, or replicated (norms and what all ranks compute alike) for each"
    )


def _pattern(name: str) -> str:
    return ".".join("*" if word.isdigit() else word for word in name.split("."))


def _of_parameter(model: nn.Module, name: str, style: str, tp: int) -> Rule:
    """The rule of a parameter named by itself: cut along dim 0 (colwise) or 1 (rowwise), or whole."""
    word, sizes, param = _word(style), _sizes(name, style), model.get_parameter(name)
    if word in ("colwise", "shared_colwise"):
        axis = axis_of(name, sizes[0] if sizes else param.shape[0], tp, word == "shared_colwise")
        return Rule(style, {name: _cut(param.ndim, 0, axis)})
    if word == "rowwise" and param.ndim > 1:
        return Rule(style, {name: _cut(param.ndim, 1, "tp")})
    if word in ("replicated", "replicated_with_grad_allreduce"):
        return Rule(style, summed="tp" if word != "replicated" else "")
    raise JobError(f'rules: {name} is a parameter; "{style}" is for modules; write colwise, rowwise or replicated')
