"""Mesh: ranks as digits along named axes, and the groups that differ only along some of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import JobError
from stretto.layout.mesh import AXES, MEANING, Mesh


def meshes(largest: int = 4) -> st.SearchStrategy[Mesh]:
    """Any mesh of up to 64 ranks."""
    sizes = st.dictionaries(st.sampled_from(AXES), st.integers(1, largest), max_size=4)
    return sizes.map(lambda s: Mesh.of(**s)).filter(lambda mesh: mesh.size <= 64)


def some_axes() -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(AXES), unique=True)


@settings(max_examples=40)
@given(meshes())
def test_a_rank_is_its_coordinates_read_as_digits(mesh: Mesh) -> None:
    sizes = [size for _, size in mesh.axes]
    for rank, coordinates in enumerate(np.ndindex(*sizes)):
        assert tuple(mesh.at(rank).values()) == coordinates
        assert mesh.rank(**mesh.at(rank)) == rank


@settings(max_examples=40)
@given(meshes(), some_axes(), st.data())
def test_a_group_is_what_a_slice_of_the_array_of_ranks_holds(mesh: Mesh, axes: list[str], data: st.DataObject) -> None:
    array = np.arange(mesh.size).reshape([size for _, size in mesh.axes])
    rank = data.draw(st.integers(0, mesh.size - 1))
    here = mesh.at(rank)
    group = array[tuple(slice(None) if name in axes else here[name] for name in AXES)].ravel()
    assert mesh.group(rank, *axes) == tuple(group)
    assert mesh.group(rank, *axes)[mesh.index(rank, *axes)] == rank
    assert mesh.extent(*axes) == len(group)


@settings(max_examples=40)
@given(meshes(), some_axes())
def test_groups_share_out_all_ranks(mesh: Mesh, axes: list[str]) -> None:
    groups = {mesh.group(rank, *axes) for rank in range(mesh.size)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))


def test_tensor_parallel_ranks_are_neighbours_and_stages_are_far_apart() -> None:
    mesh = Mesh.of(pp=2, dp=2, tp=2)
    assert mesh.group(4, "tp") == (4, 5)
    assert mesh.group(4, "pp") == (0, 4)
    assert mesh.group(5, "dp", "tp") == mesh.group(5, "tp", "dp") == (4, 5, 6, 7)


@settings(max_examples=40)
@given(meshes())
def test_a_mesh_prints_as_it_is_written(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh
    assert Mesh.parse(str(mesh).replace(" ", ","), mesh.size) == mesh


@settings(max_examples=40)
@given(meshes(), st.sampled_from(AXES), st.integers(1, 6))
def test_auto_takes_what_the_other_axes_leave(mesh: Mesh, axis: str, size: int) -> None:
    others = {name: n for name, n in mesh.axes if name != axis}
    text = " ".join(f"{name}={n}" for name, n in others.items())
    ranks = size * math.prod(others.values())
    assert Mesh.parse(f"{text} {axis}=auto", ranks) == Mesh.of(**others, **{axis: size})


def test_every_axis_is_there_and_has_a_meaning() -> None:
    assert [name for name, _ in Mesh.of().axes] == list(AXES) == list(MEANING)
    assert Mesh.of().size == Mesh.parse("").size == 1
    assert str(Mesh.of()) == "dp=1"


@pytest.mark.parametrize(
    ("text", "ranks", "words"),
    [
        ("dp_rep=2", None, ["'dp_rep'", "pp dp_replicate dp cp ep tp", "write dp_replicate=2"]),
        ("data=auto", 2, ["'data'"]),
        ("dp=0", None, ["dp=0", "1 or more"]),
        ("dp", None, ["'dp' is not axis=size", 'mesh="dp=2"']),
        ("dp=", None, ["'dp=' is not axis=size"]),
        ("=2", None, ["'=2' is not axis=size"]),
        ("dp=2 dp=4", None, ["dp twice"]),
        ("dp=2 dp=auto", 4, ["dp twice"]),
        ("dp=two", None, ["'two' is no size for dp", "dp=2"]),
        ("dp=-2", None, ["'-2' is no size for dp"]),
        ("dp=1.5", None, ["'1.5' is no size for dp"]),
        ("dp=auto tp=auto", 4, ["dp and tp", "only one axis may be auto"]),
        ("dp=auto", None, ["needs a known number of ranks"]),
        ("dp=auto tp=3", 8, ["8 ranks", "tp=3", "divisor of 8"]),
    ],
)
def test_what_is_no_mesh_is_refused_with_what_to_write(text: str, ranks: int | None, words: list[str]) -> None:
    with pytest.raises(JobError) as refusal:
        Mesh.parse(text, ranks)
    assert [word for word in words if word not in str(refusal.value)] == []


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_beyond_the_mesh_has_no_coordinates(rank: int) -> None:
    with pytest.raises(ValueError, match="dp=4 of 4 ranks"):
        Mesh.of(dp=4).at(rank)


def test_a_view_names_the_same_ranks_along_other_axes() -> None:
    view = Mesh.of(pp=2, dp=4).view(pp=2, edp=2, ep=2)
    assert view.group(5, "ep") == (4, 5)
    assert view.group(5, "edp") == (5, 7)
    with pytest.raises(JobError, match="8 ranks"):
        Mesh.of(dp=8).view(edp=3, ep=2)


def test_an_axis_is_seen_as_pieces_of_neighbours() -> None:
    mesh = Mesh.of(dp=2, tp=4)
    assert (mesh["tp/2"], mesh["tp%2"], mesh.extent("dp", "tp%2")) == (2, 2, 4)
    assert [mesh.along(rank, "tp/2") for rank in range(8)] == [0, 0, 1, 1] * 2
    assert [mesh.along(rank, "tp%2") for rank in range(8)] == [0, 1] * 4
    assert (mesh.group(6, "tp%2"), mesh.group(6, "tp/2"), mesh.group(6, "dp", "tp/2")) == ((6, 7), (4, 6), (0, 2, 4, 6))
    assert (mesh.index(6, "dp", "tp/2"), mesh.index(6, "tp%2")) == (3, 0)
    with pytest.raises(ValueError, match="tp=4 has no pieces of 3"):
        mesh["tp/3"]
