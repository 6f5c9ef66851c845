"""Timelines, measured by a given clock or foretold from a schedule."""

from __future__ import annotations

import json
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import JobError
from stretto.schedule.action import KINDS, LANE_OF, Action, Schedule
from stretto.schedule.pipelines import pipeline
from stretto.schedule.step import training_step
from stretto.schedule.timeline import Span, Timeline, chrome_trace, makespan, read_chrome_trace, simulate

SECONDS = {"F": 1.0, "B": 2.0}


def gpipe(stages: int, microbatches: int, messages: bool = False) -> Schedule:
    """All forwards, then all backwards, of one stage a rank."""
    orders = []
    for stage in range(stages):
        order = []
        for m in range(microbatches):
            order += [Action("RECV_F", stage, m)] if messages and stage else []
            order += [Action("F", stage, m)]
            order += [Action("SEND_F", stage, m)] if messages and stage < stages - 1 else []
        for m in range(microbatches):
            order += [Action("RECV_B", stage, m)] if messages and stage < stages - 1 else []
            order += [Action("B", stage, m)]
            order += [Action("SEND_B", stage, m)] if messages and stage else []
        orders.append(tuple(order))
    return Schedule("gpipe", stages, microbatches, tuple(range(stages)), tuple(orders))


def test_a_span_is_measured_by_the_given_clock_even_if_the_action_fails() -> None:
    ticks = count(10.0, 0.5)
    timeline = Timeline(rank=3, now=lambda: next(ticks))
    with timeline.span(Action("F", 0, 0)):
        pass
    with pytest.raises(ZeroDivisionError), timeline.span(Action("B", 0, 0)):
        1 / 0  # noqa: B018
    assert timeline.spans == [Span(3, Action("F", 0, 0), 10.0, 10.5), Span(3, Action("B", 0, 0), 11.0, 11.5)]
    assert timeline.seconds == 1.5
    assert (timeline.busy(3), timeline.busy(0)) == (1.0, 0.0)


def test_what_an_action_waits_for_is_not_its_own_time() -> None:
    ticks = count(10.0, 0.5)
    timeline = Timeline(rank=1, now=lambda: next(ticks))
    with timeline.span(Action("F", 1, 0)):
        timeline.arrived()
    assert timeline.spans == [Span(1, Action("F", 1, 0), 10.5, 11.0)]


def test_an_empty_timeline_takes_no_time() -> None:
    assert (Timeline().seconds, Timeline().busy(0)) == (0.0, 0.0)
    assert json.loads(chrome_trace({}))["traceEvents"] == json.loads(chrome_trace({3: Timeline()}))["traceEvents"] == []


