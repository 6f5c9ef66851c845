"""What can be chosen of a job and a cluster one by one, as sliders do: each choice with the values that there are, and the job they make.

What was chosen stands in a flat mapping of words, as the fragment of an address holds it. A degree that cannot be beside what was
moved becomes the nearest that can, and `notes` says so; whatever else cannot be is a JobError.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import log2
from typing import Any

from stretto.anatomy import DECODERS
from stretto.errors import JobError
from stretto.job import Job, parse_overrides
from stretto.keys import nearest
from stretto.layout.mesh import Mesh
from stretto.plan.asking import Asked, ask, names_of
from stretto.plan.devices import DEVICES
from stretto.plan.hardware import LINKS, Cluster
from stretto.plan.search import Plan
from stretto.plan.space import Space, divisors, runs, without_copies
from stretto.schedule.pipelines import FILE, PIPELINES
from stretto.sections import DTYPE_BYTES

#: Axes that are chosen; dp takes what they leave.
DEGREES = ("tp", "pp", "cp", "ep")
#: Choice -> the key of a job that it sets.
KEYS = {
    "blocks": "model.blocks", "hidden": "model.hidden", "seq_len": "batch.seq_len", "batch": "batch.size", "zero": "zero.stage",
    "micro": "batch.micro_size", "schedule": "pipeline.schedule", "chunks": "pipeline.chunks", "recompute": "recompute",
    "precision": "precision.compute", "compile": "compile.mode", **dict.fromkeys((*DEGREES, "dp_replicate"), "mesh"),
}  # fmt: skip
CLUSTER = ("device", "nodes", "per_node", "inside", "across")
NAMES = ("model", "words", *CLUSTER, *KEYS)
#: Of a cluster that a file describes: it is taken as it is.
GIVEN = "given"
#: Widths of a head that a slider of the model's width goes through.
HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128, 160, 192, 256)
MOST_NODES, SEQ_LENS, BATCHES = 2**11, tuple(2**n for n in range(7, 21)), tuple(n * 2**k for k in range(14) for n in (2, 3))
#: What is larger has no slider, and takes long.
MOST = {"blocks": 2000, "nodes": 2**17, "per_node": 2**10, "seq_len": 2**25}
#: Of models of which only the shape is known.
PLAIN: Mapping[str, Any] = {"precision": "bf16", "mesh": "dp=auto", "batch": {"size": 128, "seq_len": 4096, "micro_size": 1}}


@dataclass(frozen=True)
class Start:
    """What choices begin with, and go back to where another model is chosen: a job and a cluster."""

    job: Job
    cluster: Cluster

    @property
    def models(self) -> tuple[str, ...]:
        """Names that `model` may have, beside hf:FOLDER."""
        return tuple(dict.fromkeys((self.job.name, *(one.name for one in Job.builtins()), *DECODERS)))

    def job_of(self, name: str) -> Job:
        """The job by which a model is tried."""
        if name == self.job.name:
            return self.job
        if name in {one.name for one in Job.builtins()}:
            return Job.load(name)
        if name in DECODERS or name.startswith("hf:"):
            return Job.load({"name": "job" if name.startswith("hf:") else name, "model": name, **PLAIN})
        near = nearest(name, self.models)
        raise JobError(f"there is no model {name!r}; known are {', '.join(self.models)} and hf:FOLDER; write {near or self.job.name}")


@dataclass
class Chosen:
    """wanted: as asked. choices: as taken, options: the values that each may have, up to where it could not go on: then `error` says why
    and `asked` is None. notes: what was taken other than wanted."""

    wanted: Mapping[str, str]
    choices: dict[str, str] = field(default_factory=dict)
    options: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    asked: Asked | None = None
    error: str = ""

    def take(self, name: str, value: object, options: Iterable[object]) -> None:
        """A value, which need not be among the options."""
        self.choices[name] = "" if value is None else str(value)
        self.options[name] = [str(one) for one in options]

    def number(self, name: str, own: int) -> int:
        """The wanted number, or the job's own."""
        text, most = self.wanted.get(name) or str(own), MOST.get(name, 10**6)
        if not text.isascii() or not text.isdigit() or len(text) > 9:
            raise JobError(f"{name}={text} is no whole number; write for example {name}={own}")
        if int(text) > most:
            raise JobError(f"{name}={text} is more than a page asks for; write {name}={most} or less")
        return int(text)

    def word(self, name: str, own: str, options: Iterable[str]) -> str:
        """The wanted word, or the job's own, of those that there are."""
        found, known = self.wanted.get(name) or own, list(options)
        self.take(name, found, known)
        if found not in known and name in self.wanted:
            raise JobError(f"{name}={found} is not possible here; write one of {', '.join(known)}")
        return found


