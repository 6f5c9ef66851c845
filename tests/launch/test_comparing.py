"""`stretto compare` from the command line: a row for each runner, whatever becomes of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from stretto.adapters import catalog
from stretto.adapters.runner import Setting, Told
from stretto.adapters.summary import Effort, RankTurn
from stretto.cli import main
from stretto.data.batch import Batch
from stretto.job import Job
from stretto.launch import comparing

SMALL = ["model.blocks=2", "model.hidden=32", "model.ffn=48", "batch.size=4", "batch.seq_len=16", "mesh=dp=2", "device=cpu"]
SHORT = [*SMALL, "steps=4"]


def fails(setting: object) -> None:
    raise ValueError("nothing to build\nat all")


@pytest.mark.usefixtures("warm_ranks")
def test_rows_of_those_that_ran_that_could_not_that_are_absent_and_that_crashed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ddp = catalog.RUNNERS["ddp"]
    others = {
        "crashing": replace(ddp, name="crashing", build="test_comparing:fails"),
        "absent": replace(ddp, name="absent", package="no-such-package", extra="absent"),
        "unable": replace(ddp, name="unable", axes=("tp",)),
    }
    known = MappingProxyType({**catalog.RUNNERS, **others})
    monkeypatch.setattr(catalog, "RUNNERS", known)
    monkeypatch.setattr("sys.path", [str(Path(__file__).parent), *__import__("sys").path])
    out = tmp_path / "found"
    words = ["compare", "tiny", *SHORT, "--runners", "stretto,crashing,absent,unable,ddp", "--rounds", "1", "--out", str(out), "--json"]
    assert main(words) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    rows = {row["runner"]: row for row in found["rows"]}
    assert list(rows) == ["stretto", "crashing", "absent", "unable", "ddp"]
    assert {name: row["status"] for name, row in rows.items()} == {
        "stretto": "ok", "crashing": "failed", "absent": "not installed", "unable": "cannot", "ddp": "ok",
    }  # fmt: skip
    assert re.fullmatch(r"rank \d failed while building the model: ValueError: nothing to build ...", rows["crashing"]["why"])
    assert rows["absent"]["why"] == "no-such-package is not installed; pip install 'stretto[absent]'"
    assert rows["unable"]["why"] == 'mesh="dp=2": unable has no dp, but tp; write mesh="tp=2"'
    for name in ("stretto", "ddp"):
        row = rows[name]
        assert len(row["losses"]) == 4 and row["apart_at"] is None and row["apart_by"] < 1e-5
        assert row["tokens_per_second"] > 0 and row["peak_bytes"] > 0 and row["machine_bytes"] > 0 and row["startup_seconds"] > 0
    assert rows["stretto"]["sent_bytes"] == pytest.approx(rows["ddp"]["sent_bytes"], rel=0.01)
    assert json.loads((out / "compare.json").read_text()) == found
    page = (out / "compare.html").read_text()
    assert "nothing to build" in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "ValueError: nothing to build" in (out / "logs" / "crashing-1" / "rank-00000.log").read_text() + rows["crashing"]["why"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--runners", "ddq"], "write --runners ddp"),
        (["--rounds", "0"], "--rounds 0 is not possible; write --rounds 1 or more, or --rounds 0 with --cluster"),
        (["--cluster", "3 toasters"], "write"),
        (["--until", "0"], "write --until 1 or more"),
        (["mesh=dp=5"], "batch.size=12 cannot be shared evenly by dp=5"),
        (["--runner", "ddp"], "write --runners"),
    ],
)
def test_a_wrong_request_starts_nothing(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "tiny", *words]) == 2
    said = capsys.readouterr()
    assert said.out == "" and says in said.err and said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_table_shows_every_figure_and_every_reason(tmp_path: Path) -> None:
    from stretto.adapters.summary import Row
    from stretto.adapters.verdict import verdict

    ran = Row(
        "stretto", "1", "ok", "", ("a note",), 2000.0, (1900.0, 2100.0), 0.5, 1.0, (1.0, 1.0), 10**8, 3 * 10**8, 10**6, 2.5, (3.0, 2.0),
        (0.1, 0.1), None, 0.0, True,
    )  # fmt: skip
    rows = (ran, Row("other", None, "not installed", "pip install it"))
    found = comparing.Comparison("tiny", "dp=2", 2, 2, 5e-5, rows, tuple(verdict(rows, "dp=2", 5e-5, 9)), {}, str(tmp_path))
    lines = comparing.table(found).splitlines()
    assert lines[0] == "tiny on mesh dp=2: 2 steps, 2 rounds in turn"
    figures = "stretto 1 2k 1.9k-2.1k 1.000 100 MB 300 MB 1 MB 2.5 s 2.00000 no"
    assert " ".join(lines[3].split()) == figures
    assert "other: not installed: pip install it" in lines and "stretto: a note" in lines
    assert max(map(len, lines[:8])) <= 120


def turn(ranks: int, effort: Effort, seconds: float = 1.0) -> list[RankTurn]:
    """What ranks tell of steps that each last so long, after half a second of start."""
    began = time.monotonic() + 0.5
    ends = tuple(began + seconds * (step + 1) for step in range(effort.steps))
    return [RankTurn(began, ends, (1.0,) * effort.steps, (None,) * effort.steps, 8, 100, 50) for _ in range(ranks)]


@pytest.mark.parametrize("stop_at", [1, 2, 4])
def test_ctrl_c_keeps_what_was_measured(
    stop_at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()

    def run(function: object, ranks: int, args: tuple[str, Job, Effort], **_: object) -> list[RankTurn]:
        calls.append(args[0])
        if len(calls) == stop_at:
            raise KeyboardInterrupt
        return turn(ranks, args[2])

    monkeypatch.setattr(comparing, "run_local", run)
    words = ["compare", "tiny", *SHORT, "--runners", "stretto,ddp", "--rounds", "3", "--out", str(tmp_path), "--json"]
    assert main(words) == 1
    said = capsys.readouterr()
    if stop_at == 1:
        assert said.out == "" and "stopped at once" in said.err and not (tmp_path / "compare.json").exists()
        return
    found = json.loads(said.out)
    assert [row["status"] for row in found["rows"]] == ["ok", "not run" if stop_at == 2 else "ok"]
    assert found["verdict"][-1] == "It was stopped: what stands here is of the turns before."
    assert json.loads((tmp_path / "compare.json").read_text()) == found
    assert found["rows"][0]["ratio"] == 1.0


def test_rounds_take_turns_and_end_with_the_minutes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[tuple[str, int]]()

    def run(function: object, ranks: int, args: tuple[str, Job, Effort], **_: object) -> list[RankTurn]:
        calls.append((args[0].split(".")[2].split(":")[0], args[2].steps))
        return turn(ranks, args[2], seconds=2.0)

    monkeypatch.setattr(comparing, "run_local", run)
    to = ["--out", str(tmp_path), "--json", "--minutes"]
    ask = ["compare", "tiny", *SMALL, "steps=20", "--runners", "stretto,ddp", "--rounds", "3", *to]
    for minutes, expected, rounds in (("10", [20, 20, 12, 12, 12, 12], 3), ("0.6", [20, 20, 8, 8, 8, 8], 3), ("0.2", [20, 20], 1)):
        calls.clear()
        assert main([*ask, minutes]) == 0
        assert [steps for _, steps in calls] == expected and [name for name, _ in calls] == ["own", "ddp"] * rounds
        found = json.loads(capsys.readouterr().out)
        assert found["rounds"] == rounds
        assert any("rounds: another would have taken longer" in line for line in found["verdict"]) is (rounds < 3)


def test_a_rank_that_is_killed_is_a_row_that_says_so_and_the_rest_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = replace(catalog.RUNNERS["ddp"], name="dying", build="test_comparing:dies_in_its_second_step")
    monkeypatch.setattr(catalog, "RUNNERS", MappingProxyType({**catalog.RUNNERS, "dying": dying}))
    monkeypatch.setattr("sys.path", [str(Path(__file__).parent), *__import__("sys").path])
    words = ["compare", "tiny", *SHORT, "--runners", "dying,ddp", "--rounds", "1", "--out", str(tmp_path / "found"), "--json"]
    assert main(words) == 0
    dead, alive = json.loads(capsys.readouterr().out)["rows"]
    assert dead["status"] == "failed"
    assert dead["why"].startswith("rank 1 failed at step 2, in the framework's step: killed by signal 9 (SIGKILL)")
    assert alive["status"] == "ok" and alive["ratio"] == 1.0


def dies_in_its_second_step(setting: Setting) -> object:
    from stretto.adapters.ddp import build

    made = build(setting)
    whole_step = made.step

    def step(batch: Batch) -> Told:
        if made.done == 1 and setting.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole_step(batch)

    made.step = step  # type: ignore[method-assign]
    return made


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    marked = {**os.environ, "STRETTO_TEST_MARK": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = ["compare", "tiny", *SMALL, "steps=100000", "--until", "100000", "--runners", "ddp", "--out", str(tmp_path / "found")]
    asked = subprocess.Popen(
        [sys.executable, "-m", "stretto", *words], env=marked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: len(carrying(str(tmp_path))) > 2)  # its ranks have started
        asked.send_signal(signal.SIGINT)
        out, err = asked.communicate(timeout=30)
    finally:
        asked.kill()
    assert asked.returncode == 1 and err.rstrip().endswith("stretto: stopped at once; every rank is gone"), err
    until(lambda: carrying(str(tmp_path)) == [])


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.1)


def carrying(mark: str) -> list[int]:
    """Processes whose environment carries a mark."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if f"STRETTO_TEST_MARK={mark}".encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
    return found


def test_with_a_cluster_and_no_rounds_nothing_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "llama3-8b", "--cluster", "1x8 h100", "--rounds", "0", "--runners", "stretto,ddp", "--out", str(tmp_path)]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "foretold for 1x8 h100" in said and "ddp: does not fit: needs at least" in said
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == [] and [row["runner"] for row in found["foretold"]] == ["stretto", "ddp"]
    page = (tmp_path / "compare.html").read_text()
    assert "Foretold for 1x8 h100" in page and "does not fit" in page


def test_a_mesh_of_this_machine_is_not_asked_of_the_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "gpt2-small", "--cluster", "1x8 h100", "--rounds", "0", "--runners", "stretto", "--out", str(tmp_path), "--json"]
    assert main(["compare", "gpt2-small", "mesh=dp=2", *words[2:]]) == 0
    assert json.loads(capsys.readouterr().out)["foretold"][0]["mesh"] != "dp=2"
    assert main(["compare", "gpt2-small", "mesh=pp=2 dp=4", *words[2:]]) == 0
    assert json.loads(capsys.readouterr().out)["foretold"][0]["mesh"] == "pp=2 dp=4"
