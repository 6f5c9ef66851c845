"""Every layout of a job on a cluster: the best of each mesh that fits, best first, and what is known of the others.

What is looked at next is always what can still be the fastest: meshes and microbatches by their flops, then ways to compute, cut and
schedule them by what their blocks take, then single layouts by all that their ranks do; what is left is simulated. So the first
that comes out simulated is the best of all, and what was never opened is known to be slower (best-first branch and bound, as A*;
bounds are in bound.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from stretto.anatomy import Anatomy, Recompute
from stretto.layout.mesh import Mesh
from stretto.plan.bound import Held, Outline, Passes, free_seconds, held_bytes, passes_of, rooflines, step_seconds
from stretto.plan.hardware import Cluster
from stretto.plan.known import SPLIT, Known, Schedules
from stretto.plan.memory import Memory, Share
from stretto.plan.predict import Prediction, Predictor, straggle
from stretto.plan.setting import Setting
from stretto.plan.software import STRETTO, STRETTO_COMPILED, Software
from stretto.plan.space import RECOMPUTE, Order, Recipe, Sharding, Space

#: Share of a device's memory that tensors can have: allocators leave holes.
USABLE = 0.95
#: Our engine by whether blocks are compiled.
OURS: Mapping[bool, Software] = {False: STRETTO, True: STRETTO_COMPILED}


@dataclass(frozen=True)
class Plan:
    """One layout, foretold. memory: of its fullest rank, which is pipeline rank `fullest`; splits: whether weight
    gradients may be put off."""

    setting: Setting
    software: Software
    prediction: Prediction
    memory: Memory
    fullest: int
    splits: bool

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def compiled(self) -> bool:
        """Whether blocks are compiled."""
        return self.software.compiled


@dataclass
class Tried:
    """What is known of a family of meshes without a plan. next: what would be looked at next, None if nothing fits. leanest: of the
    layouts that do not fit the one that is likely to need least."""

    family: Mesh
    next: Node | None = None
    leanest: Layout | None = None

    def spare(self, layout: Layout) -> None:
        """A layout does not fit."""
        if self.leanest is None or layout.lean < self.leanest.lean:
            self.leanest = layout


class Layout(NamedTuple):
    """One combination of the space."""

    sharding: Sharding
    micro_size: int
    recipe: Recipe
    order: Order

    @property
    def lean(self) -> tuple[float, ...]:
        """The smaller, the less is a layout likely to hold."""
        copies, mode = self.sharding.mesh["dp_replicate"], RECOMPUTE.index(self.recipe.recompute)
        return copies, -self.sharding.zero, self.micro_size, -mode, self.order.schedule != "1f1b", self.order.chunks


@dataclass(frozen=True)
class Found:
    """plans: best first, one a family of meshes. tried: families without a plan. searched: layouts in all."""

    plans: tuple[Plan, ...]
    tried: tuple[Tried, ...]
    searched: int


class Node(NamedTuple):
    """Layouts that are still together. What is None is not chosen yet. bound: seconds that the best of them takes at least."""

    bound: float
    depth: int
    number: int
    family: Mesh
    micro_size: int
    recipe: Recipe | None = None
    sharding: Sharding | None = None
    order: Order | None = None
    predictor: Predictor | None = None
    seconds: Mapping[tuple[str, int], float] | None = None
    free: bool | None = None
    plan: Plan | None = None


class _Priced(NamedTuple):
    """What layouts share that differ in order and sharding alone. block: weights of the smallest block; saved: what the block that
    keeps least keeps of a microbatch; working: what passing one needs beside that; orders: schedules by the seconds that they take
    at least."""

    block: Share
    saved: float
    working: float
    orders: list[tuple[float, Order]]


def ours(anatomy: Anatomy, cluster: Cluster, software: Mapping[bool, Software] = OURS) -> dict[bool, Known]:
    """What all layouts of a model on a cluster share, by whether blocks are compiled."""
    schedules = Schedules()
    return {compiled: Known(anatomy, cluster, stack, schedules) for compiled, stack in software.items()}


def search(known: Mapping[bool, Known], space: Space, top: int = 10) -> Found:
    """The best layout of each of the `top` best families of meshes."""
    return _Search(known, space).run(top)


PLAIN = Order("1f1b", 1)


@dataclass
class _Search:
    known: Mapping[bool, Known]
    space: Space
    queue: list[Node] = field(default_factory=list)
    _made: int = 0

    def __post_init__(self) -> None:
        first = self.known[self.space.compiled[0]]
        self.cluster, self.schedules = first.cluster, first.schedules
        self.room = self.cluster.device.memory * USABLE
        self.straggle = straggle(self.cluster)
        self._rooflines: dict[tuple[int, ...], Passes] = {}
        self._priced: dict[tuple[object, ...], _Priced] = {}
        self._outlines: dict[tuple[int, Order, bool], Outline] = {}
        self._holding: dict[tuple[int, int, Order, bool], list[Held]] = {}

    def run(self, top: int) -> Found:
        tried = {family: Tried(family) for family in self.space.families}
        for family in tried:
            self._put(self._micro_sizes(family))
        plans: list[Plan] = []
        while self.queue and len(plans) < top:
            node = heapq.heappop(self.queue)
            if node.family not in tried:
                continue  # its best is found
            if node.plan:
                plans.append(node.plan)
                del tried[node.family]
            else:
                self._put(self._parts(node, tried[node.family]))
        left: dict[Mesh, Node] = {}
        for node in self.queue:
            left[node.family] = min(node, left.get(node.family, node))
        for family, one in tried.items():
            one.next = left.get(family)
        return Found(tuple(plans), tuple(tried.values()), self.space.count())

    def _put(self, nodes: Iterator[Node]) -> None:
        """Of nodes with one bound the deepest goes first, then the first made; nothing else is compared."""
        for node in nodes:
            self._made += 1
            depth = sum(part is not None for part in node[5:])
            heapq.heappush(self.queue, node._replace(depth=-depth, number=self._made))

    def _parts(self, node: Node, tried: Tried) -> Iterator[Node]:
        if node.recipe is None:
            return self._recipes(node, tried)
        if node.sharding is None:
            return self._shardings(node, node.recipe, tried)
        if node.order is None:
            return self._orders(node, node.recipe, node.sharding, tried)
        layout = Layout(node.sharding, node.micro_size, node.recipe, node.order)
        if node.predictor is None or node.seconds is None:
            return self._bounded(node, layout, tried)
        if node.free is None:
            return self._free(node, node.predictor, node.seconds)
        return self._simulated(node, node.predictor, layout, tried)

    # -- a family and a microbatch ---------------------------------------------------------------------------------

    def _micro_sizes(self, family: Mesh) -> Iterator[Node]:
        """Each with the least that its flops and crossings take under any schedule."""
        rows, pp = self.space.rows(family), family["pp"]
        for micro_size in self.space.micro_sizes_of(family):
            m = rows // micro_size
            orders = {order for compiled in self.space.compiled for order in self.space.orders_of(pp, m, compiled)}
            if orders:
                passes = self._roofline(family, rows).times(1 / m)
                least = min(outline.seconds(passes, m) for outline in {self._outline(pp, order, "none") for order in orders})
                yield Node(least * self.straggle, 0, 0, family, micro_size)

    def _roofline(self, family: Mesh, rows: int) -> Passes:
        key = (family["tp"], family["cp"], family["ep"], rows)
        if key not in self._rooflines:
            recipe = self.space.recipes[-1]._replace(recompute="none")
            setting = self.space.setting(Sharding(family, 0), rows, recipe, PLAIN)
            known = self.known[recipe.compiled]
            self._rooflines[key] = rooflines(known.costs(setting), known.whole)
        return self._rooflines[key]

    def _outline(self, pp: int, order: Order, recompute: Recompute) -> Outline:
        key = (pp, order, recompute == "full")
        if key not in self._outlines:
            base = replace(self.space.base, mesh=Mesh.of(pp=pp), schedule=order.schedule, chunks=order.chunks, recompute=recompute)
            known = self.known[self.space.compiled[0]]
            alone = order.schedule == "none" and order.chunks == 1
            self._outlines[key] = Outline.of(known.stages(base), known.ranks_of(base), order.schedule in SPLIT, alone)
        return self._outlines[key]

    # -- a recipe --------------------------------------------------------------------------------------------------

    def _recipes(self, node: Node, tried: Tried) -> Iterator[Node]:
        """Each with the least that its blocks take under any schedule, if they can fit where a rank holds one microbatch."""
        leanest = self.space.shardings(node.family)[0]
        for recipe in self.space.recipes:
            setting = self.space.setting(leanest, node.micro_size, recipe, PLAIN)
            priced = self._price(setting, recipe)
            if priced.orders:
                evenly = self.space.limits.blocks / node.family["pp"] * (held_bytes(priced.block, setting) + priced.saved)
                if evenly <= self._room(priced, recipe):
                    yield node._replace(bound=max(priced.orders[0][0], node.bound), recipe=recipe)
                else:
                    tried.spare(Layout(leanest, node.micro_size, recipe, priced.orders[0][1]))

    def _room(self, priced: _Priced, recipe: Recipe) -> float:
        return self.room - self.known[recipe.compiled].software.context - priced.working

    def _price(self, setting: Setting, recipe: Recipe) -> _Priced:
        size, m = setting.size, setting.microbatches
        key = (size["tp"], size["cp"], size["ep"], size["pp"], setting.micro_size, m, *recipe)
        if key not in self._priced:
            known = self.known[recipe.compiled]
            blocks, sizes = [part for part, _ in known.whole if part.is_block], known.sizes(setting)
            self._priced[key] = _Priced(
                min((sizes.share(part) for part in blocks), key=lambda one: one.elements),
                min(sizes.bytes_(part).saved for part in blocks),
                min(sizes.bytes_(part).working + sizes.bytes_(part).gradient for part in blocks),
                self._bounds(setting, recipe, passes_of(known.costs(setting), known.costs(setting).pair, known.whole)),
            )
        return self._priced[key]

    def _bounds(self, setting: Setting, recipe: Recipe, passes: Passes) -> list[tuple[float, Order]]:
        """Schedules by the seconds that they take at least with these passes."""
        pp, m = setting.size["pp"], setting.microbatches
        orders = self.space.orders_of(pp, m, recipe.compiled)
        return sorted((self._outline(pp, order, recipe.recompute).seconds(passes, m) * self.straggle, order) for order in orders)

    # -- a sharding ------------------------------------------------------------------------------------------------

    def _shardings(self, node: Node, recipe: Recipe, tried: Tried) -> Iterator[Node]:
        """Each with what ZeRO does beside a block's passes, if the blocks can fit."""
        for sharding in self.space.shardings(node.family):
            setting = self.space.setting(sharding, node.micro_size, recipe, PLAIN)
            priced = self._price(setting, recipe)
            evenly = self.space.limits.blocks / node.family["pp"] * (held_bytes(priced.block, setting) + priced.saved)
            if evenly > self._room(priced, recipe):
                tried.spare(Layout(sharding, node.micro_size, recipe, priced.orders[0][1]))
                continue
            bound = self._beside(setting, recipe, priced)[0][0]
            yield node._replace(bound=max(bound, node.bound), sharding=sharding)

    def _beside(self, setting: Setting, recipe: Recipe, priced: _Priced) -> list[tuple[float, Order]]:
        """Schedules by what they take at least, with the collectives that run beside blocks; stages 0 and 1 have none."""
        if setting.zero < 2:
            return priced.orders
        predictor = self._predictor(setting, recipe)
        return self._bounds(setting, recipe, passes_of(predictor.costs, predictor.pair, predictor.known.whole))

    def _predictor(self, setting: Setting, recipe: Recipe) -> Predictor:
        return Predictor.of(self.known[recipe.compiled], setting)

    # -- a schedule ------------------------------------------------------------------------------------------------

    def _orders(self, node: Node, recipe: Recipe, sharding: Sharding, tried: Tried) -> Iterator[Node]:
        """Schedules under which the blocks of the first and the last rank can fit."""
        setting = self.space.setting(sharding, node.micro_size, recipe, PLAIN)
        priced = self._price(setting, recipe)
        held, room = held_bytes(priced.block, setting), self._room(priced, recipe)
        for bound, order in self._beside(setting, recipe, priced):
            ends = self._held(setting.size["pp"], setting.microbatches, order, recipe.recompute)
            if max(end.bytes_(held, priced.saved) for end in ends) <= room:
                yield node._replace(bound=max(bound, node.bound), order=order)
            else:
                tried.spare(Layout(sharding, node.micro_size, recipe, order))

    def _held(self, pp: int, microbatches: int, order: Order, recompute: Recompute) -> list[Held]:
        """Of the first and the last rank."""
        key = (pp, self.schedules.full(order.schedule, pp, microbatches), order, recompute == "full")
        if key not in self._holding:
            blocks = self._outline(pp, order, recompute).blocks
            ranks_of = self.schedules.ranks_of(order.schedule, pp, microbatches, order.chunks)
            self._holding[key] = [
                Held.of(
                    [blocks[stage] for stage, holder in enumerate(ranks_of) if holder == rank],
                    self.schedules.moments(order.schedule, pp, microbatches, order.chunks, rank),
                )
                for rank in {0, pp - 1}
            ]
        return self._holding[key]

    # -- one layout ------------------------------------------------------------------------------------------------

    def _bounded(self, node: Node, layout: Layout, tried: Tried) -> Iterator[Node]:
        """A layout by all that each of its ranks does, if its first and last rank fit."""
        predictor = self._predictor(self.space.setting(*layout), layout.recipe)
        if max(predictor.memory(rank).peak for rank in {0, node.family["pp"] - 1}) <= self.room:
            seconds = predictor.seconds()
            bound = step_seconds(predictor, seconds) * self.straggle
            yield node._replace(bound=max(node.bound, bound), predictor=predictor, seconds=seconds)
        else:
            tried.spare(layout)

    def _free(self, node: Node, predictor: Predictor, seconds: Mapping[tuple[str, int], float]) -> Iterator[Node]:
        """A layout by its computation in the order of its schedule."""
        bound = free_seconds(predictor, seconds) * self.straggle if node.family["pp"] > 1 else node.bound
        yield node._replace(bound=max(node.bound, bound), free=True)

    def _simulated(self, node: Node, predictor: Predictor, layout: Layout, tried: Tried) -> Iterator[Node]:
        """The layout itself, if all of its ranks fit."""
        plan = plan_of(predictor)
        if plan.memory.peak <= self.room:
            yield node._replace(bound=max(node.bound, plan.seconds), plan=plan)
        else:
            tried.spare(layout)


def plan_of(predictor: Predictor) -> Plan:
    """A layout, foretold whole."""
    ranks = [predictor.memory(rank) for rank in range(predictor.setting.size["pp"])]
    fullest = max(range(len(ranks)), key=lambda rank: ranks[rank].peak)
    return Plan(predictor.setting, predictor.software, predictor.predict(), ranks[fullest], fullest, predictor.splits)
