"""Ranks of several machines: near ones meet in shared memory, far ones by messages, and groups of both go inside, across, inside."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import Store

from stretto.comm import machine as machine_module
from stretto.comm.machine import Machine
from stretto.comm.messages import Messages
from stretto.comm.nearby import Nearby
from stretto.comm.shm import SharedMemory
from stretto.comm.threads import Office, ThreadMail, run_threads
from stretto.comm.transport import World
from stretto.engine.engine import Engine
from stretto.job import Job
from stretto.models import library
from stretto.schedule.algorithms import program


@pytest.fixture
def two_machines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """run(fn, ranks, office, machines): on threads, equally many after each other on each machine."""
    here = threading.local()
    monkeypatch.setattr(machine_module, "_place", lambda: here.machine)

    def run(fn: Callable[[World], Any], ranks: int, office: Office | None = None, machines: int = 2) -> list[Any]:
        office = office or Office()

        def transport(rank: int, size: int, store: Store) -> Nearby:
            here.machine = f"machine {rank * machines // size}"
            return Nearby(SharedMemory(Machine.meet(rank, size, store), 30.0), Messages(ThreadMail(office, rank), rank))

        return run_threads(fn, ranks, office=office, transport=transport)

    return run


Run = Callable[..., list[Any]]
COMBINED = {"sum": sum, "max": max, "min": min, "avg": lambda values: sum(values) / len(values)}


def test_groups_inside_a_machine_and_across_machines_add_up_what_their_ranks_have(two_machines: Run) -> None:
    groups = {"inside": [(0, 1), (2, 3)], "across": [(0, 2), (1, 3)], "all": [(0, 1, 2, 3)]}

    def rank(world: World) -> dict[str, tuple[int, list[float]]]:
        found = {}
        for channel, (name, parts) in enumerate(groups.items()):
            ranks = next(part for part in parts if world.rank in part)
            x = world.transport.own(5, torch.float64, ranks)
            x.fill_(10.0**world.rank)
            world.transport.all_reduce(x, ranks, 2 * channel).wait()
            found[name] = (ranks, x.tolist())
        return found

    for found in two_machines(rank, 4):
        for ranks, values in found.values():
            assert values == [sum(10.0**member for member in ranks)] * 5


def test_only_what_leaves_the_machine_is_a_message(two_machines: Run) -> None:
    def rank(world: World) -> tuple[bool, bool, list[bool]]:
        over = world.transport
        assert isinstance(over, Nearby)
        inside, across = ((0, 1), (0, 2)) if world.rank == 0 else ((2 * (world.rank // 2), 2 * (world.rank // 2) + 1), (0, 2))
        common = over.common(4, torch.float32, inside)
        far = over.common(4, torch.float32, across) if world.rank in across else None
        ways = [over._among(ranks) is over.near for ranks in ((world.rank,), inside, across, range(4))]
        return common is not None, far is None, ways

    assert two_machines(rank, 4) == [(True, True, [True, True, False, False])] * 4


def test_messages_between_machines_and_inside_arrive(two_machines: Run) -> None:
    def rank(world: World) -> list[float]:
        sent = [world.transport.send(torch.full((3,), float(world.rank)), to, 0) for to in range(4) if to != world.rank]
        got = []
        for source in (s for s in range(4) if s != world.rank):
            x = torch.empty(3)
            world.transport.receive(x, source, 0).wait()
            got.append(x[0].item())
        for work in sent:
            work.wait()
        return got

    assert two_machines(rank, 4) == [[float(source) for source in range(4) if source != rank] for rank in range(4)]


@pytest.mark.parametrize("where", ["private", "own"])
@pytest.mark.parametrize(("ranks", "machines"), [(4, 2), (6, 3), (6, 2), (3, 2), (2, 2)])
def test_every_collective_over_machines_gives_what_its_formula_says(two_machines: Run, ranks: int, machines: int, where: str) -> None:
    def rank(world: World) -> list[str]:
        over, everybody, me, wrong = world.transport, range(ranks), world.rank, []
        chance = random.Random(ranks)  # the same on all ranks

        def buffer(size: int, value: float) -> torch.Tensor:
            made = over.own(size + 3, torch.float64, everybody)[3:] if where == "own" else torch.empty(size, dtype=torch.float64)
            return made.fill_(value)

        for size in (0, 1, ranks - 1, ranks, 10_007):
            cuts = sorted(chance.randint(0, size) for _ in range(ranks - 1))
            bounds = [0, *cuts, size]
            low, high = bounds[me], bounds[me + 1]
            for op, combined in COMBINED.items():
                expected = combined([3.0 * r + 1 for r in everybody])
                x = buffer(size, 3.0 * me + 1)
                over.all_reduce(x, everybody, 0, op).wait()
                if not bool((x == expected).all()):
                    wrong.append(f"all_reduce {op} of {size}: {x}")
                for start in (None, 5.0):
                    x, into = buffer(size, 3.0 * me + 1), torch.full((high - low,), start or 0.0, dtype=torch.float64)
                    over.reduce_scatter(x, bounds, everybody, 0, into, start is not None, op).wait()
                    if not bool((into == expected + (start or 0.0)).all() and (x == 3.0 * me + 1).all()):
                        wrong.append(f"reduce_scatter {op} of {size} at {bounds}: {into}")
            x = buffer(size, -1.0)
            x[low:high] = me
            over.all_gather(x, bounds, everybody, 0).wait()
            lengths = [b - a for a, b in pairwise(bounds)]
            if x.tolist() != [float(r) for r in everybody for _ in range(lengths[r])]:
                wrong.append(f"all_gather of {size} at {bounds}: {x}")
            for source in (0, ranks - 1):
                x = buffer(size, float(me))
                over.broadcast(x, everybody, source, 0).wait()
                if not bool((x == source).all()):
                    wrong.append(f"broadcast of {size} from {source}: {x}")
        return wrong

    assert two_machines(rank, ranks, machines=machines) == [[]] * ranks


def test_of_a_sum_over_machines_that_leaves_a_machine_which_the_hierarchical_program_sends_between_them(two_machines: Run) -> None:
    office, size, one = Office(), 60_000, program("all_reduce", "hierarchical", 6, nodes=2)

    def rank(world: World) -> None:
        world.transport.all_reduce(torch.ones(size), range(6), 0).wait()

    two_machines(rank, 6, office)
    crossing = [hop.src for hop in one.hops if hop.src // 3 != hop.dst // 3]
    assert office.bytes_sent == {rank: crossing.count(rank) * size * 4 * one.share() for rank in range(6)}


class Jitter(Office):
    """Every message takes a time of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance = random.Random(seed)

    def put(self, key: tuple[int, int, int], x: torch.Tensor) -> None:
        self.delay = self.chance.random() * 2e-3
        super().put(key, x)


