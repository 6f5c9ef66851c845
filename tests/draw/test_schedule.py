"""Pages about pipelines: a schedule foretold, and a run beside what was foretold of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stretto.draw.schedule import draw_schedule, draw_timeline, seconds_of, step_of
from stretto.errors import JobError
from stretto.job import Job
from stretto.schedule.action import Action
from stretto.schedule.step import unit_cost
from stretto.schedule.timeline import Span, Timeline, chrome_trace, read_chrome_trace, simulate

KEYS = {"batch.size": 8, "batch.micro_size": 1, "mesh": "pp=4"}


def cards(page: str) -> list[str]:
    return re.findall(r'<div class="card"><b>(.*?)</b>', page)


def table(page: str) -> dict[str, list[str]]:
    rows = re.findall(r"<tr[^>]*><td>(.*?)</td>(.*?)</tr>", page)
    return {name: re.findall(r"<td[^>]*>(.*?)</td>", cells) for name, cells in rows}


def test_a_page_tells_bubble_step_activations_and_messages(tmp_path: Path) -> None:
    page = draw_schedule(Job.load("tiny", pipeline="interleaved", **KEYS), tmp_path / "deep" / "s.html").read_text()
    # two stages a rank: 48 units of work, 9 of bubble; 11 of them held; 8 forwards and 8 backwards of each stage but the ends
    assert cards(page) == [f"{100 * 9 / 57:.1f}%", f"{57 / 48:.2f} x", "5.5", "32"]
    assert "interleaved: 4 pipeline ranks, 8 microbatches" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


def test_a_page_compares_all_known_schedules(tmp_path: Path) -> None:
    page = draw_schedule(Job.load("tiny", pipeline="1f1b", **KEYS), tmp_path / "s.html").read_text()
    rows = table(page)
    assert rows["1f1b"] == ["1", "27.3%", "1.38 x", "4", "16"]
    assert rows["zb-h1"] == ["1", "11.1%", "1.12 x", "4", "16"]
    assert rows["zb-v"][:3] == ["2", "5.9%", "1.06 x"]
    few = table(draw_schedule(Job.load("tiny", **KEYS | {"batch.size": 6}), tmp_path / "s.html").read_text())
    assert "needs at least 8 microbatches" in few["dualpipe-v"][0]


def test_a_schedule_of_ones_own_is_drawn_like_any(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1\n")
    job = Job.load("tiny", mesh="pp=2", pipeline=f"file:{tmp_path}/own.txt", **{"batch.size": 2, "batch.micro_size": 1})
    page = draw_schedule(job, tmp_path / "s.html").read_text()
    assert cards(page)[0] == f"{100 * 3 / 9:.1f}%"


def test_a_picture_alone_is_an_svg(tmp_path: Path) -> None:
    out = draw_schedule(Job.load("tiny", **KEYS), tmp_path / "s.svg")
    assert out.read_text().startswith("<svg xmlns=")


def test_a_trace_for_perfetto_is_what_was_foretold(tmp_path: Path) -> None:
    job = Job.load("tiny", pipeline="zb-h1", **KEYS)
    text = draw_schedule(job, tmp_path / "s.json").read_text()
    schedule = step_of(job.with_(mesh="pp=4"))
    spans = read_chrome_trace(text)[1].spans
    assert [(s.rank, s.action) for s in spans] == [(rank, action) for rank, order in enumerate(schedule.order) for action in order]
    assert max(span.stop for span in spans) == pytest.approx(simulate(schedule, unit_cost).seconds)


def test_another_ending_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"--out .*s.png: what is drawn ends in .html or .svg or .json; write --out s.html"):
        draw_schedule(Job.load("tiny", **KEYS), tmp_path / "s.png")
    assert not list(tmp_path.iterdir())


def test_a_schedule_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match='pipeline="zb-h2" on pp=4 needs at least 7 microbatches'):
        draw_schedule(Job.load("tiny", pipeline="zb-h2", **KEYS | {"batch.size": 4}), tmp_path / "s.html")


def run_folder(tmp_path: Path, job: Job, steps: dict[int, Timeline]) -> Path:
    folder = tmp_path / "runs" / "one"
    folder.mkdir(parents=True)
    (folder / "job.toml").write_text(job.to_toml())
    if steps:
        (folder / "timeline.json").write_text(chrome_trace(steps))
    return folder


def test_a_run_is_shown_as_measured_beside_what_its_own_seconds_foretell(tmp_path: Path) -> None:
    """A made-up run of 1f1b on two ranks, each action taking what `costs` says, but rank 1 one second late to everything."""
    job = Job.load("tiny", mesh="pp=2 dp=2", **{"batch.size": 8, "batch.micro_size": 2, "batch.seq_len": 8})
    schedule = step_of(job)
    costs = {"F": 1.0, "B": 2.0}
    foretold = simulate(schedule, lambda action: costs.get(action.kind, 0.0))
    assert foretold.seconds == 9.0
    late = [Span(2 * span.rank, span.action, span.start + span.rank, span.stop + span.rank) for span in foretold.spans]
    folder = run_folder(tmp_path, job, {2: Timeline(spans=late), 1: Timeline(spans=late[:1])})
    page = draw_timeline(folder, folder / "timeline.html").read_text()
    assert cards(page) == ["10 s", "9 s", "40.0%", f"{100 * 3 / 9:.1f}%"]
    assert "one, step 2: 1f1b on pp=2 dp=2" in page
    assert "measured is 1.11 x of it" in page
    assert ">rank 2<" in page
    assert "Only ranks" not in page
    assert page.count("<svg") == 2


def test_stages_that_were_not_timed_count_as_the_others(tmp_path: Path) -> None:
    job = Job.load("tiny", mesh="pp=2", **{"batch.size": 2, "batch.micro_size": 1})
    spans = [Span(0, Action("F", 0, 0), 0.0, 0.25), Span(0, Action("F", 0, 1), 0.25, 1.0), Span(0, Action("B", 0, 0), 1.0, 3.0)]
    seconds = seconds_of([Timeline(spans=spans)], step_of(job))
    assert [seconds(Action.parse(word)) for word in ("0F0", "1F1", "1B0", "0SEND_F0", "0VOTE")] == [0.5, 0.5, 2.0, 0.0, 0.0]
    folder = run_folder(tmp_path, job, {1: Timeline(spans=spans)})
    assert (
        "Only ranks [0] were timed; stages of others count as theirs. Write profile.ranks=[0, 1]"
        in draw_timeline(folder, folder / "t.html").read_text()
    )


def test_a_folder_without_a_timeline_says_how_to_get_one(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, Job.load("tiny", steps=2), {})
    with pytest.raises(JobError, match=r"has no timeline.json: none of its steps were timed; run it with profile.steps=\[2\]"):
        draw_timeline(folder, folder / "t.html")
    with pytest.raises(JobError, match="is no run folder"):
        draw_timeline(tmp_path, tmp_path / "t.html")
