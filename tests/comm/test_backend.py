"""The torch.distributed backend: every call gives what gloo gives, and what is written for gloo trains the same over it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool

from stretto.comm.transport import World
from stretto.launch.local import launch


def calls(world: World) -> list[str]:
    """Every call over groups of ours and of gloo's, of all ranks and of two; what differs."""
    import torch.distributed as dist

    import stretto.comm.shm  # noqa: F401  (it registers the backend)

    found: list[str] = []
    for members in (range(world.size), (1, 3)):
        ours, theirs = (dist.new_group(list(members), backend=backend) for backend in ("stretto", "gloo"))
        if world.rank in members:
            found += differences(ours, theirs, list(members).index(world.rank), len(members))
            for group in (ours, theirs):
                dist.destroy_process_group(group)
    return found


def differences(ours: Any, theirs: Any, me: int, n: int) -> list[str]:
    """What the calls give over two groups of n ranks, of which this is number `me`, and over one of them by a formula."""
    import torch.distributed as dist

    differ: list[str] = []

    def fresh(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.arange(1, 1 + int(torch.tensor(shape).prod())).view(shape) * (me + 2)).to(dtype)

    def reduced(op: Any, dtype: torch.dtype) -> Callable[[Any], list[torch.Tensor]]:
        def call(group: Any) -> list[torch.Tensor]:
            x = fresh(3, 5, dtype=dtype)
            dist.all_reduce(x, op, group=group)
            return [x]

        return call

    def uneven_all_to_all(group: Any) -> list[torch.Tensor]:
        x = fresh(n * (n + 1) // 2, 3)
        out = torch.zeros(n * (me + 1), 3)
        dist.all_to_all_single(out, x, [me + 1] * n, list(range(1, n + 1)), group=group)
        return [out]

    def messages(group: Any) -> list[torch.Tensor]:
        got, late = torch.zeros(7), torch.zeros(7)
        after, before = (me + 1) % n, (me - 1) % n
        works = [dist.isend(fresh(7) * 10**tag, group=group, group_dst=after, tag=tag) for tag in (0, 1)]
        works += [dist.irecv(x, group=group, group_src=before, tag=tag) for x, tag in ((late, 1), (got, 0))]
        for work in works:
            work.wait()
        batch = [dist.P2POp(dist.isend, got, group=group, group_peer=after)]
        batch.append(dist.P2POp(dist.irecv, late, group=group, group_peer=before))
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        return [got, late]

    def asked(group: Any) -> list[torch.Tensor]:
        x = fresh(9)
        work = dist.all_reduce(x, group=group, async_op=True)
        while not work.is_completed():
            time.sleep(0)
        work.wait()
        y = fresh(2)
        (z,) = dist.all_reduce(y, group=group, async_op=True).get_future().wait()
        return [x, z]

    def leaf(group: Any) -> list[torch.Tensor]:
        x = torch.nn.Parameter(fresh(4))
        dist.all_reduce(x.data, group=group)
        dist.broadcast(x, group=group, group_src=0)
        return [x.detach()]

    def kept(tensors: list[torch.Tensor], call: Callable[[], object]) -> list[torch.Tensor]:
        call()
        return tensors

    def lists(*shape: int) -> list[torch.Tensor]:
        return [torch.zeros(*shape) for _ in range(n)]

    root = n - 1
    whole, into = torch.zeros(n * 4, 3), torch.zeros(4, 3)
    many, gathered, one = lists(5), lists(5), torch.zeros(5)
    made: dict[str, Callable[[Any], list[torch.Tensor]]] = {
        **{f"all_reduce {op}": reduced(op, torch.float32) for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)},
        **{f"all_reduce {op} int": reduced(op, torch.int64) for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.BAND, dist.ReduceOp.BXOR)},
        "all_reduce bf16": reduced(dist.ReduceOp.SUM, torch.bfloat16),
        "parameters": leaf,
        "messages": messages,
        "asked": asked,
        "all_gather": lambda group: kept(many, lambda: dist.all_gather(many, fresh(5), group=group)),
        "all_gather_single": lambda group: kept([whole], lambda: dist.all_gather_single(whole, fresh(4, 3), group=group)),
        "reduce_scatter_single": lambda group: kept([into], lambda: dist.reduce_scatter_single(into, fresh(4 * n, 3), group=group)),
        "reduce_scatter": lambda group: kept([one], lambda: dist.reduce_scatter(one, [fresh(5) * i for i in range(n)], group=group)),
        "scatter": lambda group: kept(
            [one], lambda: dist.scatter(one, [fresh(5) * i for i in range(n)] if me == root else None, group=group, group_src=root)
        ),
        "gather": lambda group: kept(
            gathered, lambda: dist.gather(fresh(5), gathered if me == root else None, group=group, group_dst=root)
        ),
        "all_to_all": lambda group: kept(many, lambda: dist.all_to_all(many, [fresh(5) * i for i in range(n)], group=group)),
        "all_to_all_single": uneven_all_to_all,
    }
    for name, call in made.items():
        results = []
        for group in (theirs, ours):
            for x in (whole, into, one, *many, *gathered):
                x.zero_()
            results.append([x.clone() for x in call(group)])
        if not all(torch.equal(a, b) for a, b in zip(*results, strict=True)):
            differ.append(f"{name} of {n}: {results}")
    x = fresh(5)
    dist.reduce(x, group=ours, group_dst=root)
    total = sum(range(2, 2 + n)) if me == root else me + 2
    if not torch.equal(x, torch.arange(1.0, 6) * total):
        differ.append(f"reduce of {n}: {x}")
    average = fresh(5)
    dist.all_reduce(average, dist.ReduceOp.AVG, group=ours)
    if not torch.equal(average, torch.arange(1.0, 6) * (n + 3) / 2):
        differ.append(f"average of {n}: {average}")
    strided = fresh(6, 4).t()[1:3]  # gloo's result for this is wrong
    dist.all_reduce(strided, group=ours)
    if not torch.equal(strided, torch.arange(1.0, 25).view(6, 4).t()[1:3] * sum(range(2, 2 + n))):
        differ.append(f"strided of {n}: {strided}")
    everybody: list[Any] = [None] * n
    dist.all_gather_object(everybody, {"rank": me}, group=ours)
    if everybody != [{"rank": i} for i in range(n)]:
        differ.append(f"objects of {n}: {everybody}")
    dist.barrier(group=ours)
    return differ


