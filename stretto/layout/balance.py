"""By what the stages of a pipeline are balanced: work that is counted or was measured, the bytes that ranks hold, or both."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from stretto.errors import JobError
from stretto.layout.zero import ZeroPolicy, held_elements

By = Literal["work", "memory", "both"]
#: Of each pipeline rank its fullest moments: how many microbatches are under way in each of its stages.
Held = tuple[tuple[tuple[int, ...], ...], ...]


class Item(NamedTuple):
    """A part of a model, which one stage has as a whole.

    work: in any unit, flops for example. block: whether it is one of many alike. elements: of its weights; saved: bytes a token that
    a forward keeps of it until backward.
    """

    name: str
    work: float
    block: bool = True
    elements: int = 0
    saved: float = 0.0


@dataclass(frozen=True)
class Balance:
    """What decides a cut that is not made by hand.

    by: "work" leaves the busiest rank as little as can be; "memory" the fullest; "both" the smaller of two evils: no rank has more
    than so many times the least work, or the least bytes, that a cut can leave the busiest or the fullest.
    measured: a file of parts that were timed, whose seconds are then the work; "": work is as the items say. element: bytes that a
    rank keeps of each element of a weight between steps, with its gradient and optimizer state. tokens: of a microbatch. held: see Held.
    """

    by: By = "work"
    measured: str = ""
    element: float = 0.0
    tokens: int = 0
    held: Held = ()

    @property
    def unit(self) -> str:
        """What work is, in print."""
        return "seconds" if self.measured else "work"

    def bytes_(self, stages: Sequence[tuple[float, float]], rank_of: Sequence[int]) -> list[float]:
        """What each rank holds at its fullest, of each stage's (elements, saved bytes a token)."""
        mine: list[list[tuple[float, float]]] = [[] for _ in self.held]
        for stage, rank in zip(stages, rank_of, strict=True):
            mine[rank].append(stage)
        return [
            self.element * sum(elements for elements, _ in parts)
            + self.tokens * max(sum(n * saved for n, (_, saved) in zip(held, parts, strict=True)) for held in moments)
            for parts, moments in zip(mine, self.held, strict=True)
        ]


class Widths(NamedTuple):
    """Bytes of an element of a weight, of its gradient, and of all that the optimizer keeps for it."""

    weight: float
    gradient: float
    optimizer: float

    @staticmethod
    def of(compute: int, reduce: int, master: int, moments: int) -> Widths:
        """From the bytes of each dtype, and how many numbers the optimizer keeps beside a master copy."""
        return Widths(compute, reduce, master * (moments + (master != compute)))


def element_bytes(policy: ZeroPolicy, shards: int, widths: Widths) -> float:
    """Bytes that a rank keeps of an element between steps, where ZeRO cuts some of it over `shards` ranks (REFERENCE B1)."""
    kept = held_elements(policy, shards, shards)
    return (kept["param"] * widths.weight + kept["grad"] * widths.gradient + kept["optim"] * widths.optimizer) / shards


# -- measured parts ------------------------------------------------------------------------------------------------------


class PartTime(NamedTuple):
    """A part as it was timed. seconds: of a microbatch, forward and backward; saved: bytes a token that its forward keeps, None where
    that was not seen."""

    seconds: float
    saved: float | None = None


def write_parts(path: Path, parts: Mapping[str, PartTime], about: Mapping[str, object]) -> None:
    """Keep what was measured, for `pipeline.measured`."""
    told = {name: {"seconds": part.seconds} | ({} if part.saved is None else {"saved": part.saved}) for name, part in parts.items()}
    path.write_text(json.dumps({"about": dict(about), "parts": told}, indent=1) + "\n", encoding="utf-8")


def read_parts(path: str) -> dict[str, PartTime]:
    """What `write_parts` wrote. Raises JobError for a file that it did not."""
    try:
        told = json.loads(Path(path).read_text(encoding="utf-8"))["parts"]
        parts = {str(name): PartTime(float(part["seconds"]), part.get("saved")) for name, part in told.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise JobError(
            f'pipeline.measured="{path}" cannot be read ({type(problem).__name__}: {problem}); write the file that '
            "`stretto measure JOB --parts FILE` has made"
        ) from None
    if not parts or any(part.seconds < 0 for part in parts.values()):
        raise JobError(f'pipeline.measured="{path}" has no seconds of any part; measure again with `stretto measure JOB --parts {path}`')
    return parts


def measured(items: Sequence[Item], path: str) -> tuple[Item, ...]:
    """The parts with their measured seconds for work, and with the bytes that were seen. A model of which only some blocks were
    measured is taken to go on like them. Raises JobError if the file is of another model."""
    if not items:
        return ()
    parts = read_parts(path)
    blocks = [parts[item.name] for item in items if item.block and item.name in parts]
    if not blocks:
        raise JobError(
            f'pipeline.measured="{path}" is of another model: it has {_some(parts)}, and none of the blocks from '
            f"{next(item.name for item in items if item.block)} on; measure this one with `stretto measure JOB --parts FILE`"
        )
    seen = [part.saved for part in blocks if part.saved is not None]
    usual = PartTime(statistics.median(part.seconds for part in blocks), statistics.median(seen) if seen else None)
    found = []
    for item in items:
        part = parts.get(item.name, usual if item.block else None)
        if part is None:
            raise JobError(f'pipeline.measured="{path}" has no {item.name}; measure this model with `stretto measure JOB --parts FILE`')
        found.append(item._replace(work=part.seconds, saved=item.saved if part.saved is None else part.saved))
    return tuple(found)


def _some(names: Mapping[str, PartTime]) -> str:
    first = list(names)[:3]
    return ", ".join(first) + (" ..." if len(names) > len(first) else "")
