"""The picture of a mesh: every rank, and with each axis the colours of its groups."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from stretto.cli import main
from stretto.draw.mesh import crossing, groups, mesh_picture
from stretto.layout.mesh import Mesh

SVG = "{http://www.w3.org/2000/svg}"


def test_ranks_of_one_colour_differ_along_the_axis_alone() -> None:
    mesh = Mesh.of(pp=2, dp=2, tp=2)  # eight groups in all, so no colour is used twice in a panel
    cells = [cell for cell in ET.fromstring(mesh_picture(mesh, 4)).iter(f"{SVG}rect") if cell.get("fill")]
    panels = [cells[i : i + mesh.size] for i in range(0, len(cells), mesh.size)]
    assert len(panels) == 3
    for axis, panel in zip(("pp", "dp", "tp"), panels, strict=True):
        colours = [cell.get("fill") for cell in panel]
        for a, b in itertools.combinations(range(mesh.size), 2):
            here, there = mesh.at(a), mesh.at(b)
            alike = all(here[name] == there[name] for name in here if name != axis)
            assert (colours[a] == colours[b]) is alike


def test_groups_along_an_axis_hold_every_rank_once() -> None:
    mesh = Mesh.of(pp=3, dp=2, tp=4)
    for axis in ("pp", "dp", "tp"):
        assert sorted(rank for group in groups(mesh, axis) for rank in group) == list(range(24))


@pytest.mark.parametrize(
    ("axis", "per_node", "words"),
    [("tp", 8, "inside a node"), ("pp", 8, "across nodes"), ("tp", 2, "across nodes"), ("dp", 12, "some of them across nodes")],
)
def test_whether_an_axis_leaves_a_node_is_said(axis: str, per_node: int, words: str) -> None:
    assert crossing(Mesh.of(pp=2, dp=2, tp=4), axis, per_node) == words


def test_a_mesh_of_thousands_shows_its_first_nodes(tmp_path: Path) -> None:
    out = tmp_path / "m.svg"
    assert main(["draw", "mesh", "llama3-405b", "--out", str(out)]) == 0
    text = out.read_text()
    assert "the first 16 of 2048 nodes" in text and len(re.findall('class="node"', text)) == 3 * 16
    assert "tp=8: pieces of each weight matrix" in text and "2048 groups of 8, inside a node" in text


WRONG = [(["--per-node", "0"], "--per-node 8"), (["mesh=dp=auto"], "dp=auto needs a known number"), (["--out", "m.png"], "m.html")]


@pytest.mark.parametrize(("words", "says"), WRONG)
def test_a_wrong_request_is_one_line(words: list[str], says: str, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["draw", "mesh", "tiny", *words]) == 2
    said = capsys.readouterr()
    assert says in said.err and said.err.count("\n") == 1 and not list(tmp_path.iterdir())