def test_every_call_gives_what_gloo_gives(pool: Pool) -> None:
    assert pool.run(calls) == [[]] * 4


def train(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Losses of unmodified DDP, FSDP2 and DTensor scripts, by backend."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import stretto.comm.shm  # noqa: F401

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def ddp(model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02)

    def fsdp2(model: Any, **options: Any) -> nn.Module:
        mesh = init_device_mesh("cpu", (size,))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    def hsdp(model: Any) -> nn.Module:
        return fully_shard(model, mesh=init_device_mesh("cpu", (1, size), mesh_dim_names=("replicas", "shards")))

    def mixed(model: Any) -> nn.Module:
        return fsdp2(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    def tensor(model: nn.Module) -> nn.Module:
        return parallelize_module(model, init_device_mesh("cpu", (size,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def losses(wrap: Callable[[nn.Module], nn.Module], own_rows: bool) -> list[float]:
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 10)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        data, found = torch.Generator().manual_seed(rank if own_rows else 0), []
        for _ in range(4):
            x, y = torch.randn(16, 24, generator=data), torch.randint(0, 10, (16,), generator=data)
            loss = nn.functional.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    told = {}
    for backend in ("gloo", "stretto"):
        dist.init_process_group(backend, init_method=f"file://{folder}/{backend}", rank=rank, world_size=size)
        assert dist.get_backend() == backend
        told[backend] = {wrap.__name__: losses(wrap, wrap is not tensor) for wrap in (ddp, fsdp2, hsdp, mixed, tensor)}
        dist.destroy_process_group()
    return told


@pytest.mark.usefixtures("warm_ranks")
def test_scripts_written_for_gloo_have_the_same_losses_over_shared_memory(tmp_path: Path) -> None:
    for told in launch(train, 2, (tmp_path,), timeout=120):
        assert told["gloo"].keys() == told["stretto"].keys()
        for name, theirs in told["gloo"].items():
            assert told["stretto"][name] == pytest.approx(theirs, rel=1e-6), name
            assert len(set(theirs)) == 4


def crossed(folder: Path) -> list[float]:
    """Two groups of the same ranks, each rank beginning with another one and waiting for what the other begins last."""
    import torch.distributed as dist

    import stretto.comm.shm  # noqa: F401

    rank = int(os.environ["RANK"])
    dist.init_process_group("stretto", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    tensors = [torch.full((1_500_000,), float(10**i)) for i in range(2)]
    works = {i: dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in (rank, 1 - rank)}
    for i in (1 - rank, rank):
        works[i].wait()
    dist.destroy_process_group()
    return [x.mean().item() for x in tensors]


@pytest.mark.usefixtures("warm_ranks")
def test_groups_of_the_same_ranks_neither_mix_nor_wait_for_each_other(tmp_path: Path) -> None:
    assert launch(crossed, 2, (tmp_path,), timeout=60) == [[2.0, 20.0]] * 2
