"""A rehearsal: the engine's own step on one rank of a world of any size, without values, without peers, without their hardware.

Tensors are on torch's meta device: they have shapes, dtypes and storages of a size, and no memory. Operators run as they would,
and messages go nowhere (comm/fake.py). So what the step asks of memory and of the network is counted, not described again.

[Note: equal rounds] In the middle of a step a pipeline repeats itself: each round of actions finds what the one before found, and
leaves what it left. So a step of fewer microbatches is run, and two of its rounds are compared. If they are alike to the byte, the
rounds that are left out would have been so too. Otherwise the whole step is run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from stretto.comm.fake import world_of
from stretto.comm.group import Entry, Ledger
from stretto.data.batch import Batch
from stretto.engine.engine import Engine
from stretto.engine.look import bytes_held, held_tensors
from stretto.engine.unreal import META, Unreal, unreal
from stretto.errors import JobError
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.models import library
from stretto.parallel.boundary import Like
from stretto.parallel.memory import KINDS, Storages
from stretto.schedule.action import Action
from stretto.schedule.pipelines import microbatches_of
from stretto.schedule.repeat import Repeat, repeats
from stretto.schedule.request import requested

#: Steps of at most so many microbatches are not worth shortening.
FEW = 4
#: Of a longer one, so many rounds of the pipeline's ranks and chunks are looked through for rounds that are alike.
TRIED = 6


@dataclass(frozen=True)
class Rehearsal:
    """What one rank does and holds in a step that is not its first. bytes_: at the fullest moment, by kind (parallel/memory.py);
    they add up to peak. moment: the action in which that is. held: between steps. rehearsed: microbatches that were run for it."""

    world_size: int
    rank: int
    at: Mapping[str, int]
    peak: int
    moment: str
    bytes_: Mapping[str, int]
    held: Mapping[str, int]
    ledger: Ledger
    microbatches: int
    rehearsed: int
    seconds: float


def rehearse(job: Job, rank: int) -> Rehearsal:
    """One step of a resolved job on rank `rank` of its mesh. Raises JobError for what cannot be rehearsed."""
    began = time.perf_counter()
    mesh = Mesh.parse(job.mesh)
    loaded = load(job)
    storages, batches = Unreal(META), _batches(loaded, job)  # what rows take is not the step's own
    with storages, unreal(job.device):
        engine = rehearsing_engine(loaded, job, rank)
        engine.memory = storages  # type: ignore[assignment]
        found = _step(engine, storages, batches)
        held = bytes_held(engine.parallel, engine.optimizer)
    worst = max(found.moments, key=lambda moment: moment.live)
    return Rehearsal(
        mesh.size,
        rank,
        mesh.at(rank),
        worst.live,
        worst.action,
        {kind: worst.bytes_.get(kind, 0) for kind in KINDS},
        held,
        found.ledger,
        engine.job.microbatches,
        found.microbatches,
        time.perf_counter() - began,
    )


def load(job: Job) -> library.Loaded:
    """The job's model without memory; its values are nothing."""
    keys = job.model
    weights = "random" if keys.name.startswith("hf:") else keys.weights
    if keys.name.startswith("python:"):
        loaded = library.load(keys.name, weights=weights, seed=job.seed)
        _forget_values(loaded.model)
    else:
        with META:
            loaded = library.load(keys.name, weights=weights, seed=job.seed, overrides=keys.sizes())
    return replace(loaded, initial=lambda model, name, out, start, seed: None, stored=None)


def rehearsing_engine(loaded: library.Loaded, job: Job, rank: int) -> Engine:
    """An Engine of one rank on the meta device, whose peers say what fits."""
    mesh = Mesh.parse(job.mesh)
    stages = requested(job.pipeline.schedule, mesh["pp"], job.microbatches, job.pipeline.chunks).stages

    def others(value: Any, reason: str) -> Any:
        if reason == "stages":  # what other stages hold is not needed for a step
            return {number: ([], []) for number in range(stages) if number not in value}
        return value

    # its dtypes are resolved already; the engine looks for a GPU where it is told of one
    engine = Engine(loaded, job.with_(device="cpu", comm={"transport": "auto"}), world_of(rank, mesh.size, META, others))

    def told(stage: int, batch: Batch) -> Like:
        """All stages hand on one shape: what the blocks take and give."""
        whole = (*batch["input_ids"].shape, _hidden(loaded.model))
        stream = engine.tensors.stream
        return Like(stream.bridge.part(whole, "tokens") if stream.cut else whole, engine.precision.compute)

    engine.passes.boundary.told = told
    return engine


def _hidden(model: Any) -> int:
    shape = getattr(model, "shape", None) or model.config.get_text_config()
    return int(getattr(shape, "hidden", 0) or shape.hidden_size)


def _forget_values(model: nn.Module) -> None:
    """Parameters and buffers on the meta device in place of real ones; what was one stays one."""
    new: dict[int, Any] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                made = nn.Parameter(param.detach().to(META), param.requires_grad)
                module._parameters[name] = new.setdefault(id(param), made)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = new.setdefault(id(buffer), buffer.to(META))


