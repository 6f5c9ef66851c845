"""The least that a step can take or hold, in closed form: what a search leaves out because of it is never better than what it keeps.

Each bound is tested to be at most what `simulate`, or the count of bytes, says. They rest on two things: a rank computes all that is
its own, after the forwards that lie before its first stage and, unless weight gradients are put off, before the backwards below it;
and a microbatch goes through all stages, there and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from stretto.anatomy import Part
from stretto.layout.zero import held_elements
from stretto.plan.cost import Costs, Work
from stretto.plan.memory import Share
from stretto.plan.predict import Predictor
from stretto.plan.setting import Setting, dtype_bytes
from stretto.plan.stages import Moment, Stage, stages_of_ranks
from stretto.schedule.timeline import makespan


class Passes(NamedTuple):
    """Seconds of one microbatch through the cheapest block and through the head: forward, backward, and the half of a block's
    backward that the stage before waits for."""

    forward: float
    backward: float
    inputs: float
    head_forward: float = 0.0
    head_backward: float = 0.0

    def times(self, count: float) -> Passes:
        return Passes(*(count * each for each in self))


class Load(NamedTuple):
    """What a rank has: blocks, heads (0 or 1), and the blocks that a microbatch passes before it comes to the rank's first stage."""

    blocks: int
    heads: int
    below: int


class Outline(NamedTuple):
    """A schedule on a model that is cut in stages, told by its ranks. split: weight gradients may be put off. alone: microbatches
    do not meet. blocks: of each stage."""

    loads: tuple[Load, ...]
    split: bool
    alone: bool
    blocks: tuple[int, ...]

    @staticmethod
    def of(stages: Sequence[Stage], ranks_of: Sequence[int], split: bool, alone: bool) -> Outline:
        blocks = tuple(sum(count for part, count in stage.kinds if part.is_block) for stage in stages)
        loads: dict[tuple[int, int], Load] = {}
        for mine in stages_of_ranks(tuple(ranks_of)):
            key = sum(blocks[stage] for stage in mine), int(ranks_of[mine[0]] == ranks_of[-1])
            below = sum(blocks[: mine[0]])
            loads[key] = Load(*key, max(below, loads[key].below if key in loads else 0))
        return Outline(tuple(loads.values()), split, alone, blocks)

    def seconds(self, passes: Passes, microbatches: int) -> float:
        """Of a step of so many microbatches; what comes after the last backward is not in it."""
        f, b, i, head_f, head_b = passes
        if self.alone:
            return microbatches * (sum(self.blocks) * (f + b) + head_f + head_b)
        most = sum(self.blocks) * (f + (i if self.split else b)) + head_f  # one microbatch, there and back
        for blocks, heads, below in self.loads:
            busy = below * f + microbatches * (blocks * (f + b) + heads * (head_f + head_b))
            if self.split:
                busy = max(busy, below * (f + i) + microbatches * (blocks * (f + i) + heads * head_f))
            else:
                busy += below * b
            most = max(most, busy)
        return most


def rooflines(costs: Costs, whole: Iterable[tuple[Part, int]]) -> Passes:
    """Passes by flops at the best rate of large products, and by what crosses. One over many rows takes no more than as many over
    few rows, and nothing else is counted, so a share of it bounds a smaller microbatch too."""
    setting, device = costs.setting, costs.cluster.device
    rate = device.peak(setting.compute) * min(device.speeds.best, device.speeds.sustained)
    rate *= max(1.0, device.speeds.narrow * costs.software.narrow) if costs.narrow else 1.0
    found = []
    for part in _counted(whole):
        flops = part.matmul_flops * setting.tokens / setting.size["tp"] / rate
        hidden = costs.software.tensor != "none"  # some of what crosses, and more of it where there is more to hide behind
        f, b = (0.0, 0.0) if hidden else (costs.forward(part).crossing, costs.backward(part).crossing)
        found.append((part.is_block, flops + f, 2 * flops + b, flops + b))
    return _cheapest(found)


def passes_of(costs: Costs, pair: Callable[[Part], tuple[Work, Work]], whole: Iterable[tuple[Part, int]]) -> Passes:
    """Passes of a microbatch. pair: forward and backward of a part, with or without what ZeRO does beside them.

    A stage is as slow as its kernels and crossings, as what runs beside those, and as its host: of each the sum over its parts is no
    more than what the stage takes, so for each pass the largest of these counts.
    """
    parts = _counted(whole)
    pairs = [pair(part) for part in parts]
    forward, backward = (_slowest([works[i] for works in pairs]) for i in (0, 1))
    inputs = [max(0.0, b.compute + b.crossing - costs.weights(part)) for part, (_, b) in zip(parts, pairs, strict=True)]
    return _cheapest([(part.is_block, f, b, i) for part, f, b, i in zip(parts, forward, backward, inputs, strict=True)])


