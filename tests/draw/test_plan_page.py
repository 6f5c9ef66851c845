"""A plan as a picture: bars as long as their bytes, a step as long as foretold, and a frontier through its layouts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from stretto.cli import main
from stretto.draw import foretold
from stretto.draw.foretold import drawn_microbatches, foretold_picture, seconds_bars
from stretto.draw.frontier import frontier_picture, growth_picture
from stretto.draw.memory import BAR, LEFT, memory_picture, shown
from stretto.job import Job
from stretto.plan.asking import ask
from stretto.plan.frontier import frontier
from stretto.plan.grown import grow
from stretto.plan.hardware import Cluster
from stretto.plan.view import KINDS, View, view

JOB, CLUSTER = Job.load("llama3-8b"), Cluster.of("2x8 h100")


def seen(mesh: str, cluster: Cluster = CLUSTER, job: Job = JOB, **keys: object) -> View:
    return view(ask(job.with_(mesh=mesh, **keys), cluster, {"mesh"}))


def test_a_bar_is_as_long_as_its_bytes() -> None:
    one = seen("pp=4 dp=2 tp=2", zero=1)
    svg = memory_picture(one)
    found = re.findall(r'<rect class="(\w+)" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="22"><title>', svg)
    free = {float(width) for width in re.findall(rf'<rect class="free" x="{LEFT}" y="\d+" width="([\d.]+)" height="{BAR}"', svg)}
    assert len(free) == 1
    scale = free.pop() / CLUSTER.device.memory  # pixels a byte
    held = [(kind, getattr(memory, kind)) for memory in one.memory for kind in KINDS if getattr(memory, kind)]
    assert [(kind, float(width)) for kind, _, _, width in found] == [(kind, pytest.approx(scale * held, abs=0.1)) for kind, held in held]
    for y in {y for _, _, y, _ in found}:  # each begins where the one before it ends
        mine = [(float(x), float(width)) for _, x, row, width in found if row == y]
        assert [x for x, _ in mine] == [pytest.approx(LEFT + sum(width for _, width in mine[:i]), abs=0.1) for i in range(len(mine))]
    assert ">usable 76 GB<" in svg and ">device 80 GB<" in svg and 'class="over"' not in svg
    assert 'class="over"' in memory_picture(seen("dp=16", zero=1, recompute="none"))


def test_of_many_ranks_some_are_shown_the_ends_and_the_fullest_among_them() -> None:
    assert shown(4, 16) == [0, 1, 2, 3]
    some = shown(128, 16, 5)
    assert {0, 5, 127} <= set(some) and len(some) == 17


@pytest.mark.parametrize(("mesh", "keys"), [("dp=16", {}), ("pp=4 dp=4", {}), ("pp=4 dp=4", {"pipeline": "zb-h1"})])
def test_a_short_step_is_drawn_whole_and_ends_when_it_is_foretold_to(mesh: str, keys: dict[str, object]) -> None:
    one = seen(mesh, **keys)
    svg, note = foretold_picture(one.predictor)
    timeline, setting = one.predictor.timeline(), one.row.plan.setting
    computed = [span for span in timeline.spans if span.action.kind in "FBIW"]
    assert note == "" and len(re.findall(r'class="box \w\d" data-m=', svg)) == len(computed)
    last = max(span.stop for span in computed if span.rank == 0)
    tips = re.findall(r"<title>(\d+)[BIW](\d+): [^,]*, ([\d.]+) to ([\d.]+)</title>", svg)
    factor = 1e3 if timeline.seconds < 1 else 1.0
    assert max(float(stop) for stage, _, _, stop in tips if stage == "0") == pytest.approx(factor * last, rel=1e-3)
    assert len({m for _, m, _, _ in tips}) == setting.microbatches


def test_of_a_long_step_rounds_of_the_middle_are_left_out_and_that_is_said() -> None:
    one = seen("pp=16 dp=1", **{"batch.size": 512})
    drawn, note = drawn_microbatches(one.predictor), foretold_picture(one.predictor).note
    assert drawn < 512 and (512 - drawn) % 16 == 0 and 2 * drawn <= foretold.MOST_BOXES
    assert (
        note == f"drawn with {drawn} of 512 microbatches: those in the middle repeat, and make it fuller; 12 of 16 pipeline ranks are drawn"
    )


def test_gradients_that_meet_are_drawn_while_they_do() -> None:
    assert "gradients meet" in foretold_picture(seen("dp=16", zero=1).predictor).svg
    assert "gradients meet" not in foretold_picture(seen("tp=16", zero=1).predictor).svg


def test_shares_of_a_step_are_of_the_whole() -> None:
    one = seen("pp=4 dp=4")
    shares = [float(text) for text in re.findall(r"<b>([\d.]+)%</b>", seconds_bars(one))]
    assert sum(shares) == pytest.approx(100, abs=2)
    assert shares == sorted(shares, reverse=True)


def test_a_frontier_goes_through_its_layouts() -> None:
    points = frontier(JOB.with_(**{"batch.size": 32}), CLUSTER)
    svg = frontier_picture(points, CLUSTER.device.memory, points[2])
    dots = re.findall(r'<circle class="(\w+)" cx="([\d.]+)" cy="([\d.]+)"', svg)
    assert [style for style, _, _ in dots] == ["dot"] * len(points) + ["here"]
    assert dots[2][1:] == dots[-1][1:]
    xs, ys = [float(x) for _, x, _ in dots[:-1]], [float(y) for _, _, y in dots[:-1]]
    assert xs == sorted(xs, reverse=True) and ys == sorted(ys)  # less memory to the left, fewer tokens lower down
    line = re.search(r'<polyline class="line" points="([^"]*)"', svg)
    assert line and {f"{x},{y}" for _, x, y in dots} <= set(line[1].split())


def test_growth_has_a_point_for_what_fits_and_the_line_it_would_be_without_losses() -> None:
    grown = grow(JOB.with_(**{"batch.size": 32}), CLUSTER, [1, 8, 16, 32], 2.0, None)
    svg = growth_picture(grown)
    assert grown[0].row is None and svg.count("<circle") == 3 and 'class="ideal"' in svg
    assert all(f"{one.cost:,.0f}<" in svg for one in grown if one.cost)
    assert "nothing fits" in growth_picture(grown[:1])


def test_draw_plan_writes_a_page_with_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.html"
    assert main(["draw", "plan", "llama3-8b", "batch.size=32", "--cluster", "1x8 h100", "--gpus", "8,16", "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(out)}
    page = out.read_text()
    assert all(f'<svg xmlns="http://www.w3.org/2000/svg" class="{name}"' in page for name in ("memory", "pipe"))
    assert page.count('class="frontier"') == 2 and "The best that runs is number" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_one_part_is_a_picture_alone(tmp_path: Path) -> None:
    words = ["draw", "plan", "llama3-8b", "mesh=pp=2 dp=4", "zero=1", "--cluster", "1x8 h100"]
    assert main([*words, "--part", "memory", "--out", str(tmp_path / "m.svg")]) == 0
    assert (tmp_path / "m.svg").read_text().startswith('<svg xmlns="http://www.w3.org/2000/svg" class="memory"')
    assert main([*words, "--part", "timeline", "--out", str(tmp_path / "t.html")]) == 0
    page = (tmp_path / "t.html").read_text()
    assert 'class="pipe"' in page and 'class="memory"' not in page


def test_draw_memory_is_of_the_job_as_it_is_written_whether_it_fits_or_not(tmp_path: Path) -> None:
    words = ["draw", "memory", "llama3-8b", "mesh=dp=16", "zero=1", "recompute=none", "--cluster", "2x8 h100", "--out"]
    one = seen("dp=16", zero=1, recompute="none")
    assert main([*words, str(tmp_path / "m.svg")]) == 0 and (tmp_path / "m.svg").read_text() == memory_picture(one)
    assert main([*words, str(tmp_path / "m.html")]) == 0
    page = (tmp_path / "m.html").read_text()
    assert one.over and f"dp=16 on 2x8 h100 does not fit: {one.over}" in page and memory_picture(one) in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["memory", "llama3-8b"], "draw memory needs to know of which devices"),
        (["memory", "llama3-8b", "--cluster", "2x8 h100"], "is of 8 ranks, and the cluster has 16 devices"),
    ],
)
def test_memory_that_cannot_be_drawn_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", *words]) == 2
    out, err = capsys.readouterr()
    assert said in err and len(err.splitlines()) == 1 and not out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama3-8b"], 'write stretto draw plan llama3-8b --cluster "8x8 h100"'),
        (["llama3-8b", "--cluster", "8x8 h900"], "there is no device 'h900'"),
        (["tiny", "--cluster", "1x2 h100", "--part", "growth"], "growth needs --gpus 8,16,32"),
        (["tiny", "--cluster", "1x2 h100", "--out", "p.svg"], "a picture holds one part of a plan"),
        (["tiny", "--cluster", "1x2 h100", "--out", "p.png"], "what is drawn ends in .html or .svg"),
        (["llama3-70b", "--cluster", "1x1 h100"], "nothing fits"),
    ],
)
def test_what_cannot_be_drawn_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draw", "plan", *words]) == 2
    out, err = capsys.readouterr()
    assert said in err and len(err.splitlines()) == 1 and not out