def choose(start: Start, wanted: Mapping[str, str], moved: str = "") -> Chosen:
    """The job and cluster of what is wanted; what is not said stays as it is in `start`. moved: the choice that is kept where others
    cannot be beside it."""
    chosen = Chosen(wanted)
    try:
        if unknown := [name for name in (*wanted, *([moved] if moved else [])) if name not in NAMES]:
            near = nearest(unknown[0], NAMES)
            raise JobError(f"there is nothing {unknown[0]!r} to choose; there is {', '.join(NAMES)}; write {near or NAMES[0]}")
        cluster = _cluster(chosen, start.cluster)
        job = _sizes(chosen, _model(chosen, start), cluster)
        chosen.asked = _layout(chosen, job, cluster, moved)
    except JobError as error:
        chosen.error = str(error)
    return chosen


def choices_of(plan: Plan) -> dict[str, str]:
    """The choices that make this layout."""
    setting = plan.setting
    found = {axis: setting.size[axis] for axis in (*DEGREES, "dp_replicate")}
    found |= {"zero": setting.zero, "micro": setting.micro_size}
    pipeline = {"schedule": setting.schedule, "chunks": str(setting.chunks)} if setting.size["pp"] > 1 else {}
    return {
        **{name: str(value) for name, value in found.items()},
        **pipeline,
        "recompute": setting.recompute,
        "compile": "block" if plan.compiled else "none",
    }


def _near(found: Iterable[int], wanted: int) -> int:
    return min(found, key=lambda one: (abs(log2(one / wanted)), one))


def _powers(most: int, *more: int) -> list[int]:
    return sorted({2**n for n in range(most.bit_length()) if 2**n <= most} | set(more))


# -- where and what ----------------------------------------------------------------------------------------------------


def _cluster(chosen: Chosen, own: Cluster) -> Cluster:
    given = [GIVEN] if own.measured else []
    name = chosen.wanted.get("device") or (GIVEN if given else own.device.name)
    chosen.take("device", name, [*given, *DEVICES])
    if name == GIVEN and given:
        for key, value in (("nodes", own.nodes), ("per_node", own.per_node)):
            if chosen.number(key, value) != value:
                chosen.notes.append(f"{key}={chosen.wanted[key]} became {value}: a cluster that a file describes stays as it is")
            chosen.take(key, value, [value])
        return own
    mine = own if name == own.device.name else Cluster.of(name)
    nodes, per_node = chosen.number("nodes", own.nodes), chosen.number("per_node", min(own.per_node, mine.device.domain))
    chosen.take("nodes", nodes, _powers(MOST_NODES, *([nodes] if nodes else [])))
    chosen.take("per_node", per_node, _powers(mine.device.domain, *([per_node] if per_node else [])))
    links = [chosen.wanted.get(key) or getattr(mine, key).name for key in ("inside", "across")]
    for key, link in zip(("inside", "across"), links, strict=True):
        chosen.take(key, link, LINKS)
    usual = links == [mine.device.inside, mine.device.across]
    return Cluster.of(f"{nodes}x{per_node} {name}{'' if usual else ' ' + ' '.join(links)}")


