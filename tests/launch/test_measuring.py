"""`stretto measure`: a table for people, an object for programs, a file for plan; a wrong request costs no minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stretto.cli import main
from stretto.launch import measuring
from stretto.plan.measured import Copy, DeviceFacts, LinkTime, Measured, Product

DEVICE = DeviceFacts(
    "Some CPU", "cpu", 2, 1, 2, 2**34, 1.5e-6, (Product("fp32", 8, 16, 4, 1e-6), Product("bf16", 8, 16, 4, 5e-7)), (Copy(2**18, 1e-5),)
)
LINKS = (
    LinkTime("gloo", 2, "all_reduce", 4096, True, 5e-4),
    LinkTime("shm", 2, "all_reduce", 4096, True, 1e-5),
    LinkTime("shm", 2, "all_reduce", 4096, False, 8e-6),
    LinkTime("gloo", 2, "all_reduce", 2**20, True, 1.4e-3),
    LinkTime("gloo", 2, "all_gather", 2**22, True, 4e-3),
    LinkTime("gloo", 4, "send", 2**27, True, 2.0),
)


@pytest.mark.usefixtures("warm_ranks")
def test_two_ranks_are_measured_and_the_file_is_read_as_the_object_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "QUICK", (4096,))
    monkeypatch.setattr(measuring, "QUICK_SHAPES", ((64, 64, 64),))
    out = tmp_path / "here.toml"
    assert main(["measure", "--quick", "--ranks", "2", "--out", str(out), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert found["file"] == str(out) and found["device"]["kind"] == "cpu" and len(found["device"]["products"]) == 3
    links = {(one["transport"], one["collective"], one["private"]) for one in found["links"]}
    assert {
        ("gloo", "all_reduce", True),
        ("messages", "send", True),
        ("shm", "all_reduce", True),
        ("shm", "all_reduce", False),
        ("shm", "send", True),
    } <= links
    assert all(one["ranks"] == 2 and one["bytes"] == 4096 and one["seconds"] > 0 and one["busbw"] > 0 for one in found["links"])
    assert "2 ranks: all_reduce of 4 KiB over gloo" in said.err
    measured = Measured.read(out)
    assert len(measured.links) == len(found["links"]) and measured.device.name == found["device"]["name"]
    assert [path.name for path in tmp_path.iterdir()] == ["here.toml"]


def test_the_table_shows_times_beside_each_other() -> None:
    lines = measuring.table(Measured(DEVICE, LINKS)).splitlines()
    assert lines[0] == "Some CPU: 2 cores, 17.2 GB; 2 ranks at once, 1 thread each"
    assert lines[1] == "an operation on one number takes 1.5 us; copies 256 KiB 26.2 GB/s"
    words = [line.split() for line in lines]
    assert ["8", "x", "16", "x", "4", "1.02G", "2.05G"] in words
    at = words.index(["all_reduce,", "2", "ranks", "gloo", "shm", "shm,", "in", "place"])
    rates = ["8.19", "MB"] * 2, ["410", "MB"] * 2, ["512", "MB"] * 2  # of two ranks an all-reduce sends what it has
    assert words[at + 1] == ["4", "KiB", "500", "us", *rates[0], "10", "us", *rates[1], "8", "us", *rates[2]]
    assert words[at + 2] == ["1", "MiB", "1.4", "ms", "749", "MB", "749", "MB"]
    assert ["4", "MiB", "4", "ms", "1.05", "GB", "524", "MB"] in words  # an all-gather a half
    assert ["128", "MiB", "2", "s", "67.1", "MB", "67.1", "MB"] in words
    assert "gloo: torch.distributed's own collectives over gloo, what other frameworks have" in lines
    assert any(line.startswith("  send, 4 ranks, gloo") and line.endswith(" 0%") for line in lines)
    assert max(map(len, lines)) <= 120


WRONG = {
    "--ranks two": "--ranks two is no number of ranks; write --ranks 2",
    "--ranks 0": "--ranks 0 is not possible; write --ranks 2",
    "--ranks 2,": "write --ranks 2, or --ranks 2,4",
    "--out nowhere/a.toml": "--out nowhere/a.toml cannot be written; write --out FILE.toml",
    "--out .": "--out . cannot be written",
    "--out notes.toml": "--out notes.toml holds something else than an earlier measurement; write another",
    "--rank 2": "write --ranks",
    "tiny": "leave it out, or add --parts FILE",
}


@pytest.mark.parametrize(("words", "says"), WRONG.items())
def test_a_wrong_request_is_refused_before_anything_is_timed(
    words: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.toml").write_text("mine = true\n")
    assert main(["measure", *words.split()]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and says in said.err, said.err
    assert (tmp_path / "notes.toml").read_text() == "mine = true\n" and len(list(tmp_path.iterdir())) == 1


def test_an_earlier_measurement_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    measuring.check_replaceable(path)
    path.write_text(Measured(DEVICE, LINKS).text(), encoding="utf-8")
    measuring.check_replaceable(path)


def test_sizes_that_memory_has_no_room_for_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "_free_memory", lambda: 2**30)
    said: list[str] = []
    plan = measuring._plan(2, quick=False, device=False, tell=said.append)
    assert plan.sizes == tuple(size for size in measuring.FINE if size * 2 * measuring.BUFFERS < 2**29)
    assert said == ["2 ranks: buffers of 64 MiB and more are left out, memory is too small for them"]
