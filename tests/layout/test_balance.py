"""Stages that are balanced by the bytes of ranks, or by measured seconds: against trying all cuts; and what is refused."""

from __future__ import annotations

import itertools
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.anatomy import DECODERS, Anatomy
from stretto.errors import JobError
from stretto.layout.balance import Balance, Item, PartTime, Widths, element_bytes, measured, write_parts
from stretto.layout.stages import split_model
from stretto.layout.zero import ZeroPolicy
from stretto.schedule.pipelines import PIPELINES, microbatches_of, pipeline

sizes = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9), st.integers(1, 9)), min_size=4, max_size=8)


def model(blocks: list[tuple[int, int, int]]) -> list[Item]:
    """(work, elements, saved) of each block, between two ends that weigh much."""
    ends = Item("embed", 0, False, 15, 0), Item("head", 7, False, 15, 20)
    return [ends[0], *(Item(f"layers.{i}", w, True, e, s) for i, (w, e, s) in enumerate(blocks)), ends[1]]


def held_by(cut: tuple[int, ...], items: list[Item], balance: Balance) -> tuple[float, float]:
    """(work of the busiest, bytes of the fullest) rank of one stage each, written out."""
    work, held = [], []
    for stage, (a, b) in enumerate(pairwise(cut)):
        parts = items[a:b]
        work.append(sum(item.work for item in parts))
        most = max(moment[0] for moment in balance.held[stage])
        held.append(sum(4 * item.elements + 10 * most * item.saved for item in parts))
    return max(work), max(held)


@settings(max_examples=80, deadline=None)
@given(sizes, st.integers(2, 4), st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.sampled_from(["memory", "both"]))
def test_the_fullest_rank_holds_as_little_as_any_cut_leaves_it(blocks, ranks, name, by):
    """Or, by both, the worse of work and bytes is as good as in any cut; by memory no cut that is as good leaves less work."""
    items, balance = model(blocks), Balance(by, "", 4.0, 10, pipeline(name, ranks, 6).held)
    cuts = [(0, *(1 + i for i in inner), len(items)) for inner in itertools.combinations(range(1, len(blocks)), ranks - 1)]
    found = held_by(split_model(items, range(ranks), (), balance).bounds, items, balance)
    costs = [held_by(cut, items, balance) for cut in cuts]
    if by == "memory":
        assert found == min(costs, key=lambda cost: (cost[1], cost[0]))
        return
    best = min(work for work, _ in costs), min(held for _, held in costs)
    assert max(found[0] / best[0], found[1] / best[1]) == pytest.approx(min(max(w / best[0], h / best[1]) for w, h in costs))


@settings(max_examples=60, deadline=None)
@given(sizes, st.sampled_from(sorted(PIPELINES)))
def test_ranks_of_several_stages_hold_no_more_than_in_the_cut_by_work(blocks, name):
    schedule = pipeline(name, 2, microbatches_of(name, 2, 5))
    items = model(blocks)
    by_work, by_bytes = (split_model(items, schedule.rank_of, (), Balance(by, "", 4.0, 10, schedule.held)) for by in ("work", "memory"))
    assert by_work.bytes_() == [] and [i for s in range(by_bytes.stages) for i in by_bytes.parts(s)] == items
    as_held = Balance("memory", "", 4.0, 10, schedule.held)
    stages = [by_work.parts(stage) for stage in range(by_work.stages)]
    sums = [(float(sum(i.elements for i in parts)), sum(i.saved for i in parts)) for parts in stages]
    assert max(by_bytes.bytes_()) <= max(as_held.bytes_(sums, schedule.rank_of))


def test_early_stages_of_1f1b_get_fewer_blocks_where_bytes_count():
    """They hold more microbatches; in gpipe all hold the same."""
    items = [Item(f"layers.{i}", 1, True, 0, 1) for i in range(20)]
    counts = {}
    for name in ("1f1b", "gpipe"):
        split = split_model(items, range(4), (), Balance("memory", "", 4.0, 1, pipeline(name, 4, 8).held))
        counts[name] = [len(split.parts(stage)) for stage in range(4)]
    assert counts == {"1f1b": [2, 3, 5, 10], "gpipe": [5, 5, 5, 5]}
    assert split.bytes_() == [40.0] * 4


