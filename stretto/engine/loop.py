"""A training run from first step to last: data in, steps, events out. Who listens to the events is somebody else's affair."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import torch

from stretto.checkpoint.shelf import Keep
from stretto.comm.transport import World
from stretto.data.batch import Batch
from stretto.data.feed import Feed
from stretto.data.order import stable_number
from stretto.data.source import Part, Source, Tokens, open_source
from stretto.data.text import bigram_entropy
from stretto.engine.engine import Engine
from stretto.engine.keeping import Keeper
from stretto.engine.profile import Profile
from stretto.engine.runner import StepReport
from stretto.engine.sample import write
from stretto.errors import JobError, PeerLost
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.models import library
from stretto.schedule.step import unit_cost
from stretto.schedule.timeline import simulate

Emit = Callable[[dict[str, Any]], None]
#: Tokens looked at for the text's entropy, and written by the model before and after.
NOTHING_KEPT = Keep()
ENTROPY_TOKENS, TEXT_TOKENS, PROMPT = 1 << 24, 160, 12


def train(job: Job, world: World, emit: Emit, stop: Callable[[], bool], keep: Keep = NOTHING_KEPT) -> None:
    """Run a resolved job on this rank. Collective. emit gets plain dicts under a "kind": at, resumed, start, entropy, text, step, note,
    eval, saved, timeline, holds (this rank has others' states in memory), done.

    stop: asked at every step; ranks end together, after the step in which the first of them was asked.
    """
    loaded = _load(job)
    with ExitStack() as opened:
        source = _open(job, loaded, job.data.source, "learn")
        feed = opened.enter_context(closing(_feed(job, source)))
        asked, job = job, _with_length(job, feed)
        held_out = _evaluation_feed(job, loaded)
        if held_out is not None:
            opened.enter_context(closing(held_out))
        engine = opened.enter_context(Engine(loaded, job, world))
        engine.watch = lambda step, action: emit({"kind": "at", "step": step + 1, "action": action})
        engine.asked_to_stop = stop
        torch.manual_seed(stable_number("dropout", job.seed, engine.rows.index))  # rows of different ranks drop different units
        keeper = Keeper(engine, feed, keep, emit)
        opened.callback(keeper.leave)
        keeper.check_export()
        keeper.resume()
        if engine.steps:  # the rest of the data may be another number of steps than it was
            job = _with_length(asked, feed)
            engine.total_steps = job.schedule.steps or job.total_steps() or 1
        profile = Profile(frozenset(job.profile.steps), frozenset(job.profile.ranks or _a_rank_a_stage(engine.mesh)), world.rank)
        emit({"kind": "start", "steps": job.steps, "lines": [loaded.describe, source.describe, _where(world), *_stages(engine)]})
        prompt = _prompt(source, loaded, job)
        if prompt and isinstance(source, Tokens):
            emit({"kind": "entropy", "nats": bigram_entropy(source.stream.read(0, min(len(source.stream), ENTROPY_TOKENS)).tolist())})
            if not engine.steps:
                _sample("before", engine, prompt, emit)
        first, total = engine.steps, job.steps or 1
        try:
            rows = _steps(engine, feed, total, held_out, profile, keeper, emit)
        except PeerLost:
            keeper.rescue()
            raise
        if prompt and not engine.stopping:
            _sample("after", engine, prompt, emit)
        trace = profile.trace(engine.everybody)
        if trace is not None:
            emit({"kind": "timeline", "trace": trace, "first": first})
        emit(_done(first, rows, engine.everybody.objects(engine.memory.look(), reason="peak memory")))


def _steps(
    engine: Engine, feed: Feed, total: int, held_out: Feed | None, profile: Profile, keeper: Keeper, emit: Emit
) -> list[dict[str, Any]]:
    """The steps up to `total`, evaluations and saves between them; returns the row of each step. Ends early if a rank was asked to stop."""
    rows: list[dict[str, Any]] = []
    every = engine.job.eval.every
    for batch, data_seconds in _timed(feed, total, engine, emit):
        report = engine.step(batch)
        rows.append(_row(report, data_seconds))
        emit(rows[-1])
        profile.keep(report)
        done = report.step + 1
        if len(rows) == 1:  # only now the optimizer has its moments
            emit({"kind": "note", "text": _held(engine)})
        eval_loss = None
        if held_out is not None and (done % every == 0 or done == total):
            emit({"kind": "at", "step": done, "action": "evaluating"})
            eval_loss = engine.evaluate(held_out.walk(0, engine.rows.size, engine.rows.index))["loss"]
            emit({"kind": "eval", "step": done, "eval_loss": eval_loss})
        keeper.remember(done)
        keeper.after(done, eval_loss, last=done == total)
        if engine.stopping:
            break
    keeper.close()
    keeper.export()
    return rows


def _a_rank_a_stage(mesh: Mesh) -> tuple[int, ...]:
    """The first rank of each pipeline stage: ranks beside it do the same at the same time."""
    return tuple(mesh.rank(pp=number) for number in range(mesh["pp"]))


def _load(job: Job) -> library.Loaded:
    keys = job.model
    return library.load(keys.name, weights=keys.weights, seed=job.seed, overrides=keys.sizes())


def _feed(job: Job, source: Source) -> Feed:
    return Feed(source, size=job.batch.size, seed=job.seed if job.data.seed is None else job.data.seed, epochs=job.epochs)


def _open(job: Job, loaded: library.Loaded, spec: str, part: Part) -> Source:
    if loaded.positions is not None and job.batch.seq_len > loaded.positions:
        at_most = f"the model has {loaded.positions} positions; write batch.seq_len={loaded.positions} or less"
        raise JobError(f"batch.seq_len={job.batch.seq_len}, but {at_most}")
    return open_source(
        spec,
        seq_len=job.batch.seq_len,
        vocab=loaded.vocab,
        split=job.data.split if part != "whole" else None,
        column=job.data.column,
        tokenizer=job.data.tokenizer,
        seed=job.seed if job.data.seed is None else job.data.seed,
        part=part,
    )


def _with_length(job: Job, feed: Feed) -> Job:
    """The job with its length in steps, whichever way it was given, so that the schedule is laid over all of it."""
    if job.tokens is not None:
        return job.with_(steps=feed.steps_of_tokens(job.tokens))
    if job.epochs is None:
        return job
    if not feed.steps:
        raise JobError(f"epochs={job.epochs} of {feed.source.total} samples is less than one of them; write epochs=1")
    return job.with_(steps=feed.steps)


def _evaluation_feed(job: Job, loaded: library.Loaded) -> Feed | None:
    if not job.eval.every:
        return None
    source = _open(job, loaded, job.eval.data, "whole") if job.eval.data else _open(job, loaded, job.data.source, "held_out")
    return Feed.evaluation(source, size=job.batch.size, batches=job.eval.batches)


def _timed(feed: Feed, steps: int, engine: Engine, emit: Emit) -> Iterator[tuple[Batch, float]]:
    """This rank's rows of each step, and how long it waited for them."""
    for step in range(engine.steps, steps):
        emit({"kind": "at", "step": step + 1, "action": "reading data"})
        started = time.perf_counter()
        batch = feed.rows(step, engine.rows.size, engine.rows.index)
        yield batch, time.perf_counter() - started


def _row(report: StepReport, data_seconds: float) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": report.step + 1,
        "loss": report.loss,
        "tokens": report.tokens,
        "samples": report.samples,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "seconds": report.seconds,
        "data_seconds": data_seconds,
        "tokens_per_second": report.tokens / max(report.seconds + data_seconds, 1e-9),
        "peak_bytes": report.peak_bytes,
        "committed": report.committed,
        **({"why": report.why} if report.why else {}),
    }


