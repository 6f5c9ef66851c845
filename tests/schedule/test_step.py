"""The whole step: where messages stand, when gradients are reduced, and that it ends under the strictest transport."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import JobError
from stretto.schedule.action import LANES, Action, Schedule
from stretto.schedule.pipelines import PIPELINES, microbatches_of, pipeline
from stretto.schedule.step import forward_step, training_step, unit_cost, with_messages
from stretto.schedule.timeline import simulate


def words(text: str) -> tuple[Action, ...]:
    return tuple(Action.parse(word) for word in text.split())


@st.composite
def computations(draw: st.DrawFn, most_ranks: int = 5) -> Schedule:
    """Any of the known schedules, of few ranks and microbatches."""
    name, p = draw(st.sampled_from(sorted(PIPELINES))), draw(st.integers(1, most_ranks))
    chunks = draw(st.integers(1, 3)) if PIPELINES[name].chunks is None else None
    return pipeline(name, p, microbatches_of(name, p, draw(st.integers(1, 9))), chunks)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_one_stage_takes_each_microbatch_forward_and_back_before_the_next(microbatches: int) -> None:
    schedule = training_step(pipeline("1f1b", 1, microbatches))
    assert str(schedule) == " ".join(f"0F{m} 0B{m}" for m in range(microbatches)) + " 0REDUCE 0VOTE 0UPDATE"
    assert (schedule.stages, schedule.ranks, schedule.microbatches) == (1, 1, microbatches)


def test_the_update_waits_for_the_vote_and_the_vote_for_every_backward() -> None:
    schedule = training_step(pipeline("1f1b", 1, 2))
    assert schedule.needs(Action("UPDATE", 0)) == (Action("VOTE", 0),)
    assert schedule.needs(Action("VOTE", 0)) == (Action("REDUCE", 0),)
    assert set(schedule.needs(Action("REDUCE", 0))) == {Action("B", 0, 0), Action("B", 0, 1)}


def test_a_step_of_two_stages_written_out() -> None:
    schedule = training_step(pipeline("1f1b", 2, 2))
    assert str(schedule).splitlines() == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE 0VOTE 0UPDATE",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE 1VOTE 1UPDATE",
    ]


@settings(max_examples=150, deadline=None)
@given(computations())
def test_messages_cost_no_time_of_their_own(compute: Schedule) -> None:
    step = training_step(compute)
    assert simulate(step, unit_cost).seconds == simulate(compute, unit_cost).seconds
    assert step.only("FBIW") == compute


@settings(max_examples=100, deadline=None)
@given(computations(), st.randoms(use_true_random=False), st.booleans())
def test_a_step_ends_whatever_an_action_really_takes(compute: Schedule, draw: random.Random, slow: bool) -> None:
    """Under the meeting rule, executed here by hand: each rank a host that goes on, and lanes that take one thing at a time."""
    step = training_step(compute)
    cost = {a: draw.random() * (10.0 if slow and a.kind in LANES["messages"] else 1.0) for order in step.order for a in order}
    timeline = simulate(step, cost.__getitem__)
    assert {span.action for span in timeline.spans} == set(cost)
    spans = {span.action: span for span in timeline.spans}
    for order in step.order:
        for kinds in LANES.values():
            for earlier, later in pairwise([action for action in order if action.kind in kinds]):
                assert spans[later].start >= spans[earlier].stop
    for action, span in spans.items():
        assert all(spans[need].stop <= span.start for need in step.needs(action) if step.event(need) != step.event(action))
        assert spans[action][2:] == spans[step.event(action)][2:]  # both ends of a message are under way at once


@settings(max_examples=60, deadline=None)
@given(computations())
def test_every_rank_pair_sends_in_the_order_in_which_the_other_receives(compute: Schedule) -> None:
    step = training_step(compute)
    for source in range(step.ranks):
        for target in range(step.ranks):
            sent = [a for a in step.order[source] if a.kind.startswith("SEND") and target == step.rank_of[neighbour(a)]]
            got = [step.event(a) for a in step.order[target] if a.kind.startswith("RECV") and step.rank_of[step.event(a).stage] == source]
            assert sent == got


def neighbour(send: Action) -> int:
    return send.stage + (1 if send.kind == "SEND_F" else -1)


def test_receives_just_before_their_use_deadlock_most_pipelines() -> None:
    """Why messages are placed in pairs: the obvious place is the wrong one."""
    for name in ("1f1b", "interleaved", "zb-h1"):
        compute = pipeline(name, 4, 8)
        orders = []
        for actions in with_messages(compute).order:
            order: list[Action] = []
            for action in actions:
                if action.kind in ("F", "B", "I"):
                    order += [a for a in actions if a.kind == f"RECV_{'F' if action.kind == 'F' else 'B'}" and a[1:] == action[1:]]
                order += [] if action.kind.startswith("RECV") else [action]
            orders.append(tuple(order))
        with pytest.raises(JobError, match="the circle: "):
            Schedule(name, compute.stages, 8, compute.rank_of, tuple(orders)).check()


@settings(max_examples=60, deadline=None)
@given(computations())
def test_gradients_of_a_stage_are_reduced_as_soon_as_they_are_whole(compute: Schedule) -> None:
    for rank, order in enumerate(training_step(compute).order):
        for stage in compute.stages_of(rank):
            mine = [i for i, a in enumerate(order) if a.stage == stage and a.kind in ("B", "I", "W")]
            between = order[mine[-1] + 1 : order.index(Action("REDUCE", stage))]
            assert all(action.kind in LANES["messages"] for action in between)
        assert [a.kind for a in order[-2:]] == ["VOTE", "UPDATE"]


def test_a_stage_that_is_done_early_reduces_beside_what_remains() -> None:
    step = training_step(pipeline("bfs", 2, 4))
    cost = {"REDUCE": 4.0}
    slower = simulate(step, lambda a: cost.get(a.kind, unit_cost(a))).seconds - simulate(step, unit_cost).seconds
    assert slower == 4.0  # of the first stage alone; the reduction of each rank's later stage is hidden


def test_the_two_ends_of_a_tied_weight_add_their_gradients_before_the_vote() -> None:
    step = training_step(pipeline("1f1b", 3, 4), tied=(0, 2))
    assert [[str(a) for a in order[-4:]] for order in step.order] == [
        ["0REDUCE", "0TIE", "0VOTE", "0UPDATE"],
        ["1SEND_B3", "1REDUCE", "1VOTE", "1UPDATE"],
        ["2REDUCE", "2TIE", "2VOTE", "2UPDATE"],
    ]
    assert set(step.needs(Action("TIE", 2))) == {Action("REDUCE", 0), Action("REDUCE", 2)}
    assert Action("TIE", 0) in step.needs(Action("VOTE", 1))


@settings(max_examples=60, deadline=None)
@given(computations())
def test_an_evaluation_runs_every_forward_and_nothing_else(compute: Schedule) -> None:
    schedule = forward_step(compute)
    schedule.check()
    assert {a.kind for order in schedule.order for a in order} <= {"F", "SEND_F", "RECV_F"}
    assert sum(a.kind == "F" for order in schedule.order for a in order) == compute.stages * compute.microbatches


# --- mutations ------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(computations(4), st.data())
def test_a_lost_action_is_named(compute: Schedule, data: st.DataObject) -> None:
    step = training_step(compute)
    rank = data.draw(st.integers(0, step.ranks - 1))
    lost = data.draw(st.sampled_from(step.order[rank]))
    left = tuple(tuple(a for a in order if a != lost) for order in step.order)
    with pytest.raises(JobError) as refusal:
        Schedule("mutant", step.stages, step.microbatches, step.rank_of, left).check()
    partner = Action("I" if lost.kind == "W" else "W", lost.stage, lost.microbatch)
    assert f"{lost} is missing" in str(refusal.value) or (lost.kind in "IW" and str(partner) in str(refusal.value))


@settings(max_examples=150, deadline=None)
@given(computations(4), st.data())
def test_two_actions_swapped_against_needs_are_refused_with_the_circle(compute: Schedule, data: st.DataObject) -> None:
    step = training_step(compute)
    rank = data.draw(st.integers(0, step.ranks - 1))
    order = step.order[rank]
    pairs = [(i, j) for j, later in enumerate(order) for i, earlier in enumerate(order[:j]) if earlier in step.needs(later)]
    i, j = data.draw(st.sampled_from(pairs))
    swapped = list(order)
    swapped[i], swapped[j] = order[j], order[i]
    orders = tuple(tuple(swapped) if r == rank else o for r, o in enumerate(step.order))
    mutant = Schedule("mutant", step.stages, step.microbatches, step.rank_of, orders)
    with pytest.raises(JobError, match="mutant never ends: rank .* waits at .*; the circle: ") as refusal:
        mutant.check()
    circle = [Action.parse(word) for word in str(refusal.value).rpartition("the circle: ")[2].split(" waits for ")]
    assert circle[0] == circle[-1]
    assert all(later in mutant.waits[earlier] for earlier, later in pairwise(circle))


@pytest.mark.parametrize(
    ("orders", "says"),
    [
        (("0F0 0B0", "1F0 1B0 0F0"), "0F0 stands on ranks 0 and 1; write it once"),
        (("0F0 0B0 0B0", "1F0 1B0"), "0B0 stands twice in the order of rank 0"),
        (("0F0 0B0 1B0", "1F0"), "1B0 stands on rank 0, and rank 1 holds stage 1; write it there"),
        (("0F0", "1F0 1B0"), "0B0 is missing; write it in the order of rank 0, which holds stage 0"),
        (("0B0", "1F0 1B0"), "0F0 is missing"),
        (("0F0 0I0", "1F0 1B0"), "0W0 is missing"),
        (("0F0 0B0 0I0 0W0", "1F0 1B0"), "0B0 has no place in it"),
        (("0F0 0B0 0F1", "1F0 1B0"), "0F1 is none of its 2 stages and 1 microbatches"),
        (("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0"), "1RECV_F0 is missing, so 0SEND_F0 meets nobody"),
        (("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"), "0RECV_B0 is missing, so 1SEND_B0 meets nobody"),
        (("0F0 0B0 0REDUCE 0VOTE 0UPDATE", "1F0 1B0 1REDUCE 1UPDATE"), "1VOTE is missing"),
        (("0F0 0B0", "1B0 1F0"), "never ends: rank 0 waits at 0B0 for 1B0; rank 1 waits at 1B0 for 1F0; the circle: 1B0 waits for 1F0"),
    ],
)
def test_what_is_no_step_is_refused_saying_what_is_wrong(orders: tuple[str, str], says: str) -> None:
    with pytest.raises(JobError) as refusal:
        Schedule("by hand", 2, 1, (0, 1), tuple(map(words, orders))).check()
    assert says in str(refusal.value)
