"""Every known schedule: its bubble and its activations are those of the formulas, and it can be run."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import JobError
from stretto.schedule.action import Action
from stretto.schedule.pipelines import PIPELINES, chunks_of, microbatches_of, pipeline
from stretto.schedule.step import unit_cost
from stretto.schedule.timeline import Timeline, simulate


class Truth(NamedTuple):
    """What REFERENCE E2 and B7 say of a schedule of p ranks, v chunks and m microbatches, in the time of one stage's forward.

    bubble: step time less a rank's own computation. idle: of a rank between its own first and last action, where it is a formula.
    peak: (stage, microbatch) pairs whose activations rank q holds.
    """

    bubble: Callable[[int, int, int], float]
    peak: Callable[[int, int, int, int], int]
    least: Callable[[int], int] = lambda p: p
    never_idle: bool = False


#: F = 1, B = 2, I = W = 1, each of one stage; a rank's share of the model is v stages.
TRUTHS = {
    ("none", 1): Truth(lambda p, v, m: (p - 1) * 3 * m, lambda p, v, m, q: 1, lambda p: 1),
    ("none", 2): Truth(lambda p, v, m: (p - 1) * 3 * m * v, lambda p, v, m, q: v, lambda p: 1),
    ("gpipe", 1): Truth(lambda p, v, m: (p - 1) * 3, lambda p, v, m, q: m, lambda p: 1),
    ("1f1b", 1): Truth(lambda p, v, m: (p - 1) * 3, lambda p, v, m, q: min(m, p - q), lambda p: 1),
    ("interleaved", 2): Truth(lambda p, v, m: (p - 1) * 3, lambda p, v, m, q: 2 * (p - q - 1) + (v - 1) * p + 1),
    ("interleaved", 3): Truth(lambda p, v, m: (p - 1) * 3, lambda p, v, m, q: 2 * (p - q - 1) + (v - 1) * p + 1),
    ("bfs", 2): Truth(lambda p, v, m: (p - 1) * 3, lambda p, v, m, q: m * v),
    ("bfs", 4): Truth(lambda p, v, m: (p - 1) * 3, lambda p, v, m, q: m * v),
    ("zb-h1", 1): Truth(lambda p, v, m: p - 1, lambda p, v, m, q: min(m, p)),
    ("zb-h2", 1): Truth(lambda p, v, m: p - 1, lambda p, v, m, q: 2 * p - 1, lambda p: 2 * p - 1, never_idle=True),
    ("zb-v", 2): Truth(lambda p, v, m: p - 1, lambda p, v, m, q: 2 * p, lambda p: 2 * p, never_idle=True),
    ("dualpipe-v", 2): Truth(lambda p, v, m: p - 1, lambda p, v, m, q: 2 * p + 1, lambda p: 2 * p),
}
CASES = list(TRUTHS)


def hold(name: str, v: int, p: int, m: int) -> None:
    """The schedule's bubble, idle time and peaks are the formulas'."""
    truth, schedule = TRUTHS[name, v], pipeline(name, p, m, v)
    schedule.check()
    timeline = simulate(schedule, unit_cost)
    assert {timeline.busy(rank) for rank in range(p)} == {3 * m * v}
    bubble = truth.bubble(p, v, m)
    peaks = [schedule.peak(rank) for rank in range(p)]
    assert {timeline.bubble(rank) for rank in range(p)} == {bubble}, (name, v, p, m)
    if name == "interleaved":  # groups of up to 2p - 1 microbatches where p does not divide m: up to p - 1 more a chunk are held
        largest = -(-m // (m // p))
        assert peaks == [min(m * v, 2 * (p - q - 1) + (v - 1) * largest + 1) for q in range(p)]
        assert largest == p or m % p
    if name != "interleaved" or (m % p == 0 and m > p):
        assert peaks == [truth.peak(p, v, m, q) for q in range(p)], (name, v, p, m)
    if truth.never_idle:
        assert [idle(timeline, rank) for rank in range(p)] == [0.0] * p


def idle(timeline: Timeline, rank: int) -> float:
    """What a rank waits between its own first and last action."""
    mine = [span for span in timeline.spans if span.rank == rank]
    return max(s.stop for s in mine) - min(s.start for s in mine) - timeline.busy(rank)


@pytest.mark.parametrize(("name", "v"), CASES)
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 16), (3, 7), (4, 4), (4, 8), (5, 11), (8, 24), (8, 17)])
def test_bubbles_and_activations_are_those_of_the_formulas(name: str, v: int, p: int, m: int) -> None:
    if m < TRUTHS[name, v].least(p):
        m += p
    hold(name, v, p, m)


@pytest.mark.grid
@pytest.mark.parametrize(("name", "v"), CASES)
@pytest.mark.parametrize("p", range(2, 17))
def test_bubbles_and_activations_of_every_size(name: str, v: int, p: int) -> None:
    for m in range(TRUTHS[name, v].least(p), 8 * p + 1):
        if p <= 8 or m % p in (0, 1, p - 1):  # of many ranks those next to their multiples: a schedule has thousands of actions
            hold(name, v, p, m)


@pytest.mark.parametrize(
    ("name", "v", "makespan", "peaks"),
    [
        ("1f1b", 1, 93, [8, 7, 6, 5, 4, 3, 2, 1]),
        ("interleaved", 2, 82.5, [23, 21, 19, 17, 15, 13, 11, 9]),
        ("interleaved", 4, 77.25, [39, 37, 35, 33, 31, 29, 27, 25]),
        ("zb-h1", 1, 79, [8] * 8),
        ("zb-h2", 1, 79, [15] * 8),
        ("zb-v", 2, 75.5, [16] * 8),
    ],
)
def test_published_sizes_of_eight_ranks_and_24_microbatches(name: str, v: int, makespan: float, peaks: list[int]) -> None:
    schedule = pipeline(name, 8, 24, v)
    assert simulate(schedule, unit_cost).seconds / v == makespan
    assert [schedule.peak(rank) for rank in range(8)] == peaks


def test_unequal_times_of_the_halves() -> None:
    costs = {"F": 1.0, "I": 1.2, "W": 0.8}
    timeline = simulate(pipeline("zb-h1", 8, 24), lambda action: costs[action.kind])
    assert timeline.bubble(0) == pytest.approx(7 * (1.0 + 1.2 - 0.8))
    assert idle(simulate(pipeline("zb-h2", 8, 24), lambda action: costs[action.kind]), 0) == pytest.approx(4.2)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 24), (5, 12)])
def test_pairs_of_dualpipe_v_run_as_one_action_leave_the_published_bubble(p: int, m: int) -> None:
    """(p - 1)(F&B + B - 3W) in stage times: 2 (p - 1). Every F with the B behind it is one action here, but for the first of the
    last rank; the simulation is written out once more, since an action of two is none of ours."""
    fused: list[list[tuple[Action, ...]]] = []
    for rank, actions in enumerate(pipeline("dualpipe-v", p, m).order):
        mine: list[tuple[Action, ...]] = []
        for action in actions:
            first = rank == p - 1 and not any(a.kind == "B" for pair in mine for a in pair)
            if action.kind == "B" and mine and [a.kind for a in mine[-1]] == ["F"] and mine[-1][0].stage != action.stage and not first:
                mine[-1] = (mine[-1][0], action)
            else:
                mine.append((action,))
        fused.append(mine)
    schedule = pipeline("dualpipe-v", p, m)
    stops: dict[Action, float] = {}
    free, at = [0.0] * p, [0] * p
    while any(at[rank] < len(fused[rank]) for rank in range(p)):
        for rank in range(p):
            while at[rank] < len(fused[rank]) and all(n in stops for a in fused[rank][at[rank]] for n in schedule.needs(a)):
                pair = fused[rank][at[rank]]
                start = max([free[rank], *(stops[need] for action in pair for need in schedule.needs(action))])
                free[rank] = start + sum(unit_cost(action) for action in pair)
                stops |= dict.fromkeys(pair, free[rank])
                at[rank] += 1
    assert max(free) - 6 * m == 2 * (p - 1)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CASES), st.integers(1, 6), st.integers(1, 20))
def test_any_number_of_microbatches_makes_a_schedule_that_ends_or_is_refused_with_the_least(case: tuple[str, int], p: int, m: int) -> None:
    name, v = case
    least = microbatches_of(name, p, 1)
    if m < least:
        with pytest.raises(JobError, match=f'pipeline="{name}" on pp={p} needs at least {least} microbatches .* has {m}; write'):
            pipeline(name, p, m, v)
        m = microbatches_of(name, p, m)
    schedule = pipeline(name, p, m, v if p > 1 or v == 1 else None)
    schedule.check()
    assert (schedule.microbatches, schedule.ranks) == (m, p)


@pytest.mark.parametrize(("p", "v"), [(2, 2), (3, 2), (4, 2), (4, 3), (8, 4)])
def test_interleaved_loses_nothing_where_ranks_do_not_divide_microbatches(p: int, v: int) -> None:
    for m in range(p, 4 * p):
        assert simulate(pipeline("interleaved", p, m, v), unit_cost).bubble(0) == 3 * (p - 1)


@pytest.mark.parametrize("name", PIPELINES)
def test_stages_lie_in_a_loop_or_in_a_v(name: str) -> None:
    schedule = pipeline(name, 3, 8, None)
    loop, vee = (0, 1, 2) * (schedule.stages // 3), (0, 1, 2, 2, 1, 0)
    assert schedule.rank_of == (vee if name in ("zb-v", "dualpipe-v") else loop)


@pytest.mark.parametrize("name", PIPELINES)
def test_one_rank_takes_each_microbatch_forward_and_back(name: str) -> None:
    assert str(pipeline(name, 1, 3)) == "0F0 0B0 0F1 0B1 0F2 0B2"


def test_chunks_that_a_schedule_does_not_have_are_refused() -> None:
    with pytest.raises(JobError, match='pipeline.chunks=2: pipeline="1f1b" has 1 stage a rank; .* write pipeline="interleaved" or "bfs"'):
        chunks_of("1f1b", 4, 2)
    with pytest.raises(JobError, match='pipeline.chunks=3: pipeline="zb-v" has 2 stages a rank'):
        pipeline("zb-v", 4, 8, 3)
    assert [chunks_of(name, 4, None) for name in ("none", "1f1b", "interleaved", "bfs", "zb-v")] == [1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    ("peer", "name"), [("ScheduleInterleaved1F1B", "interleaved"), ("ScheduleZBVZeroBubble", "zb-v"), ("ScheduleDualPipeV", "dualpipe-v")]
)
@pytest.mark.parametrize(("p", "m"), [(2, 8), (4, 12)])
def test_orders_are_those_of_torch(peer: str, name: str, p: int, m: int) -> None:
    for rank, actions in enumerate(pipeline(name, p, m).order):
        assert [str(action) for action in actions] == torchs_order(peer, rank, p, m)


def torchs_order(peer: str, rank: int, p: int, m: int) -> list[str]:
    """What torch's schedule of two stages a rank computes, pairs one after the other."""
    from torch.distributed.pipelining import schedules

    style = "loop" if "1F1B" in peer else "v"
    stages = schedules.generate_rank_to_stage_mapping(p, 2 * p, style=style)
    stub = SimpleNamespace(
        pp_group_size=p, _n_microbatches=m, _num_stages=2 * p, num_stages=2 * p, n_local_stages=2, rank=rank, rank_to_stages=stages,
        number_of_rounds=m // p, microbatches_per_round=p,
    )  # fmt: skip
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    found = []
    for action in getattr(schedules, peer)._calculate_single_rank_operations(stub, rank):
        for one in [] if action is None else action.sub_actions or [action]:
            if one.computation_type.name in kinds:
                found.append(f"{one.stage_index}{kinds[one.computation_type.name]}{one.microbatch_index}")
    return found
