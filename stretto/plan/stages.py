"""Which parts of a model each pipeline stage has, by the same cut that the engine makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from stretto.anatomy import Anatomy, Part
from stretto.layout.balance import Held, Item
from stretto.layout.layout import split
from stretto.layout.stages import split_model
from stretto.plan.setting import Setting
from stretto.plan.software import Software


class Moment(NamedTuple):
    """One moment of a rank's step: how many microbatches each of its stages holds, and which of them (by position) runs."""

    held: tuple[int, ...]
    runs: int


class Stage(NamedTuple):
    """One stage. kinds: its parts, those that are alike once, with how many there are of each; like: the first stage with the same."""

    number: int
    parts: tuple[Part, ...]
    kinds: tuple[tuple[Part, int], ...]
    like: int = 0

    @staticmethod
    def of(number: int, parts: Sequence[Part], like: Mapping[str, Part]) -> Stage:
        """like: the part that stands for each part, by name."""
        counts = Counter(like[part.name].name for part in parts)
        return Stage(number, tuple(parts), tuple((like[name], count) for name, count in counts.items()))


@lru_cache(maxsize=256)
def stages_of_ranks(ranks_of: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank, of the rank of each stage."""
    found: list[list[int]] = [[] for _ in range(max(ranks_of) + 1)]
    for stage, rank in enumerate(ranks_of):
        found[rank].append(stage)
    return tuple(map(tuple, found))


def cut(anatomy: Anatomy, setting: Setting, rank_of: Sequence[int], software: Software, held: Held = ()) -> tuple[Stage, ...]:
    """The stages of a model, of which stage s is on pipeline rank rank_of[s]. held: where bytes are balanced too. Raises JobError for
    more stages than blocks."""
    if software.stages == "work" and not setting.layers:
        items = [Item(*part) for part in anatomy.work(setting.seq_len, setting.recompute, setting.bytes_)]
        bounds = split_model(items, rank_of, setting.split, setting.balanced(held)).bounds
        parts = [anatomy.parts[start:stop] for start, stop in pairwise(bounds)]
    else:
        parts = _by_blocks(anatomy, len(rank_of), setting.layers)
    stages = [Stage.of(number, mine, anatomy.like) for number, mine in enumerate(parts)]
    first: dict[tuple[tuple[str, int], ...], int] = {}
    return tuple(
        stage._replace(like=first.setdefault(tuple((part.name, count) for part, count in stage.kinds), stage.number)) for stage in stages
    )


def _by_blocks(anatomy: Anatomy, stages: int, layers: Sequence[int]) -> list[tuple[Part, ...]]:
    """As many blocks each, or as many as `layers` says; what is before them with the first, what is after with the last."""
    first = next(i for i, part in enumerate(anatomy.parts) if part.is_block)
    blocks = anatomy.blocks
    before, after = anatomy.parts[:first], anatomy.parts[first + len(blocks) :]
    found: list[tuple[Part, ...]] = []
    at = 0
    for stage in range(stages):
        start, stop = split(len(blocks), stages, stage)
        size = layers[stage] if layers else stop - start
        found.append(blocks[at : at + size])
        at += size
    found[0] = before + found[0]
    found[-1] = found[-1] + after
    return found
