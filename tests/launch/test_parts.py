"""`stretto measure JOB --parts FILE`: a file of seconds that a pipeline can be cut by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.cli import main
from stretto.job import Job
from stretto.launch.parts import table
from stretto.launch.training import check_pipeline
from stretto.layout.balance import Item, PartTime, read_parts, write_parts

SMALL = ["batch.seq_len=8", "batch.size=4", "batch.micro_size=1", "mesh=pp=2"]


def test_the_parts_of_a_model_are_timed_and_a_job_can_be_cut_by_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "parts.json"
    assert main(["measure", "tiny", *SMALL, "zero=3", "--parts", str(file)]) == 0
    out = capsys.readouterr().out
    assert f"written to {file}" in out and "by counted work:     embed to layers.3 | " in out and "by measured seconds: embed to " in out
    parts = read_parts(str(file))
    assert list(parts) == ["embed", *(f"layers.{i}" for i in range(8)), "norm", "head"]
    assert all(part.seconds > 0 for name, part in parts.items())
    job = Job.load("tiny", **{"mesh": "pp=2", "batch.micro_size": 1, "batch.seq_len": 8, "pipeline.measured": str(file)})
    check_pipeline(job.resolve(2, "cpu", 0))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["measure", "tiny"], "measure tiny would time the machine, which is the same for any job; leave it out, or add --parts FILE"),
        (["measure", "tiny", "--parts", "nowhere/parts.json"], "there is no folder nowhere"),
        (["measure", "tiny", "--parts", "taken.json"], 'pipeline.measured="taken.json" cannot be read'),
        (["train", "tiny", "mesh=pp=2", "pipeline.measured=taken.json"], "cannot be read"),
        (
            ["train", "tiny", "mesh=pp=2", "pipeline.measured=other.json"],
            "is of another model: it has h.0, and none of the blocks from layers.0",
        ),
    ],
)
def test_what_cannot_be_timed_or_cut_by_is_refused_before_any_rank(words, says, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken.json").write_text(json.dumps({"mine": 1}))
    write_parts(Path("other.json"), {"h.0": PartTime(1.0)}, {})
    assert main(words) == 2
    assert says in capsys.readouterr().err
    assert json.loads(Path("taken.json").read_text()) == {"mine": 1}


def test_what_was_measured_stands_beside_what_is_counted() -> None:
    items = [Item("embed", 0, False, 8, 8.0), *(Item(f"layers.{i}", 30, True, 8, 16.0) for i in range(2)), Item("head", 40, False, 8, 4.0)]
    parts = {"embed": PartTime(0.001, 8.0), "layers.0": PartTime(0.02), "layers.1": PartTime(0.02), "head": PartTime(0.059, 5.0)}
    job = Job.load("tiny", **{"mesh": "dp=1", "batch.micro_size": 2}).resolve(1, "cpu", 0)
    lines = table(job, items, parts, Path("parts.json"), shortened=False).splitlines()
    assert lines[0] == "tiny: 2 rows of 64 tokens, forward and back, on one cpu"
    assert [line.split() for line in lines[3:7]] == [
        ["embed", "1.00", "1.0%", "0.0%", "8", "8"],
        ["layers.0", "20.00", "20.0%", "30.0%", "-", "16"],
        ["layers.1", "20.00", "20.0%", "30.0%", "-", "16"],
        ["head", "59.00", "59.0%", "40.0%", "5", "4"],
    ]
