"""Actions, the one rule of what waits for what, and the proof that a schedule ends."""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import JobError
from stretto.schedule.action import KINDS, Action, Schedule


def two_stages(first: str, second: str, microbatches: int = 2) -> Schedule:
    """A schedule of two ranks, from what each issues, as '0F0 0SEND_F0 ...'."""
    orders = tuple(tuple(Action.parse(word) for word in line.split()) for line in (first, second))
    return Schedule("by hand", 2, microbatches, (0, 1), orders)


END = ["0REDUCE 0VOTE 0UPDATE", "1REDUCE 1VOTE 1UPDATE"]
COMPUTE = (f"0F0 0F1 0B0 0B1 {END[0]}", f"1F0 1B0 1F1 1B1 {END[1]}")
MESSAGES = (
    f"0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 {END[0]}",
    f"1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 {END[1]}",
)
HALVES = (f"0F0 0F1 0I0 0W0 0I1 0W1 {END[0]}", f"1F0 1I0 1F1 1W0 1I1 1W1 {END[1]}")


def ends(schedule: Schedule) -> bool:
    """Whether the graph of needs and of each rank's order has a beginning and no circle (of computation: there are no lanes)."""
    present = {action for actions in schedule.order for action in actions}
    before = {action: set(schedule.needs(action)) for action in present}
    for actions in schedule.order:
        for earlier, later in pairwise(actions):
            before[later].add(earlier)
    if any(not needed <= present for needed in before.values()):
        return False
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True


@settings(max_examples=40)
@given(st.sampled_from(KINDS), st.integers(0, 99), st.none() | st.integers(0, 99))
def test_an_action_parses_back_from_what_it_prints(kind: str, stage: int, microbatch: int | None) -> None:
    action = Action(kind, stage, microbatch)
    assert Action.parse(str(action)) == action


def test_actions_print_stage_kind_and_microbatch() -> None:
    assert [str(Action("F", 2, 0)), str(Action("SEND_B", 1, 12)), str(Action("REDUCE", 0))] == ["2F0", "1SEND_B12", "0REDUCE"]


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2f0", "2F0 ", "2F-1", "REDUCE"])
def test_what_is_no_action_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(JobError, match="as 2F0"):
        Action.parse(text)


@pytest.mark.parametrize("orders", [COMPUTE, MESSAGES, HALVES], ids=["compute", "messages", "halves"])
def test_good_schedules_pass(orders: tuple[str, str]) -> None:
    two_stages(*orders).check()


@pytest.mark.parametrize(
    ("orders", "action", "needs"),
    [
        (COMPUTE, "1F0", "0F0"),
        (COMPUTE, "0F1", ""),
        (COMPUTE, "1B0", "1F0"),
        (COMPUTE, "0B1", "0F1 1B1"),
        (MESSAGES, "1F0", "1RECV_F0"),
        (MESSAGES, "1RECV_F0", "0SEND_F0"),
        (MESSAGES, "0SEND_F0", "0F0"),
        (MESSAGES, "0B0", "0F0 0RECV_B0"),
        (MESSAGES, "0RECV_B1", "1SEND_B1"),
        (MESSAGES, "1SEND_B1", "1B1"),
        (HALVES, "0I0", "0F0 1I0"),
        (HALVES, "0W0", "0I0"),
        (HALVES, "1REDUCE", "1I0 1W0 1I1 1W1"),
        (COMPUTE, "0REDUCE", "0B0 0B1"),
        (COMPUTE, "1VOTE", "0REDUCE 1REDUCE"),
        (COMPUTE, "1UPDATE", "1VOTE"),
    ],
)
def test_an_action_waits_for_what_it_uses(orders: tuple[str, str], action: str, needs: str) -> None:
    assert set(two_stages(*orders).needs(Action.parse(action))) == {Action.parse(word) for word in needs.split()}


@settings(max_examples=100)
@given(st.data(), st.sampled_from([COMPUTE, HALVES]))
def test_a_spoilt_order_is_refused_saying_who_waits_for_what(data: st.DataObject, orders: tuple[str, str]) -> None:
    actions = [[a for a in order if a.kind in "FBIW"] for order in two_stages(*orders).order]
    for _ in range(data.draw(st.integers(1, 3))):
        rank = data.draw(st.integers(0, 1))
        moved = actions[rank].pop(data.draw(st.integers(0, len(actions[rank]) - 1)))
        actions[rank].insert(data.draw(st.integers(0, len(actions[rank]))), moved)
    schedule = Schedule("spoilt", 2, 2, (0, 1), tuple(map(tuple, actions)))
    if ends(schedule):
        schedule.check()
        return
    with pytest.raises(JobError, match="spoilt never ends") as refusal:
        schedule.check()
    waits = re.findall(r"rank (\d) waits at (\w+) for ([\w, ]+)", str(refusal.value))
    assert waits
    before: list[set[Action]] = [set(), set()]  # what each rank issues before it stands still
    for rank, order in enumerate(schedule.order):
        stands = next((order.index(Action.parse(at)) for who, at, _ in waits if int(who) == rank), len(order))
        before[rank] = set(order[:stands])
    for _, at, missing in waits:
        for need in missing.split(", "):
            assert Action.parse(need) in schedule.needs(Action.parse(at))
            assert Action.parse(need) not in before[0] | before[1]


def test_two_ranks_that_wait_for_each_other_are_both_named() -> None:
    with pytest.raises(JobError) as refusal:
        two_stages("0B0 0F0", "1F0 1B0", microbatches=1).check()
    assert "rank 0 waits at 0B0 for 0F0, 1B0" in str(refusal.value)
    assert "rank 1 waits at 1F0 for 0F0" in str(refusal.value)


def test_a_send_and_its_receive_must_meet_so_messages_in_another_order_deadlock() -> None:
    """Rank 0 wants to send the second microbatch first, rank 1 to send back the first: with one lane a rank neither can."""
    late = MESSAGES[1].replace("1F0 1RECV_F1 1B0 1SEND_B0", "1F0 1B0 1SEND_B0 1RECV_F1")
    with pytest.raises(JobError, match="the circle: 0SEND_F1 waits for 1SEND_B0 waits for 0SEND_F1"):
        two_stages(MESSAGES[0], late).check()


@pytest.mark.parametrize(("early", "late"), [("0SEND_F1", "0F1"), ("0REDUCE", "0B1")])
def test_what_is_handed_over_before_it_is_made_is_refused(early: str, late: str) -> None:
    words = MESSAGES[0].split()
    a, b = words.index(early), words.index(late)
    words[a], words[b] = words[b], words[a]
    with pytest.raises(JobError, match=f"the circle: .*{early} waits for {late}|the circle: {late} waits for {early}"):
        two_stages(" ".join(words), MESSAGES[1]).check()


def test_an_action_that_stands_twice_is_refused() -> None:
    with pytest.raises(JobError, match="0F1 stands twice"):
        two_stages("0F0 0F1 0F1 0B0 0B1", "1F0 1B0 1F1 1B1").check()


def test_a_receive_that_nobody_sends_is_refused() -> None:
    with pytest.raises(JobError, match="0RECV_B0 is missing|0SEND_F0 is missing, so 1RECV_F0 meets nobody"):
        two_stages("0F0 0B0", "1RECV_F0 1F0 1B0", microbatches=1).check()
