"""Why a layout takes what it takes, and why another is not among the best: in words and numbers that a person can check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from stretto.layout.mesh import Mesh
from stretto.plan.hardware import Cluster, Link
from stretto.plan.known import Known
from stretto.plan.memory import Memory
from stretto.plan.predict import Predictor
from stretto.plan.search import PLAIN, USABLE, Node, Plan, Tried, plan_of
from stretto.plan.setting import Setting
from stretto.plan.space import RECOMPUTE, Space
from stretto.plan.traffic import Seats, collective_seconds

#: Shares of a step that are too small to be told.
TELLING = 0.015


class Where(NamedTuple):
    """A part of a step: seconds of the busiest rank, in words."""

    words: str
    seconds: float


def where_it_goes(plan: Plan) -> list[Where]:
    """The step's seconds by what they go to, the largest first; together they are the step."""
    p = plan.prediction
    busy = p.pipeline * (1 - p.bubble)
    fixed = p.reduce + p.gather + p.update
    size = plan.setting.size
    found = [
        Where("products, attention and passes over memory", busy - p.crossing),
        Where(crossings_of(plan.setting), p.crossing),
        Where(f"waiting in the pipeline of {size['pp']}", p.pipeline - busy),
        Where("gradients meet", p.reduce),
        Where("parameters come back", p.gather),
        Where("weights are updated", p.update),
        Where("waiting for the slowest machine", max(0.0, p.seconds - p.pipeline - fixed)),
    ]
    return sorted((each for each in found if each.seconds > 0), key=lambda each: -each.seconds)


def crossings_of(setting: Setting) -> str:
    """What crosses inside blocks, in words."""
    return " and ".join(f"{axis} crossings" for axis in ("tp", "cp", "ep") if setting.size[axis] > 1) or "crossings"


def told(parts: list[Where], whole: float) -> str:
    """As 'products 71%, tp crossings 12%'."""
    return ", ".join(f"{part.words} {part.seconds / whole:.0%}" for part in parts if part.seconds > TELLING * whole)


def size_of(bytes_: float) -> str:
    """12 345 678 901 -> '12.3 GB'."""
    unit, name = (1e9, "GB") if bytes_ >= 1e9 else (1e6, "MB")
    return f"{bytes_ / unit:.3g} {name}"


