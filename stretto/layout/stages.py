"""Which parts of a model each pipeline stage has: cut where the work is shared best, or where one says."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from stretto.errors import JobError


class Item(NamedTuple):
    """A part of a model, which one stage has as a whole. work: in any unit, flops for example. block: whether it is one of many alike."""

    name: str
    work: float
    block: bool = True


@dataclass(frozen=True)
class Split:
    """Stage s has items[bounds[s] : bounds[s + 1]], in the order in which a forward runs them, and is on pipeline rank rank_of[s]."""

    items: tuple[Item, ...]
    bounds: tuple[int, ...]
    rank_of: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    def parts(self, stage: int) -> tuple[Item, ...]:
        """The items of a stage."""
        return self.items[self.bounds[stage] : self.bounds[stage + 1]]

    def loads(self) -> list[float]:
        """The work of each pipeline rank, over all its stages."""
        return _loads([sum(item.work for item in self.parts(stage)) for stage in range(self.stages)], self.rank_of)

    @property
    def imbalance(self) -> float:
        """The work of the busiest rank over the mean: 1 is even, and every step takes that many times as long."""
        loads = self.loads()
        return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0

    def __str__(self) -> str:
        """As 'embed to layers.3 | layers.4 to head (work 46% 54%, 1.08 of an even split)'."""
        if not self.items:
            return "all in one stage"
        loads = self.loads()
        shares = " ".join(f"{load / (sum(loads) or 1):.0%}" for load in loads)
        stages = " | ".join(_range([item.name for item in self.parts(stage)]) for stage in range(self.stages))
        return f"{stages} (work {shares}, {self.imbalance:.2f} of an even split)"


def split_model(items: Sequence[Item], rank_of: Sequence[int], by_hand: Sequence[str] = ()) -> Split:
    """Cut a model in len(rank_of) stages: in front of the parts named `by_hand`, or so that the busiest rank has as little as can be.

    Cut by itself, each stage has a block at least; what stands before the first block goes to the first stage, what stands
    after the last to the last. Raises JobError for more stages than blocks, and for names that are no cut.
    """
    stages, names = len(rank_of), [item.name for item in items]
    if by_hand:
        return Split(tuple(items), _given(names, items, stages, by_hand), tuple(rank_of))
    blocks = [i for i, item in enumerate(items) if item.block]
    if stages > 1 and stages > len(blocks):
        raise JobError(
            f"{stages} pipeline stages are more than the {len(blocks)} blocks of the model; write a mesh with fewer pp, a smaller "
            "pipeline.chunks, or a schedule with fewer stages a rank"
        )
    if stages == 1:
        return Split(tuple(items), (0, len(items)), tuple(rank_of))
    # one work a block, the ends with the block that they go with
    starts = [0, *blocks[1:], len(items)]
    work = [sum(item.work for item in items[a:b]) for a, b in pairwise(starts)]
    cuts = _improve(_smallest(work, stages), work, rank_of)
    return Split(tuple(items), tuple(starts[cut] for cut in cuts), tuple(rank_of))


def _given(names: list[str], items: Sequence[Item], stages: int, by_hand: Sequence[str]) -> tuple[int, ...]:
    first = next((i for i, item in enumerate(items) if item.block), 0)
    allowed = names[max(first, 1) :]
    if len(by_hand) != stages - 1:
        raise JobError(
            f"pipeline.split={list(by_hand)} makes {len(by_hand) + 1} stages, and there are {stages}; name the first part of each of the "
            f"{stages - 1} later ones, or leave it out"
        )
    for name in by_hand:
        if name not in allowed:
            near = difflib.get_close_matches(name, allowed, n=1)
            raise JobError(
                f"pipeline.split={list(by_hand)}: no stage can begin with {name!r}; write {near[0] if near else 'one'} of {_range(allowed)}"
            )
    bounds = (0, *(names.index(name) for name in by_hand), len(names))
    if any(a >= b for a, b in pairwise(bounds)):
        raise JobError(f"pipeline.split={list(by_hand)} is not in the order of the model; write the names in order, each once")
    return bounds


def _smallest(work: Sequence[float], stages: int) -> list[int]:
    """Cuts, from 0 to len(work), that make the largest stage as small as can be; each stage has one entry at least."""
    low, high = max(work), sum(work)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _filled(work, stages, middle) else (middle, high)
    cuts = _filled(work, stages, high)
    assert cuts is not None
    return cuts


def _filled(work: Sequence[float], stages: int, limit: float) -> list[int] | None:
    """Stages filled up to `limit` one after the other; None if something is left."""
    cuts, at = [0], 0
    for stage in range(stages):
        left = stages - stage - 1
        load, start = 0.0, at
        while at < len(work) - left and (at == start or load + work[at] <= limit):
            load += work[at]
            at += 1
        if load > limit:
            return None
        cuts.append(at)
    return cuts if at == len(work) else None


def _improve(cuts: list[int], work: Sequence[float], rank_of: Sequence[int]) -> list[int]:
    """Move cuts by one as long as that takes work off the busiest rank, then off the largest stage, then evens out the rest."""

    def cost(cuts: Sequence[int]) -> tuple[float, float, float]:
        stages = [sum(work[a:b]) for a, b in pairwise(cuts)]
        unit = sum(work) or 1.0
        return tuple(round(x / unit, 9) for x in (max(_loads(stages, rank_of)), max(stages), sum(s * s for s in stages) / unit))  # type: ignore[return-value]

    best = cost(cuts)
    while True:
        moved = [
            [*cuts[:i], cuts[i] + by, *cuts[i + 1 :]]
            for i in range(1, len(cuts) - 1)
            for by in (-1, 1)
            if cuts[i - 1] < cuts[i] + by < cuts[i + 1]
        ]
        better = min(moved, key=cost, default=cuts)
        if cost(better) >= best:
            return cuts
        cuts, best = better, cost(better)


def _loads(stages: Sequence[float], rank_of: Sequence[int]) -> list[float]:
    loads = [0.0] * (max(rank_of) + 1)
    for work, rank in zip(stages, rank_of, strict=True):
        loads[rank] += work
    return loads


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
