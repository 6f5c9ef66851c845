"""Which job goes on, and what is refused before any rank starts."""

from __future__ import annotations

import io
import json

import pytest

from stretto.checkpoint.shelf import Shelf, name_of
from stretto.checkpoint.store import LocalStore
from stretto.errors import JobError
from stretto.job import Job
from stretto.launch import training
from stretto.launch.record import joined_traces
from stretto.launch.resuming import check_there_is_one, job_of_run, place_of_checkpoints
from stretto.launch.training import train, train_or_go_on


def folder_of(tmp_path, job, step=2):
    """A run folder as a stopped run leaves it, with one checkpoint."""
    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "job.toml").write_text(job.to_toml())
    (tmp_path / "run" / "status.json").write_text(json.dumps({"status": "interrupted", "step": step}))
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "loss": 9.0 - n}) + "\n" for n in range(1, step + 2)))
    if step:
        shelf = Shelf(LocalStore(tmp_path / "run" / "checkpoints"))
        shelf.store.commit(shelf.store.temporary(name_of(step), "t"), name_of(step), b"{}")
    return tmp_path / "run"


def resolved(**keys):
    return Job.load("tiny", steps=6, **keys).resolve(None, "cpu", 0)


def test_the_job_is_that_of_the_run_with_keys_changed(tmp_path):
    run = folder_of(tmp_path, resolved(zero=3, seed=7))
    assert job_of_run(run, {}) == resolved(zero=3, seed=7)
    changed = job_of_run(run, {"mesh": "dp=4", "zero": {"stage": 1}})
    assert (changed.mesh, changed.zero.stage, changed.zero.gradients, changed.seed) == ("dp=4", 1, None, 7)
    assert job_of_run(run, {"device": "cpu"}).comm.transport == "auto"
    assert job_of_run(tmp_path / "none", {}) is None


def test_a_choice_that_the_user_made_is_not_undone_by_another_key(tmp_path):
    run = folder_of(tmp_path, resolved(zero={"stage": 2, "gradients": "end"}))
    assert job_of_run(run, {"zero": {"stage": 3}}).zero.gradients == "end"


def test_checkpoints_lie_in_the_run_folder_unless_the_job_says_where(tmp_path):
    assert place_of_checkpoints(resolved(), tmp_path) == str(tmp_path / "checkpoints")
    assert place_of_checkpoints(resolved(**{"checkpoint.folder": "s3://bucket/run"}), tmp_path) == "s3://bucket/run"


def test_going_on_from_nothing_is_refused_with_what_to_write(tmp_path):
    with pytest.raises(JobError, match=r"holds no run to go on with; .*--resume=auto"):
        check_there_is_one(resolved(), tmp_path / "none")
    with pytest.raises(JobError, match=r"has no checkpoint to go on from \(the run is interrupted, step 0\); write --resume=auto"):
        check_there_is_one(resolved(), folder_of(tmp_path, resolved(), step=0))
    check_there_is_one(resolved(), folder_of(tmp_path, resolved()))


def goes_on(here, job, keep):
    """A rank that says what a training that goes on would."""
    here.emit({"kind": "resumed", "step": 2, "path": f"{keep.place}/step-00000002"})
    here.emit({"kind": "start", "steps": job.steps, "lines": []})
    for step in range(3, job.steps + 1):
        here.emit({"kind": "step", "step": step, "loss": 9.0 - step, "seconds": 0.1, "tokens": 5, "committed": True})
    here.emit({"kind": "saved", "step": 6, "path": f"{keep.place}/step-00000006", "bytes": 10, "seconds": 0.1, "stall_seconds": 0.0})
    here.emit({"kind": "done", "steps": job.steps, "losses": [9.0 - step for step in range(3, job.steps + 1)], "peak_bytes": [1]})


def test_a_run_that_goes_on_tells_the_losses_of_all_its_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train_rank", goes_on)
    run = folder_of(tmp_path, resolved(mesh="dp=1"))
    said = io.StringIO()
    trained = train(job_of_run(run, {}), run, resume="yes", stream=said)
    assert trained.status == "done" and trained.steps == 6 and trained.losses == (8.0, 7.0, 6.0, 5.0, 4.0, 3.0)
    assert trained.saved == str(run / "checkpoints" / "step-00000006") and trained.final_loss == 3.0
    rows = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows == [1, 2, 3, 4, 5, 6] and "the next step is 3" in said.getvalue()


def test_the_library_goes_on_with_the_runs_own_job(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train_rank", goes_on)
    run = folder_of(tmp_path, resolved(mesh="dp=1"))
    assert train_or_go_on(None, run, None, True).steps == 6
    with pytest.raises(JobError, match="write out=FOLDER"):
        train_or_go_on("tiny", None, None, True)
    with pytest.raises(JobError, match="there is no job"):
        train_or_go_on(None, tmp_path / "none", None, "auto")


def test_a_timeline_that_goes_on_has_no_step_twice(tmp_path):
    def trace(*steps):
        events = [{"ph": "M", "name": "thread_name"}]
        for step in steps:
            events += [{"ph": "X", "cat": "step", "name": f"step {step}"}, {"ph": "X", "cat": "F", "name": f"0F0 of {step}"}]
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

    path = tmp_path / "timeline.json"
    assert joined_traces(path, trace(4), 3) == trace(4)
    path.write_text(trace(2, 3, 4))
    names = [event["name"] for event in json.loads(joined_traces(path, trace(4, 5), 3))["traceEvents"] if event["ph"] == "X"]
    assert names == ["step 2", "0F0 of 2", "step 3", "0F0 of 3", "step 4", "0F0 of 4", "step 5", "0F0 of 5"]
