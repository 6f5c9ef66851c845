"""The named algorithms: right for any number of ranks, and with the rounds and bytes that the literature gives (REFERENCE A2, A3)."""

from __future__ import annotations

import re
from math import ceil, floor, log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import JobError
from stretto.schedule.algorithms import ALGORITHMS, possible, program
from stretto.schedule.collective import COLLECTIVES, Program, prove
from stretto.schedule.price import traffic
from stretto.schedule.trees import in_order, mirrored

SIZES = range(1, 34)
POWERS = (1, 2, 4, 8, 16, 32)
NAMES = [(collective, algorithm) for collective in COLLECTIVES for algorithm in possible(collective)]


def lg(n: int) -> int:
    """Rounds in which what one rank has can reach n."""
    return ceil(log2(n))


def sent(one: Program) -> float:
    """By the rank that sends most, in parts of the buffer."""
    return max(rank.sent for rank in traffic(one, 1.0))


def received(one: Program) -> list[float]:
    return [rank.received for rank in traffic(one, 1.0)]


@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
def test_a_program_keeps_its_promise_on_1_to_12_ranks(collective: str, algorithm: str) -> None:
    for ranks in range(1, 13):
        prove(program(collective, algorithm, ranks, root=ranks * 5 // 7))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.integers(13, 33), st.integers(0, 99))
def test_a_program_keeps_its_promise_on_up_to_33_ranks(names: tuple[str, str], ranks: int, root: int) -> None:
    prove(program(*names, ranks, root=root % ranks))


@pytest.mark.grid
@pytest.mark.parametrize(("collective", "algorithm"), NAMES)
@pytest.mark.parametrize("ranks", SIZES)
def test_a_program_keeps_its_promise_with_any_root(collective: str, algorithm: str, ranks: int) -> None:
    roots = range(ranks) if "root" in COLLECTIVES[collective][1:] else [0]
    for root in roots:
        prove(program(collective, algorithm, ranks, root=root))


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 8), st.integers(1, 4), st.sampled_from(["hierarchical", "torus"]), st.sampled_from([*COLLECTIVES]), st.integers(0, 99)
)
def test_nodes_may_be_any_number_of_any_size(nodes: int, size: int, algorithm: str, collective: str, root: int) -> None:
    one = program(collective, algorithm, nodes * size, nodes=nodes, root=root % (nodes * size))
    assert one.nodes == nodes
    prove(one)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 33), st.integers(1, 12), st.sampled_from(["naive", "ring", "tree", "double-tree"]), st.booleans(), st.integers(0, 99))
def test_what_goes_along_trees_may_be_cut_into_any_number_of_pieces(ranks: int, pieces: int, algorithm: str, back: bool, root: int) -> None:
    one = program("reduce" if back else "broadcast", algorithm, ranks, pieces=pieces, root=root % ranks)
    assert one.chunks == pieces
    prove(one)


@pytest.mark.parametrize("n", SIZES)
def test_a_ring_sends_each_part_once_around(n: int) -> None:
    for collective, times in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2), ("barrier", 1)):
        one = program(collective, "ring", n)
        assert one.rounds == times * (n - 1)
        assert received(one) == pytest.approx([times * (n - 1) / n] * n)
        assert {(hop.dst - hop.src) % n for hop in one.hops} <= {1}  # all to the right
        assert all(rank.messages == one.rounds for rank in traffic(one, 1.0))


def test_a_ring_goes_round_as_written_in_the_literature() -> None:
    n, one = 5, program("all_reduce", "ring", 5)
    for s in range(n - 1):  # reduce-scatter so that rank r ends with chunk r, then all-gather (REFERENCE A3)
        assert {hop[1:] for hop in one.hops if hop.round == s} == {(r, (r + 1) % n, (r - 1 - s) % n, True) for r in range(n)}
        assert {hop[1:] for hop in one.hops if hop.round == n - 1 + s} == {(r, (r + 1) % n, (r - s) % n, False) for r in range(n)}