def test_a_chrome_trace_has_a_row_a_rank_with_its_steps_and_below_them_their_actions() -> None:
    first = Timeline(spans=[Span(0, Action("F", 0, 1), 5.0, 5.25), Span(0, Action("B", 0, 1), 5.5, 6.0)])
    second = Timeline(spans=[Span(1, Action("VOTE", 1), 6.5, 7.0), Span(0, Action("F", 0, 0), 6.0, 6.25)])
    events = json.loads(chrome_trace({11: second, 10: first}))["traceEvents"]
    assert [(e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"] == [(0, "rank 0"), (1, "rank 1")]
    assert [(e["name"], e["cat"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("step 10", "step", 0, 0.0, 1_000_000.0),
        ("0F1", "F", 0, 0.0, 250_000.0),
        ("0B1", "B", 0, 500_000.0, 500_000.0),
        ("step 11", "step", 0, 1_000_000.0, 250_000.0),
        ("0F0", "F", 0, 1_000_000.0, 250_000.0),
        ("step 11", "step", 1, 1_500_000.0, 500_000.0),
        ("1VOTE", "VOTE", 1, 1_500_000.0, 500_000.0),
    ]


@settings(max_examples=30)
@given(st.integers(1, 6), st.data())
def test_one_stage_takes_the_sum_of_its_actions(microbatches: int, data: st.DataObject) -> None:
    schedule = training_step(pipeline("1f1b", 1, microbatches))
    seconds = {action: float(data.draw(st.integers(0, 9))) for action in schedule.order[0]}
    timeline = simulate(schedule, seconds.__getitem__)
    assert timeline.seconds == sum(seconds.values())
    assert timeline.bubble(0) == seconds[Action("REDUCE", 0)]
    assert [span.action for span in timeline.spans] == list(schedule.order[0])


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (4, 8), (8, 2)])
def test_gpipe_takes_three_times_microbatches_and_stages_less_one(stages: int, microbatches: int, messages: bool) -> None:
    timeline = simulate(gpipe(stages, microbatches, messages), lambda action: SECONDS.get(action.kind, 0.0))
    assert timeline.seconds == 3 * (microbatches + stages - 1)  # F=1, B=2, messages in no time
    assert {timeline.busy(rank) for rank in range(stages)} == {3 * microbatches}


def test_messages_that_take_time_delay_the_neighbour_and_not_their_own_rank() -> None:
    timeline = simulate(gpipe(2, 2, messages=True), lambda action: SECONDS.get(action.kind, 0.25))
    stops = {str(span.action): span.stop for span in timeline.spans}
    assert stops == {
        "0F0": 1.0, "0SEND_F0": 1.25, "1RECV_F0": 1.25, "0F1": 2.0, "1F0": 2.25, "0SEND_F1": 2.5, "1RECV_F1": 2.5, "1F1": 3.5,
        "1B0": 5.5, "1SEND_B0": 5.75, "0RECV_B0": 5.75, "1B1": 7.5, "0B0": 7.75, "1SEND_B1": 8.0, "0RECV_B1": 8.0, "0B1": 10.0,
    }  # fmt: skip
    assert (timeline.busy(0), timeline.bubble(0)) == (6.0, 4.0)


def test_a_message_takes_the_longer_of_its_two_ends() -> None:
    costs = {"SEND_F": 0.5, "RECV_F": 2.0}
    timeline = simulate(gpipe(2, 1, messages=True), lambda action: costs.get(action.kind, 1.0 if action.kind == "F" else 0.0))
    assert [span[2:] for span in timeline.spans if span.action.kind in costs] == [(1.0, 3.0), (1.0, 3.0)]


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
def test_every_action_starts_as_soon_as_its_lane_and_its_needs_allow(
    stages: int, microbatches: int, messages: bool, data: st.DataObject
) -> None:
    schedule = gpipe(stages, microbatches, messages)
    costs = data.draw(st.lists(st.integers(0, 5), min_size=len(KINDS), max_size=len(KINDS)))
    timeline = simulate(schedule, lambda action: float(costs[KINDS.index(action.kind)]))
    spans = {span.action: span for span in timeline.spans}
    start: dict[Action, float] = {}
    for rank, order in enumerate(schedule.order):
        assert [span.action for span in timeline.spans if span.rank == rank] == list(order)
        computed = handed = 0.0
        for action in order:
            message = LANE_OF[action.kind] == "messages"
            sent = [spans[need].stop for need in schedule.needs(action) if not message or LANE_OF[need.kind] != "messages"]
            start[action] = max([computed, handed if message else 0.0, *sent])
            computed, handed = (computed, spans[action].stop) if message else (spans[action].stop, handed)
    for action, at in start.items():
        partners = [other for other in start if schedule.event(other) == schedule.event(action)]
        assert spans[action].start == max(start[partner] for partner in partners) >= at


def test_a_schedule_that_never_ends_is_not_simulated() -> None:
    schedule = Schedule("spoilt", 1, 1, (0,), ((Action("B", 0, 0), Action("F", 0, 0)),))
    with pytest.raises(JobError, match="rank 0 waits at 0B0 for 0F0; the circle"):
        simulate(schedule, lambda action: 1.0)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(KINDS), st.integers(0, 99), st.integers(0, 999)), min_size=1, max_size=9))
def test_a_chrome_trace_reads_back_as_the_timelines_it_was_written_from(drawn: list[tuple[int, str, int, int]]) -> None:
    spans = [Span(rank, Action(kind, rank, 0), start / 64, (start + length) / 64) for rank, kind, start, length in drawn]
    first, second = Timeline(spans=spans), Timeline(spans=[s._replace(start=s.start + 99, stop=s.stop + 99) for s in spans])
    read = read_chrome_trace(chrome_trace({7: first, 8: second}))
    origin = min(span.start for span in spans)
    for step, written in ((7, first), (8, second)):
        told = sorted((rank, action, start + origin, stop + origin) for rank, action, start, stop in read[step].spans)
        for mine, truth in zip(told, sorted(tuple(span) for span in written.spans), strict=True):
            assert mine[:2] == truth[:2]
            assert mine[2:] == pytest.approx(truth[2:])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "none"])
def test_a_makespan_by_numbers_is_that_of_the_simulation(name: str) -> None:
    """Every kind costs something else on every stage, messages too."""
    step = training_step(pipeline(name, 4, 9))
    costs = {(kind, stage): 0.1 + ((i * 7 + stage * 3) % 11) / 4 for i, kind in enumerate(KINDS) for stage in range(step.stages)}
    assert makespan(step, costs) == pytest.approx(simulate(step, lambda action: costs[action.kind, action.stage]).seconds, rel=1e-12)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_without_messages_a_result_is_under_way_as_long_as_is_said_and_never_waits_for_another(name: str) -> None:
    compute = pipeline(name, 4, 9)
    costs = {(kind, stage): 1.0 for kind in KINDS for stage in range(compute.stages)}
    step = {**costs, **{(kind, stage): 0.5 for kind in LANE_OF if "_" in kind for stage in range(compute.stages)}}
    free = makespan(compute, costs, 0.5)
    ends = {(kind, stage): 0.0 for kind in ("REDUCE", "VOTE", "UPDATE") for stage in range(compute.stages)}
    assert makespan(compute, costs) < free <= makespan(training_step(compute), {**step, **ends})
