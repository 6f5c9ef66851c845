"""`stretto compare` from the command line: a row for each runner, whatever becomes of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from stretto.adapters import catalog
from stretto.cli import main
from stretto.launch import comparing

SMALL = ["model.blocks=2", "model.hidden=32", "model.ffn=48", "batch.size=4", "batch.seq_len=16", "steps=4", "mesh=dp=2", "device=cpu"]


def fails(setting: object) -> None:
    raise ValueError("nothing to build\nat all")


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
    words = ["compare", "tiny", *SMALL, "--runners", "stretto,crashing,absent,unable,ddp", "--rounds", "1", "--out", str(out), "--json"]
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
        (["--rounds", "0"], "--rounds 0 is not possible; write --rounds 1"),
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