def _model(chosen: Chosen, start: Start) -> Job:
    name = chosen.wanted.get("model") or start.job.name
    chosen.take("model", name, start.models)
    words = chosen.wanted.get("words", "")
    chosen.take("words", words, [])
    job = start.job_of(name)
    try:
        keys = parse_overrides(shlex.split(words))
    except ValueError as error:  # of quotes that do not close
        raise JobError(f"the keys {words!r} cannot be read ({error}); write KEY=VALUE, as optimizer=sgd") from None
    if twice := sorted(names_of(keys) & {*KEYS.values(), "model.name"}):
        raise JobError(f"{twice[0]} has a control of its own here; move that, and leave it out of the other keys")
    return Job.load(job, **keys)


def _sizes(chosen: Chosen, job: Job, cluster: Cluster) -> Job:
    """The job with all that is no layout."""
    shape = DECODERS[job.model.name].with_(job.model.sizes()) if job.model.name in DECODERS else None
    model: dict[str, object] = {}
    if shape:
        blocks, hidden = chosen.number("blocks", shape.blocks), chosen.number("hidden", shape.hidden)
        chosen.take("blocks", blocks, sorted({*range(1, 2 * shape.blocks + 1), blocks} - {0}))
        chosen.take("hidden", hidden, sorted({*(shape.heads * width for width in HEAD_DIMS), shape.hidden, hidden} - {0}))
        model = {"blocks": blocks} if blocks != shape.blocks else {}
        if hidden != shape.hidden:  # the MLP stays as many times as wide
            model |= {"hidden": hidden, "ffn": max(64, round(shape.ffn * hidden / shape.hidden / 64) * 64)}
    seq_len, batch = chosen.number("seq_len", job.batch.seq_len), chosen.number("batch", job.batch.size)
    chosen.take("seq_len", seq_len, sorted({*SEQ_LENS, seq_len, job.batch.seq_len} - {0}))
    chosen.take("batch", batch, sorted({1, *BATCHES, batch} - {0}))
    known = [dtype for dtype in DTYPE_BYTES if dtype in cluster.device.flops]
    precision = chosen.word("precision", job.precision.compute or ("bf16" if "bf16" in known else "fp32"), known)
    zero = chosen.word("zero", str(job.zero.stage), "0123")
    recompute = chosen.word("recompute", job.recompute, ("none", "selective", "full"))
    compiled = chosen.word("compile", job.compile.mode if cluster.device.compiles else "none", ("none", "block"))
    keys: dict[str, object] = {"zero": {"stage": int(zero)}, "recompute": recompute, "compile": {"mode": compiled}}
    keys |= {"batch": {"seq_len": seq_len, "size": batch}, "precision": {"compute": precision}}
    return job.with_(**keys, **({"model": model} if model else {}))


# -- the layout --------------------------------------------------------------------------------------------------------


