"""Which parts each stage has: as even as can be, against trying all cuts; and what is refused."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.anatomy import DECODERS, Anatomy
from stretto.errors import JobError
from stretto.layout.balance import Item
from stretto.layout.stages import Split, split_model
from stretto.schedule.pipelines import ranks_of_stages

works = st.lists(st.integers(0, 20), min_size=4, max_size=9)


def model(work: list[int], before: int = 3, after: int = 7) -> list[Item]:
    return [Item("embed", before, False), *(Item(f"layers.{i}", w) for i, w in enumerate(work)), Item("head", after, False)]


@given(works, st.integers(1, 4), st.integers(0, 30), st.integers(0, 30))
def test_the_busiest_of_stages_has_as_little_as_any_cut_leaves_it(work, stages, before, after):
    """Against all cuts that give each stage a block."""
    split = split_model(model(work, before, after), range(stages))
    ends = [work[0] + before, *work[1:-1], work[-1] + after]
    cuts = ((0, *inner, len(work)) for inner in itertools.combinations(range(1, len(work)), stages - 1))
    assert max(split.loads()) == min(max(sum(ends[a:b]) for a, b in pairwise(cut)) for cut in cuts)


@given(works, st.integers(1, 4), st.integers(1, 2), st.booleans())
def test_every_part_is_in_one_stage_in_order_and_each_stage_has_a_block(work, ranks, chunks, vee):
    rank_of = ranks_of_stages(ranks, 2 if vee else chunks, vee)
    items = model(work)
    if len(rank_of) > len(work):
        with pytest.raises(JobError, match=f"{len(rank_of)} pipeline stages are more than the {len(work)} blocks"):
            split_model(items, rank_of)
        return
    split = split_model(items, rank_of)
    assert [item for stage in range(split.stages) for item in split.parts(stage)] == items
    assert all(any(item.block for item in split.parts(stage)) for stage in range(split.stages))
    assert sum(split.loads()) == sum(item.work for item in items)


@pytest.mark.parametrize("blocks", [30, 33])
def test_blocks_that_do_not_divide_are_all_there(blocks):
    """C25 (c): a floor division would train 28 of 30."""
    split = split_model(model([10] * blocks), range(4))
    assert sum(item.block for stage in range(4) for item in split.parts(stage)) == blocks
    assert split.imbalance < 1.1


def test_where_a_rank_has_several_stages_their_sum_is_what_is_balanced():
    split = split_model(model([10] * 6, before=0, after=20), ranks_of_stages(2, 2, vee=True))
    assert split.loads() == [40, 40]


def test_the_head_of_a_decoder_costs_its_stage_blocks():
    split = split_model([Item(*part) for part in Anatomy.of_decoder(DECODERS["30m"]).work(256)], range(2))
    block = 2 * (4 * 512**2 + 2 * 512 * 2048) + 4 * 512 * 128  # one token's forward; a query meets half of the keys
    assert split.loads() == [3 * 5 * block, 3 * (3 * block + 2 * 512 * 8192)]
    assert str(split) == "embed to layers.4 | layers.5 to head (work 54% 46%, 1.08 of an even split)"


def test_a_split_by_hand_is_taken_and_shown():
    split = split_model(model([1, 1, 1, 1], 0, 0), range(3), ["layers.1", "head"])
    assert isinstance(split, Split) and split.bounds == (0, 2, 5, 6)
    assert str(split) == "embed to layers.0 | layers.1 to layers.3 | head (work 25% 75% 0%, 2.25 of an even split)"


@pytest.mark.parametrize(
    ("by_hand", "says"),
    [
        (["layers.1"], "makes 2 stages, and there are 3; name the first part of each of the 2 later ones"),
        (["layers.1", "laiers.2"], "no stage can begin with 'laiers.2'; write layers.2 of layers.0 to head"),
        (["embed", "layers.2"], "no stage can begin with 'embed'"),
        (["layers.2", "layers.1"], "is not in the order of the model"),
        (["layers.1", "layers.1"], "is not in the order of the model"),
    ],
)
def test_a_split_by_hand_that_is_none_is_refused(by_hand, says):
    with pytest.raises(JobError, match=says):
        split_model(model([1, 1, 1, 1]), range(3), by_hand)


def test_a_model_that_is_not_cut_says_so():
    assert str(Split((), (0, 0), (0,))) == "all in one stage"
