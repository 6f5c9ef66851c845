"""`stretto train` as a user types it: real ranks, the real engine, the built-in job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import warm

import stretto


@pytest.fixture
def start(tmp_path):
    """`stretto train WORDS` in a folder of its own; fresh: by a `python` that is started for it, else by one that has torch loaded."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**kept, "PYTHONPATH": str(Path(stretto.__file__).parents[1])}
    started = []

    def run(*words, out="run", fresh=False):
        words = ["-m", "stretto", "train", *words, "--json", "--out", out]
        if fresh:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            process = subprocess.Popen([sys.executable, *words], cwd=tmp_path, env=environment, **pipes)
        else:
            process = warm.Program(words, tmp_path, environment, tmp_path / f"told-{len(started)}")
        started.append(process)
        return process, tmp_path / out

    run.folder = tmp_path / "run"
    yield run
    for process in started:
        process.kill()
        process.communicate(timeout=10)


def test_without_a_word_it_trains_tiny_and_forty_steps_take_more_than_a_nat_off_the_loss(start):
    asked = ("steps=40", "profile.steps=[2, 40]", "profile.ranks=[0, 1]", "eval.every=20", "eval.batches=2", "data.split=0.05")
    process, folder = start(*asked, fresh=True)
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, err
    told = json.loads(out)
    assert (told["status"], told["steps"], told["mesh"], len(told["losses"])) == ("done", 40, "dp=2", 40)
    assert told["final_loss"] == told["losses"][-1] < told["losses"][0] - 1
    assert len(told["peak_bytes"]) == 2 and set(told["texts"]) == {"before", "after"} and 2.4 < told["entropy"] < 2.5
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 41))
    assert [row["step"] for row in rows if "eval_loss" in row] == [20, 40] and rows[-1]["eval_loss"] == told["eval_loss"] < 4.5
    names = {"job.toml", "environment.json", "metrics.jsonl", "status.json", "timeline.json", "report.html", "logs"}
    assert set(os.listdir(folder)) == names
    trace = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    assert {(e["name"], e["tid"]) for e in trace if e.get("cat") == "step"} == {(f"step {n}", r) for n in (2, 40) for r in (0, 1)}


def test_stopped_by_any_signal_all_is_saved_and_what_goes_on_is_bitwise_the_run_that_was_never_stopped(start):
    """Ctrl-C, SIGUSR1 and SIGTERM, one after the other; exit code 0 each time, and a command that goes on."""
    small = ("model.blocks=1", "batch.seq_len=16", "steps=5000", "mesh=dp=2")

    def stopped_by(number, *words):
        process, folder = start(*words)
        rows = folder / "metrics.jsonl"
        before = len(rows.read_text().splitlines()) if rows.exists() else 0
        limit = time.monotonic() + 120
        while not rows.exists() or len(rows.read_text().splitlines()) < before + 2:
            assert process.poll() is None and time.monotonic() < limit, process.communicate(timeout=5)
            time.sleep(0.05)
        process.send_signal(number)
        if number == signal.SIGTERM:  # a scheduler that cannot wait says it again, perhaps in the midst of the save
            time.sleep(0.1)
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        told, status = json.loads(out), json.loads((folder / "status.json").read_text())
        name = signal.Signals(number).name
        assert told["status"] == status["status"] == "interrupted" and name in status["why"] and status["step"] == told["steps"]
        assert told["saved"].endswith(f"step-{told['steps']:08d}") and "stretto train --out run --resume" in err
        assert len(told["losses"]) == told["steps"]
        return told

    stopped_by(signal.SIGINT, *small)
    stopped_by(signal.SIGUSR1, "--resume")
    told = stopped_by(signal.SIGTERM, "--resume")
    folder = start.folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, told["steps"] + 1))
    whole, _ = start(*small, "--until", str(told["steps"]), out="whole")
    out, err = whole.communicate(timeout=120)
    assert whole.returncode == 0 and json.loads(out)["losses"] == told["losses"], err
    again, _ = start(*small)  # starting over what is there is refused
    out, err = again.communicate(timeout=60)
    assert again.returncode == 2 and "--resume" in err