class Explainer:
    """Tells of layouts of one model on one cluster."""

    def __init__(self, known: Mapping[bool, Known]) -> None:
        self.known = known
        self.cluster = next(iter(known.values())).cluster
        self.room = self.cluster.device.memory * USABLE

    def plan(self, setting: Setting, compiled: bool) -> Plan:
        """A layout, foretold."""
        return plan_of(self.predictor(setting, compiled))

    def predictor(self, setting: Setting, compiled: bool) -> Predictor:
        """Of a layout on this cluster."""
        return Predictor.of(self.known[compiled], setting)

    # -- why this layout -------------------------------------------------------------------------------------------

    def why(self, plan: Plan) -> str:
        """Where its time goes, and what it has to do for its memory."""
        return "; ".join([told(where_it_goes(plan), plan.seconds), *self._forced(plan)])

    def _forced(self, plan: Plan) -> Iterator[str]:
        """What would be faster and does not fit."""
        setting, compiled = plan.setting, plan.compiled
        if setting.recompute != "none":
            lighter = RECOMPUTE[RECOMPUTE.index(setting.recompute) - 1]
            over = self.memory(replace(setting, recompute=lighter), compiled).peak - self.room
            if over > 0:
                yield f"recompute={setting.recompute}, since {lighter} is {size_of(over)} over"
        if setting.zero > 1:
            over = self.memory(replace(setting, zero=1), compiled).peak - self.room
            if over > 0:
                yield f"zero={setting.zero}, since 1 is {size_of(over)} over"

    def memory(self, setting: Setting, compiled: bool) -> Memory:
        """What its fullest rank holds."""
        predictor = self.predictor(setting, compiled)
        return max((predictor.memory(rank) for rank in range(setting.size["pp"])), key=lambda one: one.peak)

    def bought(self, plan: Plan) -> list[str]:
        """What one change would buy: twice the links, more memory, more rows a step."""
        found = []
        for words, cluster in self._faster(plan):
            known = self.known[plan.compiled]
            faster = Predictor(known.anatomy, plan.setting, cluster, plan.software, known.schedules).predict().seconds
            if faster < (1 - TELLING) * plan.seconds:
                found.append(f"{words}: {1 - faster / plan.seconds:.0%} less time")
        setting, compiled = plan.setting, plan.compiled
        if setting.recompute != "none":
            kept = replace(setting, recompute="none")
            faster, over = self.predictor(kept, compiled).predict().seconds, self.memory(kept, compiled).peak - self.room
            if over > 0 and faster < (1 - TELLING) * plan.seconds:
                found.append(f"{size_of(over)} more memory a device: recompute=none, {1 - faster / plan.seconds:.0%} less time")
        twice = replace(setting, batch=2 * setting.batch)
        each = self.predictor(twice, compiled).predict().seconds / 2
        if each < (1 - TELLING) * plan.seconds:
            found.append(f"batch.size={twice.batch}: {plan.seconds / each - 1:.0%} more tokens a second")
        return found

    def _faster(self, plan: Plan) -> Iterator[tuple[str, Cluster]]:
        cluster = self.cluster
        if cluster.measured:
            return
        if cluster.nodes > 1:
            yield f"twice the network ({cluster.across.name})", replace(cluster, across=_twice(cluster.across))
        if cluster.per_node > 1:
            yield f"twice the links inside ({cluster.inside.name})", replace(cluster, inside=_twice(cluster.inside))

    # -- why not -----------------------------------------------------------------------------------------------------

    def too_much(self, setting: Setting, compiled: bool) -> str:
        """What of a layout is over, and the nearest change that would fit; "" if it fits."""
        memory = self.memory(setting, compiled)
        over = memory.peak - self.room
        if over <= 0:
            return ""
        kinds = {kind: getattr(memory, kind) for kind in ("parameters", "gradients", "optimizer", "activations", "buffers")}
        kind = max(kinds, key=kinds.__getitem__)
        at = f" at microbatch {setting.micro_size}" if kind == "activations" else ""
        words = f"{size_of(over)} over, {kind} {size_of(kinds[kind])}{at}"
        return f"{words}; {self._what_fits(setting, compiled)}"

    def _what_fits(self, setting: Setting, compiled: bool) -> str:
        """The first of a few small changes after which it fits."""
        changes: list[dict[str, object]] = [{"recompute": mode} for mode in RECOMPUTE[RECOMPUTE.index(setting.recompute) + 1 :]]
        changes += [{"micro_size": n} for n in reversed(_below(setting.micro_size))]
        changes += [{"zero": stage} for stage in range(setting.zero + 1, 4)]
        changes += [{"zero": 3, "micro_size": 1, "recompute": "full"}]
        for change in changes:
            changed = replace(setting, **change)  # type: ignore[arg-type]
            if self.memory(changed, compiled).peak <= self.room:
                return "fits with " + " ".join(f"{KEYS[key]}={value}" for key, value in change.items())
        return "no recompute, microbatch or ZeRO stage makes it fit"

    def why_not(self, tried: Tried, space: Space, best: Plan | None) -> str:
        """Why a family of meshes is not among the plans, in a line."""
        if tried.next is None:
            if tried.leanest is None:
                return "no schedule has so few microbatches"
            setting, compiled = space.setting(*tried.leanest), tried.leanest.recipe.compiled
            memory = self.memory(setting, compiled)
            need = f"needs {size_of(memory.peak)} of {size_of(self.room)}"
            return f"{need} even with zero={setting.zero} recompute={setting.recompute} microbatch {setting.micro_size}"
        assert best is not None
        slower = tried.next.bound / best.seconds
        times = f", {slower:.2g}x the best" if slower > 1.05 else ""
        return f"at least {tried.next.bound:.3g} s{times}: {self._cause(tried.next, space, best)}"

    def _cause(self, node: Node, space: Space, best: Plan) -> str:
        """What of a layout takes longer than in the best one."""
        lightest = min(space.recipes, key=lambda one: (RECOMPUTE.index(one.recompute), not one.compiled))
        recipe, sharding = node.recipe or lightest, node.sharding or space.shardings(node.family)[-1]
        setting = space.setting(sharding, node.micro_size, recipe, node.order or PLAIN)
        predictor = self.predictor(setting, recipe.compiled)
        forward, backward = predictor.work_of(predictor.known.whole)
        times = setting.microbatches / setting.size["pp"]
        compute, crossing = times * (forward.compute + backward.compute), times * (forward.crossing + backward.crossing)
        beside = max(0.0, times * (forward.beside + backward.beside) - compute)
        p = best.prediction
        waiting = max(0.0, node.bound - compute - crossing - beside)
        more = {
            "compute": compute - (p.pipeline * (1 - p.bubble) - p.crossing),
            "crossing": crossing - p.crossing,
            "beside": beside,
            "waiting": waiting - p.pipeline * p.bubble - p.reduce - p.gather - p.update,
        }
        return self._words(max(more, key=more.__getitem__), setting, waiting / node.bound)

    def _words(self, cause: str, setting: Setting, waiting: float) -> str:
        size = setting.size
        if cause == "crossing":
            axis = max(("tp", "cp", "ep"), key=lambda axis: size[axis])
            slower = self._crossing_machines(setting.mesh, axis)
            return (
                f"{axis}={size[axis]} crosses machines: {slower:.1f}x slower crossing"
                if slower > 1.05
                else f"crossings of {axis}={size[axis]}"
            )
        if cause == "beside":
            return f"zero={setting.zero} moves more than its computation hides"
        if cause == "waiting":
            return f"{waiting:.0%} of the step waiting: pp={size['pp']} with {setting.microbatches} microbatches"
        if setting.recompute == "full":
            return "computes blocks again, since nothing less fits"
        return f"products of tp={size['tp']} at microbatch {setting.micro_size} are too small for the device"

    def _crossing_machines(self, mesh: Mesh, axis: str) -> float:
        """How many times as long a crossing of 64 MB takes as it would among as many devices of one machine."""
        seats = Seats.of(mesh, (axis,), self.cluster.per_node)
        inside = Seats(seats.ranks, seats.ranks, 1)
        seconds = [collective_seconds(self.cluster, each, "all_gather", 64e6) for each in (seats, inside)]
        return seconds[0] / seconds[1] if seconds[1] else 1.0


#: What a setting calls a key of a job.
KEYS = {"recompute": "recompute", "micro_size": "batch.micro_size", "zero": "zero"}


def _below(n: int) -> list[int]:
    """Divisors of n that are less than n."""
    return [k for k in range(1, n) if n % k == 0]


def _twice(link: Link) -> Link:
    return replace(link, bandwidth=2 * link.bandwidth)
