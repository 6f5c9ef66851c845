"""What a search may choose, and every legal combination of it: meshes, ZeRO stages, microbatches, recompute, schedules, chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from stretto.anatomy import Anatomy, Recompute
from stretto.layout.mesh import Mesh
from stretto.limits import LATER
from stretto.plan.known import SPLIT
from stretto.plan.setting import Setting
from stretto.schedule.pipelines import PIPELINES

#: Most stages a rank that holds several in a round; more of them only add messages.
MOST_CHUNKS = 8
#: Share of its largest stage's blocks that the mean stage has at least, where a rank has several.
EVEN = 0.9
#: Fewest tokens of a row that a cp rank is given.
LEAST_TOKENS = 128
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


class Recipe(NamedTuple):
    """How blocks are computed. compiled: whether they are compiled."""

    recompute: Recompute
    compute: str
    compiled: bool


class Sharding(NamedTuple):
    """How what dp ranks share is cut and copied: a mesh with its dp and dp_replicate, and the stage of ZeRO."""

    mesh: Mesh
    zero: int


class Order(NamedTuple):
    """A pipeline schedule and the stages a rank holds."""

    schedule: str
    chunks: int


@dataclass(frozen=True)
class Limits:
    """What of a model bounds its meshes. experts: 0 for a dense model."""

    heads: int
    kv_heads: int
    blocks: int
    experts: int

    @staticmethod
    def of(anatomy: Anatomy) -> Limits:
        blocks = anatomy.blocks
        scores = next((block.scores for block in blocks if block.scores), None)
        experts = max((matmul.experts for block in blocks for matmul in block.matmuls), default=1)
        heads, kv_heads = (scores.heads, scores.kv_heads) if scores else (1, 1)
        return Limits(heads, kv_heads, len(blocks), experts if experts > 1 else 0)

    def tp_fits(self, tp: int) -> bool:
        """Queries are cut between heads, keys and values too, or neighbours share one."""
        return self.heads % tp == 0 and (self.kv_heads % tp == 0 or tp % self.kv_heads == 0)


@dataclass(frozen=True)
class Space:
    """Every layout of one job on so many devices. base: what is not chosen. Of what is chosen, the values that are allowed; an empty
    tuple allows all. later: only meshes that the engine does not run yet, or (False) only those that it does."""

    base: Setting
    limits: Limits
    devices: int
    per_node: int
    meshes: tuple[Mesh, ...] = ()
    zero: tuple[int, ...] = ()
    micro_sizes: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = ()
    compute: tuple[str, ...] = ()
    compiled: tuple[bool, ...] = (False,)
    schedules: tuple[str, ...] = ()
    chunks: tuple[int, ...] = ()
    later: bool | None = None
    _shardings: dict[Mesh, tuple[Sharding, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _orders: dict[tuple[int, int, bool], tuple[Order, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def families(self) -> tuple[Mesh, ...]:
        """Meshes whose degrees divide the model, the batch and the devices; of those that differ in dp_replicate alone the one without."""
        found = dict.fromkeys(without_copies(mesh) for mesh in self.meshes) if self.meshes else self._families()
        return tuple(family for family in found if self.later is None or runs(family) is not self.later)

    def _families(self) -> Iterator[Mesh]:
        limits, base = self.limits, self.base
        for tp in (n for n in divisors(self.devices) if limits.tp_fits(n)):
            for pp in (n for n in divisors(self.devices // tp) if n <= limits.blocks):
                for cp in (n for n in divisors(self.devices // tp // pp) if self._cp_fits(n)):
                    left = self.devices // tp // pp // cp
                    if base.batch % left == 0:
                        for ep in divisors(left) if limits.experts else (1,):
                            if ep == 1 or limits.experts % ep == 0:
                                yield Mesh.of(tp=tp, pp=pp, cp=cp, ep=ep, dp=left // ep)

    def _cp_fits(self, cp: int) -> bool:
        seq_len = self.base.seq_len
        return cp == 1 or (seq_len % (2 * cp) == 0 and seq_len // cp >= LEAST_TOKENS)

    def rows(self, mesh: Mesh) -> int:
        """Rows a step of one dp rank."""
        return self.base.batch // mesh.extent("dp", "dp_replicate", "ep")

    def micro_sizes_of(self, mesh: Mesh) -> list[int]:
        """Rows a forward, all microbatches equal."""
        return [n for n in divisors(self.rows(mesh)) if not self.micro_sizes or n in self.micro_sizes]

    @cached_property
    def recipes(self) -> tuple[Recipe, ...]:
        return tuple(
            Recipe(recompute, compute, compiled)
            for compiled in self.compiled
            for compute in self.compute or (self.base.compute,)
            for recompute in self.recompute or RECOMPUTE
        )

    def shardings(self, family: Mesh) -> tuple[Sharding, ...]:
        """What is cut over all dp ranks, or over groups of a machine or of 8, 64 ... machines, with copies; the leanest first."""
        if family not in self._shardings:
            meshes = [mesh for mesh in self.meshes if without_copies(mesh) == family] or self._copied(family)
            found = [Sharding(mesh, zero) for mesh in meshes for zero in self._zero(mesh)]
            self._shardings[family] = tuple(sorted(found, key=lambda one: (one.mesh["dp_replicate"], -one.zero)))
        return self._shardings[family]

    def _copied(self, family: Mesh) -> list[Mesh]:
        sizes = dict(family.axes)
        inside = self.per_node // (sizes["tp"] * sizes["ep"] * sizes["cp"])
        shards = [n for n in divisors(sizes["dp"])[1:-1] if n >= inside >= 1 and n % inside == 0 and is_power(n // inside, GROUPED)]
        return [family, *(Mesh.of(**{**sizes, "dp": n, "dp_replicate": sizes["dp"] // n}) for n in shards)]

    def _zero(self, mesh: Mesh) -> tuple[int, ...]:
        """Stages that differ on the mesh: with nobody to share with all are one, and stage 0 copies over dp anyway."""
        allowed, copies = self.zero or (0, 1, 2, 3), mesh["dp_replicate"] > 1
        if mesh.extent("dp", "dp_replicate", "cp", "ep") == 1:
            return (min(allowed),)
        return tuple(stage for stage in allowed if stage or not copies)

    def orders_of(self, pp: int, microbatches: int, compiled: bool) -> tuple[Order, ...]:
        """Schedules that there can be."""
        key = (pp, microbatches, compiled)
        if key not in self._orders:
            self._orders[key] = tuple(self._possible(*key))
        return self._orders[key]

    def _possible(self, pp: int, microbatches: int, compiled: bool) -> Iterator[Order]:
        for order in (Order("1f1b", 1),) if pp == 1 else self._known(pp):
            known, whole = PIPELINES[order.schedule], not compiled or order.schedule not in SPLIT  # a compiled block has but one backward
            if order.chunks * pp <= self.limits.blocks and known.least(pp) <= microbatches and whole:
                yield order

    def _known(self, pp: int) -> Iterator[Order]:
        most = min(MOST_CHUNKS, self.limits.blocks // pp)
        for name, known in PIPELINES.items():
            several = [n for n in range(2, most + 1) if self._evenly(pp * n)] if name != "none" else [1]
            for chunks in (known.chunks,) if known.chunks else self.chunks or several:
                if name in (self.schedules or PIPELINES) and chunks in (self.chunks or (chunks,)):
                    yield Order(name, chunks)

    def _evenly(self, stages: int) -> bool:
        """Whether so many stages are about equal: where some have twice the blocks of others, a round waits for those."""
        return self.limits.blocks >= EVEN * stages * -(-self.limits.blocks // stages)

    def setting(self, sharding: Sharding, micro_size: int, recipe: Recipe, order: Order) -> Setting:
        """The combination as a setting."""
        return replace(
            self.base,
            mesh=sharding.mesh,
            zero=sharding.zero,
            micro_size=micro_size,
            recompute=recipe.recompute,
            compute=recipe.compute,
            schedule=order.schedule,
            chunks=order.chunks,
        )

    def count(self) -> int:
        """Layouts in all."""
        total = 0
        compiled = [recipe.compiled for recipe in self.recipes]
        for family in self.families:
            orders = (
                compiled.count(each) * len(self.orders_of(family["pp"], self.rows(family) // micro_size, each))
                for micro_size in self.micro_sizes_of(family)
                for each in self.compiled
            )
            total += sum(orders) * len(self.shardings(family))
        return total


#: Groups of so many machines, and of so many times as many, may share what is cut.
GROUPED = 8


def runs(mesh: Mesh) -> bool:
    """Whether the engine can run it already."""
    return all(mesh[axis] == 1 for axis in LATER)


def without_copies(mesh: Mesh) -> Mesh:
    """The mesh with its copies as dp ranks that share."""
    return Mesh.of(**{**dict(mesh.axes), "dp": mesh.extent("dp", "dp_replicate"), "dp_replicate": 1})


def is_power(n: int, base: int) -> bool:
    """Whether n is 1, base, base * base ..."""
    while n % base == 0:
        n //= base
    return n == 1


def divisors(n: int) -> list[int]:
    """From 1 to n."""
    small = [k for k in range(1, int(n**0.5) + 1) if n % k == 0]
    return small + [n // k for k in reversed(small) if k * k != n]