def _layout(chosen: Chosen, job: Job, cluster: Cluster, moved: str) -> Asked:
    space = ask(job.with_(mesh="dp=auto"), cluster).space
    mesh = _mesh(chosen, job, space, moved)
    rows = space.rows(mesh) or 1
    sizes = space.micro_sizes_of(mesh) if space.rows(mesh) else [1]
    wanted = chosen.number("micro", job.batch.micro_size or rows)
    micro_size = wanted if wanted in sizes else max((one for one in sizes if one <= wanted), default=sizes[0])
    if wanted != micro_size and "micro" in chosen.wanted:
        chosen.notes.append(f"micro_size={wanted} became {micro_size}: a dp rank has {rows} row{'s' if rows > 1 else ''} a step")
    chosen.take("micro", micro_size, sizes)
    pipeline = _pipeline(chosen, job, space, mesh["pp"], rows // micro_size)
    made = job.with_(mesh=str(mesh), pipeline=pipeline, **{"batch.micro_size": micro_size})
    return ask(made, cluster, {"mesh"})


def _mesh(chosen: Chosen, job: Job, space: Space, moved: str) -> Mesh:
    """The wanted mesh, or the legal one that is nearest to it."""
    own = _own_mesh(job, space.devices)
    wanted = {axis: max(1, chosen.number(axis, own[axis])) for axis in DEGREES}
    copies = max(1, chosen.number("dp_replicate", own["dp_replicate"]))
    families = space.families
    for axis in DEGREES:
        chosen.take(axis, wanted[axis], sorted({family[axis] for family in families} or {wanted[axis]}))
    chosen.take("dp_replicate", copies, [copies])
    if not families:
        raise JobError(_no_mesh(space))
    kept = [family for family in families if moved in DEGREES and family[moved] == wanted[moved]] or list(families)
    if runs(Mesh.of(**wanted)):
        kept = [family for family in kept if runs(family)] or kept
    family = min(kept, key=lambda one: (sum(abs(log2(one[axis] / wanted[axis])) for axis in DEGREES), one["pp"]))
    changed = [axis for axis in DEGREES if family[axis] != wanted[axis]]
    if changed:
        limits = space.limits
        became = ", ".join(f"{axis}={wanted[axis]} became {family[axis]}" for axis in changed)
        chosen.notes.append(
            f"{became}: no mesh of {space.devices} devices like that shares {space.base.batch} rows, {limits.blocks} blocks and "
            f"{limits.heads} heads ({limits.kv_heads} of keys and values)"
        )
    shared = divisors(family["dp"])
    found = max(n for n in shared if n <= copies)
    if found != copies and "dp_replicate" in chosen.wanted:
        chosen.notes.append(f"dp_replicate={copies} became {found}: it divides the {family['dp']} dp ranks")
    for axis in DEGREES:
        chosen.choices[axis] = str(family[axis])
    chosen.take("dp_replicate", found, shared)
    return Mesh.of(**{**dict(family.axes), "dp": family["dp"] // found, "dp_replicate": found})


def _own_mesh(job: Job, devices: int) -> Mesh:
    """The job's own mesh where it is of so many devices, else its degrees beside dp."""
    if job.mesh in ("", "auto"):
        return Mesh.of(dp=devices)
    mesh = Mesh.parse(job.mesh, devices if "auto" in job.mesh else None)
    return mesh if mesh.size == devices else without_copies(mesh)


def _no_mesh(space: Space) -> str:
    return (
        f"no mesh of {space.devices} devices shares {space.base.batch} rows a step, {space.limits.blocks} blocks and "
        f"{space.limits.heads} heads; choose a batch that {space.devices} devices can share, or fewer devices"
    )


def _pipeline(chosen: Chosen, job: Job, space: Space, pp: int, microbatches: int) -> dict[str, object]:
    own = job.pipeline.schedule
    names = [*PIPELINES, *([own] if own.startswith(FILE) else [])]
    schedule = chosen.word("schedule", own, names)
    compiled = job.compile.mode == "block"
    fits = [order.chunks for order in space.orders_of(pp, microbatches, compiled) if order.schedule == schedule] if pp > 1 else [1]
    wanted = chosen.number("chunks", job.pipeline.chunks or (fits or [1])[0])
    chunks = wanted if wanted in fits or not fits else _near(fits, max(1, wanted))
    if chunks != wanted and "chunks" in chosen.wanted and pp > 1 and "schedule" in chosen.wanted:
        chosen.notes.append(f"chunks={wanted} became {chunks}: {schedule} of {space.limits.blocks} blocks on pp={pp} has {_either(fits)}")
    chosen.take("chunks", chunks, fits or [chunks])
    several = schedule in PIPELINES and PIPELINES[schedule].chunks is None
    return {"schedule": schedule, "chunks": chunks if several and pp > 1 and fits else None}


def _either(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, numbers))
