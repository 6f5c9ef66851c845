"""A plan of a job: the best layouts on a cluster as jobs, what the others lack, and what the job as written would take."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from stretto.errors import JobError
from stretto.job import Job
from stretto.plan.asking import Asked, ask
from stretto.plan.explain import Explainer, size_of, told, where_it_goes
from stretto.plan.hardware import Cluster
from stretto.plan.search import Plan, Tried, ours, search
from stretto.plan.space import runs, without_copies
from stretto.plan.wires import Wire, wires

#: Families of meshes that are looked for: that the engine runs, and that it does not run yet.
TOP, LATER_TOP = 6, 2
#: Most devices that are tried where nothing fits.
MOST_DEVICES = 2**17


@dataclass(frozen=True)
class Row:
    """One layout as a user meets it. tokens_per_second: of one device; runs: whether the engine can run it already."""

    plan: Plan
    job: Job
    tokens_per_second: float
    mfu: float
    runs: bool
    why: str

    def plain(self) -> dict[str, Any]:
        """As values of JSON."""
        plan, setting, memory = self.plan, self.plan.setting, self.plan.memory
        return {
            "mesh": str(setting.mesh),
            "zero": setting.zero,
            "pipeline": setting.schedule,
            "chunks": setting.chunks,
            "micro_size": setting.micro_size,
            "microbatches": setting.microbatches,
            "recompute": setting.recompute,
            "precision": setting.compute,
            "compile": self.job.compile.mode,
            "step_seconds": plan.seconds,
            "tokens_per_second_per_device": self.tokens_per_second,
            "mfu": self.mfu,
            "bytes": {
                "parameters": memory.parameters,
                "gradients": memory.gradients,
                "optimizer": memory.optimizer,
                "activations": memory.activations,
                "buffers": memory.buffers,
            },
            "peak_bytes": memory.peak,
            "fullest_rank": plan.fullest,
            "bubble": plan.prediction.bubble,
            "exposed_seconds": plan.prediction.exposed,
            "where": {part.words: part.seconds for part in where_it_goes(plan)},
            "runs": self.runs,
            "why": self.why,
        }


@dataclass(frozen=True)
class Rejected:
    """A family of meshes that is not among the plans. fits: whether some layout of it fits; at_least: seconds that it takes then."""

    mesh: str
    fits: bool
    at_least: float
    why: str


@dataclass(frozen=True)
class Planned:
    """rows: best first, one a family of meshes. own: the job as it is written; None where it cannot be on this cluster, or with
    `own_why` where it does not fit. bought: what one change to the best would buy, sent: what a device
    sends in a step of it. searched: layouts, in `families` of meshes."""

    asked: Asked
    rows: tuple[Row, ...]
    rejected: tuple[Rejected, ...]
    own: Row | None
    own_why: str
    actions: dict[str, list[float]]
    bought: tuple[str, ...]
    sent: tuple[Wire, ...]
    searched: int
    families: int
    seconds: float

    @property
    def best(self) -> Row | None:
        """The best that the engine can run; the best of all where it can run none."""
        return next((row for row in self.rows if row.runs), self.rows[0] if self.rows else None)

    def plain(self) -> dict[str, Any]:
        """As values of JSON."""
        own = None if self.own is None else {**self.own.plain(), "actions": self.actions}
        return {
            "cluster": self.asked.cluster.name,
            "devices": self.asked.cluster.devices,
            "job": self.asked.job.name,
            "parameters": self.asked.anatomy.parameters(),
            "plans": [row.plain() for row in self.rows],
            "rejected": [
                {"mesh": one.mesh, "why": one.why, "fits": one.fits, **({"at_least_seconds": one.at_least} if one.fits else {})}
                for one in self.rejected
            ],
            "own": own,
            "own_why": self.own_why,
            "bought": list(self.bought),
            "sent": [wire._asdict() for wire in self.sent],
            "searched": self.searched,
            "families": self.families,
            "seconds": self.seconds,
        }


def plan_job(job: Job, cluster: Cluster, keep: Collection[str] = (), top: int = TOP) -> Planned:
    """keep: full names of the keys that are not to be changed. top: families of meshes that are told.

    Raises JobError in one line where nothing fits, with the nearest that would.
    """
    began = time.perf_counter()
    asked = ask(job, cluster, keep)
    planner = _Planner(asked)
    return replace(planner.planned(top), seconds=time.perf_counter() - began)


class _Planner:
    def __init__(self, asked: Asked) -> None:
        self.asked, self.space, self.cluster = asked, asked.space, asked.cluster
        self.known = ours(asked.anatomy, asked.cluster)
        self.explainer = Explainer(self.known)

    def planned(self, top: int) -> Planned:
        asked = self.asked
        if not self.space.families:
            raise JobError(self._no_mesh())
        plans: list[Plan] = []
        tried: list[Tried] = []
        searched = 0
        for later, most in ((False, top), (True, max(1, min(top, LATER_TOP)))):
            found = search(self.known, replace(self.space, later=later), most)
            plans, tried, searched = [*plans, *found.plans], [*tried, *found.tried], searched + found.searched
        plans, tried = self._with_own_family(plans, tried)
        plans.sort(key=lambda plan: plan.seconds)
        own, why = self._own()
        if not plans:
            raise JobError(self._nothing_fits())
        best = next((plan for plan in plans if runs(plan.setting.mesh)), plans[0])
        return Planned(
            asked,
            tuple(self._row(plan, self.explainer.why(plan)) for plan in plans),
            tuple(sorted((self._rejected(one, best) for one in tried), key=lambda one: (not one.fits, one.at_least))),
            own,
            why,
            self._actions(own),
            tuple(self.explainer.bought(best)),
            wires(self.explainer.predictor(best.setting, best.compiled)),
            searched,
            len(self.space.families),
            0.0,
        )

    def _row(self, plan: Plan, why: str) -> Row:
        return row_of(self.asked, plan, why)

    # -- the job as written ----------------------------------------------------------------------------------------

    def _own(self) -> tuple[Row | None, str]:
        """The layout of the job, and why it would not do."""
        setting = self.asked.setting
        if setting is None:
            return None, self.asked.why
        plan = self.explainer.plan(setting, self.asked.compiled)
        over = self.explainer.too_much(setting, self.asked.compiled)
        return self._row(plan, told(where_it_goes(plan), plan.seconds)), over

    def _actions(self, own: Row | None) -> dict[str, list[float]]:
        """Kind -> seconds on each stage, of the job as written."""
        if own is None:
            return {}
        seconds = self.explainer.predictor(own.plan.setting, self.asked.compiled).seconds()
        split = own.plan.splits
        kinds = [*("FIW" if split else "FB"), *(("SEND_F", "SEND_B") if own.plan.setting.size["pp"] > 1 else ()), "REDUCE", "UPDATE"]
        return {kind: [seconds[kind, stage] for stage in range(own.plan.setting.stages)] for kind in kinds}

    def _with_own_family(self, plans: list[Plan], tried: list[Tried]) -> tuple[list[Plan], list[Tried]]:
        """The family of the job's own mesh is always told, however far from the best."""
        if self.asked.setting is None:
            return plans, tried
        family = without_copies(self.asked.setting.mesh)
        if family not in {one.family for one in tried}:
            return plans, tried
        meshes = tuple(dict.fromkeys(sharding.mesh for sharding in self.space.shardings(family)))
        found = search(self.known, replace(self.space, meshes=meshes), 1)
        return [*plans, *found.plans], [one for one in tried if one.family != family] + list(found.tried)

    # -- what is not there -----------------------------------------------------------------------------------------

    def _rejected(self, one: Tried, best: Plan) -> Rejected:
        at_least = one.next.bound if one.next else 0.0
        return Rejected(str(one.family), one.next is not None, at_least, self.explainer.why_not(one, self.space, best))

    def _no_mesh(self) -> str:
        base, devices = self.space.base, self.cluster.devices
        return (
            f"no mesh of {devices} devices shares batch.size={base.batch} and the {self.space.limits.blocks} blocks and "
            f"{self.space.limits.heads} heads of {self.asked.job.model.name}; write a batch.size that {devices} ranks can share, "
            f"as batch.size={devices}, or fewer devices"
        )

    def _nothing_fits(self) -> str:
        """In one line, with the nearest that would: more devices, or the leanest layout's need."""
        job, base = self.asked.job, self.space.base
        devices = self.cluster.devices
        lean = min(self._leanest(devices), default=0.0)
        words = (
            f"nothing fits: {job.model.name} with batch.size={base.batch} and batch.seq_len={base.seq_len} needs at least "
            f"{size_of(lean)} a device on {self.cluster.name}, which has {size_of(self.explainer.room)} for it"
        )
        while (devices := 2 * devices) <= MOST_DEVICES:
            if any(need <= self.explainer.room for need in self._leanest(devices)):
                return f'{words}; it fits on {devices} of them: write --cluster "{self.cluster.resized(devices).name}"'
        return f"{words}; write a smaller model, a shorter batch.seq_len, or a device with more memory"

    def _leanest(self, devices: int) -> list[float]:
        """What the leanest layout of each mesh of so many devices holds."""
        space = replace(self.space, devices=devices, meshes=(), later=False)
        needs = []
        for family in space.families:
            sharding = space.shardings(family)[0]
            recipe = max(space.recipes, key=lambda one: ("none", "selective", "full").index(one.recompute))
            micro_size = space.micro_sizes_of(family)[0]
            for order in space.orders_of(family["pp"], space.rows(family) // micro_size, recipe.compiled)[:2]:
                needs.append(self.explainer.memory(space.setting(sharding, micro_size, recipe, order), recipe.compiled).peak)
        return needs


def row_of(asked: Asked, plan: Plan, why: str) -> Row:
    """A layout with its rates. why: it takes what it takes."""
    setting, cluster = plan.setting, asked.cluster
    tokens = setting.batch * setting.seq_len / plan.seconds / cluster.devices
    mfu = asked.anatomy.flops_per_token(setting.seq_len) * tokens / cluster.device.peak(setting.compute)
    return Row(plan, job_of(asked.job, plan), tokens, mfu, runs(setting.mesh), why)


def job_of(job: Job, plan: Plan) -> Job:
    """The job with this layout, as `--write` writes it."""
    setting = plan.setting
    pipeline = {"schedule": setting.schedule, "chunks": setting.chunks} if setting.size["pp"] > 1 else {}
    return job.with_(
        mesh=str(setting.mesh),
        zero={"stage": setting.zero},
        batch={"micro_size": setting.micro_size},
        recompute=setting.recompute,
        compile={"mode": "block" if plan.compiled else "none"},
        **({"pipeline": pipeline} if pipeline else {}),
        **({"precision": {"compute": setting.compute}} if job.precision.compute is None else {}),
    )
