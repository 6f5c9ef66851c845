"""The folder of a run: what was asked, where it ran, what every step gave, and how it ended."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from stretto.checkpoint.claim import hold
from stretto.errors import JobError, RunError

Status = Literal["running", "done", "interrupted", "failed"]
MARKS = ("status.json", "metrics.jsonl", "job.toml")  # a folder with one of them holds a run
REPLACED = ("job.toml", "environment.json", "status.json")
VERSIONS = ("stretto", "torch", "numpy", "pydantic", "transformers", "datasets")


def json_text(value: object, indent: int | None = None) -> str:
    """JSON that every reader takes: a number that is not finite becomes null."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False, default=str)


def default_folder(name: str, now: time.struct_time, parent: Path = Path("runs")) -> Path:
    """runs/NAME-TIME, with a number behind it if two runs start in one second."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S', now)}"
    taken = (parent / f"{stem}-{number}" for number in range(2, 1000))
    return next(path for path in (parent / stem, *taken) if not path.exists())


def environment_facts(command: Sequence[str], device: str, gpus: int) -> dict[str, Any]:
    """Versions, devices, command and commit, for environment.json."""
    versions = {}
    for package in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "command": " ".join(command),
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
        "device": device,
        "gpus": gpus,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_bytes": _memory(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


class RunFolder:
    """An open run folder. Made before any rank starts, so that a folder that cannot be written is found out in time."""

    def __init__(self, path: Path, made: Path | None, before: Mapping[str, str] | None = None) -> None:
        self.path = path
        self.logs = path / "logs"
        self._made = made  # the topmost folder that was not there before
        self._before = before  # of a run that goes on: the files that opening it replaced
        self._let_go = hold(path, f"--out {path}: a process runs in it now{_state(path)}; wait for its end, or stop it")
        self._metrics = (path / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)

    @classmethod
    def create(cls, path: Path, job: str, environment: Mapping[str, Any], mesh: str) -> RunFolder:
        """Make the folder and write job.toml, environment.json and a first status.json.

        job: the resolved job as TOML. Raises JobError, with nothing left behind, if there is a run in it already or it
        cannot be written.
        """
        refuse_a_run(path)
        above = [parent for parent in (path, *path.parents) if not parent.exists()]
        made = above[-1] if above else None
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
            folder = cls(path, made)
            folder.write("job.toml", job)
            folder.write("environment.json", json_text(environment, indent=2) + "\n")
            folder.set_status("running", 0, "", mesh=mesh)
        except OSError as error:
            _remove(path, made)
            raise JobError(f"--out {path} cannot be written ({error.strerror}); write --out DIR with a folder that you may write") from None
        return folder

    @classmethod
    def reopen(cls, path: Path, job: str, environment: Mapping[str, Any], mesh: str) -> RunFolder:
        """Go on in the folder of a run: its job.toml, environment.json and status.json are those of now, its rows stay.

        The job.toml that was there, if it said something else, is kept as job.before-STEP.toml.
        """
        before = {name: text for name in REPLACED if (text := _text_of(path / name)) is not None}
        step = told_in(path).get("step", 0)
        try:
            (path / "logs").mkdir(exist_ok=True)
            folder = cls(path, None, before)
            if before.get("job.toml", job) != job:
                folder.write(f"job.before-{step}.toml", before["job.toml"])
            folder.write("job.toml", job)
            folder.write("environment.json", json_text(environment, indent=2) + "\n")
            folder.set_status("running", step, "", mesh=mesh)
        except OSError as error:
            raise JobError(f"--out {path} cannot be written ({error.strerror}), so the run in it cannot go on") from None
        return folder

    def go_on_from(self, step: int) -> list[dict[str, Any]]:
        """Drop the rows of steps after `step`, which are run again; returns the rows that stay."""
        self._metrics.close()
        name = "metrics.jsonl"
        rows = [row for row in rows_of(self.path / name) if row.get("step", 0) <= step]
        self.write(name, "".join(json_text(row) + "\n" for row in rows))
        self._metrics = (self.path / name).open("a", encoding="utf-8", buffering=1)
        self._before = None  # from here on it is another run than it was
        return rows

    def add_row(self, row: Mapping[str, Any]) -> None:
        """One more line of metrics.jsonl, on disk when this returns (but for the system's own cache)."""
        try:
            self._metrics.write(json_text(row) + "\n")
        except OSError as error:
            raise RunError(f"{self.path / 'metrics.jsonl'} cannot be written any more: {error.strerror}") from error

    def set_status(self, status: Status, step: int, why: str, **more: Any) -> None:
        """Replace status.json as a whole: a reader never finds half of it."""
        self.write("status.json", json_text({"status": status, "step": step, "why": why, "time": time.time(), **more}, indent=2) + "\n")

    def close(self) -> None:
        self._metrics.close()
        self._let_go()

    def discard(self) -> None:
        """Take away what this run put here: it was refused before its first step. A run that was to go on is as it was."""
        self.close()
        if self._before is None:
            _remove(self.path, self._made)
            return
        for name, text in self._before.items():
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        """A file of the folder, there whole or not at all."""
        new = self.path / f".{name}.new"
        new.write_text(text, encoding="utf-8")
        os.replace(new, self.path / name)


def refuse_a_run(path: Path) -> None:
    """JobError if there is a run in `path` already: going over it would mix two runs."""
    if path.exists() and not path.is_dir():
        raise JobError(f"--out {path} is a file; write --out DIR with a folder, new or empty")
    if not holds_a_run(path):
        return
    raise JobError(
        f"--out {path} holds a run already{_state(path)}; write another --out, --resume to go on with it, "
        "or remove that folder to start over"
    )


def _state(path: Path) -> str:
    """As ' (running, step 12)'; nothing where no status is told."""
    found = told_in(path)
    return f" ({found['status']}, step {found['step']})" if {"status", "step"} <= set(found) else ""


def holds_a_run(path: Path) -> bool:
    """Whether a run has been here."""
    return any((path / mark).exists() for mark in MARKS)


def told_in(path: Path) -> dict[str, Any]:
    """What status.json says; {} if nothing."""
    try:
        found: dict[str, Any] = json.loads((path / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that a crash cut short is left out."""
    rows = []
    for line in (_text_of(path) or "").splitlines():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def _remove(path: Path, made: Path | None) -> None:
    if made is not None:
        shutil.rmtree(made, ignore_errors=True)
        return
    for name in (*MARKS, "environment.json", *(f".{mark}.new" for mark in (*MARKS, "environment.json"))):
        (path / name).unlink(missing_ok=True)
    shutil.rmtree(path / "logs", ignore_errors=True)


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _commit() -> str | None:
    """The commit of the folder the command was given in, with a + if files differ from it; None outside of git."""
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "") if head.returncode == 0 else None


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    if sys.platform == "win32":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
