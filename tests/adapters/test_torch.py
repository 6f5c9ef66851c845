"""DDP and fully_shard, with tensor parallelism and torch's pipelining, train what one process trains: the adapters map a Job rightly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pool import Pool

from stretto.adapters.catalog import RUNNERS
from stretto.adapters.runner import Setting, real
from stretto.adapters.summary import Effort
from stretto.adapters.traffic import Traffic
from stretto.adapters.turn import take_turn
from stretto.comm.transport import World
from stretto.data.batch import prepare_labels
from stretto.data.feed import Feed
from stretto.data.source import open_source
from stretto.engine.loss import call_model, next_token_loss
from stretto.engine.plain import plain_steps
from stretto.job import Job
from stretto.models import library

STEPS = 3
SMALL: Mapping[str, Any] = {
    "model": {"name": "tiny", "blocks": 4, "hidden": 32, "ffn": 48},
    "batch": {"size": 8, "seq_len": 12},
    "data": "random",
    "precision": "fp64",
    "schedule": {"shape": "cosine", "warmup": 1},
    "steps": STEPS,
    "clip": 0.3,
    "device": "cpu",
}


def job_of(**keys: Any) -> Job:
    return Job.load(dict(SMALL), **keys).resolve(4, "cpu", 0)


def expected(job: Job) -> list[tuple[float, float]]:
    """(loss, norm of the gradient) of each step, by the plain loop of one process."""
    loaded = library.load(job.model.name, seed=job.seed, overrides=job.model.sizes())
    sizes: Any = {"seq_len": job.batch.seq_len, "vocab": loaded.vocab}
    source = open_source("random", **sizes, split=None, column=None, tokenizer=None, seed=0, part="learn")
    feed = Feed(source, size=job.batch.size)
    batches = [prepare_labels(feed.rows(step)) for step in range(STEPS)]
    model = real(loaded, job.seed, torch.device("cpu"), torch.float64)
    steps = plain_steps(model, batches, job, call_model, next_token_loss, compute=torch.float64, master=torch.float64)
    return [(step.loss, step.grad_norm) for step in steps]


def turn(world: World, runner: str, job: Job) -> tuple[list[float], list[float | None], int | None]:
    told = take_turn(RUNNERS[runner].build, Setting(job, world.rank, world.size, world.device), Effort.of(STEPS))
    return list(told.losses), list(told.norms), told.sent


CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ddp": ("ddp", {"mesh": "dp=4"}),
    "ddp of two microbatches": ("ddp", {"mesh": "dp=4", "batch.micro_size": 1}),
    "ddp recomputing": ("ddp", {"mesh": "dp_replicate=2 dp=2", "recompute": "full"}),
    "accelerate": ("accelerate", {"mesh": "dp=4", "precision": "fp32", "batch.micro_size": 1}),
    "fsdp2 keeping parameters": ("fsdp2", {"mesh": "dp=4", "zero": 2}),
    "fsdp2 resharding, two microbatches": ("fsdp2", {"mesh": "dp=4", "zero": 3, "batch.micro_size": 1}),
    "fsdp2 reducing at the end": ("fsdp2", {"mesh": "dp=4", "zero": 3, "batch.micro_size": 1, "zero.gradients": "end"}),
    "fsdp2 hybrid": ("fsdp2", {"mesh": "dp_replicate=2 dp=2", "zero": 3, "recompute": "selective"}),
    "fsdp2 and tensor parallel": ("fsdp2", {"mesh": "dp=2 tp=2", "zero": 3}),
    "tensor parallel in two microbatches": ("fsdp2", {"mesh": "dp=2 tp=2", "zero": 2, "batch.micro_size": 2}),
    "pipeline and fsdp2": ("fsdp2", {"mesh": "pp=2 dp=2", "zero": 2, "batch.micro_size": 1}),
    "pipeline of one dp rank": ("fsdp2", {"mesh": "pp=4", "batch.micro_size": 2}),
    "gpipe": ("fsdp2", {"mesh": "pp=4", "batch.micro_size": 2, "pipeline": "gpipe"}),
    "interleaved": ("fsdp2", {"mesh": "pp=2 dp=2", "batch.micro_size": 1, "pipeline": "interleaved"}),
}


#: Each is near another one that make test runs.
FULL = ("fsdp2 and tensor parallel", "gpipe", "ddp recomputing", "fsdp2 reducing at the end")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.grid] * (case in FULL)) for case in CASES])
def test_a_framework_trains_what_one_process_trains(case: str, pool: Pool) -> None:
    runner, keys = CASES[case]
    job = job_of(**keys)
    assert RUNNERS[runner].refusal(job) == ""
    told = pool.run(turn, 4, (runner, job), timeout=120)
    near = 1e-11 if job.precision.compute == "fp64" else 1e-6
    for step, (loss, norm) in enumerate(expected(job)):
        assert sum(losses[step] for losses, _, _ in told) == pytest.approx(loss, rel=near)
        assert [norms[step] for _, norms, _ in told] == pytest.approx([norm] * 4, rel=100 * near)


def parameters() -> int:
    keys = job_of(mesh="dp=4").model
    return sum(p.numel() for p in library.load(keys.name, overrides=keys.sizes()).model.parameters())


def test_the_bytes_that_frameworks_send_are_those_of_the_formulas(pool: Pool) -> None:
    """Over 4 ranks: an all-reduce of P doubles sends 2 * 3/4 * 8 P, resharding two gathers and one reduction 3 * 3/4 * 8 P."""
    whole = 8 * parameters()
    for runner, keys, gathers in (("ddp", {}, 2), ("fsdp2", {"zero": 2}, 2), ("fsdp2", {"zero": 3}, 3)):
        job = job_of(mesh="dp=4", clip=0, **keys)
        told = pool.run(turn, 4, (runner, job), timeout=120)
        for _, norms, sent in told:
            assert norms == [None] * STEPS  # nobody computes a norm that is not asked for
            assert sent == pytest.approx(gathers * 3 / 4 * whole, rel=0.02)  # fully_shard pads to even parts


def count_calls(world: World) -> tuple[int, dict[str, int]]:
    import torch.distributed as dist

    x, parts = torch.ones(8, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    with Traffic() as traffic:
        dist.all_reduce(x)
        dist.reduce_scatter_tensor(parts, x)
        dist.all_gather_into_tensor(x, parts)
        if world.rank < 2:
            other = 1 - world.rank
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, parts, other), dist.P2POp(dist.irecv, parts.clone(), other)]):
                work.wait()
        x + x
    return traffic.sent, traffic.calls


def test_every_kind_of_message_is_counted_once_by_its_group(pool: Pool) -> None:
    told = pool.run(count_calls, 4)
    expected = 2 * 3 / 4 * 64 + 3 / 4 * 64 + 3 * 16
    assert [sent for sent, _ in told] == [expected + 16, expected + 16, expected, expected]
    assert sum(told[0][1].values()) == 4 and sum(told[3][1].values()) == 3
