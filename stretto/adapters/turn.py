"""One turn of a runner: some steps in fresh processes, watched from inside. This is what every rank runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from importlib import import_module

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from stretto.adapters.runner import Build, Runner, Setting
from stretto.adapters.summary import Effort, RankTurn
from stretto.adapters.traffic import Traffic
from stretto.comm.transport import World
from stretto.data.feed import Feed
from stretto.data.source import open_source
from stretto.engine.watch import MemoryWatch
from stretto.job import Job

#: Hears which step (from 1; None before the first) a rank is in, and what it does there.
At = Callable[[int | None, str], None]


@contextlib.contextmanager
def join(job: Job, own: bool, rank: int, ranks: int) -> Iterator[Setting]:
    """Within it the ranks have met over what the frameworks use: torch's process group, gloo on CPUs and NCCL on GPUs.

    own: the runner meets them itself.
    """
    gpu = job.device == "cuda"
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if own:
        yield Setting(job, rank, ranks, device)
        return
    backend = "nccl" if gpu else "gloo"
    if ranks == 1:  # nobody to meet, and frameworks want a group all the same
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        yield Setting(job, rank, ranks, device)
        dist.destroy_process_group()
        return
    world = World.from_environment(job.device, backend, job.comm.init_timeout, job.comm.step_timeout)
    yield Setting(job, world.rank, world.size, world.device)
    world.close()  # not after an error: it would wait for ranks that are gone


def take_turn(build: str, setting: Setting, effort: Effort, at: At = lambda step, action: None) -> RankTurn:
    """Build the runner and run the steps of a turn on this rank. build: "module:function". Collective."""
    at(None, "while building the model")
    module, _, function = build.partition(":")
    make: Build = getattr(import_module(module), function)
    with ExitStack() as opened:
        runner = make(setting)
        feed = opened.enter_context(closing(_feed(setting)))
        told = _steps(runner, feed, setting.device, effort, at)
        runner.close()
    return told


def _feed(setting: Setting) -> Feed:
    """The batches of the job, as a training run reads them."""
    job = setting.job
    loaded_vocab = setting.loaded().vocab
    seed = job.seed if job.data.seed is None else job.data.seed
    source = open_source(
        job.data.source,
        seq_len=job.batch.seq_len,
        vocab=loaded_vocab,
        split=job.data.split,
        column=job.data.column,
        tokenizer=job.data.tokenizer,
        seed=seed,
        part="learn",
    )
    return Feed(source, size=job.batch.size, seed=seed, epochs=job.epochs)


def _steps(runner: Runner, feed: Feed, device: torch.device, effort: Effort, at: At) -> RankTurn:
    began, ends = time.monotonic(), list[float]()
    losses, norms = list[float](), list[float | None]()
    sent, watch = None, MemoryWatch()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for step in range(effort.steps):
        at(step + 1, "reading data")
        batch = feed.rows(step)
        at(step + 1, "in the framework's step")
        traffic = Traffic() if step == effort.traffic and not runner.counts_bytes else None
        with traffic or contextlib.nullcontext(), watch if step == effort.memory else contextlib.nullcontext():
            told = runner.step(batch)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        ends.append(time.monotonic())
        losses.append(told.loss)
        norms.append(told.grad_norm)
        if step == effort.traffic:
            sent = traffic.sent if traffic is not None else told.sent
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else watch.private_bytes
    share = peak if device.type == "cuda" else watch.share_bytes
    return RankTurn(began, tuple(ends), tuple(losses), tuple(norms), sent, peak, share)
