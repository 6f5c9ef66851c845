"""A prediction: what one step of a setting takes on a cluster, action by action, from the ground's own Schedule and ZERO table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log2

from stretto.anatomy import Anatomy, Part
from stretto.plan.cost import Work
from stretto.plan.hardware import Cluster
from stretto.plan.known import SPLIT, Known, Schedules
from stretto.plan.memory import Memory, Share, rank_memory
from stretto.plan.setting import Setting, dtype_bytes
from stretto.plan.software import STRETTO, Software
from stretto.plan.stages import Stage, stages_of_ranks
from stretto.plan.traffic import Seats, collective_seconds, message_seconds
from stretto.schedule.action import Schedule
from stretto.schedule.pipelines import FILE
from stretto.schedule.timeline import Timeline, makespan, simulate

#: Share of its time that a kernel loses to a collective running beside it.
STOLEN = 0.15
#: What each doubling of machines costs: a step waits for the slowest, and the slowest of more is slower.
STRAGGLE = 0.006
#: Seconds that the host takes once a step.
HOST_STEP = 2e-3
#: Rounds of pp microbatches, and microbatches, after which a pipeline repeats itself.
STEADY, SETTLED = 4, 32


@dataclass(frozen=True)
class Prediction:
    """Seconds of one step and where they go. bubble: share of the pipeline's time in which a rank waits for another.

    exposed: seconds of collectives that computation waited for. update: of optimizer and clipping.
    """

    seconds: float
    pipeline: float
    reduce: float
    gather: float
    update: float
    bubble: float
    crossing: float
    messages: float

    @property
    def exposed(self) -> float:
        return self.reduce + self.gather + self.crossing + self.messages


class Predictor:
    """One setting on one cluster: what its step takes and holds."""

    def __init__(
        self,
        anatomy: Anatomy,
        setting: Setting,
        cluster: Cluster,
        software: Software = STRETTO,
        schedules: Schedules | None = None,
        known: Known | None = None,
    ) -> None:
        """known: what other settings of this model, cluster and software have made."""
        self.known = known or Known(anatomy, cluster, software, schedules)
        self.schedules = self.known.schedules
        self.anatomy, self.setting, self.cluster, self.software = anatomy, setting, cluster, software
        self.costs = self.known.costs(setting)
        self.sizes = self.known.sizes(setting)
        self._works: dict[str, tuple[Work, Work]] = {}
        self._stage_works: dict[int, tuple[Work, Work]] = {}
        self._ends: dict[tuple[int, ...], tuple[float, float, float]] = {}
        self.zero_seats = Seats.of(setting.mesh, ("dp", "cp", "ep"), cluster.per_node)
        self.expert_seats = Seats.of(setting.mesh, ("dp", "cp"), cluster.per_node)
        self.copy_seats = Seats.of(setting.mesh, ("dp_replicate",), cluster.per_node)

    @staticmethod
    def of(known: Known, setting: Setting) -> Predictor:
        """Of a setting, with what others of its model, cluster and software have made."""
        return Predictor(known.anatomy, setting, known.cluster, known.software, known=known)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        return self.known.stages(self.setting)

    # -- one stage -------------------------------------------------------------------------------------------------

    def work(self, stage: int) -> tuple[Work, Work]:
        """Forward and backward of one microbatch through a stage, with the collectives of ZeRO that run beside them."""
        like = self.stages[stage].like
        if like not in self._stage_works:
            self._stage_works[like] = self.work_of(self.stages[like].kinds)
        return self._stage_works[like]

    def work_of(self, kinds: Iterable[tuple[Part, int]]) -> tuple[Work, Work]:
        """Of parts, each so many times."""
        forward, backward = Work(), Work()
        for part, count in kinds:
            f, b = self.pair(part)
            forward, backward = forward + f.times(count), backward + b.times(count)
        return forward, backward

    def pair(self, part: Part) -> tuple[Work, Work]:
        """Forward and backward of one part."""
        if part.name not in self._works:
            self._works[part.name] = self._beside_zero(part, *self.costs.pair(part))
        return self._works[part.name]

    def _beside_zero(self, part: Part, f: Work, b: Work) -> tuple[Work, Work]:
        policy = self.setting.policy
        if policy.params == "microbatch" and policy.does("before_forward", ("all_gather", "param")):
            gather = self.collective("all_gather", self.share(part), self.setting.compute)
            f = beside(f, gather)
            b = beside(b, gather) if self.software.backward_gather == "overlap" else b._replace(crossing=b.crossing + gather)
        if policy.does("after_backward", ("reduce_scatter", "grad")):
            b = beside(b, self.collective("reduce_scatter", self.share(part), self.setting.reduce))
        return f, b

    def collective(self, name: str, share: Share, dtype: str) -> float:
        """Seconds of a ZeRO collective over what the ranks share, and over their experts."""
        width = dtype_bytes(dtype, 2)
        dense = collective_seconds(self.cluster, self.zero_seats, name, share.dense * width)
        return dense + collective_seconds(self.cluster, self.expert_seats, name, share.experts * width)

    def share(self, part: Part) -> Share:
        """What this rank has of a part's weights."""
        return self.sizes.share(part)

    def shares(self, stages: Sequence[int]) -> Share:
        """What this rank has of the weights of its stages."""
        return sum((self.share(part).times(count) for stage in stages for part, count in self.stages[stage].kinds), Share())

    # -- the pipeline ----------------------------------------------------------------------------------------------

    def message(self) -> float:
        """Seconds to hand a microbatch's hidden states to the next stage; each tp rank sends its share."""
        size = self.setting.size
        if size["pp"] == 1:
            return 0.0
        per_stage = self.setting.mesh.size // size["pp"]
        hidden = self.anatomy.blocks[0].weights[0].shape[0]
        bytes_ = self.setting.tokens * hidden * self.setting.bytes_ / size["tp"]
        return message_seconds(self.cluster, per_stage >= self.cluster.per_node, bytes_)

    def predict(self) -> Prediction:
        """One step: the ground's schedule, each action with its seconds."""
        setting = self.setting
        seconds = self.seconds()
        makespan = self.makespan(seconds)
        fixed = max(seconds["REDUCE", stage] + seconds["UPDATE", stage] for stage in range(setting.stages))
        busy = max(sum(seconds[kind, stage] for stage in stages for kind in "FB") for stages in self.ranks)
        crossing = max(sum(work.crossing for stage in stages for work in self.work(stage)) for stages in self.ranks)
        reduce, gather, update = self.ends(self.ranks[0])
        return Prediction(
            makespan * straggle(self.cluster),
            makespan - fixed,
            reduce,
            gather,
            update,
            max(0.0, 1 - setting.microbatches * busy / (makespan - fixed)),
            setting.microbatches * crossing,
            2 * setting.microbatches * self.message() * (setting.size["pp"] > 1),
        )

    def seconds(self) -> dict[tuple[str, int], float]:
        """(kind, stage) -> seconds of each action. Where a stack waits for its messages, they are part of what waits."""
        message = self.message()
        wait = message if self.software.messages == "wait" else 0.0
        last = self.setting.stages - 1
        found: dict[tuple[str, int], float] = {}
        weights: dict[int, float] = {}
        for stage in self.stages:
            number, like = stage.number, stage.like
            if like not in weights:
                weights[like] = sum(count * self.costs.weights(part) for part, count in stage.kinds)
            f, b = self.work(number)
            found["F", number] = f.seconds + (wait if number else 0.0)
            found["B", number] = backward = b.seconds + (wait if number < last else 0.0)
            found["W", number] = weights[like]
            found["I", number] = max(0.0, backward - weights[like])
            for kind in ("SEND_F", "SEND_B", "RECV_F", "RECV_B"):
                found[kind, number] = message - wait
        for stages in self.ranks:
            reduce, gather, update = self.ends(stages)
            for number in stages:
                found["REDUCE", number] = reduce / len(stages)
                found["UPDATE", number] = update + gather
        return found

    def ends(self, stages: Sequence[int]) -> tuple[float, float, float]:
        """Seconds of what a rank with these stages does once a step: reduce, gather, update."""
        key = tuple(self.stages[stage].like for stage in stages)
        if key not in self._ends:
            self._ends[key] = self._reduce(stages), self._gather(stages), self._update(stages)
        return self._ends[key]

    @cached_property
    def ranks_of(self) -> tuple[int, ...]:
        return self.known.ranks_of(self.setting)

    @property
    def splits(self) -> bool:
        """Whether a microbatch's weight gradients may be put off."""
        name = self.setting.schedule
        return name in SPLIT or (name.startswith(FILE) and any(a.kind == "I" for rank in self.schedule(1).order for a in rank))

    @cached_property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each pipeline rank."""
        return stages_of_ranks(self.ranks_of)

    def makespan(self, seconds: Mapping[tuple[str, int], float]) -> float:
        """Of the simulated step. Long steps repeat: two shorter ones, a round apart, give the seconds that each round adds."""
        p, m = self.setting.size["pp"], self.setting.microbatches
        if p == 1 and self.setting.chunks == 1:  # one after the other: nothing to simulate
            ends = sum(seconds.get((kind, 0), 0.0) for kind in ("REDUCE", "VOTE", "UPDATE"))
            return m * (seconds["F", 0] + seconds["B", 0]) + ends
        first = makespan(self.schedule(self.short), seconds)
        return first if not self.rounds else first + self.rounds * (makespan(self.schedule(self.short + p), seconds) - first)

    @property
    def rounds(self) -> int:
        """Rounds of a long step that are not simulated, since they repeat."""
        p, m = self.setting.size["pp"], self.setting.microbatches
        return 0 if self.setting.schedule.startswith(FILE) else max(0, (m - max(STEADY * p, SETTLED)) // p)

    @property
    def short(self) -> int:
        """Microbatches of the step without these rounds."""
        return self.setting.microbatches - self.rounds * self.setting.size["pp"]

    def schedule(self, microbatches: int) -> Schedule:
        """The whole step that the engine would run, of so many microbatches."""
        setting = self.setting
        return self.schedules.step(setting.schedule, setting.size["pp"], microbatches, setting.chunks)

    def timeline(self) -> Timeline:
        """When each action of the step would run."""
        seconds = self.seconds()
        return simulate(self.schedule(self.setting.microbatches), lambda action: seconds.get((action.kind, action.stage), 0.0))

    # -- once a step -----------------------------------------------------------------------------------------------

    def _reduce(self, stages: Sequence[int]) -> float:
        """Exposed seconds of the gradients' reduction after the last microbatch."""
        setting, policy = self.setting, self.setting.policy
        mine = self.shares(stages)
        width = dtype_bytes(setting.reduce)
        total = 0.0
        if not policy.does("after_backward", ("reduce_scatter", "grad")):
            total = self.collective(policy.reduction, mine, setting.reduce)
        if self.copy_seats.ranks > 1:
            if policy.reduction == "reduce_scatter":
                part = mine.dense / setting.shards + mine.experts / setting.expert_shards
                total += collective_seconds(self.cluster, self.copy_seats, "all_reduce", part * width)
            else:
                both = Seats.of(setting.mesh, ("dp_replicate", "dp", "cp", "ep"), self.cluster.per_node)
                total = collective_seconds(self.cluster, both, "all_reduce", mine.elements * width)
        return self.exposed(total, stages, [self.work(stage)[1].seconds for stage in stages], self.software.reduce)

    def _gather(self, stages: Sequence[int]) -> float:
        """Exposed seconds of bringing the updated parameters to everybody."""
        if not self.setting.policy.does("after_step", ("all_gather", "param")):
            return 0.0
        total = self.collective("all_gather", self.shares(stages), self.setting.compute)
        return self.exposed(total, stages, [self.work(stage)[0].seconds for stage in stages], self.software.gather)

    def exposed(self, seconds: float, stages: Sequence[int], covers: Sequence[float], way: str) -> float:
        """What is seen of collectives that run group by group beside one microbatch's pass: the last group, and what is longer."""
        if way == "after":
            return seconds
        groups = max(1, sum(len(self.stages[stage].parts) for stage in stages))
        cover = sum(covers)
        return max(seconds / groups, seconds - cover * (groups - 1) / groups) + STOLEN * min(seconds, cover)

    def _update(self, stages: Sequence[int]) -> float:
        """The norm of the gradient, the optimizer's passes over what this rank updates, and clearing the gradients."""
        setting, policy = self.setting, self.setting.policy
        mine = self.shares(stages)
        part = mine.dense / setting.shards + mine.experts / setting.expert_shards
        updated = part if "optim" in policy.cut else mine.elements
        summed = part if "grad" in policy.cut and policy.gradients == "each" else mine.elements
        width = dtype_bytes(setting.reduce)
        return self.costs.kernels.stream(updated * (self.software.optimizer_bytes + width) + summed * width, 20) + HOST_STEP

    # -- memory ----------------------------------------------------------------------------------------------------

    def memory(self, rank: int) -> Memory:
        """What a rank of pipeline rank `rank` holds at most."""
        setting = self.setting
        stages = [self.stages[stage] for stage in self.ranks[rank]]
        moments = self.schedules.moments(setting.schedule, setting.size["pp"], setting.microbatches, setting.chunks, rank)
        return rank_memory(stages, setting, self.software, moments, self.sizes)


def straggle(cluster: Cluster) -> float:
    """What waiting for the slowest machine makes of a step."""
    return 1 + STRAGGLE * log2(cluster.nodes)


def beside(work: Work, collectives: float) -> Work:
    """The work with collectives beside it, which take some of its speed."""
    if not collectives:
        return work
    slower = work.compute + STOLEN * min(work.compute, collectives)
    return work._replace(compute=slower, beside=work.beside + collectives)


def predict(
    anatomy: Anatomy, setting: Setting, cluster: Cluster, software: Software = STRETTO, schedules: Schedules | None = None
) -> Prediction:
    """One step of `setting`. Raises JobError for a setting that cannot be."""
    return Predictor(anatomy, setting, cluster, software, schedules).predict()
