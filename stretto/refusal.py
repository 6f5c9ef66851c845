"""One of pydantic's complaints as a line of ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from stretto.keys import nearest, short, show, unknown

#: The start of pydantic's name for an error of kind -> what the value should have been.
KINDS: Mapping[str, str] = MappingProxyType(
    {
        "int": "a whole number",
        "float": "a number",
        "finite": "a finite number",
        "bool": "true or false",
        "string": "text",
        "tuple": "a list",
    }
)
BOUNDS: Mapping[str, str] = MappingProxyType({"ge": "at least", "gt": "above", "le": "at most", "lt": "below"})


def refusal(error: ErrorDetails, fields: Mapping[str, FieldInfo], sections: Collection[str]) -> str:
    """What was asked, what is possible, what to write. fields: by full dotted name. sections: the tables they lie in."""
    loc, value, kind, context = error["loc"], error["input"], error["type"], error.get("ctx", {})
    name = ".".join(map(str, loc[:2] if loc[0] in sections else loc[:1]))
    if kind == "extra_forbidden":
        return unknown(name, value, [*fields, *sections])
    field = fields[name]
    item = "".join(f"[{part}]" for part in loc[2:] if isinstance(part, int))
    asked = f"{name}{item}={short(value)}"
    example = f"{name}={show(field.default)}"
    if kind == "value_error":
        return f"{asked} {context['error']}"
    if kind == "literal_error":
        choices = [*_choices(field.annotation), *(["auto"] if field.default is None else [])]
        near = choices[-1] if value is True else nearest(str(value), map(str, choices)) or field.default
        possible = f"one of {', '.join(map(str, choices))}" if len(choices) > 1 else f"only {choices[0]} in this version"
        return f"{asked} is not possible: {name} is {possible}; write {name}={show(near if near in choices else choices[0])}"
    if kind == "string_pattern_mismatch":
        return f'{asked} cannot name a folder; write letters, digits, ".", "_" and "-" only, as {example}'
    for bound, words in BOUNDS.items():
        if bound in context:
            limit = context[bound]
            if bound in ("ge", "le"):
                example = f"{name}={show(limit)}"
            return f"{asked} is not possible: {name} is {words} {limit} ({field.description}); write {example}"
    if kind in ("missing", "too_long"):
        return f"{name}={short(value)} has the wrong length ({field.description}); write for example {example}"
    wanted = KINDS.get(kind.partition("_")[0], "of another kind")
    return f"{asked} is not {wanted} ({field.description}); write for example {example}"


def _choices(annotation: object) -> list[object]:
    """The values of the Literal inside an annotation."""
    inner = get_args(annotation)
    return list(inner) if get_origin(annotation) is Literal else [choice for part in inner for choice in _choices(part)]