def _done(first: int, rows: list[dict[str, Any]], peak_bytes: list[int]) -> dict[str, Any]:
    """What the run came to since its `first` steps, which it went on from; its speed is that of its steps, data included and evaluations
    not."""
    losses = [row["loss"] for row in rows]
    seconds = sum(row["seconds"] + row["data_seconds"] for row in rows)
    return {
        "kind": "done",
        "steps": first + len(rows),
        "final_loss": losses[-1] if losses else None,
        "losses": losses,
        "tokens_per_second": sum(row["tokens"] for row in rows) / max(seconds, 1e-9),
        "peak_bytes": peak_bytes,
    }


def _prompt(source: Source, loaded: library.Loaded, job: Job) -> list[int]:
    """The first bytes of the text, where tokens are bytes that a reader can read; else nothing."""
    readable = isinstance(source, Tokens) and job.data.tokenizer is None and job.data.source.partition(":")[0] in ("topics", "text")
    return source.stream.read(0, PROMPT).tolist() if readable and isinstance(source, Tokens) and loaded.vocab == 256 else []


def _sample(when: str, engine: Engine, prompt: list[int], emit: Emit) -> None:
    emit({"kind": "at", "action": "while the model writes"})
    tokens = write(engine, prompt, TEXT_TOKENS, seed=engine.job.seed, context=min(engine.job.batch.seq_len, 128))
    emit({"kind": "text", "when": when, "text": bytes(tokens).decode("utf-8", "replace")})


def _where(world: World) -> str:
    why = f" ({world.why})" if world.why else ""
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks over {world.transport.name}{why}"
    return f"{ranks} on {world.device.type}"


def _stages(engine: Engine) -> list[str]:
    """How the model is cut in pipeline stages, and what that leaves idle."""
    if engine.mesh["pp"] == 1:
        return []
    schedule, split = engine.schedule_of(engine.job.microbatches), engine.parallel.split
    foretold = simulate(schedule, unit_cost)
    idle = sum(foretold.bubble(rank) for rank in range(schedule.ranks)) / (foretold.seconds * schedule.ranks)
    return [
        f"{schedule.name} of {schedule.microbatches} microbatches: ranks idle {idle:.0%} of a step, if stages take equally long",
        f"stages: {split}",
    ]


def _held(engine: Engine) -> str:
    """What a rank holds between steps, by kind."""
    kinds = ", ".join(f"{kind} {size / 2**20:.1f}" for kind, size in engine.bytes_held().items())
    return f"MiB that rank {engine.world.rank} holds: {kinds}"
