"""The way of a run, with ranks that only say what a training would: no torch, no model."""

import io
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from stretto.errors import JobError
from stretto.job import Job
from stretto.launch import training
from stretto.launch.failure import RankFailed
from stretto.launch.training import check_data, ready, shortened, summary, train


def row(step, loss):
    steady = {"tokens": 96, "samples": 12, "grad_norm": 1.0, "lr": 0.1, "seconds": 0.01, "committed": True}
    return {"kind": "step", "step": step, "loss": loss, **steady}


def pretend(here, job, keep):
    here.emit({"kind": "start", "steps": job.steps, "lines": [f"a model for {here.ranks} ranks"]})
    here.emit({"kind": "entropy", "nats": 2.45})
    here.emit({"kind": "text", "when": "before", "text": "xq\x00zv"})
    losses = []
    for step in range(1, job.steps + 1):
        here.emit({"kind": "at", "step": step, "action": "0F0"})
        losses.append(5.0 - step / 10)
        here.emit(row(step, losses[-1]))
        time.sleep(0.01)
        if here.stop():
            break
    here.emit({"kind": "eval", "step": step, "eval_loss": 3.3})
    here.emit({"kind": "timeline", "trace": '{"traceEvents": []}'})
    here.emit({"kind": "text", "when": "after", "text": "The import statement"})
    here.emit({"kind": "done", "steps": step, "final_loss": losses[-1], "losses": losses, "tokens_per_second": 9e3, "peak_bytes": [1, 2]})


def fails_at_3(here, job, keep):
    for step in range(1, 9):
        here.emit({"kind": "at", "step": step, "action": "1B0"})
        if here.rank == 1 and step == 3:
            while (here.board.read(0).step or 0) < 2:  # rank 0 has told a step by then
                time.sleep(0.01)
            raise ValueError("boom")
        here.emit(row(step, 4.0))
        time.sleep(0.1 if here.rank == 0 else 0)
    time.sleep(60)


def refuses(here, job, keep):
    raise JobError("model=hf:nowhere: there is no such folder")


@pytest.fixture
def run(tmp_path, monkeypatch, warm_ranks):
    def start(work, *, until=None, **overrides):
        monkeypatch.setattr(training, "train_rank", work)
        stream = io.StringIO()
        job = Job.load("tiny", **{"steps": 12, "log.every": 5, **overrides})
        return train(job, tmp_path / "run", until=until, stream=stream), stream.getvalue(), tmp_path / "run"

    return start


