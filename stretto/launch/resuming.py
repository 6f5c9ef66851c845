"""A run that goes on: which job it is, and whether there is anything to go on from. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from stretto.errors import JobError
from stretto.job import Job
from stretto.launch.runfolder import holds_a_run, told_in


def job_of_run(out: str | Path, changes: Mapping[str, object]) -> Job | None:
    """The job of the run in `out`, with some keys changed; None if there is no run. Raises JobError.

    changes: as Job.load takes them. What was filled in from a key that is changed now is filled in anew.
    """
    path = Path(out)
    if not holds_a_run(path):
        return None
    if not (path / "job.toml").is_file():
        raise JobError(f"--out {path} holds a run without its job.toml, which says how to go on; remove that folder to start over")
    job = Job.load(path / "job.toml")
    zero = changes.get("zero")
    if isinstance(zero, Mapping) and "stage" in zero and "gradients" not in zero and _as_filled_in(job):
        job = Job.load(job, **{"zero.gradients": None})
    if "device" in changes and job.comm.transport == "nccl":
        job = Job.load(job, **{"comm.transport": "auto"})
    return Job.load(job, **changes)


def place_of_checkpoints(job: Job, out: Path) -> str:
    """The folder or URL that holds the checkpoints of a run."""
    return job.checkpoint.folder if job.checkpoint.folder is not None else str(out / "checkpoints")


def check_there_is_one(job: Job, out: Path) -> None:
    """JobError, before any rank starts, if there is no complete checkpoint to go on from."""
    from stretto.checkpoint.shelf import Shelf
    from stretto.checkpoint.store import open_store

    place = place_of_checkpoints(job, out)
    if not holds_a_run(out):
        raise JobError(f"--out {out} holds no run to go on with; leave --resume out, or write --resume=auto to start one")
    if not Shelf(open_store(place)).steps():
        state = told_in(out)
        how = f" (the run is {state['status']}, step {state['step']})" if {"status", "step"} <= set(state) else ""
        raise JobError(f"{place} has no checkpoint to go on from{how}; write --resume=auto to start at step 1 then")


def _as_filled_in(job: Job) -> bool:
    """Whether zero.gradients is what the stage gives if nobody says."""
    return job.zero.gradients == ("each" if job.zero.stage >= 2 else "end")
