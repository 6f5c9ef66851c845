"""What a framework can do of what a Job may ask, as data: it says why not before any rank starts, and what runs otherwise than asked.

No torch and none of the frameworks is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from stretto.anatomy import DECODERS, DecoderShape
from stretto.job import Job
from stretto.keys import show
from stretto.layout.mesh import AXES, Mesh

#: (compute, master) that a plain training loop runs; fp16 would need a loss scaler of the framework's own.
PLAIN_PRECISIONS = (("fp32", "fp32"), ("bf16", "fp32"), ("fp64", "fp64"))
#: A further condition of one framework: why a resolved job cannot be run, or "".
Condition = Callable[[Job, Mesh], str]


@dataclass(frozen=True)
class Ability:
    """One runner.

    name: as in --runners. package: the distribution whose version is told. extra: stretto's extra that installs it ("": comes with
    stretto). build: "module:function" that makes its Runner in a rank. axes: those it can make longer than 1. zero: stage of the
    job -> how it is run where that is not exactly what was asked ("": exactly). schedules: pipeline schedule -> what it is called
    there ("": the same). alone: pairs of axes that it cannot have both. decoder_only: whether it needs a built-in decoder, which it
    rebuilds. conditions: what else must hold. driver: whether one process of ours starts the ranks through the framework itself.
    """

    name: str
    package: str
    build: str
    axes: tuple[str, ...]
    zero: Mapping[int, str]
    extra: str = ""
    schedules: Mapping[str, str] = field(default_factory=dict)
    precisions: tuple[tuple[str, str], ...] = PLAIN_PRECISIONS
    optimizers: tuple[str, ...] = ("adamw", "sgd")
    recompute: tuple[str, ...] = ("none", "selective", "full")
    compile: bool = True
    alone: tuple[tuple[str, str], ...] = ()
    decoder_only: bool = False
    cuda: bool = True
    conditions: tuple[Condition, ...] = ()
    driver: bool = False
    about: str = ""

    def version(self) -> str | None:
        """The version that is installed; None if none is."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install 'stretto[{self.extra}]'" if self.extra else "pip install stretto"

    def refusal(self, job: Job) -> str:
        """Why this framework cannot run a resolved job: what was asked, what it can, what to write; "" if it can."""
        mesh = Mesh.parse(job.mesh)
        return next(filter(None, (check(self, job, mesh) for check in CHECKS)), "") or next(
            filter(None, (condition(job, mesh) for condition in self.conditions)), ""
        )

    def notes(self, job: Job) -> tuple[str, ...]:
        """What it runs otherwise than the job says, or in words of its own."""
        mesh = Mesh.parse(job.mesh)
        told = [self.about, self.zero.get(job.zero.stage, "") if mesh.extent("dp", "dp_replicate") > 1 else ""]
        if mesh["pp"] > 1 and self.schedules[job.pipeline.schedule]:
            told.append(f"pipeline {job.pipeline.schedule} is its {self.schedules[job.pipeline.schedule]}")
        return tuple(filter(None, told))


def shape_of(job: Job) -> DecoderShape | None:
    """The sizes of a job's built-in decoder; None for other models."""
    return DECODERS[job.model.name].with_(job.model.sizes()) if job.model.name in DECODERS else None


def _axes(can: Ability, job: Job, mesh: Mesh) -> str:
    long = [axis for axis in AXES if mesh[axis] > 1]
    for axis in long:
        if axis not in can.axes:
            return f'mesh="{mesh}": {can.name} has no {axis}, but {", ".join(can.axes)}; write mesh="{can.axes[0]}={mesh.size}"'
    for one, other in can.alone:
        if one in long and other in long:
            return f'mesh="{mesh}": {can.name} runs {one} or {other} here, not both; write mesh="{one}={mesh.size}"'
    return ""


def _zero(can: Ability, job: Job, mesh: Mesh) -> str:
    if job.zero.stage in can.zero or mesh.extent("dp", "dp_replicate") == 1:
        return ""
    return f"zero={job.zero.stage}: {can.name} has stages {_either(map(str, can.zero))}; write zero={min(can.zero)}"


