"""What thousands of settings have in common, made once: schedules, cuts of a model, prices of its parts, places in a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate

from stretto.anatomy import Anatomy, Part
from stretto.layout.balance import Held
from stretto.plan.cost import Costs, Work
from stretto.plan.hardware import Cluster
from stretto.plan.memory import Sizes
from stretto.plan.setting import Setting
from stretto.plan.software import Software
from stretto.plan.stages import Moment, Stage, cut
from stretto.schedule.action import Action, Schedule
from stretto.schedule.pipelines import FILE, PIPELINES, Place, pipeline, ranks_of_stages
from stretto.schedule.step import training_step

#: Rounds of pp microbatches after which no rank holds more of them than before, in schedules where that is so.
FULL = 3


def _most(name: str, microbatches: int) -> int:
    """Microbatches under way at a time on the first of two ranks."""
    order = PIPELINES[name].order(Place(0, 2, PIPELINES[name].chunks or 2, microbatches))
    held = accumulate((action.kind == "F") - (action.kind in ("B", "W")) for action in order)
    return max(held)


#: Schedules whose ranks hold the more the more microbatches there are: all forwards come first.
GROWING: frozenset[str] = frozenset(name for name in PIPELINES if _most(name, 4 * FULL) > _most(name, 2 * FULL))

#: Schedules whose backwards are halves, some or all.
SPLIT: frozenset[str] = frozenset(
    name
    for name, known in PIPELINES.items()
    if any(action.kind == "I" for action in known.order(Place(0, 2, known.chunks or 1, max(4, known.least(2)))))
)


class Schedules:
    """The ground's schedules, each made once. A key is (name, pipeline ranks, microbatches, stages a rank)."""

    def __init__(self) -> None:
        self._compute: dict[tuple[str, int, int, int], Schedule] = {}
        self._step: dict[tuple[str, int, int, int], Schedule] = {}
        self._moments: dict[tuple[str, int, int, int, int], tuple[Moment, ...]] = {}

    def compute(self, name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
        """Only what is computed."""
        key = (name, ranks, microbatches, chunks)
        if key not in self._compute:
            self._compute[key] = pipeline(name, ranks, microbatches, chunks)
        return self._compute[key]

    def step(self, name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
        """The whole step that the engine runs."""
        key = (name, ranks, microbatches, chunks)
        if key not in self._step:
            self._step[key] = training_step(self.compute(*key))
        return self._step[key]

    def ranks_of(self, name: str, ranks: int, microbatches: int, chunks: int) -> tuple[int, ...]:
        """Stage -> pipeline rank."""
        if name.startswith(FILE):
            return self.compute(name, ranks, microbatches, chunks).rank_of
        return ranks_of_stages(ranks, chunks, PIPELINES[name].vee)

    def full(self, name: str, ranks: int, microbatches: int) -> int:
        """Microbatches of a step that is as full as one of so many: that is long enough, and leaves the same rest."""
        if name.startswith(FILE) or name in GROWING:
            return microbatches
        return min(microbatches, max(FULL * ranks, PIPELINES[name].least(ranks)) + microbatches % ranks)

    def moments(self, name: str, ranks: int, microbatches: int, chunks: int, rank: int) -> tuple[Moment, ...]:
        """The fullest moments of a rank's step."""
        key = (name, ranks, self.full(name, ranks, microbatches), chunks, rank)
        if key not in self._moments:
            held = [stage for stage, holder in enumerate(self.ranks_of(*key[:4])) if holder == rank]
            self._moments[key] = fullest_moments(self._order(*key), held)
        return self._moments[key]

    def _order(self, name: str, ranks: int, microbatches: int, chunks: int, rank: int) -> Iterable[Action]:
        """What one rank computes, without making it for the others."""
        if name.startswith(FILE) or (ranks == 1 and chunks == 1):
            return self.compute(name, ranks, microbatches, chunks).order[rank]
        return PIPELINES[name].order(Place(rank, ranks, chunks, microbatches))


def fullest_moments(order: Iterable[Action], stages: Sequence[int]) -> tuple[Moment, ...]:
    """The moments of a rank's order that no other moment with the same stage running exceeds in every stage."""
    position = {stage: i for i, stage in enumerate(stages)}
    held = [0] * len(stages)
    seen: dict[Moment, None] = {}
    for action in order:
        at = position[action.stage]
        held[at] += action.kind == "F"
        seen[Moment(tuple(held), at)] = None
        held[at] -= action.kind in ("B", "W")
    most: list[Moment] = []
    for one in sorted(seen, key=lambda moment: -sum(moment.held)):
        if not any(one.runs == other.runs and all(a <= b for a, b in zip(one.held, other.held, strict=True)) for other in most):
            most.append(one)
    return tuple(most)


class Known:
    """What settings of one model on one cluster with one stack share."""

    def __init__(self, anatomy: Anatomy, cluster: Cluster, software: Software, schedules: Schedules | None = None) -> None:
        self.anatomy, self.cluster, self.software = anatomy, cluster, software
        self.schedules = schedules or Schedules()
        self._cuts: dict[tuple[object, ...], tuple[Stage, ...]] = {}
        self._costs: dict[tuple[object, ...], Costs] = {}
        self._sizes: dict[tuple[object, ...], Sizes] = {}
        self._prices: dict[tuple[object, ...], dict[tuple[str, str], Work]] = {}

    @cached_property
    def whole(self) -> tuple[tuple[Part, int], ...]:
        """All parts of the model, those that are alike once, with how many there are."""
        return Stage.of(0, self.anatomy.parts, self.anatomy.like).kinds

    def stages(self, setting: Setting) -> tuple[Stage, ...]:
        """The stages of the model."""
        ranks_of = self.ranks_of(setting)
        key: tuple[object, ...] = (ranks_of, setting.split, setting.layers, setting.seq_len, setting.recompute == "full", setting.measured)
        held: Held = ()
        if setting.balance != "work":
            held = self.schedules.compute(setting.schedule, setting.size["pp"], setting.microbatches, setting.chunks).held
            key = (*key, setting.recompute, setting.balanced(held))
        if key not in self._cuts:
            self._cuts[key] = cut(self.anatomy, setting, ranks_of, self.software, held)
        return self._cuts[key]

    def ranks_of(self, setting: Setting) -> tuple[int, ...]:
        return self.schedules.ranks_of(setting.schedule, setting.size["pp"], setting.microbatches, setting.chunks)

    def costs(self, setting: Setting) -> Costs:
        """Prices of parts. What else a setting says does not move them: dp, pp, ZeRO and the schedule price whole stages."""
        shared, key = self._of_parts(setting)
        if key not in self._costs:
            self._costs[key] = Costs(setting, self.cluster, self.software, self._prices.setdefault(shared, {}))
        return self._costs[key]

    def sizes(self, setting: Setting) -> Sizes:
        """Weights and bytes of parts."""
        _, key = self._of_parts(setting)
        if key not in self._sizes:
            self._sizes[key] = Sizes(setting, self.software)
        return self._sizes[key]

    def _of_parts(self, setting: Setting) -> tuple[tuple[object, ...], tuple[object, ...]]:
        """What of a setting parts depend on, without recompute and with it."""
        size = setting.size
        shared = (
            (size["tp"], size["ep"], size["cp"], setting.micro_size, setting.seq_len, setting.sequence),
            (setting.compute, setting.reduce, setting.microbatches if setting.compute in ("fp8", "fp4") else 0),
        )
        return shared, (shared, setting.recompute)