def test_sums_over_machines_have_the_same_bits_on_all_ranks_and_in_all_runs(two_machines: Run) -> None:
    def rank(world: World) -> torch.Tensor:
        generator = torch.Generator().manual_seed(world.rank)
        x = torch.randn(5003, generator=generator) * 10.0 ** torch.randint(-3, 3, (5003,), generator=generator)
        world.transport.all_reduce(x, range(6), 0).wait()
        return x

    first, *others = [x for seed in range(3) for x in two_machines(rank, 6, Jitter(seed), machines=3)]
    assert all(torch.equal(first, x) for x in others)


def test_sums_over_machines_go_on_though_ranks_wait_in_different_orders_or_not_yet(two_machines: Run) -> None:
    """Each rank issues the sums of four channels in an order of its own, then messages, and waits in another order."""
    met = threading.Barrier(4)

    def rank(world: World) -> list[float]:
        over, everybody, chance = world.transport, range(4), random.Random(world.rank)
        tensors, works = [torch.full((40_000,), 10.0**channel) for channel in range(4)], {}
        for channel in chance.sample(range(4), 4):
            works[channel] = over.all_reduce(tensors[channel], everybody, 2 * channel)
        if world.rank != 3:
            works[world.rank].wait()  # which is not to need that anybody else waits
        met.wait(20)
        for channel in chance.sample(range(4), 4):
            works[channel].wait()
        return [x.mean().item() for x in tensors]

    assert two_machines(rank, 4) == [[4.0 * 10.0**channel for channel in range(4)]] * 4


def test_a_sum_that_nobody_waits_for_is_done_behind_the_caller(two_machines: Run) -> None:
    def rank(world: World) -> bool:
        work = world.transport.all_reduce(torch.ones(100_000), range(4), 0)
        limit = time.monotonic() + 20
        while not work._over.is_set() and time.monotonic() < limit:
            time.sleep(1e-3)
        return work._over.is_set()

    assert two_machines(rank, 4) == [True] * 4


