"""A training run from first step to last: data in, steps, events out. Who listens to the events is somebody else's affair."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from stretto.comm.transport import World
from stretto.data.feed import Feed
from stretto.data.source import Source, Tokens, open_source
from stretto.data.text import bigram_entropy
from stretto.engine.engine import Engine
from stretto.engine.runner import StepReport
from stretto.engine.sample import write
from stretto.errors import JobError
from stretto.job import Job
from stretto.models import library

Emit = Callable[[dict[str, Any]], None]
#: Tokens looked at for the text's entropy, and written by the model before and after.
ENTROPY_TOKENS, TEXT_TOKENS, PROMPT = 1 << 24, 160, 12


def train(job: Job, world: World, emit: Emit, stop: Callable[[], bool]) -> None:
    """Run a resolved job on this rank. Collective. emit gets plain dicts under a "kind": start, step, eval, text, entropy, done.

    stop: asked at every step; ranks end together, after the step in which the first of them was asked.
    """
    keys = job.model
    overrides = keys.model_dump(exclude={"name", "weights"}, exclude_none=True)
    loaded = library.load(keys.name, weights=keys.weights, seed=job.seed, overrides=overrides)
    feed, source = _feed(job, loaded)
    job = _with_length(job, feed)
    evaluation = _evaluation_feed(job, loaded)
    with Engine(loaded, job, world) as engine:
        engine.watch = lambda step, action: emit({"kind": "at", "step": step + 1, "action": action})
        engine.asked_to_stop = stop
        total = job.total_steps() or 1
        emit({"kind": "start", "steps": total, "lines": [loaded.describe, *([source.describe] if source else []), _where(engine)]})
        prompt = _prompt(source, loaded, job)
        if prompt and isinstance(source, Tokens):
            emit({"kind": "entropy", "nats": bigram_entropy(source.stream.read(0, min(len(source.stream), ENTROPY_TOKENS)).tolist())})
            emit(_text("before", engine, prompt))
        losses: list[float] = []
        tokens, started = 0, time.perf_counter()
        for batch, data_seconds in _timed(feed, total, engine):
            report = engine.step(batch)
            losses.append(report.loss)
            tokens += report.tokens
            emit(_row(report, data_seconds))
            done = report.step + 1
            if evaluation is not None and job.eval.every and (done % job.eval.every == 0 or done == total):
                emit({"kind": "eval", "step": done, "eval_loss": engine.evaluate(evaluation.walk())["loss"]})
            if engine.stopping:
                break
        seconds = time.perf_counter() - started
        if prompt:
            emit(_text("after", engine, prompt))
        peaks = engine.everybody.objects(engine.memory.look(), reason="peak memory")
        emit(
            {
                "kind": "done",
                "steps": engine.steps,
                "final_loss": losses[-1] if losses else None,
                "losses": losses,
                "tokens_per_second": tokens / seconds,
                "peak_bytes": peaks,
            }
        )
    for used in (feed, evaluation):
        if used is not None:
            used.close()


def _feed(job: Job, loaded: library.Loaded) -> tuple[Feed, Source | None]:
    source = _open(job, loaded, job.data.source, "learn")
    seed = job.seed if job.data.seed is None else job.data.seed
    return Feed(source, size=job.batch.size, seed=seed, epochs=job.epochs), source


def _open(job: Job, loaded: library.Loaded, spec: str, part: Any) -> Source:
    if loaded.positions is not None and job.batch.seq_len > loaded.positions:
        raise JobError(f"batch.seq_len={job.batch.seq_len}, but the model has {loaded.positions} positions; write batch.seq_len={loaded.positions} or less")
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
    return job.with_(steps=feed.steps) if job.epochs is not None and feed.steps else job


def _evaluation_feed(job: Job, loaded: library.Loaded) -> Feed | None:
    if not job.eval.every:
        return None
    source = _open(job, loaded, job.eval.data, "whole") if job.eval.data else _open(job, loaded, job.data.source, "held_out")
    return Feed.evaluation(source, size=job.batch.size, batches=job.eval.batches)


def _timed(feed: Feed, steps: int, engine: Engine) -> Iterator[tuple[Any, float]]:
    """This rank's rows of each step, and how long it waited for them."""
    for step in range(steps):
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


def _prompt(source: Source | None, loaded: library.Loaded, job: Job) -> list[int]:
    """The first bytes of the text, where tokens are bytes that a reader can read; else nothing."""
    readable = isinstance(source, Tokens) and job.data.tokenizer is None and job.data.source.partition(":")[0] in ("topics", "text")
    return source.stream.read(0, PROMPT).tolist() if readable and isinstance(source, Tokens) and loaded.vocab == 256 else []


def _text(when: str, engine: Engine, prompt: list[int]) -> dict[str, Any]:
    tokens = write(engine, prompt, TEXT_TOKENS, seed=engine.job.seed, context=min(engine.job.batch.seq_len, 128))
    return {"kind": "text", "when": when, "text": bytes(tokens).decode("utf-8", "replace")}


def _where(engine: Engine) -> str:
    held = {kind: f"{size / 2**20:.1f}" for kind, size in engine.bytes_held().items()}
    kinds = ", ".join(f"{kind} {size}" for kind, size in held.items())
    return f"{engine.world.size} ranks over {engine.world.transport.name} on {engine.world.device.type}; MiB a rank: {kinds}"
