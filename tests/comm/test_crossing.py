"""A crossing brings a value and its gradient where one process would have them, and the Ledger has its collectives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from stretto.comm.crossing import Bridge, cross
from stretto.comm.group import Group, Ledger
from stretto.comm.threads import run_threads
from stretto.comm.transport import World
from stretto.errors import RunError
from stretto.layout.mesh import Mesh
from stretto.layout.transition import TRANSITIONS, Have, Want

TOKENS = [(1, 4, 3), (2, 5, 2), (3, 1), (1, 1, 2)]  # [B, T, H], also without rows; fewer tokens than ranks


def values(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).double()


def lay(have: Have, whole: Tensor, bridge: Bridge) -> Tensor:
    """What this rank has of a value that lies so."""
    if have == "same":
        return whole.clone()
    if have == "cut":
        return whole.reshape(-1, whole.shape[-1]).tensor_split(bridge.size)[bridge.index].reshape(bridge.part(whole.shape, "tokens"))
    parts = [values(tuple(whole.shape), 100 + rank) for rank in range(bridge.size - 1)]
    return [*parts, whole - sum(parts, torch.zeros_like(whole))][bridge.index]


@pytest.mark.parametrize("shape", TOKENS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("have", "want"), TRANSITIONS)
def test_a_crossing_is_its_row_of_the_table_forward_and_backward(have: Have, want: Want, ranks: int, shape: tuple[int, ...]) -> None:
    whole, gradient = values(shape, 0), values(shape, 1)
    upstream: Have = "cut" if want == "cut" else "same" if have == "sum" or want == "alike" else "sum"

    def rank(world: World) -> tuple[bool, bool, list[str], list[str]]:
        ledger = Ledger()
        bridge = Bridge.of(Group(world, Mesh.of(tp=ranks), ("tp",), ledger))
        x = lay(have, whole, bridge).requires_grad_()
        y = cross(x, bridge, have, want, shape, reason="test")
        there = torch.equal(y, lay("cut" if want == "cut" else "same", whole, bridge))
        forward = [entry.collective for entry, _ in ledger.take()]
        y.backward(lay(upstream, gradient, bridge))
        back = torch.equal(x.grad, lay("cut" if have == "cut" else "same", gradient, bridge))  # by a summand: that by the sum
        return there, back, forward, [entry.collective for entry, _ in ledger]

    silent = ("none", "slice")
    forward, backward = ([] if c in silent else [c] for c in TRANSITIONS[have, want])
    assert run_threads(rank, ranks) == [(True, True, forward, backward)] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_features_are_cut_and_joined_along_the_last_dim(ranks: int) -> None:
    whole, gradient = values((2, 3, 7), 0), values((2, 3, 7), 1)

    def rank(world: World) -> bool:
        bridge = Bridge.of(Group(world, Mesh.of(tp=ranks), ("tp",), Ledger()))
        x = whole.clone().requires_grad_()
        part = cross(x, bridge, "same", "cut", whole.shape, reason="split", dim="features")
        joined = cross(part, bridge, "cut", "alike", whole.shape, reason="join", dim="features")
        joined.backward(gradient)
        mine = whole.tensor_split(ranks, dim=-1)[bridge.index]
        return torch.equal(part, mine) and torch.equal(joined, whole) and torch.equal(x.grad, gradient)

    assert all(run_threads(rank, ranks))


def test_a_value_of_the_wrong_shape_is_refused_where_it_crosses() -> None:
    """[2, 4, 3] * [1, 4, 3] would broadcast without a word: tokens of one row, times those of two."""
    bridge = Bridge.of(Group(World.alone("cpu"), Mesh.of(), ("tp",), Ledger()))
    with pytest.raises(RunError, match=r"enters attn: \[2, 4, 3\] came where this rank's part of \[2, 4, 3\] is \[1, 8, 3\]"):
        cross(torch.zeros(2, 4, 3), bridge, "cut", "same", (2, 4, 3), reason="enters attn")


def test_the_ledger_has_the_size_of_the_whole() -> None:
    def rank(world: World) -> list[tuple[str, int, str]]:
        ledger = Ledger()
        bridge = Bridge.of(Group(world, Mesh.of(tp=2), ("tp",), ledger))
        x = torch.zeros(bridge.part((2, 5, 3), "tokens"), requires_grad=True)
        cross(x, bridge, "cut", "same", (2, 5, 3), reason="enters mlp").sum().backward()
        return [(entry.collective, entry.elements, entry.reason) for entry, _ in ledger]

    size = math.prod((2, 5, 3))
    assert run_threads(rank, 2)[0] == [("all_gather", size, "enters mlp"), ("reduce_scatter", size, "enters mlp, backward")]


def test_the_compiler_takes_a_crossing_as_one_node_of_one_graph() -> None:
    bridge = Bridge.of(Group(World.alone("cpu"), Mesh.of(), ("tp",), Ledger()))

    def block(x: Tensor) -> Tensor:
        return cross(x * 2, bridge, "cut", "same", (2, 3, 4), reason="test") + 1

    x = values((1, 6, 4), 0).requires_grad_()
    y = torch.compile(block, backend="aot_eager", fullgraph=True)(x)
    y.sum().backward()
    assert torch.equal(y, (x * 2 + 1).view(2, 3, 4))
    assert torch.equal(x.grad, torch.full_like(x, 2.0))