def test_kinds_on_one_channel_stay_in_the_order_in_which_they_were_issued(two_machines: Run) -> None:
    def rank(world: World) -> list[list[float]]:
        over, everybody, chance = world.transport, range(4), random.Random(5)
        found, works = [], []
        for k in range(30):
            x = torch.full((chance.choice([1, 7, 5000]),), float(k) + world.rank)
            kind = chance.choice(["sum", "broadcast", "inside"])
            if kind == "sum":
                works.append(over.all_reduce(x, everybody, 0))
            elif kind == "broadcast":
                works.append(over.broadcast(x, everybody, k % 4, 0))
            else:
                works.append(over.all_reduce(x, over.near.machine.ranks, 0))
            expected = {"sum": 4.0 * k + 6, "broadcast": k + k % 4.0, "inside": 2.0 * k + (1 if world.rank < 2 else 5)}[kind]
            found.append((x, expected))
        for work in works:
            work.wait()
        return [[x.min().item(), x.max().item()] for x, expected in found if not bool((x == expected).all())]

    assert two_machines(rank, 4) == [[]] * 4


@pytest.mark.parametrize(
    ("mesh", "zero"), [("dp=4", 2), ("dp=2 dp_replicate=2", 3), ("pp=2 dp=2", 1), ("dp=2 tp=2", 3)], ids=lambda value: str(value)
)
def test_the_engine_takes_the_step_of_one_process(two_machines: Run, mesh: str, zero: int) -> None:
    sizes = {"blocks": 2, "hidden": 16, "heads": 2, "ffn": 24, "vocab": 11}
    usual = {"precision": "fp64", "batch.size": 8, "batch.micro_size": 2, "clip": 1.0}
    ids = torch.randint(11, (8, 8), generator=torch.Generator().manual_seed(0))

    def losses(mesh: str, zero: int) -> Callable[[World], list[float]]:
        def rank(world: World) -> list[float]:
            with Engine(library.load("tiny", overrides=sizes), Job.load(mesh=mesh, zero=zero, **usual), world) as engine:
                return [engine.step({"input_ids": ids, "labels": ids}).loss for _ in range(3)]

        return rank

    (alone,) = run_threads(losses("dp=1", 0), 1)
    for found in two_machines(losses(mesh, zero), 4):
        assert found == pytest.approx(alone, rel=1e-12)


def trained_apart(folder: Path) -> dict[str, list[float]]:
    """Losses of unmodified scripts over gloo and over our backend, with two ranks on each of two machines, or so they are told."""
    import os

    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import stretto.comm.shm  # noqa: F401

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    machine_module._place = lambda: f"machine {rank // 2}"  # this process is the test's own
    told = {}

    def sharded(model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=init_device_mesh("cpu", (size,)))

    def hybrid(model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))

    for backend in ("gloo", "stretto"):
        dist.init_process_group(backend, init_method=f"file://{folder}/{backend}", rank=rank, world_size=size)
        for wrap in (nn.parallel.DistributedDataParallel, sharded, hybrid):
            torch.manual_seed(0)
            model = wrap(nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 10)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = torch.Generator().manual_seed(rank)
            for _ in range(3):
                x, y = torch.randn(16, 24, generator=data), torch.randint(0, 10, (16,), generator=data)
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                told.setdefault(f"{backend} {wrap.__name__}", []).append(loss.item())
        x, into = torch.full((4,), float(rank)), torch.empty(4)
        dist.all_to_all_single(into, x)
        everybody: list[Any] = [None] * size
        dist.all_gather_object(everybody, rank)
        total, pairs = torch.full((3,), 2.0**rank), [dist.new_group([0, 2]), dist.new_group([1, 3]), dist.new_group(range(size))]
        for group in (pairs[rank % 2], pairs[2]):  # of groups with the same number for these ranks neither takes the other's messages
            dist.all_reduce(total, group=group)
        work = dist.all_reduce(total, async_op=True)
        while not work.is_completed():
            time.sleep(0)
        dist.barrier()
        told[f"{backend} calls"] = [*into.tolist(), *everybody, *total.tolist()]
        over = getattr(dist.group.WORLD, "transport", None)
        told[f"{backend} way"] = [float(isinstance(over, Nearby))]
        dist.destroy_process_group()
    return told


def test_as_a_backend_of_torch_over_machines_scripts_have_the_losses_of_gloo(tmp_path: Path) -> None:
    from stretto.launch.local import launch

    for told in launch(trained_apart, 4, (tmp_path,), timeout=120):
        assert told.pop("stretto way") == [1.0] and told.pop("gloo way") == [0.0]
        for name in [name for name in told if name.startswith("gloo")]:
            assert told[name.replace("gloo", "stretto")] == pytest.approx(told[name], rel=1e-5), name
