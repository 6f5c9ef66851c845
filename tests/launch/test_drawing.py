"""A word after `stretto draw` makes one file, of the kind that its name ends in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.cli import main


def test_a_collective_is_drawn_as_a_picture_or_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, begins in (("ring.svg", "<svg "), ("ring.html", "<!doctype html>")):
        assert main(["draw", "collective", "--algorithm", "ring", "--ranks", "3", "--out", str(tmp_path / name)]) == 0
        assert capsys.readouterr().out == f"{tmp_path / name}\n"
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert text.startswith(begins) and "all_reduce on 3 ranks, ring" in text


def test_the_file_is_named_by_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--collective", "broadcast", "--algorithm", "tree", "--ranks", "5", "--root", "2", "--pieces", "3", "--json"]
    assert main(["draw", "collective", *words]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": "broadcast-tree-5.html"}
    assert [path.name for path in tmp_path.iterdir()] == ["broadcast-tree-5.html"]


def test_what_can_be_drawn_is_listed_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "--help"]) == 0
    out = capsys.readouterr().out
    for kind in ("schedule", "timeline", "collective"):
        assert f"\n  {kind} " in out and f"\n  stretto draw {kind} " in out


@pytest.mark.parametrize("words", [["--ranks", "100000000"], ["--algorithm", "tree", "--pieces", "100000000"]])
def test_what_nobody_could_read_is_refused_before_it_is_made(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "collective", *words]) == 2
    assert f"a picture of 100000000 {words[-2][2:]} cannot be read; write {words[-2]} " in capsys.readouterr().err
