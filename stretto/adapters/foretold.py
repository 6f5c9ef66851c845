"""What the planner foretells of each framework under its own restrictions, on a cluster that need not be at hand."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from stretto.adapters.capabilities import TABLE, VERSIONS
from stretto.adapters.restrictions import PEERS, ZERO_ROWS, Peer, Way, combines, needs, reaches, spaces, stacks_on
from stretto.job import Job
from stretto.plan.asking import Asked, ask
from stretto.plan.explain import Explainer, size_of
from stretto.plan.hardware import Cluster
from stretto.plan.known import Known, Schedules
from stretto.plan.search import Plan, search

#: What is foretold of two stacks is this much apart without meaning anything (docs/validation.md: errors of a few percent each).
TRUST = 0.08


@dataclass(frozen=True)
class Foretold:
    """One framework on the cluster, with the best layout that it can run.

    why: in words. lacks: what the best of all makes use of and it has not, each with what the table of capabilities says. kernels: what it
    computes with that is not torch's. ratio: to the first that fits. tokens_per_second: of one device.
    """

    runner: str
    framework: str
    version: str
    status: Literal["fits", "does not fit", "cannot"]
    why: str
    way: str = ""
    kernels: str = ""
    lacks: tuple[str, ...] = ()
    not_priced: str = ""
    mesh: str | None = None
    zero: int | None = None
    pipeline: str | None = None
    chunks: int | None = None
    micro_size: int | None = None
    recompute: str | None = None
    compile: str | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    ratio: float | None = None
    peak_bytes: float | None = None
    kept_bytes: float | None = None
    exposed_seconds: float | None = None
    searched: int = 0

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return dict(self.__dict__)


class Forecast(NamedTuple):
    """All frameworks on one cluster. said: which of them fits the job there, and why, in sentences."""

    cluster: str
    devices: int
    rows: tuple[Foretold, ...]
    said: tuple[str, ...]


class _Best(NamedTuple):
    """What came of one framework. plan: its best that fits; lean: the least that any layout needs; way: by which it runs."""

    peer: Peer
    plan: Plan | None
    way: Way | None
    explainer: Explainer | None
    lean: float | None
    searched: int


def foretell(job: Job, cluster: Cluster, runners: Sequence[str], keep: Collection[str] = ()) -> Forecast:
    """keep: full names of keys that are not to be changed (a mesh only where it is of the cluster's size). Raises JobError for a job that
    cannot be foretold at all."""
    asked = ask(job, cluster, keep)
    schedules = Schedules()
    found = [_best(PEERS[name], asked, schedules) for name in runners]
    first = next((one for one in found if one.plan), None)
    rows = tuple(_row(one, first, found, asked) for one in found)
    return Forecast(cluster.name, cluster.devices, rows, tuple(_said(rows, asked, cluster)))


def _best(peer: Peer, asked: Asked, schedules: Schedules) -> _Best:
    """The best of its ways."""
    best: tuple[Plan, Way, Explainer] | None = None
    leans: list[float] = []
    searched = 0
    for way in peer.ways:
        stacks = stacks_on(way, asked.cluster)
        known = {compiled: Known(asked.anatomy, asked.cluster, stack, schedules) for compiled, stack in stacks.items()}
        explainer = Explainer(known)
        for space in spaces(peer, way, asked.space):
            result = search(known, space, 1)
            searched += result.searched
            if result.plans and (best is None or result.plans[0].seconds < best[0].seconds):
                best = (result.plans[0], way, explainer)
            for tried in result.tried:
                if tried.leanest is not None and not result.plans:
                    leans.append(explainer.memory(space.setting(*tried.leanest), tried.leanest.recipe.compiled).peak)
    plan, taken, explainer_of = best or (None, None, None)
    return _Best(peer, plan, taken, explainer_of, min(leans, default=None), searched)


def _row(one: _Best, first: _Best | None, every: Sequence[_Best], asked: Asked) -> Foretold:
    peer = one.peer
    base = {
        "runner": peer.runner,
        "framework": peer.framework,
        "version": VERSIONS[peer.framework][1],
        "not_priced": peer.not_priced,
        "searched": one.searched,
    }
    if one.plan is None or one.way is None or one.explainer is None:
        return Foretold(**base, status="does not fit" if one.lean else "cannot", why=_why_not(one, asked), lacks=_lacks(one, every))  # type: ignore[arg-type]
    plan, setting, memory = one.plan, one.plan.setting, one.plan.memory
    tokens = setting.batch * setting.seq_len / plan.seconds / asked.cluster.devices
    assert first is not None and first.plan is not None
    return Foretold(
        **base,  # type: ignore[arg-type]
        status="fits",
        why=one.explainer.why(plan),
        way=one.way.name,
        kernels=one.way.kernels if not asked.cluster.measured else "",
        lacks=_lacks(one, every),
        mesh=str(setting.mesh),
        zero=setting.zero,
        pipeline=setting.schedule if setting.size["pp"] > 1 else "",
        chunks=setting.chunks,
        micro_size=setting.micro_size,
        recompute=setting.recompute,
        compile="block" if plan.compiled else "none",
        step_seconds=plan.seconds,
        tokens_per_second=tokens,
        mfu=asked.anatomy.flops_per_token(setting.seq_len) * tokens / asked.cluster.device.peak(setting.compute),
        ratio=first.plan.seconds / plan.seconds,
        peak_bytes=memory.peak,
        kept_bytes=memory.parameters + memory.gradients + memory.optimizer,
        exposed_seconds=plan.prediction.exposed,
    )


def _why_not(one: _Best, asked: Asked) -> str:
    room = one.explainer.room if one.explainer else asked.cluster.device.memory * 0.95
    if one.lean is not None:
        return f"needs at least {size_of(one.lean)} a device of {size_of(room)}, however it is cut with {combines(one.peer)}"
    return f"no layout for {_asked(asked)} with {combines(one.peer)}"


def _asked(asked: Asked) -> str:
    """What every layout must have."""
    space, devices = asked.space, asked.cluster.devices
    words = [f'mesh="{space.meshes[0]}"' if space.meshes else f"{devices} devices, batch.size={asked.job.batch.size}"]
    words += [f"zero={stage}" for stage in space.zero] + [f'pipeline="{schedule}"' for schedule in space.schedules]
    return " ".join(words)


def _lacks(one: _Best, every: Sequence[_Best]) -> tuple[str, ...]:
    """What the fastest of all makes use of and this one has not."""
    best = min((other.plan for other in every if other.plan), key=lambda plan: plan.seconds, default=None)
    if best is None or best is one.plan:
        return ()
    free = one.plan is not None and one.plan.setting.recompute == best.setting.recompute  # nothing that ZeRO would have saved is missed
    lacking = [row for row in needs(best.setting) if not reaches(one.peer, row) and not (free and row in ZERO_ROWS.values())]
    return tuple(f"{row}: {_words(one.peer, row)}" for row in lacking)


def _words(peer: Peer, row: str) -> str:
    """What the table says of a row that a peer lacks, or that it is not one of its ways."""
    cell = peer.cell(row)
    return cell.words if cell.can != "yes" else f"not in {' or '.join(way.name for way in peer.ways)}"


# -- in words ---------------------------------------------------------------------------------------------------------

#: Rows of the table that decide between frameworks of one speed.
ELSE = ("a model as it is", "a checkpoint goes on on another mesh", "restarts after a failure")


def _said(rows: Sequence[Foretold], asked: Asked, cluster: Cluster) -> Iterator[str]:
    """Sentences: who would be fastest, who is slower and why, who does not fit, and what to take."""
    where = f"{cluster.name} ({cluster.devices} devices)"
    fits = sorted((row for row in rows if row.status == "fits"), key=lambda row: row.step_seconds or 0.0)
    if not fits:
        yield f"Foretold for {where}: none of them can run this job there; the reasons stand above."
        return
    best = fits[0]
    assert best.step_seconds
    even = [row for row in fits[1:] if (row.step_seconds or 0.0) < best.step_seconds * (1 + TRUST)]
    yield f"Foretold for {where}: {best.runner} would be fastest, {best.step_seconds:.3g} s a step on mesh {best.mesh}, zero {best.zero}."
    if best.kernels and any(row.kernels != best.kernels for row in fits):
        yield f"It computes with {best.kernels}; whatever runs torch's own operators is foretold with those."
    if even:
        yield f"Within what a prediction can tell ({TRUST:.0%}): {', '.join(row.runner for row in even)}."
    for row in fits[1 + len(even) :]:
        assert row.step_seconds
        lacks = f"; it has no {'; no '.join(row.lacks)}" if row.lacks else ""
        its = f"its best is mesh {row.mesh}, zero {row.zero}{f', recompute {row.recompute}' if row.recompute != 'none' else ''}"
        yield f"{row.runner} would take {row.step_seconds / best.step_seconds:.2f} times as long: {its} ({row.why}){lacks}."
    for row in rows:
        if row.status != "fits":
            yield f"{row.runner} {row.status}: {row.why}."
    yield from _choice(best, even)


def _choice(best: Foretold, even: Sequence[Foretold]) -> Iterator[str]:
    if not even:
        yield f"For this job there: {best.runner}."
        return
    equals = [best, *even]
    yield f"For this job there speed does not decide between {', '.join(row.runner for row in equals)}; what else they can do does:"
    for feature in ELSE:
        cells = {row.framework: TABLE[feature][row.framework] for row in equals}
        yield f"- {feature}: {'; '.join(f'{name} {cell.can}, {cell.words}' for name, cell in cells.items())}."