def test_both_are_printed_with_what_they_are_off_an_even_split():
    items = [Item(*part) for part in Anatomy.of_decoder(DECODERS["30m"]).work(256)]
    split = split_model(items, range(2), (), Balance("memory", "", 16.0, 1024, pipeline("1f1b", 2, 4).held))
    held = split.bytes_()
    shares = " ".join(f"{100 * each / sum(held):.0f}%" for each in held)
    assert str(split).endswith(f"of an even split; memory {shares}, {max(held) / (sum(held) / 2):.2f})")


@pytest.mark.parametrize(
    ("stage", "shards", "wanted"), [(0, 4, 16.0), (1, 4, 8 + 8 / 4), (2, 4, 4 + 4 / 4 + 8 / 4), (3, 4, 16 / 4), (3, 1, 16.0)]
)
def test_bytes_of_an_element_are_those_of_zero(stage, shards, wanted):
    """REFERENCE B1 with fp32 and Adam: 4 + 4 + 8, of which stage s cuts the last s."""
    assert element_bytes(ZeroPolicy.of(stage), shards, Widths.of(4, 4, 4, 2)) == wanted
    assert element_bytes(ZeroPolicy.of(0), 1, Widths.of(2, 4, 4, 2)) == 2 + 4 + 12  # a master copy


def test_where_stages_begin_with_their_fullest_moments():
    """Of the looped schedule, moments that another exceeds everywhere are left out."""
    for name in PIPELINES:
        schedule = pipeline(name, 3, microbatches_of(name, 3, 6))
        for rank in range(3):
            moments = schedule.held[rank]
            assert max(map(sum, moments)) == schedule.peak(rank)
            assert not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for a in moments for b in moments)


# --- measured seconds -----------------------------------------------------------------------------


def test_measured_seconds_take_the_place_of_counted_work(tmp_path: Path):
    """A head that takes as long as three blocks moves the cut."""
    items = [Item("embed", 0, False, 8, 1.0), *(Item(f"layers.{i}", 10, True, 5, 2.0) for i in range(5)), Item("head", 10, False)]
    file = tmp_path / "parts.json"
    seconds = {"embed": 0.0, **{f"layers.{i}": 0.1 for i in range(5)}, "head": 0.3}
    write_parts(file, {name: PartTime(each, 7.0 if name == "layers.0" else None) for name, each in seconds.items()}, {})
    split = split_model(items, range(2), (), Balance(measured=str(file)))
    assert str(split) == "embed to layers.3 | layers.4 to head (seconds 50% 50%, 1.00 of an even split)"
    assert [item.saved for item in split.items] == [1.0, 7.0, *[2.0] * 4, 0.0]
    by_hand = split_model(items, range(2), ["layers.1"], Balance(measured=str(file)))
    assert str(by_hand) == "embed to layers.0 | layers.1 to head (seconds 13% 88%, 1.75 of an even split)"


def test_blocks_that_were_not_measured_take_as_long_as_the_others(tmp_path: Path):
    write_parts(tmp_path / "two.json", {"layers.0": PartTime(1.0), "layers.1": PartTime(3.0), "head": PartTime(5.0)}, {})
    items = [*(Item(f"layers.{i}", 1) for i in range(4)), Item("head", 1, False)]
    assert [item.work for item in measured(items, str(tmp_path / "two.json"))] == [1.0, 3.0, 2.0, 2.0, 5.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read"),
        ("{}", "cannot be read"),
        ("[", "cannot be read"),
        (json.dumps({"parts": {}}), "has no seconds of any part"),
        (json.dumps({"parts": {"layers.0": {"seconds": -1}}}), "has no seconds of any part"),
        (json.dumps({"parts": {"h.0": {"seconds": 1}}}), "is of another model: it has h.0, and none of the blocks from layers.0 on"),
        (json.dumps({"parts": {"layers.0": {"seconds": 1}}}), "has no head; measure this model with"),
    ],
)
def test_a_file_of_something_else_is_refused(text, says, tmp_path: Path):
    file = tmp_path / "parts.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(JobError, match=says):
        measured([Item("layers.0", 1), Item("head", 1, False)], str(file))
