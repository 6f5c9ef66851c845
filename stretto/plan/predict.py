"""A prediction: what one step of a setting takes on a cluster, action by action, from the ground's own Schedule and ZERO table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log2

from stretto.anatomy import Anatomy, Part
from stretto.layout.layout import split
from stretto.plan.cost import Costs, Work
from stretto.plan.hardware import Cluster
from stretto.plan.memory import Memory, Share, rank_memory, share
from stretto.plan.setting import Setting, dtype_bytes
from stretto.plan.software import STRETTO, Software
from stretto.plan.traffic import Seats, collective_seconds, message_seconds
from stretto.schedule.action import Action, Schedule
from stretto.schedule.pipelines import PIPELINES, pipeline, ranks_of_stages
from stretto.schedule.step import training_step
from stretto.schedule.timeline import Timeline, simulate

#: Share of its time that a kernel loses to a collective running beside it.
STOLEN = 0.15
#: What each doubling of machines costs: a step waits for the slowest, and the slowest of more is slower.
STRAGGLE = 0.006
#: Seconds that the host takes once a step.
HOST_STEP = 2e-3
#: Rounds of pp microbatches after which a pipeline repeats itself.
STEADY = 4


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


def stage_parts(anatomy: Anatomy, setting: Setting) -> list[tuple[Part, ...]]:
    """The parts of each stage: blocks as evenly as can be, what is before them with the first, what is after with the last."""
    first = next(i for i, part in enumerate(anatomy.parts) if part.is_block)
    blocks = anatomy.blocks
    before, after = anatomy.parts[:first], anatomy.parts[first + len(blocks) :]
    stages: list[tuple[Part, ...]] = []
    at = 0
    for stage in range(setting.stages):
        start, stop = split(len(blocks), setting.stages, stage)
        size = setting.layers[stage] if setting.layers else stop - start
        stages.append(blocks[at : at + size])
        at += size
    stages[0] = before + stages[0]
    stages[-1] = stages[-1] + after
    return stages


class Schedules:
    """The ground's schedules, each made once: thousands of settings ask for the same few."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int, int, int, bool], Schedule] = {}

    def compute(self, name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
        """Only what is computed."""
        key = (name, ranks, microbatches, chunks, False)
        if key not in self._made:
            self._made[key] = pipeline(name, ranks, microbatches, chunks)
        return self._made[key]

    def step(self, name: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
        """The whole step that the engine runs."""
        key = (name, ranks, microbatches, chunks, True)
        if key not in self._made:
            self._made[key] = training_step(self.compute(name, ranks, microbatches, chunks))
        return self._made[key]


class Predictor:
    """One setting on one cluster: what its step takes and holds."""

    def __init__(
        self, anatomy: Anatomy, setting: Setting, cluster: Cluster, software: Software = STRETTO, schedules: Schedules | None = None
    ) -> None:
        self.schedules = schedules or Schedules()
        self.anatomy, self.setting, self.cluster, self.software = anatomy, setting, cluster, software
        self.costs = Costs(setting, cluster, software)
        self.stages = stage_parts(anatomy, setting)
        self._shares: dict[tuple[object, ...], Share] = {}
        self.zero_seats = Seats.of(setting.mesh, ("dp", "cp", "ep"), cluster.per_node)
        self.expert_seats = Seats.of(setting.mesh, ("dp", "cp"), cluster.per_node)
        self.copy_seats = Seats.of(setting.mesh, ("dp_replicate",), cluster.per_node)

    # -- one stage -------------------------------------------------------------------------------------------------

    def work(self, stage: int) -> tuple[Work, Work]:
        """Forward and backward of one microbatch through a stage, with the collectives of ZeRO that run beside them."""
        forward, backward = Work(), Work()
        policy = self.setting.policy
        fetches = policy.params == "microbatch"
        for part in self.stages[stage]:
            f, b = self.costs.forward(part), self.costs.backward(part)
            if fetches and policy.does("before_forward", ("all_gather", "param")):
                f = beside(f, self.collective("all_gather", self.share(part), self.setting.compute))
            if fetches and policy.does("before_backward", ("all_gather", "param")):
                again = self.collective("all_gather", self.share(part), self.setting.compute)
                b = beside(b, again) if self.software.backward_gather == "overlap" else b._replace(crossing=b.crossing + again)
            if policy.does("after_backward", ("reduce_scatter", "grad")):
                b = beside(b, self.collective("reduce_scatter", self.share(part), self.setting.reduce))
            forward, backward = forward + f, backward + b
        return forward, backward

    def collective(self, name: str, share: Share, dtype: str) -> float:
        """Seconds of a ZeRO collective over what the ranks share, and over their experts."""
        width = dtype_bytes(dtype, 2)
        dense = collective_seconds(self.cluster, self.zero_seats, name, share.dense * width)
        return dense + collective_seconds(self.cluster, self.expert_seats, name, share.experts * width)

    def share(self, part: Part) -> Share:
        """What this rank has of a part's weights."""
        if part.price_key not in self._shares or not part.is_block:
            self._shares[part.price_key] = share(part, self.setting)
        return self._shares[part.price_key]

    def shares(self, stages: Sequence[int]) -> Share:
        return sum((self.share(part) for stage in stages for part in self.stages[stage]), Share())

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
        works = [self.work(stage) for stage in range(setting.stages)]
        seconds = self.seconds(works)
        makespan = self.makespan(lambda action: seconds.get((action.kind, action.stage), 0.0))
        busy = [0.0] * setting.size["pp"]
        for stage, rank in enumerate(self.ranks_of):
            busy[rank] += setting.microbatches * (seconds["F", stage] + seconds["B", stage])
        fixed = max(seconds["REDUCE", stage] + seconds["UPDATE", stage] for stage in range(setting.stages))
        crossing = setting.microbatches * max(
            sum(work.crossing for stage in self.of_rank(rank) for work in works[stage]) for rank in range(setting.size["pp"])
        )
        first = self.of_rank(0)
        return Prediction(
            makespan * (1 + STRAGGLE * log2(self.cluster.nodes)),
            makespan - fixed,
            self.reduce(first, works),
            self.gather(first, works),
            self.update(first),
            max(0.0, 1 - max(busy) / (makespan - fixed)),
            crossing,
            2 * setting.microbatches * self.message() * (setting.size["pp"] > 1),
        )

    def seconds(self, works: Sequence[tuple[Work, Work]]) -> dict[tuple[str, int], float]:
        """(kind, stage) -> seconds of each action. Where a stack waits for its messages, they are part of what waits."""
        setting = self.setting
        message = self.message()
        wait = message if self.software.messages == "wait" else 0.0
        found: dict[tuple[str, int], float] = {}
        for stage, (f, b) in enumerate(works):
            first, last = stage == 0, stage == setting.stages - 1
            weights = sum(self.costs.weights(part) for part in self.stages[stage])
            found["F", stage] = f.seconds + (0.0 if first else wait)
            found["B", stage] = b.seconds + (0.0 if last else wait)
            found["W", stage] = weights
            found["I", stage] = max(0.0, found["B", stage] - weights)
            for kind in ("SEND_F", "SEND_B", "RECV_F", "RECV_B"):
                found[kind, stage] = message - wait
            rank = self.of_rank(self.ranks_of[stage])
            found["REDUCE", stage] = self.reduce(rank, works) / len(rank)
            found["UPDATE", stage] = self.update(rank) + self.gather(rank, works)
        return found

    @cached_property
    def ranks_of(self) -> tuple[int, ...]:
        setting = self.setting
        return ranks_of_stages(setting.size["pp"], setting.chunks, PIPELINES[setting.schedule].vee)

    def of_rank(self, rank: int) -> list[int]:
        return [stage for stage, holder in enumerate(self.ranks_of) if holder == rank]

    def makespan(self, seconds: Callable[[Action], float]) -> float:
        """Of the simulated step. Long steps repeat: two shorter ones, a round apart, give the seconds that each round adds."""
        p, m = self.setting.size["pp"], self.setting.microbatches
        if p == 1 and self.setting.chunks == 1:  # one after the other: nothing to simulate
            ends = sum(seconds(Action(kind, 0)) for kind in ("REDUCE", "VOTE", "UPDATE"))
            return m * (seconds(Action("F", 0, 0)) + seconds(Action("B", 0, 0))) + ends
        rounds = max(0, (m - STEADY * p) // p)
        short = m - rounds * p
        first = simulate(self.schedule(short), seconds).seconds
        return first if not rounds else first + rounds * (simulate(self.schedule(short + p), seconds).seconds - first)

    def schedule(self, microbatches: int) -> Schedule:
        """The whole step that the engine would run, of so many microbatches."""
        setting = self.setting
        return self.schedules.step(setting.schedule, setting.size["pp"], microbatches, setting.chunks)

    def timeline(self) -> Timeline:
        """When each action of the step would run."""
        seconds = self.seconds([self.work(stage) for stage in range(self.setting.stages)])
        return simulate(self.schedule(self.setting.microbatches), lambda action: seconds.get((action.kind, action.stage), 0.0))

    # -- once a step -----------------------------------------------------------------------------------------------

    def reduce(self, stages: Sequence[int], works: Sequence[tuple[Work, Work]]) -> float:
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
        return self.exposed(total, stages, [works[stage][1].seconds for stage in stages], self.software.reduce)

    def gather(self, stages: Sequence[int], works: Sequence[tuple[Work, Work]]) -> float:
        """Exposed seconds of bringing the updated parameters to everybody."""
        if not self.setting.policy.does("after_step", ("all_gather", "param")):
            return 0.0
        total = self.collective("all_gather", self.shares(stages), self.setting.compute)
        return self.exposed(total, stages, [works[stage][0].seconds for stage in stages], self.software.gather)

    def exposed(self, seconds: float, stages: Sequence[int], covers: Sequence[float], way: str) -> float:
        """What is seen of collectives that run group by group beside one microbatch's pass: the last group, and what is longer."""
        if way == "after":
            return seconds
        groups = max(1, sum(len(self.stages[stage]) for stage in stages))
        cover = sum(covers)
        return max(seconds / groups, seconds - cover * (groups - 1) / groups) + STOLEN * min(seconds, cover)

    def update(self, stages: Sequence[int]) -> float:
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
        full = min(setting.microbatches, max(3 * setting.size["pp"], PIPELINES[setting.schedule].least(setting.size["pp"])))
        stages = [(stage, self.stages[stage]) for stage in self.of_rank(rank)]
        schedule = self.schedules.compute(setting.schedule, setting.size["pp"], full, setting.chunks)
        return rank_memory(stages, setting, self.software, schedule, rank)


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
