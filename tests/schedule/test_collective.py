"""A collective is a list of hops, and what the list gives is proved, not believed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import JobError
from stretto.schedule.algorithms import possible, program
from stretto.schedule.collective import COLLECTIVES, Hop, Program, prove, states

NAMES = [(collective, algorithm) for collective in COLLECTIVES for algorithm in possible(collective)]


def by_hand(*hops: Sequence[int], collective: str = "all_reduce", ranks: int = 2) -> Program:
    """hops: (round, src, dst, chunk), those of reductions with one number more."""
    return Program(collective, "by hand", ranks, 1, tuple(Hop(*hop[:4], len(hop) > 4) for hop in hops))


def computed(one: Program, inputs: Sequence[Sequence[int | None]]) -> list[list[int | None]]:
    """What each rank has of each chunk at the end, by numbers: another reading of the list than prove's."""
    now = [list(chunks) for chunks in inputs]
    for number in range(one.rounds):
        before = [list(chunks) for chunks in now]
        for hop in one.hops:
            if hop.round == number:
                value, mine = before[hop.src][hop.chunk], now[hop.dst][hop.chunk]
                assert value is not None
                now[hop.dst][hop.chunk] = value + (mine or 0) if hop.reduce else value
    return now


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(1, 20), st.integers(0, 1000), st.randoms(use_true_random=False))
def test_numbers_that_go_through_a_program_are_added_as_its_promise_says(names, ranks, root, random) -> None:
    one = program(*names, ranks, root=root % ranks)
    value = {(rank, chunk): random.randrange(10**9) for chunk in range(one.chunks) for rank in one.starts(chunk)}
    found = computed(one, [[value.get((rank, chunk)) for chunk in range(one.chunks)] for rank in range(ranks)])
    for chunk in range(one.chunks):
        total = sum(value[rank, chunk] for rank in one.starts(chunk))
        assert [found[rank][chunk] for rank in one.ends(chunk)] == [total] * len(one.ends(chunk))


def test_promises_say_who_has_what_before_and_after() -> None:
    said = {}
    for name in COLLECTIVES:
        one = Program(name, "none", 3, 1, (), root=1)
        said[name] = [(one.starts(chunk), one.ends(chunk)) for chunk in range(one.chunks)]
    everybody = (0, 1, 2)
    assert said == {
        "broadcast": [((1,), everybody)],
        "scatter": [((1,), (i,)) for i in range(3)],
        "gather": [((i,), (1,)) for i in range(3)],
        "reduce": [(everybody, (1,))],
        "all_gather": [((i,), everybody) for i in range(3)],
        "reduce_scatter": [(everybody, (i,)) for i in range(3)],
        "all_reduce": [(everybody, everybody)],
        "all_to_all": [((i,), (j,)) for i in range(3) for j in range(3)],
        "barrier": [((i,), everybody) for i in range(3)],
    }


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
def test_a_program_without_any_one_of_its_hops_is_refused(collective: str, algorithm: str) -> None:
    one = program(collective, algorithm, 6, root=2)
    prove(one)
    for i in range(0, len(one.hops), 1 + len(one.hops) // 40):
        hops = one.hops[:i] + one.hops[i + 1 :]
        with pytest.raises(JobError, match=r"is lost|does not have|not 0, 1, 2"):
            prove(replace(one, hops=hops))


@pytest.mark.parametrize(("collective", "algorithm"), [names for names in NAMES if "reduce" in names[0]])
def test_a_sum_that_is_sent_twice_is_refused(collective: str, algorithm: str) -> None:
    one = program(collective, algorithm, 6, root=2)
    for i, hop in enumerate(one.hops):
        if hop.reduce:
            with pytest.raises(JobError, match=r"is there \d times, and belongs there 1 times"):
                prove(replace(one, hops=one.hops[: i + 1] + one.hops[i:]))


@pytest.mark.parametrize(
    ("hops", "said"),
    [
        ([(0, 0, 1, 0, 1)], "in chunk 0 on rank 0 the contribution of rank 1 is lost"),
        ([(0, 0, 1, 0, 1), (1, 1, 0, 0, 1)], "in chunk 0 on rank 0 the contribution of rank 0 is there 2 times, and belongs there 1 times"),
        ([(0, 0, 1, 0), (1, 1, 0, 0)], "in chunk 0 on rank 0 the contribution of rank 1 is lost"),
        ([(1, 0, 1, 0, 1), (0, 1, 0, 0)], "rounds are not 0, 1, 2 ... in order"),
        ([(1, 0, 1, 0, 1)], "rounds are not 0, 1, 2 ... in order"),
        ([(0, 0, 0, 0, 1)], "is not between two of its ranks"),
        ([(0, 0, 2, 0, 1)], "is not between two of its ranks"),
        ([(0, 0, 1, 7, 1)], "or of none of its 1 chunks"),
    ],
)
def test_the_proof_says_what_is_wrong(hops: list[tuple[int, ...]], said: str) -> None:
    with pytest.raises(JobError, match=re.escape(said)):
        prove(by_hand(*hops))
    prove(by_hand((0, 0, 1, 0, 1), (0, 1, 0, 0, 1)))  # both at once is right: each sends what it had before the round


def test_a_rank_cannot_send_what_it_does_not_have_or_be_sent_two_things_for_one_place() -> None:
    with pytest.raises(JobError, match="in round 0 rank 1 sends chunk 0, which it does not have"):
        prove(by_hand((0, 1, 2, 0), (1, 0, 1, 0), collective="broadcast", ranks=3))
    with pytest.raises(JobError, match="in round 1 rank 2 is sent two things for its place of chunk 0"):
        prove(by_hand((0, 0, 1, 0), (1, 0, 2, 0), (1, 1, 2, 0), collective="broadcast", ranks=3))


def test_states_show_contributions_arrive() -> None:
    one = program("all_reduce", "ring", 3)
    shown = [({hop.chunk for hop in hops}, sorted(held[0, 0])) for hops, held in states(one)]
    assert [contributors for _, contributors in shown] == [[0], [0], [0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert [chunks for chunks, _ in shown] == [set()] + [{0, 1, 2}] * 4


@given(st.integers(1, 9), st.lists(st.integers(0, 50), min_size=9, max_size=9))
def test_chunks_are_cut_out_of_their_part_as_evenly_as_can_be(ranks: int, sizes: list[int]) -> None:
    one = program("reduce_scatter", "torus", ranks)
    parts = sizes[:ranks]
    cut = one.sizes(parts)
    for part, size in enumerate(parts):
        pieces = cut[part * one.pieces : (part + 1) * one.pieces]
        assert sum(pieces) == size and max(pieces) - min(pieces) <= 1
    with pytest.raises(ValueError, match="sizes are given"):
        one.sizes([1] * (ranks + 1))
