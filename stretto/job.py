"""What is asked: a Job, frozen and validated once, from TOML, keywords and KEY=VALUE overrides.

Every request that cannot be met is one JobError, a line a problem: what was asked, what is possible, what to write.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from stretto.errors import JobError
from stretto.keys import nearest, read_file, read_value, short, show
from stretto.layout.balance import Balance, Held, Widths, element_bytes
from stretto.layout.mesh import Mesh
from stretto.layout.zero import SHARD_AXES, ZeroPolicy
from stretto.limits import check_checkpoint, check_mesh, check_model, check_precision, check_profile, check_rows
from stretto.refusal import refusal
from stretto.sections import (
    DTYPE_BYTES,
    Batch,
    Checkpoint,
    Comm,
    Compile,
    Count,
    Data,
    Dtype,
    Eval,
    Log,
    Model,
    Natural,
    Nonnegative,
    Optimizer,
    Pipeline,
    Positive,
    Precision,
    Profile,
    Schedule,
    Section,
    Tensor,
    Zero,
)

#: How long to train; one of them.
LENGTHS = ("steps", "epochs", "tokens")

JOBS = Path(__file__).with_name("jobs")


class Key(NamedTuple):
    """A key as `stretto keys` lists it; `default` is TOML text."""

    name: str
    default: str
    description: str


class Builtin(NamedTuple):
    """A job that ships with stretto: `text` is its commented TOML, `summary` the first comment."""

    name: str
    summary: str
    text: str


class Derived(NamedTuple):
    """A value nobody wrote but that follows from what was written; `why` is the sum that gives it."""

    name: str
    value: int
    why: str


def _text(value: object) -> object:
    """Refuses what is no text with the text that would be right."""
    if isinstance(value, Mapping):
        words = " ".join(f"{axis}={size}" for axis, size in value.items())
        raise ValueError(f"is a table, and a mesh is one text; write mesh={show(words)}")
    if isinstance(value, int | float):
        raise ValueError(f'names no axis; write mesh="dp={value if value > 1 else 1}"')
    return value


def _mesh(value: str) -> str:
    if value.strip() == "auto":
        raise ValueError('asks for a plan, which is not in this version yet; write mesh="dp=auto" for all ranks')
    # The number of ranks is not known yet; the product of the sizes is one that leaves 1 for an auto axis.
    Mesh.parse(value, math.prod(map(int, re.findall(r"=([0-9]+)", value))))
    return value.strip()


class Job(Section):
    """One training job. Job.load reads a file or a built-in name; Job(model="tiny", zero=3, ...) takes keywords."""

    version: Literal[1] = Field(default=1, description="schema of this file; a later stretto that reads it differently counts up")
    name: str = Field(default="job", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="names the run folder")
    runner: Literal["stretto"] = Field(default="stretto", description="who runs the job")
    steps: Count | None = Field(default=100, description="optimizer steps; or give epochs or tokens instead")
    epochs: Positive | None = Field(default=None, description="passes over the data")
    tokens: Count | None = Field(default=None, description="tokens to train on, padding included")
    mesh: Annotated[str, BeforeValidator(_text), AfterValidator(_mesh)] = Field(
        default="",
        description='axes pp dp_replicate dp cp ep tp, as "dp=2 tp=2"; one may be auto; empty = dp over the visible GPUs, else 1 rank',
    )
    clip: Nonnegative = Field(default=1.0, description="largest global norm of the gradient; longer ones are scaled down to it; 0 = off")
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="activations made again in backward instead of kept: none, selective (cheap ones), full (all but block inputs)",
    )
    loss_chunk: Natural = Field(
        default=0,
        description="tokens that head and loss take at a time, so that logits of all tokens never exist; 0 = all at once (faster by one "
        "product of the head)",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: cuda if every rank here gets a GPU of its own, else cpu"
    )
    seed: Natural = Field(default=0, le=2**63 - 1, description="seed of initial weights, order of samples and dropout")
    model: Model = Field(default=Model(), description="what is trained")
    data: Data = Field(default=Data(), description="what it is trained on")
    zero: Zero = Field(default=Zero(), description="what is cut over dp")
    tensor: Tensor = Field(default=Tensor(), description="what is cut over tp")
    batch: Batch = Field(default=Batch(), description="rows and tokens a step")
    pipeline: Pipeline = Field(default=Pipeline(), description="order of work on pp ranks")
    precision: Precision = Field(default=Precision(), description="dtypes")
    optimizer: Optimizer = Field(default=Optimizer(), description="how weights are updated")
    schedule: Schedule = Field(default=Schedule(), description="how the learning rate moves")
    compile: Compile = Field(default=Compile(), description="torch.compile")
    eval: Eval = Field(default=Eval(), description="evaluation while training")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="what is saved")
    log: Log = Field(default=Log(), description="what is printed")
    profile: Profile = Field(default=Profile(), description="what is timed in detail")
    comm: Comm = Field(default=Comm(), description="how ranks talk")

    def __init__(self, **values: object) -> None:
        keyed = {key: value for key, value in nested(values.items()).items() if key not in LENGTHS or value is not None}
        lengths = [key for key in LENGTHS if key in keyed]
        if len(lengths) > 1:
            asked = " and ".join(f"{key}={short(keyed[key])}" for key in lengths)
            raise JobError(f"{asked} each say how long to train; write one of {', '.join(LENGTHS)}")
        if lengths:  # else the default of steps holds
            keyed = dict.fromkeys(LENGTHS) | keyed
        try:
            super().__init__(**keyed)
        except ValidationError as error:
            fields, sections = _fields(), list(filter(_section, Job.model_fields))
            lines = list(dict.fromkeys(refusal(problem, fields, sections) for problem in error.errors(include_url=False)))
            raise JobError("\n".join(lines[:3] + ([f"and {len(lines) - 3} more"] if len(lines) > 3 else []))) from None

    @staticmethod
    def load(source: str | Path | Mapping[str, object] | Job | None = None, **overrides: object) -> Job:
        """A Job from a TOML file, a built-in name, a mapping or another Job, with overrides merged in.

        overrides: zero=3, zero={"stage": 3} or **{"zero.stage": 3}. One of steps, epochs, tokens replaces whichever the source has.
        Raises JobError.
        """
        if isinstance(source, Job):
            return Job(**merge(source.model_dump(), nested(overrides.items())))
        if source is None or isinstance(source, Mapping):
            return Job(**merge(nested((source or {}).items()), nested(overrides.items())))
        path = _path(source)
        return Job(**merge({"name": _name(path)} | nested(read_file(path).items()), nested(overrides.items())))

    @staticmethod
    def of(mapping: Mapping[str, object]) -> Job:
        """A Job from nested or dotted keys."""
        return Job(**mapping)

    def with_(self, **overrides: object) -> Job:
        """This job with some keys changed, validated anew (model_copy would not)."""
        return Job.load(self, **overrides)

    @staticmethod
    def keys() -> list[Key]:
        """Every key, by its full dotted name, in the order of to_toml."""
        return [Key(name, show(field.default), field.description or "") for name, field in _fields().items()]

    @staticmethod
    def builtins() -> list[Builtin]:
        """The jobs that ship with stretto, by name."""
        texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(JOBS.glob("*.toml"))}
        return [Builtin(name, text.partition("\n")[0].lstrip("# "), text) for name, text in texts.items()]

    def to_toml(self, comments: bool = True) -> str:
        """TOML that loads as this very job. With comments, each key is explained and keys left open stand as comments."""
        lines: list[str] = []
        section = ""
        for name, field in _fields().items():
            head, dot, leaf = name.rpartition(".")
            if head != section:
                about = Job.model_fields[head].description
                lines += ["", f"[{head}]" + (f"  # {about}" if comments else "")]
                section = head
            value = getattr(getattr(self, head) if dot else self, leaf)
            if value is not None:
                setting = f"{leaf} = {show(value)}"
            elif comments and name not in LENGTHS:
                setting = f'# {leaf} = "auto"'
            else:
                continue
            lines.append(f"{setting:<26}  # {field.description}" if comments else setting)
        return "\n".join(lines) + "\n"

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        """What can be known without ranks and device; what needs them is in resolve."""
        check_model(self.model, self.batch.seq_len)
        check_precision(self.precision)
        if self.zero.gradients == "each" and self.zero.stage < 2:
            raise JobError(
                f'zero.gradients="each" with zero={self.zero.stage}: stages 0 and 1 keep whole gradients and reduce them once a step; '
                'write zero=2, or zero.gradients="end"'
            )
        total = self.schedule.steps or self.total_steps()
        if total is not None and self.schedule.warmup_steps(total) > total:
            raise JobError(
                f"schedule.warmup={self.schedule.warmup} is longer than the {total} steps of the schedule; "
                f"write schedule.warmup={total} or less, or a share of them, as 0.1"
            )
        if self.eval.every and not self.eval.data and not isinstance(self.data.split, float):
            raise JobError(  # a split's name holds nothing out
                f"eval.every={self.eval.every} has nothing to evaluate on; write data.split=0.05 to hold out a share, or eval.data=SOURCE"
            )
        if self.optimizer.name == "adamw" and self.optimizer.momentum:
            raise JobError(
                f'optimizer.momentum={self.optimizer.momentum} has no effect on adamw; write optimizer="sgd", or optimizer.betas'
            )
        check_checkpoint(self.checkpoint, self.eval.every)
        return self

    def resolve(self, ranks: int | None, device: Literal["cpu", "cuda"], visible: int, *, own_model: bool = False) -> Job:
        """This job on a machine: mesh, device, dtypes, transport and zero.gradients filled in, sizes checked.

        ranks: how many were started, None where the mesh is to say. device: what is there. visible: GPUs seen here. own_model: a
        module is handed in, and the job's own model is not read.
        Raises JobError for whatever can be known to fail before a rank starts.
        """
        if self.device == "cuda" and device == "cpu":
            raise JobError('device="cuda": no GPU is visible here; write device="cpu"')
        chosen = device if self.device == "auto" else self.device
        gpus = visible if chosen == "cuda" else 0
        count = ranks or max(gpus, 1)
        mesh = Mesh.parse(self.mesh or "dp=auto", count)
        if ranks is not None and mesh.size != ranks:
            raise JobError(f'mesh="{mesh}" makes {mesh.size} ranks, and {ranks} started; write mesh="dp={ranks}", or start {mesh.size}')
        if chosen == "cuda" and ranks is None and mesh.size > gpus:
            if self.device == "cuda":
                raise JobError(
                    f'mesh="{mesh}" needs {mesh.size} GPUs, and {gpus} are visible; write mesh="dp={max(gpus, 1)}", or device="cpu"'
                )
            chosen = "cpu"
        check_mesh(mesh, None if own_model else self.model, self.batch.size, ranks)
        check_rows(self.batch, mesh)
        check_profile(self.profile, mesh, self.total_steps())
        if self.comm.transport == "nccl" and chosen == "cpu":
            raise JobError('comm.transport="nccl" needs GPUs, and the job runs on the CPU; write comm.transport="auto"')
        if self.comm.transport == "shm" and chosen == "cuda":
            raise JobError('comm.transport="shm" is for CPUs, and the job runs on GPUs; write comm.transport="nccl", or device="cpu"')
        transport = "nccl" if chosen == "cuda" else "auto"  # on CPUs the ranks choose, once they know who shares a machine
        compute: Dtype = self.precision.compute or ("bf16" if chosen == "cuda" else "fp32")
        master: Dtype = self.precision.master or ("fp64" if compute == "fp64" else "fp32")
        return self.with_(
            mesh=str(mesh),
            device=chosen,
            zero={"gradients": self.zero.gradients or ("each" if self.zero.stage >= 2 else "end")},
            precision={"compute": compute, "master": master, "reduce": self.precision.reduce or master},
            comm={"transport": transport if self.comm.transport == "auto" else self.comm.transport},
        )

    @property
    def shards(self) -> int:
        """Ranks among which the rows of a batch are shared (of a resolved job)."""
        return Mesh.parse(self.mesh).extent("dp", "dp_replicate")

    @property
    def rows_per_rank(self) -> int:
        """Rows a step on each dp rank (of a resolved job)."""
        return self.batch.size // self.shards

    @property
    def microbatches(self) -> int:
        """Forward passes a step on each dp rank; the last may have fewer rows (of a resolved job)."""
        return -(-self.rows_per_rank // (self.batch.micro_size or self.rows_per_rank))

    def balance(self, held: Held) -> Balance:
        """What pipeline stages are cut by (of a resolved job). held: of the schedule's ranks."""
        keys = self.precision
        assert keys.compute and keys.reduce and keys.master
        moments = 2 if self.optimizer.name == "adamw" else int(self.optimizer.momentum > 0)
        widths = Widths.of(DTYPE_BYTES[keys.compute], DTYPE_BYTES[keys.reduce], DTYPE_BYTES[keys.master], moments)
        policy = ZeroPolicy.of(self.zero.stage, self.zero.gradients, self.zero.params)
        element = element_bytes(policy, Mesh.parse(self.mesh).extent(*SHARD_AXES), widths)
        tokens = (self.batch.micro_size or self.rows_per_rank) * self.batch.seq_len
        return Balance(self.pipeline.balance, self.pipeline.measured, element, tokens, held)

    def total_steps(self, samples: int | None = None) -> int | None:
        """Optimizer steps of the whole job; None where it is given in epochs and the number of samples is not known."""
        if self.steps is not None:
            return self.steps
        if self.tokens is not None:
            return -(-self.tokens // (self.batch.size * self.batch.seq_len))
        if self.epochs is None or samples is None:
            return None
        return max(1, math.ceil(Fraction(repr(self.epochs)) * samples / self.batch.size))

    def derived(self) -> tuple[Derived, ...]:
        """What follows from the keys of a resolved job, each with the sum that gives it, for printing at the start."""
        batch, rows, shards = self.batch, self.rows_per_rank, self.shards
        return (
            Derived("ranks", Mesh.parse(self.mesh).size, f'mesh="{self.mesh}"'),
            Derived("rows_per_rank", rows, f"batch.size={batch.size} / {shards} dp ranks"),
            Derived("microbatches", self.microbatches, f"{rows} rows / batch.micro_size={batch.micro_size or rows}, rounded up"),
            Derived("tokens_per_step", batch.size * batch.seq_len, f"batch.size={batch.size} * batch.seq_len={batch.seq_len}"),
        )


def parse_override(text: str) -> tuple[str, object]:
    """'batch.size=8' -> ('batch.size', 8): the value is TOML if it parses, else the text itself. Raises JobError without '='."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise JobError(f"{text!r} is not KEY=VALUE; write for example batch.size=8 (`stretto keys` lists the keys)")
    return key.strip(), read_value(value)


def parse_overrides(texts: Iterable[str]) -> dict[str, object]:
    """KEY=VALUE words as overrides for Job.load. Raises JobError where two of them set one key."""
    return nested(parse_override(text) for text in texts)


def nested(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Keys as a user may write them ("zero", "zero.stage", {"zero": {"stage": ...}}) -> one table a section.

    Keys of no section stay as they are. Raises JobError where one key is set twice, naming both.
    """
    tables: dict[str, dict[str, object]] = {}
    plain: dict[str, object] = {}
    origins: dict[str, str] = {}
    for key, value in pairs:
        head, _, rest = key.partition(".")
        if isinstance(value, Section):
            value = value.model_dump(exclude_unset=True)
        kind = _section(head)
        if kind is None:
            given = {key: value}
        elif rest:
            given = {rest: value}
        else:
            given = dict(value) if isinstance(value, Mapping) else {kind.main: value}
        for leaf, item in given.items():
            full = key if kind is None else f"{head}.{leaf}"
            origin = f"{full if isinstance(value, Mapping) else key}={short(item)}"
            if full in origins:
                raise JobError(f"{full} is given twice: {origins[full]} and {origin}; write one of them")
            origins[full] = origin
            (plain if kind is None else tables.setdefault(head, {}))[leaf] = item
    return {**plain, **tables}


def merge(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """`over` laid on `base`, key by key inside sections; a length in `over` takes the place of any length in `base`."""
    merged = dict(base)
    if any(over.get(key) is not None for key in LENGTHS):
        merged = {key: value for key, value in merged.items() if key not in LENGTHS}
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = {**below, **value} if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def _section(name: str) -> type[Section] | None:
    field = Job.model_fields.get(name)
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _fields() -> dict[str, FieldInfo]:
    """Full dotted name -> field; the plain keys come first, as TOML wants them."""
    plain: dict[str, FieldInfo] = {}
    tables: dict[str, FieldInfo] = {}
    for name, field in Job.model_fields.items():
        kind = _section(name)
        if kind is None:
            plain[name] = field
        else:
            tables |= {f"{name}.{leaf}": inner for leaf, inner in kind.model_fields.items()}
    return plain | tables


def _path(source: str | Path) -> Path:
    """The file of a built-in name or of a path. Raises JobError naming what there is."""
    text = str(source)
    names = [path.stem for path in sorted(JOBS.glob("*.toml"))]
    if text in names:
        return JOBS / f"{text}.toml"
    path = Path(source)
    if os.path.exists(path) and not os.path.isdir(path):  # a pipe will do; unlike Path's own, these answer for any text
        return path
    for found in (f"{text}.toml", os.path.join(text, "job.toml")):
        if os.path.isfile(found):
            raise JobError(f"there is no job file {text}; write {found}")
    near = nearest(path.stem, names)
    what = "job file" if path.suffix == ".toml" or "/" in text else "job"
    raise JobError(
        f"there is no {what} {text}; the built-in jobs are {', '.join(names)}; write {near or 'one of them'}, or the path of a TOML file"
    )


def _name(path: Path) -> str:
    """The default name of a job: its file's, as far as a folder may be called so."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in path.stem).lstrip("._-")
    return kept or "job"
