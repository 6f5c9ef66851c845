"""What an exporter says of a job, and how it reads one: each key that it reads is answered, and what is left is listed.

[Note: nothing is passed over] An exporter never sees the Job, only a Reading of it, which remembers the keys it was asked for. What a
user wrote and no exporter asked for is listed as missing by itself, so a key that is new here cannot be forgotten there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from stretto.anatomy import DECODERS, DecoderShape
from stretto.job import Job
from stretto.keys import short
from stretto.layout.mesh import Mesh

#: Keys that say how stretto itself runs, or what the launcher does: no other framework's configuration is about them.
OURS = ("version", "name", "runner", "log.every", "comm.transport", "steps", "epochs", "tokens")


class Missing(NamedTuple):
    """A key of the job that the other framework cannot be told, or does otherwise: `why` says which, and what to do."""

    key: str
    asked: str  # its value, as TOML
    why: str

    def __str__(self) -> str:
        return f"{self.key}={self.asked}: {self.why}"


class File(NamedTuple):
    """A file of an export."""

    name: str
    text: str


@dataclass(frozen=True)
class Exported:
    """A job in another framework's terms. files: the configuration itself stands first. run: the command that starts it in their folder."""

    framework: str
    version: str  # the release whose keys these are
    files: tuple[File, ...]
    missing: tuple[Missing, ...]
    run: str


class Reading:
    """A resolved job as an exporter reads it. reading("batch.size") gives a value, and notes that it was asked for."""

    def __init__(self, job: Job, framework: str) -> None:
        self.job, self.framework = job, framework
        self.mesh = Mesh.parse(job.mesh)
        self._read: set[str] = set()
        self._missing: dict[str, Missing] = {}

    def __call__(self, key: str) -> Any:
        """The value of a dotted key."""
        self._read.add(key)
        value: Any = self.job
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def lacks(self, key: str, why: str) -> None:
        """The framework cannot be told this key, or does it otherwise."""
        self._missing[key] = Missing(key, short(self(key)), why)

    def lacks_if(self, key: str, usual: object, why: str) -> None:
        """As `lacks`, where the value is another than `usual`."""
        if self(key) != usual:
            self.lacks(key, why)

    def axis(self, name: str, why: str) -> int:
        """The length of an axis of the mesh that the framework has no counterpart for: listed where it is longer than 1."""
        if self.mesh[name] > 1:
            self._missing[f"mesh.{name}"] = Missing(f"mesh.{name}", str(self.mesh[name]), why)
        return self.mesh[name]

    def missing(self) -> tuple[Missing, ...]:
        """All that was said to be missing, then what the user changed and nobody asked for."""
        usual = _flat(Job().model_dump())
        filled_in = {"mesh", "device", "zero.gradients", "precision.compute", "precision.master", "precision.reduce"}
        left = [
            Missing(key, short(value), f"{self.framework} has no counterpart")
            for key, value in _flat(self.job.model_dump()).items()
            if key not in self._read and key not in OURS and key not in filled_in and value != usual[key]
        ]
        return (*self._missing.values(), *left)

    # ---- what several exporters need ----

    def answered_by_model(self) -> None:
        """The model is told as a whole, with all its keys."""
        self._read |= {f"model.{name}" for name in type(self.job.model).model_fields}

    @property
    def shape(self) -> DecoderShape | None:
        """The built-in decoder that is asked for; None where the model is somebody's own."""
        self.answered_by_model()
        found = DECODERS.get(self.job.model.name)
        return found.with_(self.job.model.sizes()) if found else None

    @property
    def micro_size(self) -> int:
        """Rows of one forward on a dp rank."""
        self._read |= {"batch.size", "batch.micro_size"}
        return self.job.batch.micro_size or self.job.rows_per_rank

    @property
    def total_steps(self) -> int:
        """Optimizer steps; epochs, of which the data alone says how many steps they are, are listed and counted as 1000 steps."""
        steps = self.job.total_steps()
        if steps is None:
            self.lacks("epochs", "written as 1000 steps; only the data says how many there are")
        return steps or 1000

    @property
    def schedule_steps(self) -> int:
        """Steps over which the learning rate is laid."""
        self._read |= {"schedule.steps", "schedule.warmup"}
        return self.job.schedule.steps or self.total_steps

    @property
    def warmup_steps(self) -> int:
        return self.job.schedule.warmup_steps(self.schedule_steps)

    def even_microbatches(self) -> None:
        """Other frameworks divide rows evenly, or not at all."""
        if self.job.rows_per_rank % self.micro_size:
            self.lacks("batch.micro_size", f"does not divide the {self.job.rows_per_rank} rows of a rank, and here all forwards are equal")


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"zero": {"stage": 1}} -> {"zero.stage": 1}."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return found


def comments(exported_for: str, missing: tuple[Missing, ...], run: str) -> str:
    """The head of a file whose format has comments: what it is, how it is run, and what it cannot say."""
    lines = [exported_for, f"run: {run}", *(["what has no counterpart:"] if missing else []), *(f"  {one}" for one in missing)]
    return "".join(f"# {line}\n" for line in lines)