def test_a_run_leaves_its_whole_folder_and_tells_how_it_went(run):
    trained, said, folder = run(pretend)
    assert (trained.status, trained.steps, trained.final_loss, trained.peak_bytes) == ("done", 12, 3.8, (1, 2))
    assert len(trained.losses) == 12 and trained.entropy == 2.45 and trained.mesh == "dp=2" and trained.out == str(folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [*range(1, 13), 12] and rows[-1] == {"step": 12, "eval_loss": 3.3} and "kind" not in rows[0]
    status = json.loads((folder / "status.json").read_text())
    assert (status["status"], status["step"], status["final_loss"]) == ("done", 12, 3.8)
    assert Job.load(folder / "job.toml").steps == 12 and json.loads((folder / "timeline.json").read_text()) == {"traceEvents": []}
    assert "report.html" in os.listdir(folder) and sorted(os.listdir(folder / "logs")) == ["rank-00000.log", "rank-00001.log"]
    assert "a model for 2 ranks" in said and "step 5/12" in said and "step 6/12" not in said and "evaluation loss 3.3" in said


def test_the_job_in_the_folder_is_the_resolved_one_and_repeats_itself(run):
    _, _, folder = run(pretend)
    first = Job.load(folder / "job.toml")
    assert first.resolve(None, "cpu", 0) == first and first.precision.compute == "fp32"


def test_the_summary_sets_the_loss_beside_the_entropy_and_the_texts_beside_each_other(run):
    trained, _, folder = run(pretend)
    said = summary(trained, braille=True)
    assert "bigram entropy of the text: 2.45 nats a byte; final loss 3.8000 (1.55 of it)" in said
    assert said.index("xq\N{REPLACEMENT CHARACTER}zv") < said.index("The import statement") < said.index(str(folder / "report.html"))
    summary(trained, braille=False).replace("\N{REPLACEMENT CHARACTER}", "").encode("ascii")


def test_stopping_early_keeps_the_schedule_and_the_job_that_goes_on(run):
    trained, _, folder = run(pretend, until=4)
    assert (trained.status, trained.steps, len(trained.losses)) == ("interrupted", 4, 4)
    assert Job.load(folder / "job.toml").steps == 12
    assert "--until" in json.loads((folder / "status.json").read_text())["why"]


def test_until_lays_the_schedule_over_all_steps():
    job = Job.load("tiny", steps=100)
    assert (shortened(job, 10).steps, shortened(job, 10).schedule.steps) == (10, 100)
    assert shortened(Job.load(job, **{"schedule.steps": 40}), 10).schedule.steps == 40
    assert shortened(Job.load(job, **{"profile.steps": [3, 50]}), 10).profile.steps == (3,)
    assert shortened(job, 100) == job == shortened(job, None) and shortened(job, 500) == job
    for until, words in ((0, "at least 1"), (-3, "at least 1")):
        with pytest.raises(JobError, match=words):
            shortened(job, until)
    with pytest.raises(JobError, match="epochs"):
        shortened(Job.load("tiny", epochs=1), 10)


def test_a_signal_ends_the_run_after_its_step_and_it_says_so(run):
    timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    trained, said, folder = run(pretend, steps=2000)
    timer.join()
    assert trained.status == "interrupted" and 0 < trained.steps < 2000 and "SIGTERM" in said
    assert "SIGTERM" in json.loads((folder / "status.json").read_text())["why"]


def test_a_failure_is_in_the_status_with_rank_step_action_and_error_and_the_rows_are_kept(run, tmp_path):
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 1 failed at step 3, action 1B0: ValueError: boom"):
        run(fails_at_3)
    assert time.monotonic() - start < 10
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["status"] == "failed" and status["why"] == "rank 1 failed at step 3, action 1B0: ValueError: boom"
    assert (tmp_path / "run" / "metrics.jsonl").read_text() and "boom" in (tmp_path / "run" / "report.html").read_text()
    assert "ValueError: boom" in (tmp_path / "run" / "logs" / "rank-00001.log").read_text()


def test_a_job_that_the_ranks_refuse_leaves_no_folder(run, tmp_path):
    with pytest.raises(JobError, match="no such folder"):
        run(refuses)
    assert not (tmp_path / "run").exists()


def test_a_second_run_in_one_folder_is_refused_before_any_rank_starts(run):
    _, _, folder = run(pretend)
    before = (folder / "metrics.jsonl").read_text()
    with pytest.raises(JobError, match=r"holds a run already \(done, step 12\)"):
        run(refuses)
    assert (folder / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "empty"), (b"\x00\x01" * 200, "binary"), (b"too short", "one sequence"), (None, "no such file")],
)
def test_bad_data_is_refused_before_any_rank_starts_or_folder_exists(content, words, tmp_path, run):
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(JobError, match=words):
        run(refuses, data=f"text:{file}")
    assert not (tmp_path / "run").exists()


def test_evaluation_data_is_looked_at_as_well(tmp_path):
    with pytest.raises(JobError, match="no such file"):
        check_data(Job.load("tiny", **{"eval.every": 5, "eval.data": f"text:{tmp_path / 'none.txt'}"}))
    check_data(Job.load("tiny", **{"eval.every": 5, "data.split": 0.1}))


def test_a_rank_that_somebody_else_started_does_the_same_in_its_own_process(run, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    trained, said, folder = run(lambda here, job, keep: pretend(here, job, keep))
    assert trained.status == "done" and (folder / "report.html").exists() and "step 5/12" in said
    monkeypatch.setenv("RANK", "1")
    other, said, _ = run(lambda here, job, keep: pretend(here, job, keep))
    assert other is None and said == "" and Path(folder).exists()


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"mesh": "pp=9"}, "9 pipeline stages are more than the 8 blocks of the model"),
        ({"mesh": "pp=5", "pipeline": "zb-v"}, "10 pipeline stages are more than the 8 blocks of the model"),
        ({"mesh": "pp=4", "pipeline": "zb-h2", "batch.micro_size": 2}, r"needs at least 7 microbatches \(2 pp - 1\), and a step has 6"),
        (
            {"mesh": "pp=2", "pipeline": "zb-h1", "compile": "block"},
            'splits the backward, and a compiled block has but one; write pipeline="1f1b"',
        ),
        ({"mesh": "pp=2", "pipeline.chunks": 2}, 'pipeline="1f1b" has 1 stage a rank'),
        ({"mesh": "pp=2", "pipeline.split": ["nosuch"]}, "no stage can begin with 'nosuch'"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_before_ranks_start(keys, says):
    with pytest.raises(JobError, match=says):
        ready(Job.load("tiny", **keys))


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layer"])
def test_more_stages_than_a_folder_says_blocks_are_refused_before_ranks_start(key, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({key: 3}))
    ready(Job.load("tiny", model=f"hf:{tmp_path}", mesh="pp=3"))
    with pytest.raises(JobError, match="4 pipeline stages are more than the 3 blocks of the model; write a mesh with fewer pp"):
        ready(Job.load("tiny", model=f"hf:{tmp_path}", mesh="pp=4"))
