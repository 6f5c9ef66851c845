"""Groups along axes of a mesh, and the ledger of every call."""

from __future__ import annotations

import random
import time

import pytest
import torch

from stretto.comm.group import LANES, Entry, Group, Ledger
from stretto.comm.messages import SMALL
from stretto.comm.threads import Office, run_threads
from stretto.comm.transport import World
from stretto.layout.mesh import AXES, Mesh

MESH = Mesh.of(dp_replicate=2, dp=2, tp=2)


@pytest.mark.parametrize("axes", [(), ("dp",), ("tp",), ("dp_replicate", "dp"), ("dp", "dp_replicate"), AXES])
def test_a_group_adds_over_the_ranks_that_differ_only_along_its_axes(axes: tuple[str, ...]) -> None:
    def rank(world: World) -> tuple[float, list[float]]:
        group = Group(world, MESH, axes, Ledger())
        assert group.ranks[group.index] == world.rank
        total = torch.full((3,), 10.0**world.rank, dtype=torch.float64)
        group.all_reduce(total, reason="test").wait()
        every = torch.zeros(group.size)
        every[group.index] = world.rank
        group.all_gather(every, range(group.size + 1), reason="test").wait()
        return float(total[0]), every.tolist()

    for here, (total, every) in enumerate(run_threads(rank, MESH.size)):
        assert every == list(MESH.group(here, *axes))
        assert total == sum(10.0**peer for peer in MESH.group(here, *axes))


def test_a_group_reduces_scatters_and_broadcasts_by_position_not_by_rank() -> None:
    def rank(world: World) -> None:
        group = Group(world, MESH, ("dp",), Ledger())
        into = torch.zeros(2)
        group.reduce_scatter(torch.arange(4.0) + world.rank, (0, 2, 4), reason="test", into=into).wait()
        mine = torch.tensor([0.0, 1.0]) if group.index == 0 else torch.tensor([2.0, 3.0])
        assert torch.equal(into, 2 * mine + sum(group.ranks))
        x = torch.full((2,), float(world.rank))
        group.broadcast(x, 1, reason="test").wait()
        assert x.tolist() == [group.ranks[1]] * 2
        largest = torch.tensor([float(world.rank)])
        group.all_reduce(largest, op="max", reason="test").wait()
        assert largest.item() == max(group.ranks)

    run_threads(rank, MESH.size)


@pytest.mark.parametrize("axes", [("dp",), ("dp_replicate", "dp", "tp")])
def test_objects_of_any_size_come_in_group_order(axes: tuple[str, ...]) -> None:
    def rank(world: World) -> list[object]:
        return Group(world, MESH, axes, Ledger()).objects({"rank": world.rank, "text": "x" * 1000 * world.rank}, reason="test")

    for here, found in enumerate(run_threads(rank, MESH.size)):
        assert found == [{"rank": peer, "text": "x" * 1000 * peer} for peer in MESH.group(here, *axes)]


def test_a_group_of_one_is_a_group() -> None:
    ledger = Ledger()
    group = Group(World.alone("cpu"), Mesh.of(), ("dp", "cp"), ledger)
    x, into = torch.arange(3.0), torch.zeros(3)
    group.all_reduce(x, reason="sum").wait()
    group.reduce_scatter(x, (0, 3), reason="scatter", into=into).wait()
    group.all_gather(x, (0, 3), reason="gather").wait()
    group.broadcast(x, 0, reason="tell").wait()
    assert x.tolist() == into.tolist() == [0, 1, 2]
    assert group.objects("hello", reason="say") == ["hello"]
    assert [entry.collective for entry, _ in ledger][:4] == ["all_reduce", "reduce_scatter", "all_gather", "broadcast"]
    assert ledger.bytes_sent(Mesh.of()) == 0


def test_the_ledger_counts_calls_of_a_kind_in_the_order_of_the_first() -> None:
    ledger = Ledger()
    group = Group(World.alone("cpu"), Mesh.of(), ("dp",), ledger)
    for reason, size in [("a", 5), ("b", 5), ("a", 5), ("a", 6)]:
        group.all_reduce(torch.zeros(size, dtype=torch.bfloat16), reason=reason).wait()
    entries = [Entry("all_reduce", ("dp",), size, "bfloat16", reason) for reason, size in [("a", 5), ("b", 5), ("a", 6)]]
    assert list(ledger) == [(entries[0], 2), (entries[1], 1), (entries[2], 1)]
    assert len(ledger) == 4
    taken = ledger.take()
    assert (len(taken), len(ledger)) == (4, 0)


@pytest.mark.parametrize("mesh", [Mesh.of(dp=1), Mesh.of(dp=3), Mesh.of(dp_replicate=2, dp=2), Mesh.of(dp=4, tp=1, cp=1)])
def test_the_ledger_foretells_the_bytes_that_are_sent(mesh: Mesh) -> None:
    size = 12 * SMALL
    office = Office()

    def rank(world: World) -> int:
        ledger = Ledger()
        shard, replicas = Group(world, mesh, ("dp", "cp"), ledger), Group(world, mesh, ("dp_replicate",), ledger)
        bounds = [size * i // shard.size for i in range(shard.size + 1)]
        x = torch.ones(size, dtype=torch.bfloat16)
        into = torch.zeros(size // shard.size)
        for _ in range(2):
            shard.reduce_scatter(x.float(), bounds, reason="gradients", into=into, accumulate=True).wait()
        replicas.all_reduce(into, reason="replicas").wait()
        shard.all_gather(x, bounds, reason="parameters").wait()
        assert into.tolist() == [2.0 * mesh.size] * len(into)
        return ledger.bytes_sent(mesh)

    foretold = run_threads(rank, mesh.size, office=office)
    assert foretold == [office.bytes_sent[rank] for rank in range(mesh.size)]
    n, copies = mesh["dp"], mesh["dp_replicate"]  # REFERENCE B9: two reduce-scatters in fp32, one gather in bf16; fp32 between copies
    assert foretold[0] == (n - 1) * (2 * 4 + 2) * size // n + 2 * (copies - 1) * (size // n) * 4 // copies


@pytest.mark.parametrize("seed", range(3))
def test_lanes_and_axes_issued_in_different_orders_on_different_ranks_do_not_mix(seed: int) -> None:
    kinds = [(axes, lane) for axes in (("dp",), ("tp",), ("dp", "tp")) for lane in LANES]

    def rank(world: World) -> None:
        chance = random.Random(100 * seed + world.rank)
        groups = {axes: Group(world, MESH, axes, Ledger()) for axes in (("dp",), ("tp",), ("dp", "tp"))}
        under_way = []
        for axes, lane in chance.sample(kinds, len(kinds)):
            x = torch.full((3,), 100.0 * kinds.index((axes, lane)) + world.rank, dtype=torch.float64)
            under_way.append((axes, lane, x, groups[axes].all_reduce(x, reason="test", lane=lane)))
            time.sleep(chance.random() * 1e-3)
        for axes, lane, x, work in under_way:
            work.wait()
            assert x.tolist() == [sum(100.0 * kinds.index((axes, lane)) + peer for peer in groups[axes].ranks)] * 3

    run_threads(rank, MESH.size, delay=1e-3)