# -- the step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moment:
    """The fullest moment of an action."""

    action: str
    live: int
    bytes_: Mapping[str, int]

    def after(self, growth: Mapping[str, int], times: int = 1) -> Moment:
        """The same after `times` more rounds, each of which leaves `growth`."""
        bytes_ = {kind: size + times * growth.get(kind, 0) for kind, size in self.bytes_.items()}
        return Moment(self.action, sum(bytes_.values()), bytes_)


@dataclass
class Course:
    """A step as it went by: at the beginning of each action what was held, and what the ledger had; each action's fullest moment."""

    begins: list[Mapping[str, int]] = field(default_factory=list)
    written: list[Mapping[Entry, int]] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    moments: list[Moment]
    ledger: Ledger
    microbatches: int


#: Rows of the job (None: all of a step) -> such a batch.
Batches = Callable[[int | None], Mapping[str, Any]]


def _step(engine: Engine, storages: Storages, batches: Batches) -> Found:
    """The second step: the first makes the optimizer's moments, and neighbours tell each other their shapes."""
    job, pipeline = engine.job, engine.job.pipeline
    ranks, rank, total = engine.mesh["pp"], engine.parallel.pipeline.index, job.microbatches
    even = job.rows_per_rank == total * (job.batch.micro_size or job.rows_per_rank)
    each = job.batch.size // total  # rows of the job that are one microbatch on every rank
    first = min(microbatches_of(pipeline.schedule, ranks, 1), total)
    engine.step(batches(first * each if even else None))
    storages.name(held_tensors(engine.parallel, engine.optimizer))
    order = engine.schedule_of(total).order[rank]
    if even and total > FEW:
        for few in range(max(first, FEW), min(total, FEW + TRIED * engine.parallel.split.stages)):
            more = repeats(engine.schedule_of(few).order[rank], order)
            if more is not None:
                course = _run(engine, storages, batches(few * each), engine.schedule_of(few).order[rank])
                longer = _prolonged(course, more)
                if longer is not None:
                    return replace(longer, microbatches=few)
                break
    course = _run(engine, storages, batches(None), order)
    return Found(course.moments, Ledger(dict(course.written[-1])), total)


def _run(engine: Engine, storages: Storages, batch: Mapping[str, Any], order: tuple[Action, ...]) -> Course:
    """A step, watched."""
    course = Course()
    action = "before"

    def turn(name: str) -> None:
        nonlocal action
        course.moments.append(Moment(action, storages.peak, storages.at_peak))
        storages.begin()
        action = name
        course.begins.append(dict(storages.bytes_))
        course.written.append(dict(engine.ledger.times))

    storages.begin()
    engine.watch = lambda step, name: turn(name)
    report = engine.step(batch)
    assert report.committed, report.why
    course.moments.append(Moment(action, storages.peak, storages.at_peak))
    del course.moments[0]  # taking its rows
    course.written.append(dict(report.ledger.times))
    assert len(course.moments) == len(order)
    return course


def _prolonged(course: Course, more: Sequence[Repeat]) -> Found | None:
    """The long step that follows from a short one; None if the rounds were not alike. [Note: equal rounds]"""
    moments: list[Moment] = []
    shift: dict[str, int] = {}  # what the rounds that were left out have left, so far
    ledger = dict(course.written[-1])
    done = 0
    for at, length, times in more:
        before, middle = at - 2 * length, at - length
        growth = _difference(course.begins[at], course.begins[middle])
        calls = _difference(course.written[at], course.written[middle])
        last = course.moments[middle:at]
        if (
            growth != _difference(course.begins[middle], course.begins[before])
            or calls != _difference(course.written[middle], course.written[before])
            or any(now.bytes_ != then.after(growth).bytes_ for now, then in zip(last, course.moments[before:middle], strict=True))
        ):
            return None
        moments += [moment.after(shift) for moment in course.moments[done:at]]
        # what grows evenly is fullest at an end
        moments += [moment.after(shift).after(growth, n) for n in (1, times) for moment in last]
        shift = {kind: shift.get(kind, 0) + times * growth.get(kind, 0) for kind in shift | growth}
        for entry, count in calls.items():
            ledger[entry] += times * count
        done = at
    moments += [moment.after(shift) for moment in course.moments[done:]]
    return Found(moments, Ledger(ledger), 0)


def _difference(later: Mapping[Any, int], earlier: Mapping[Any, int]) -> dict[Any, int]:
    return {key: value - earlier.get(key, 0) for key, value in later.items() if value != earlier.get(key, 0)}


def _batches(loaded: library.Loaded, job: Job) -> Batches:
    """Rows of token ids. Where there are GPUs they come from the host, as in a run; on CPUs they are where they are used."""
    if loaded.batches is not None:
        own = loaded.batches() if callable(loaded.batches) else loaded.batches
        given = next(iter(own))
        return lambda rows: {name: x.to(META) if isinstance(x, Tensor) else x for name, x in given.items()}
    if loaded.vocab is None:
        raise JobError(f"{loaded.describe}: nothing says what its batches are; give a stretto.Task(model, batches=...) with one of them")
    length = min(job.batch.seq_len, loaded.positions or job.batch.seq_len)
    one = torch.zeros((1, 1), dtype=torch.int64, device="cpu" if job.device == "cuda" else META)

    def made(rows: int | None) -> Mapping[str, Any]:
        ids = one.expand(rows or job.batch.size, length)
        return {"input_ids": ids, "shift_labels": ids}

    return made