def _schedule(can: Ability, job: Job, mesh: Mesh) -> str:
    asked = job.pipeline.schedule
    if mesh["pp"] == 1 or asked in can.schedules:
        return ""
    return f'pipeline="{asked}": {can.name} has {_either(can.schedules)}; write pipeline="{next(iter(can.schedules), "1f1b")}"'


def _precision(can: Ability, job: Job, mesh: Mesh) -> str:
    compute, master = job.precision.compute or "fp32", job.precision.master or "fp32"
    if (compute, master) in can.precisions:
        return ""
    fits = _either(one for one, _ in can.precisions)
    return f'precision="{compute}" with master="{master}": {can.name} is run here in {fits}; write precision="{can.precisions[0][0]}"'


def _optimizer(can: Ability, job: Job, mesh: Mesh) -> str:
    asked = job.optimizer.name
    return "" if asked in can.optimizers else f'optimizer="{asked}": {can.name} is run here with {_either(can.optimizers)}'


def _recompute(can: Ability, job: Job, mesh: Mesh) -> str:
    asked = job.recompute
    return "" if asked in can.recompute else f'recompute="{asked}": {can.name} is run here with {_either(can.recompute)}; write one of them'


def _compile(can: Ability, job: Job, mesh: Mesh) -> str:
    asked = job.compile.mode != "none" and not can.compile
    return f'compile="{job.compile.mode}": {can.name} is run here without; write compile="none"' if asked else ""


def _model(can: Ability, job: Job, mesh: Mesh) -> str:
    if not can.decoder_only or job.model.name in DECODERS:
        return ""
    known = ", ".join(DECODERS)
    return f"model={show(job.model.name)}: {can.name} builds the model itself, which is known here of built-in decoders ({known})"


def _device(can: Ability, job: Job, mesh: Mesh) -> str:
    return "" if can.cuda or job.device == "cpu" else f'device="{job.device}": {can.name} is run here on CPUs only; write device="cpu"'


def _either(words: object) -> str:
    listed = list(words)  # type: ignore[call-overload]
    return " or ".join(filter(None, (", ".join(listed[:-1]), *listed[-1:]))) or "none"


CHECKS: tuple[Callable[[Ability, Job, Mesh], str], ...] = (
    _axes, _zero, _schedule, _precision, _optimizer, _recompute, _compile, _model, _device,
)  # fmt: skip


def whole_pipeline(job: Job, mesh: Mesh) -> str:
    """For frameworks that cannot tie weights over stages or send microbatches of different sizes."""
    if mesh["pp"] == 1:
        return ""
    shape = shape_of(job)
    if shape is None:
        return f"model={show(job.model.name)} with pp: how it is cut in stages is known here of built-in decoders; write a mesh without pp"
    if shape.tied:
        return f"{job.model.name} ties its head to its embedding, which lie on different stages; write a mesh without pp"
    if job.rows_per_rank % job.microbatches:
        return (
            f"{job.rows_per_rank} rows in {job.microbatches} microbatches are of different sizes, and its messages of one; "
            "write a batch.micro_size that divides them"
        )
    return ""


def megatron_model(job: Job, mesh: Mesh) -> str:
    """Megatron cuts kv heads and vocabulary evenly over tp, blocks evenly over pp, and all its layer norms have biases."""
    shape, tp, pp = shape_of(job), mesh["tp"], mesh["pp"]
    if shape is None:
        return ""
    if shape.kv_heads % tp or shape.vocab % tp:
        what = f"kv_heads={shape.kv_heads}" if shape.kv_heads % tp else f"vocab={shape.vocab}"
        return f"mesh.tp={tp}: megatron cuts {what} of {job.model.name} evenly; write a tp that divides it"
    if shape.blocks % pp:
        return f"mesh.pp={pp}: megatron shares the {shape.blocks} blocks of {job.model.name} evenly; write a pp that divides them"
    if shape.norm == "layer" and not shape.bias:
        return f"{job.model.name} has layer norms without biases, and megatron's have them; write model.norm=rms"
    return ""


EXACT: Mapping[int, str] = MappingProxyType(dict.fromkeys(range(4), ""))
