"""The picture of a timeline: every computation a box, as long as it took."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from stretto.draw.timeline import LEFT, RIGHT, WIDTH, picture, rows_of
from stretto.schedule.action import Action, Schedule
from stretto.schedule.pipelines import PIPELINES, pipeline
from stretto.schedule.step import training_step, unit_cost
from stretto.schedule.timeline import Span, Timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"


def drawn(timeline: Timeline, schedule: Schedule, until: float = 0.0) -> ET.Element:
    return ET.fromstring(picture(rows_of(timeline), schedule, title="a & b", unit="s", show=lambda at: f"{at:g}", until=until))


def boxes(svg: ET.Element) -> dict[str, ET.Element]:
    """The boxes by the action that their tip names."""
    return {r[0].text.partition(":")[0]: r for r in svg.iter(f"{SVG}rect") if "box" in r.get("class", "") and len(r)}


@pytest.mark.parametrize("name", PIPELINES)
def test_every_computation_is_a_box_where_it_stands_in_time(name: str) -> None:
    schedule = training_step(pipeline(name, 3, 6))
    timeline = simulate(schedule, unit_cost)
    found = boxes(drawn(timeline, schedule))
    computed = {str(span.action): span for span in timeline.spans if span.action.kind in "FBIW"}
    assert found.keys() == computed.keys()
    left, scale = float(found["0F0"].get("x")), (WIDTH - LEFT - RIGHT) / timeline.seconds  # the step fills the room
    for action, span in computed.items():
        assert float(found[action].get("x")) == pytest.approx(left + span.start * scale, abs=0.02)
        assert float(found[action].get("width")) == pytest.approx((span.stop - span.start) * scale, abs=0.02)
        assert found[action].get("data-m") == str(span.action.microbatch)


def test_each_row_tells_how_busy_its_rank_is_and_what_it_holds() -> None:
    schedule = training_step(pipeline("1f1b", 4, 8))
    texts = [text.text for text in drawn(simulate(schedule, unit_cost), schedule).iter(f"{SVG}text")]
    assert [t for t in texts if "busy" in str(t)] == ["73% busy"] * 4  # 24 of 33
    assert [t for t in texts if "at most" in str(t)] == [f"at most {n} held" for n in (4, 3, 2, 1)]


def test_stages_of_one_rank_differ_in_shade() -> None:
    schedule = training_step(pipeline("interleaved", 2, 4))
    found = boxes(drawn(simulate(schedule, unit_cost), schedule))
    assert [found[action].get("class") for action in ("0F0", "2F0", "1B0", "3B0")] == ["box F0", "box F1", "box B0", "box B1"]


def test_two_pictures_can_have_one_scale() -> None:
    schedule = training_step(pipeline("1f1b", 1, 2))
    short = Timeline(spans=[Span(0, Action("F", 0, 0), 100.0, 101.0)])
    (box,) = boxes(drawn(short, schedule, until=4.0)).values()
    (whole,) = boxes(drawn(short, schedule)).values()
    assert float(box.get("width")) == pytest.approx(float(whole.get("width")) / 4, abs=0.02)
    assert float(whole.get("x")) + float(whole.get("width")) < WIDTH


def test_an_empty_timeline_is_a_picture_too() -> None:
    assert boxes(drawn(Timeline(), training_step(pipeline("1f1b", 1, 1)))) == {}
