"""Which parts of a model each pipeline stage has: cut where the work is shared best, or where one says."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from stretto.errors import JobError
from stretto.layout.balance import Balance, Item, measured

#: Of cuts, from 0 to the number of entries: what they cost, the most important first.
Cost = Callable[[Sequence[int]], tuple[float, ...]]
PLAIN = Balance()


@dataclass(frozen=True)
class Split:
    """Stage s has items[bounds[s] : bounds[s + 1]], in the order in which a forward runs them, and is on pipeline rank rank_of[s]."""

    items: tuple[Item, ...]
    bounds: tuple[int, ...]
    rank_of: tuple[int, ...]
    balance: Balance = PLAIN

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
        return _of_even(self.loads())

    def bytes_(self) -> list[float]:
        """What each pipeline rank holds at its fullest moment, as far as it is counted in `items`; [] where nobody asks for it."""
        stages = [self.parts(stage) for stage in range(self.stages)]
        sums = [(float(sum(item.elements for item in parts)), sum(item.saved for item in parts)) for parts in stages]
        return self.balance.bytes_(sums, self.rank_of) if self.balance.by != "work" else []

    def __str__(self) -> str:
        """As 'embed to layers.3 | layers.4 to head (work 46% 54%, 1.08 of an even split)'."""
        if not self.items:
            return "all in one stage"
        loads, held = self.loads(), self.bytes_()
        stages = " | ".join(_range([item.name for item in self.parts(stage)]) for stage in range(self.stages))
        told = f"{self.balance.unit} {_shares(loads)}, {_of_even(loads):.2f} of an even split"
        if held:
            told += f"; memory {_shares(held)}, {_of_even(held):.2f}"
        return f"{stages} ({told})"


def _of_even(loads: Sequence[float]) -> float:
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def _shares(loads: Sequence[float]) -> str:
    return " ".join(f"{load / (sum(loads) or 1):.0%}" for load in loads)


def split_model(items: Sequence[Item], rank_of: Sequence[int], by_hand: Sequence[str] = (), balance: Balance = PLAIN) -> Split:
    """Cut a model in len(rank_of) stages: in front of the parts named `by_hand`, or as `balance` says.

    Cut by itself, each stage has a block at least; what stands before the first block goes to the first stage, what stands
    after the last to the last. Raises JobError for more stages than blocks, and for names that are no cut.
    """
    stages, names = len(rank_of), [item.name for item in items]
    items = measured(items, balance.measured) if balance.measured else items
    if by_hand:
        return Split(tuple(items), _given(names, items, stages, by_hand), tuple(rank_of), balance)
    blocks = [i for i, item in enumerate(items) if item.block]
    if stages > 1 and stages > len(blocks):
        raise JobError(
            f"{stages} pipeline stages are more than the {len(blocks)} blocks of the model; write a mesh with fewer pp, a smaller "
            "pipeline.chunks, or a schedule with fewer stages a rank"
        )
    if stages == 1:
        return Split(tuple(items), (0, len(items)), tuple(rank_of), balance)
    # one entry a block, the ends with the block that they go with
    starts = [0, *blocks[1:], len(items)]
    entries = [items[a:b] for a, b in pairwise(starts)]
    work = [sum(item.work for item in entry) for entry in entries]
    cuts = _improve(_smallest(work, stages), _by_work(work, rank_of))
    if balance.by != "work":
        elements = [float(sum(item.elements for item in entry)) for entry in entries]
        saved = [sum(item.saved for item in entry) for entry in entries]
        cuts = _by_bytes_too(cuts, _Loads(work, elements, saved, rank_of, balance))
    return Split(tuple(items), tuple(starts[cut] for cut in cuts), tuple(rank_of), balance)


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


def _by_work(work: Sequence[float], rank_of: Sequence[int]) -> Cost:
    """Work of the busiest rank, then of the largest stage, then how uneven the rest is."""
    unit = sum(work) or 1.0

    def cost(cuts: Sequence[int]) -> tuple[float, ...]:
        stages = [sum(work[a:b]) for a, b in pairwise(cuts)]
        return tuple(round(x / unit, 9) for x in (max(_loads(stages, rank_of)), max(stages), sum(s * s for s in stages) / unit))

    return cost


def _improve(cuts: list[int], cost: Cost, *, far: bool = False) -> list[int]:
    """Move cuts by one as long as that lowers the cost. far: several neighbouring cuts at once too, which takes an entry from a stage
    and gives one to another far from it."""
    best = cost(cuts)
    while True:
        inner = range(1, len(cuts) - 1)
        ranges = [(i, j) for i in inner for j in (inner[i - 1 :] if far else (i,))]
        moved = [[*cuts[:i], *(cut + by for cut in cuts[i : j + 1]), *cuts[j + 1 :]] for i, j in ranges for by in (-1, 1)]
        better = min((one for one in moved if all(a < b for a, b in pairwise(one))), key=cost, default=cuts)
        if cost(better) >= best:
            return cuts
        cuts, best = better, cost(better)


# -- memory --------------------------------------------------------------------------------------------------------------


class _Loads:
    """Work and bytes of any cut, from sums over entries."""

    def __init__(
        self, work: Sequence[float], elements: Sequence[float], saved: Sequence[float], rank_of: Sequence[int], balance: Balance
    ) -> None:
        self.entries, self.rank_of, self.balance = len(work), rank_of, balance
        self._sums = [[0.0, *accumulate(each)] for each in (work, elements, saved)]
        place: dict[int, int] = {}  # how many of a rank's stages come before
        self._most = []  # microbatches of each stage, at the most
        for rank in rank_of:
            at = place.get(rank, 0)
            self._most.append(max(held[at] for held in balance.held[rank]))
            place[rank] = at + 1

    def stage(self, start: int, stop: int) -> tuple[float, float, float]:
        """Work, elements and saved bytes a token of the entries from start to stop."""
        work, elements, saved = (sums[stop] - sums[start] for sums in self._sums)
        return work, elements, saved

    def alone(self, stage: int, start: int, stop: int) -> tuple[float, float]:
        """Work and bytes of the rank of one stage, if it has only that."""
        work, elements, saved = self.stage(start, stop)
        return work, self.balance.element * elements + self.balance.tokens * self._most[stage] * saved

    def largest(self, cuts: Sequence[int]) -> tuple[float, float]:
        """Work of the busiest rank and bytes of the fullest."""
        stages = [self.stage(a, b) for a, b in pairwise(cuts)]
        held = self.balance.bytes_([(elements, saved) for _, elements, saved in stages], self.rank_of)
        return max(_loads([work for work, _, _ in stages], self.rank_of)), max(held)


def _by_bytes_too(busiest: list[int], loads: _Loads) -> list[int]:
    """The cuts that leave the fullest rank the fewest bytes, or that are as good as can be in both. busiest: those by work alone.

    Exact where a rank has one stage; where it has several, as good as moves of single entries make it.
    """

    def bytes_first(cuts: Sequence[int]) -> tuple[float, ...]:
        work, bytes_ = loads.largest(cuts)
        return bytes_, work

    starts = [busiest, _least(loads, lambda stage, a, b: loads.alone(stage, a, b)[1])]
    fullest = min((_improve(start, bytes_first, far=True) for start in starts), key=bytes_first)
    least_bytes, least_work = loads.largest(fullest)[1] or 1.0, loads.largest(busiest)[0] or 1.0
    if loads.balance.by == "memory":

        def within(stage: int, start: int, stop: int) -> float:
            work, bytes_ = loads.alone(stage, start, stop)
            return work if bytes_ <= least_bytes * (1 + 1e-12) else work + 1e6 * least_work * len(loads.rank_of)

        return min((fullest, _improve(_least(loads, within), bytes_first, far=True)), key=bytes_first)

    def both(cuts: Sequence[int]) -> tuple[float, ...]:
        work, bytes_ = loads.largest(cuts)
        return max(work / least_work, bytes_ / least_bytes), work / least_work + bytes_ / least_bytes

    def worse(stage: int, start: int, stop: int) -> float:
        work, bytes_ = loads.alone(stage, start, stop)
        return max(work / least_work, bytes_ / least_bytes)

    return min((_improve(start, both, far=True) for start in (busiest, fullest, _least(loads, worse))), key=both)


def _least(loads: _Loads, cost: Callable[[int, int, int], float]) -> list[int]:
    """Cuts whose costliest stage costs as little as can be; cost(stage, start, stop)."""
    stages, entries = len(loads.rank_of), loads.entries
    # best[i] = (cost, cuts) of the first entries up to i in the stages so far
    best: dict[int, tuple[float, list[int]]] = {0: (0.0, [0])}
    for stage in range(stages):
        left = stages - stage - 1
        now: dict[int, tuple[float, list[int]]] = {}
        for stop in range(stage + 1, entries - left + 1):
            start = min((i for i in best if i < stop), key=lambda i: max(best[i][0], cost(stage, i, stop)))
            now[stop] = max(best[start][0], cost(stage, start, stop)), [*best[start][1], stop]
        best = now
    return best[entries][1]


def _loads(stages: Sequence[float], rank_of: Sequence[int]) -> list[float]:
    loads = [0.0] * (max(rank_of) + 1)
    for work, rank in zip(stages, rank_of, strict=True):
        loads[rank] += work
    return loads


def _range(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
