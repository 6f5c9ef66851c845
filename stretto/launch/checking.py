"""The way of a check: the same steps on the mesh and in one process, and what differs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from stretto.draw.numbers import bytes_
from stretto.errors import CheckFailed, RunError
from stretto.job import Job
from stretto.launch.agreeing import join
from stretto.launch.training import ready
from stretto.launch.worker import Event, Rank

if TYPE_CHECKING:
    from torch import nn

    from stretto.models.library import Task

Dtype = Literal["fp64", "job"]
Findings = Mapping[str, Any]  # what `check --json` prints; see CONTRACTS


def check(model: nn.Module | Task | None, job: Job | str | Path, *, dtype: Dtype, steps: int, blocks: int | None) -> Findings:
    """stretto.check: the findings, or CheckFailed."""
    findings = run_check(model, job if isinstance(job, Job) else Job.load(job), dtype=dtype, steps=steps, blocks=blocks)
    if findings is None:
        return {}
    if not findings["ok"]:
        raise CheckFailed(failed_line(findings))
    return findings


def run_check(
    model: nn.Module | Task | None, job: Job, *, dtype: Dtype, steps: int, blocks: int | None, inject: str | None = None
) -> Findings | None:
    """The findings, held or not; None on ranks other than 0 where somebody else started the ranks."""
    from stretto.launch.local import run_local
    from stretto.launch.outside import run_here

    prepared = ready(job, own_model=model is not None)
    heard: list[Event] = []
    options = (dtype, steps, inject, blocks)
    if prepared.seat:
        run_here(check_rank, (prepared.job, model, *options), prepared.seat, heard.append)
        if prepared.seat.rank:
            return None
    else:
        own = None if model is None else type(getattr(model, "model", model))  # a Task's own module decides how it travels
        run_local(check_rank, prepared.ranks, (prepared.job, model, *options), on_event=heard.append, on_line=_to_stderr, of=own)
    told = [event for event in heard if event["kind"] == "check"]
    if not told:
        raise RunError("the ranks ended without a finding; this is a fault of stretto's own")
    return {name: value for name, value in told[-1].items() if name != "kind"}


def check_rank(
    here: Rank, job: Job, model: nn.Module | Task | None, dtype: Dtype, steps: int, inject: str | None, blocks: int | None
) -> None:
    """One rank's part of a check."""
    here.emit({"kind": "at", "action": "while loading torch"})
    from stretto.engine import check as engine_check

    world, _ = join(here, job)
    own = {"model": model} if model is not None else {}
    engine_check.run(job, world, here.emit, dtype=dtype, steps=steps, inject=inject, blocks=blocks, **own)
    world.close()  # not after an error: it would wait for ranks that are gone


def _to_stderr(rank: int, line: str) -> None:
    print(f"[{rank}] {line}", file=sys.stderr, flush=True)


ERRORS = (("loss", "loss_error"), ("gradient", "gradient_error"), ("parameters", "parameter_error"), ("gradient norm", "grad_norm_error"))


def table(findings: Findings, name: str) -> str:
    """The findings for people."""
    tolerance = findings["tolerance"]
    lines = [f"{name} on mesh {findings['mesh']} against one process: {findings['steps']} steps, {findings['compared']} tensors"]
    for title, key in ERRORS:
        value = findings[key]
        lines.append(f"  {title:<14} {_error(value):>9}  {'ok' if value is not None and value <= tolerance else 'TOO LARGE'}")
    lines.append(f"  largest on {findings['worst_parameter']}; allowed is {_error(tolerance)}")
    dropout = findings.get("dropout", "none")
    if dropout != "none":
        lines.append("  dropout is on: both drop the same elements" if dropout == "named" else f"  dropout is {dropout}")
    for rank, held in enumerate(findings.get("bytes") or ()):
        lines.append(f"  rank {rank} holds " + ", ".join(f"{kind} {bytes_(size)}" for kind, size in held.items()))
    lines.append("the mesh and one process agree" if findings["ok"] else failed_line(findings))
    return "\n".join(lines)


def failed_line(findings: Findings) -> str:
    """One line: which tensor, by how much, on which mesh."""
    worst = max((findings[key] for _, key in ERRORS if findings[key] is not None), default=None)
    off = f"{findings['worst_parameter']} is off by {_error(worst)}"
    return f"check failed on mesh {findings['mesh']}: {off}, and {_error(findings['tolerance'])} is allowed"


def _error(value: float | None) -> str:
    return "nan" if value is None else f"{value:.1e}"
