"""ZERO: what a step sends and what a rank keeps, against the published formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.layout.zero import ZERO, Call, GroupFacts, ZeroPolicy, calls, held_elements

GRADIENTS = ("each", "end")
PARAMS = ("microbatch", "step")


def groups(shards: int = 1) -> st.SearchStrategy[tuple[GroupFacts, ...]]:
    facts = st.tuples(st.integers(1, 99), st.booleans(), st.booleans())
    return st.lists(facts, min_size=1, max_size=5).map(
        lambda found: tuple(GroupFacts(f"g{i}", n * shards, trainable, kept) for i, (n, trainable, kept) in enumerate(found))
    )


def volume(issued: list[Call], axes: tuple[str, ...] | None = None) -> int:
    """Elements a rank of n sends, in units of (n-1)/n: an all-reduce counts twice (REFERENCE A2)."""
    return sum(call.elements * (2 if call.collective == "all_reduce" else 1) for call in issued if axes is None or call.axes == axes)


@pytest.mark.parametrize(
    ("stage", "gradients", "params", "times"),
    [
        (0, None, "microbatch", lambda m: 2),
        (1, None, "microbatch", lambda m: 2),
        (2, "each", "microbatch", lambda m: m + 1),
        (2, "end", "microbatch", lambda m: 2),
        (3, "each", "microbatch", lambda m: 3 * m),
        (3, "end", "microbatch", lambda m: 2 * m + 1),
        (3, "each", "step", lambda m: 1 + m),
        (3, "end", "step", lambda m: 2),
    ],
)
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_a_step_sends_what_the_reference_says(
    stage: int, gradients: str | None, params: str, times: Callable[[int], int], microbatches: int
) -> None:
    facts = (GroupFacts("embed", 70), GroupFacts("layers.0", 20), GroupFacts("head", 10))
    issued = calls(ZeroPolicy.of(stage, gradients, params), facts, microbatches)
    assert volume(issued) == times(microbatches) * 100  # REFERENCE B9


@settings(max_examples=60)
@given(groups(), st.sampled_from(range(4)), st.sampled_from(GRADIENTS), st.sampled_from(PARAMS), st.integers(1, 5))
def test_each_group_is_reduced_and_gathered_as_often_as_its_facts_ask(
    facts: tuple[GroupFacts, ...], stage: int, gradients: str, params: str, microbatches: int
) -> None:
    issued = calls(ZeroPolicy.of(stage, gradients, params), facts, microbatches)
    for group in facts:
        mine = [call for call in issued if call.reason.split(" ", 1)[1] == group.name]
        assert {call.elements for call in mine} <= {group.elements}
        reductions = [call.collective for call in mine if call.what == "grad"]
        gathers = [call.collective for call in mine if call.what == "param"]
        often = microbatches if gradients == "each" and stage >= 2 else 1
        assert reductions == ["all_reduce" if stage == 0 else "reduce_scatter"] * (often if group.trainable else 0)
        if stage == 3:
            twice = 1 if group.kept else 2  # what is kept from the forward is there in the backward
            assert gathers == ["all_gather"] * (1 if params == "step" else twice * microbatches)
        else:
            assert gathers == ["all_gather"] * (1 if stage in (1, 2) and group.trainable else 0)


@settings(max_examples=60)
@given(groups(), st.sampled_from(range(4)), st.sampled_from(GRADIENTS), st.sampled_from(PARAMS), st.integers(1, 3))
def test_gathers_run_forward_then_backward_and_reductions_backward(
    facts: tuple[GroupFacts, ...], stage: int, gradients: str, params: str, microbatches: int
) -> None:
    issued = calls(ZeroPolicy.of(stage, gradients, params), facts, microbatches)
    names = [group.name for group in facts]

    def order(moment: str) -> list[str]:
        return [call.reason.split(" ", 1)[1] for call in issued if call.reason.startswith(moment)]

    for moment, forward in [("before_forward", True), ("after_step", True), ("before_backward", False), ("after_backward", False)]:
        found = order(moment)
        once = [name for name in (names if forward else reversed(names)) if name in found]
        assert found == once * (len(found) // max(len(once), 1))


@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("stage", range(4))
@settings(max_examples=15)
@given(st.data(), st.integers(2, 4))
def test_copies_of_the_sharded_model_add_one_all_reduce_of_a_shard(stage: int, shards: int, data: st.DataObject, replicas: int) -> None:
    facts = data.draw(groups(shards))
    policy, trainable = ZeroPolicy.of(stage), sum(group.elements for group in facts if group.trainable)
    alone, hybrid = calls(policy, facts, 3), calls(policy, facts, 3, replicas, shards)
    if stage == 0:  # the one all-reduce goes over all of them
        assert hybrid == alone
        assert {call.axes for call in hybrid} <= {("dp_replicate", "dp", "cp")}
    else:
        assert volume(hybrid, ("dp", "cp")) == volume(alone)
        assert volume(hybrid, ("dp_replicate",)) == 2 * trainable // shards  # REFERENCE B9, HSDP
        order = [call.reason for call in hybrid if call.axes == ("dp_replicate",)]
        assert order == [f"replicas {group.name}" for group in facts if group.trainable]


@pytest.mark.parametrize("stage", range(4))
@settings(max_examples=10)
@given(groups(), st.sampled_from(GRADIENTS), st.integers(1, 4))
def test_when_gradients_are_reduced_does_not_change_what_is_gathered_or_cut(
    stage: int, facts: tuple[GroupFacts, ...], gradients: str, microbatches: int
) -> None:
    chosen, default = ZeroPolicy.of(stage, gradients), ZERO[stage]
    assert chosen.cut == default.cut
    gathers = [[call for call in calls(policy, facts, microbatches) if call.what == "param"] for policy in (chosen, default)]
    assert gathers[0] == gathers[1]


@pytest.mark.parametrize(
    ("weights", "grads", "optimizer"),
    [(2, 2, 12), (2, 4, 12), (2, 6, 12), (4, 4, 8), (2, 2, 4), (2, 4, 8)],
    ids=["mixed Adam", "bf16 + fp32 grads", "fp16 + main grads", "fp32", "pure bf16", "SGD"],
)
@pytest.mark.parametrize("n", [1, 2, 64])
def test_bytes_a_parameter_are_those_of_the_table(weights: int, grads: int, optimizer: int, n: int) -> None:
    elements = 64 * 1000
    table = [
        weights + grads + optimizer,
        weights + grads + optimizer / n,
        weights + (grads + optimizer) / n,
        (weights + grads + optimizer) / n,
    ]  # REFERENCE B1
    for stage, bytes_ in enumerate(table):
        held = held_elements(ZeroPolicy.of(stage), elements, n)
        assert weights * held["param"] + grads * held["grad"] + optimizer * held["optim"] == bytes_ * elements


def test_seven_and_a_half_billion_parameters_on_64_ranks_take_the_published_gigabytes() -> None:
    elements, found = 7_500_000_000, []
    for stage in range(4):
        held = held_elements(ZeroPolicy.of(stage), elements, 64)
        found.append((2 * held["param"] + 2 * held["grad"] + 12 * held["optim"]) / 1e9)
    assert found == pytest.approx([120, 31.41, 16.64, 1.875], abs=0.005)  # Rajbhandari et al. 2020, figure 1


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_reduced_once_a_step_are_kept_whole(stage: int) -> None:
    assert held_elements(ZeroPolicy.of(stage, "end"), 64, 4)["grad"] == 64
    assert held_elements(ZeroPolicy.of(stage, "each"), 64, 4)["grad"] == 16


def test_a_stage_cuts_what_the_stage_before_cuts_and_one_thing_more() -> None:
    cuts = [ZERO[stage].cut for stage in range(4)]
    assert cuts == [frozenset(), {"optim"}, {"optim", "grad"}, {"optim", "grad", "param"}]
