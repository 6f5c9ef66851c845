"""What a rank is filled with is its part of the whole, and it is never given the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.layout.layout import Layout
from stretto.layout.mesh import Mesh
from stretto.parallel import place as place_module
from stretto.parallel.place import Place, fill_parts

LAYOUTS = {
    "rows": Layout((("tp",), ())),
    "columns": Layout(((), ("tp",))),
    "fused rows": Layout((("tp",), ()), packed=((4, 5, 3), ())),
    "fused columns": Layout(((), ("tp",)), packed=((), (6, 2))),
    "shared": Layout((("tp/2",), ())),
}


def asking(whole, asked=None):
    def fill(name, start, out):
        if asked is not None:
            asked.append(out.numel())
        out.copy_(whole.reshape(-1)[start : start + out.numel()])

    return fill


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_range_of_a_part_is_that_of_the_whole(name, data):
    whole, mesh = torch.arange(12 * 8).view(12, 8).double(), Mesh.of(dp=2, tp=4)
    place, rank = Place((12, 8), LAYOUTS[name]), data.draw(st.integers(0, 7))
    part = torch.zeros(place.local_shape(mesh, rank), dtype=torch.float64)
    for there, here in place.layout.place(place.shape, mesh, rank):
        part[here] = whole[there]
    start = data.draw(st.integers(0, part.numel()))
    out = torch.zeros(data.draw(st.integers(0, part.numel() - start)), dtype=torch.float64)
    fill_parts(asking(whole), {"w": place}, mesh, rank)("w", start, out)
    assert out.tolist() == part.reshape(-1)[start : start + out.numel()].tolist()


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_more_than_a_bounded_number_of_whole_rows_is_made(name, monkeypatch):
    monkeypatch.setattr(place_module, "FILL_ELEMENTS", 16)
    asked: list[int] = []
    whole, mesh, place = torch.arange(12 * 8).view(12, 8).double(), Mesh.of(tp=4), Place((12, 8), LAYOUTS[name])
    out = torch.zeros(math.prod(place.local_shape(mesh, 1)), dtype=torch.float64)
    fill_parts(asking(whole, asked), {"w": place}, mesh, 1)("w", 0, out)
    assert max(asked) <= (16 if "columns" in name else out.numel())
    assert sum(asked) == (whole.numel() if "columns" in name else out.numel())


def test_one_of_the_ranks_that_hold_the_same_counts_it_in_a_norm():
    mesh = Mesh.of(dp=2, tp=4)
    counting = {
        axis: [place.counts(mesh, rank) for rank in range(4)]
        for axis, place in (
            ("tp", Place((8, 2), LAYOUTS["rows"])),
            ("tp/2", Place((8, 2), LAYOUTS["shared"])),
            ("", Place.whole((8, 2))),
        )
    }
    assert counting == {"tp": [True] * 4, "tp/2": [True, False, True, False], "": [True, False, False, False]}


def test_all_ranks_leave_room_for_the_largest_part():
    place = Place((7, 2), LAYOUTS["rows"])
    assert [place.local_shape(Mesh.of(tp=3), rank) for rank in range(3)] == [(3, 2), (2, 2), (2, 2)]
    assert place.room(Mesh.of(tp=3)) == 6