@pytest.mark.parametrize("n", SIZES)
def test_what_is_sent_directly_takes_one_round(n: int) -> None:
    for collective in ("all_gather", "reduce_scatter", "all_to_all", "barrier"):
        one = program(collective, "direct", n)
        assert one.rounds == min(n - 1, 1)
        assert [rank[:2] for rank in traffic(one, 1.0)] == [(n - 1, pytest.approx((n - 1) / n))] * n


@pytest.mark.parametrize("n", SIZES)
def test_bruck_takes_the_fewest_rounds_for_any_number_of_ranks(n: int) -> None:
    for collective in ("all_gather", "reduce_scatter", "barrier"):
        one = program(collective, "bruck", n)
        assert one.rounds == lg(n)
        assert received(one) == pytest.approx([(n - 1) / n] * n)
    assert program("all_to_all", "bruck", n).rounds == lg(n)
    if n in POWERS:
        assert sent(program("all_to_all", "bruck", n)) == pytest.approx(lg(n) / 2)


@pytest.mark.parametrize("n", SIZES)
def test_what_has_one_root_goes_along_a_binomial_tree(n: int) -> None:
    for algorithm in ("bruck", "halving-doubling") if n in POWERS else ("bruck",):
        spread = program("broadcast", algorithm, n, root=n // 2)
        assert spread.rounds == lg(n) and sent(spread) == lg(n)
        assert sorted(received(spread)) == [0.0] + [1.0] * (n - 1)
        collected = program("gather", algorithm, n, root=n // 2)
        assert collected.rounds == lg(n)
        assert received(collected)[n // 2] == pytest.approx((n - 1) / n)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 9])
def test_a_barrier_takes_as_many_rounds_as_dissemination(n: int) -> None:
    assert program("barrier", "bruck", n).rounds == {2: 1, 3: 2, 5: 3, 8: 3, 9: 4}[n]  # REFERENCE A1


@pytest.mark.parametrize("n", SIZES)
def test_halving_and_doubling_takes_log_rounds_and_the_fewest_bytes(n: int) -> None:
    power = 2 ** floor(log2(n))
    one = program("all_reduce", "halving-doubling", n)
    folded = 2 if n > power else 0  # one round to hand over, one to hand back (REFERENCE A3)
    assert one.rounds == 2 * lg(power) + folded
    assert sent(one) == pytest.approx(2 * (power - 1) / power + folded / 2)
    for collective in ("all_gather", "reduce_scatter"):
        half = program(collective, "halving-doubling", n)
        assert half.rounds == lg(power) + folded
        if n == power:
            assert received(half) == pytest.approx([(n - 1) / n] * n)


@pytest.mark.parametrize("n", SIZES)
def test_the_naive_way_loads_one_rank_with_everything(n: int) -> None:
    one = program("all_reduce", "naive", n)
    assert one.rounds == 2 * (n - 1)
    assert [rank[:3] for rank in traffic(one, 1.0)] == [(n - 1, n - 1, n - 1)] + [(1, 1, 1)] * (n - 1)


@pytest.mark.parametrize("n", SIZES)
def test_in_two_trees_nobody_passes_on_in_both(n: int) -> None:
    first, second = in_order(n), mirrored(n)
    for tree in (first, second):
        assert sorted(child for below in tree for child in below) == list(range(1, n))
        assert all(len(below) <= 2 for below in tree)
        assert depth(tree) <= lg(n) + 1
    assert [position for position in range(1, n) if first[position] and second[position]] == []


def depth(tree, position: int = 0) -> int:
    return max((1 + depth(tree, child) for child in tree[position]), default=0)


@pytest.mark.parametrize(("n", "pieces"), [*((n, 6) for n in SIZES[1:]), *((n, 64) for n in (2, 4, 5, 8, 16, 33))])
def test_two_trees_come_close_to_the_bandwidth_of_a_ring_in_log_latency(n: int, pieces: int) -> None:
    one = program("all_reduce", "double-tree", n, pieces=pieces)
    assert sent(one) <= 2.0  # a ring: 2 (n-1)/n
    assert one.rounds <= 2 * pieces + 4 * lg(n)  # a single tree: 4 for each piece
    broadcast = program("broadcast", "double-tree", n, pieces=pieces)
    assert sorted(received(broadcast)) == pytest.approx([0.0] + [1.0] * (n - 1))


@pytest.mark.parametrize("n", SIZES[1:])
@pytest.mark.parametrize("pieces", [1, 9])
def test_a_chain_passes_pieces_on_while_others_come(n: int, pieces: int) -> None:
    for collective in ("broadcast", "reduce"):
        assert program(collective, "ring", n, pieces=pieces, root=n // 3).rounds == n - 2 + pieces


@pytest.mark.parametrize(("nodes", "size"), [(1, 1), (1, 4), (4, 1), (2, 3), (3, 2), (4, 8), (8, 8)])
def test_hierarchical_all_reduce_sends_a_share_across_nodes(nodes: int, size: int) -> None:
    one = program("all_reduce", "hierarchical", nodes * size, nodes=nodes)
    assert one.rounds == 2 * (size - 1) + 2 * (nodes - 1)
    across = [hop for hop in one.hops if hop.src // size != hop.dst // size]
    assert all(hop.src % size == hop.dst % size for hop in across)  # between ranks of one place in their nodes
    assert len(across) * one.share() / (nodes * size) == pytest.approx(2 * (nodes - 1) / nodes / size)
    assert (len(one.hops) - len(across)) * one.share() / (nodes * size) == pytest.approx(2 * (size - 1) / size)


def test_hierarchical_all_to_all_sends_fewer_and_larger_messages_across_nodes() -> None:
    nodes, size = 4, 8
    messages = {}
    for algorithm, more in (("direct", {}), ("hierarchical", {"nodes": nodes})):
        one = program("all_to_all", algorithm, nodes * size, **more)
        far = [hop for hop in one.hops if hop.src // size != hop.dst // size]
        assert len(far) >= (nodes - 1) * size * nodes * size
        messages[algorithm] = len({hop[:3] for hop in far})
    assert messages["direct"] == size * messages["hierarchical"]


@pytest.mark.parametrize("side", [1, 2, 3, 4, 5])
def test_a_torus_uses_rows_and_columns_at_the_same_time(side: int) -> None:
    n = side * side
    one = program("all_reduce", "torus", n, nodes=side)
    assert one.rounds == 4 * (side - 1)
    for number in range(one.rounds):
        rows = [hop for hop in one.hops if hop.round == number and hop.src // side == hop.dst // side]
        columns = [hop for hop in one.hops if hop.round == number and hop.src % side == hop.dst % side]
        assert len(rows) > 0 and len(columns) > 0
    assert received(one) == pytest.approx([2 * (n - 1) / n] * n)


def test_programs_are_made_once() -> None:
    assert program("all_reduce", "ring", 4) is program("all_reduce", "ring", 4)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"collective": "allreduce"}, "there is no collective 'allreduce'; write one of broadcast, "),
        ({"algorithm": "rings"}, "there is no algorithm 'rings'; write one of naive, direct, ring"),
        ({"collective": "all_gather", "algorithm": "double-tree"}, "double-tree has no all_gather; write one of naive, direct, ring"),
        ({"ranks": 0}, "ranks=0, root=0 is not possible; write 1 rank or more"),
        ({"root": 4}, "root=4 is not possible; write 1 rank or more, and a root from 0 to 3"),
        ({"nodes": 2}, "nodes=2: ring treats all ranks alike; leave it out, or write algorithm hierarchical or torus"),
        ({"nodes": 3, "algorithm": "torus"}, "nodes=3 does not divide 4 ranks; write one of 1, 2, 4"),
        ({"pieces": 4}, "pieces=4: ring all_reduce cuts the data by itself; leave it out"),
        ({"pieces": 0, "algorithm": "tree"}, "pieces=0 is not possible; write 1 or more"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(asked: dict[str, object], said: str) -> None:
    with pytest.raises(JobError, match=re.escape(said)):
        program(**{"collective": "all_reduce", "algorithm": "ring", "ranks": 4, **asked})


def test_each_algorithm_says_what_it_does() -> None:
    assert all(way.summary for way in ALGORITHMS.values())
    assert set(possible("all_reduce")) == set(ALGORITHMS)