def _slowest(works: Sequence[Work]) -> list[float]:
    ways = (
        [work.compute + work.crossing for work in works],
        [work.beside + work.crossing for work in works],
        [work.host for work in works],
    )
    return max(ways, key=sum)


def _counted(whole: Iterable[tuple[Part, int]]) -> list[Part]:
    """The kinds of blocks, and the head."""
    return [part for part, _ in whole if part.is_block or part.name == "head"]


def _cheapest(found: Sequence[tuple[bool, float, float, float]]) -> Passes:
    blocks = [each[1:] for each in found if each[0]]
    f, b, i = (min(each) for each in zip(*blocks, strict=True))
    return Passes(f, b, i, sum(each[1] for each in found if not each[0]), sum(each[2] for each in found if not each[0]))


def step_seconds(predictor: Predictor, seconds: Mapping[tuple[str, int], float]) -> float:
    """Of one layout whose actions take these seconds: then gradients meet and weights are updated."""
    setting, ranks_of = predictor.setting, predictor.ranks_of
    m, last, back = setting.microbatches, setting.stages - 1, "I" if predictor.splits else "B"
    before, after = _chain(seconds, ranks_of, "F"), _chain(seconds, ranks_of, back)
    reduced = seconds["REDUCE", 0]
    ends = [before[last] + seconds["F", last] + seconds[back, last] + after[last] + reduced]
    for mine in predictor.ranks:
        start, stop = min(before[stage] for stage in mine), min(after[stage] for stage in mine)
        busy = start + m * sum(seconds["F", stage] + seconds["B", stage] for stage in mine)
        if predictor.splits:
            inputs = m * sum(seconds["F", stage] + seconds["I", stage] for stage in mine)
            ends.append(start + inputs + stop + seconds["B", 0] - seconds["I", 0] + reduced)
            ends.append(busy + min(seconds["REDUCE", stage] for stage in mine))
        else:
            ends.append(busy + stop + reduced)
    return max(ends) + _update(predictor, seconds)


def free_seconds(predictor: Predictor, seconds: Mapping[tuple[str, int], float]) -> float:
    """Of one layout, nearer to what is simulated: its computation in the order of its schedule, where messages are under way beside it
    and never wait for each other."""
    setting = predictor.setting
    compute = predictor.schedules.compute(setting.schedule, setting.size["pp"], predictor.short, setting.chunks)
    across = seconds["SEND_F", 0]
    rounds = predictor.rounds
    first = makespan(compute, seconds, across)
    if rounds:
        longer = predictor.schedules.compute(setting.schedule, setting.size["pp"], predictor.short + setting.size["pp"], setting.chunks)
        first += rounds * (makespan(longer, seconds, across) - first)
    return first + min(seconds["REDUCE", stage] for stage in range(setting.stages)) + _update(predictor, seconds)


def _update(predictor: Predictor, seconds: Mapping[tuple[str, int], float]) -> float:
    return max(seconds["UPDATE", stage] for stage in range(predictor.setting.stages))


def _chain(seconds: Mapping[tuple[str, int], float], ranks_of: Sequence[int], kind: str) -> list[float]:
    """For each stage, what one microbatch takes through all stages before it, with the messages between ranks."""
    found = [0.0]
    for stage in range(1, len(ranks_of)):
        sent = ("SEND_F", stage - 1) if kind == "F" else ("SEND_B", stage)
        far = ranks_of[stage] != ranks_of[stage - 1]
        found.append(found[-1] + seconds[kind, stage - 1] + (seconds[sent] if far else 0.0))
    return found


class Held(NamedTuple):
    """Blocks that a rank has, and the most blocks of which it holds a microbatch's activations at a time."""

    blocks: int
    most: int

    @staticmethod
    def of(blocks: Sequence[int], moments: Iterable[Moment]) -> Held:
        """blocks: of each of its stages."""
        return Held(sum(blocks), max(sum(n * size for n, size in zip(moment.held, blocks, strict=True)) for moment in moments))

    def bytes_(self, held: float, saved: float) -> float:
        """Where each block holds `held` bytes between steps and keeps `saved` of a microbatch; the ends of the model are not in it."""
        return self.blocks * held + self.most * saved


def held_bytes(block: Share, setting: Setting) -> float:
    """Of parameters, gradients and optimizer, for one block of which a tp and ep rank has these weights."""
    policy = setting.policy
    dense = held_elements(policy, int(block.dense), setting.shards)
    experts = held_elements(policy, int(block.experts), setting.expert_shards)
    moments = {"adamw": 2, "sgd": 0}.get(setting.optimizer, 1) + (setting.master != setting.compute)
    return float(
        dtype_bytes(setting.compute, 2) * (dense["param"] + experts["param"])
        + dtype_bytes(setting.reduce) * (dense["grad"] + experts["grad"])
        + moments * dtype_bytes(setting.master) * (dense["optim"] + experts["optim"])
    )
