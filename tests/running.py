"""Runs of a small model on a short text, one thread a rank, and what they tell."""

from __future__ import annotations

from stretto.comm.threads import run_threads
from stretto.engine.loop import train
from stretto.job import Job

SHAPE = {"blocks": 1, "hidden": 8, "heads": 2, "kv_heads": 1, "ffn": 12}
LENGTH, TOKENS = 8, 500  # 62 samples of 8 tokens: a little more than five batches of 12


def run(text, keep, ranks=2, stop_after=None, **keys):
    """The events of rank 0 of a run; stop_after: ranks are asked to stop after that step."""
    usual = {"model": {"name": "tiny", **SHAPE}, "data": f"text:{text}", "batch.size": 12, "batch.seq_len": LENGTH, "precision": "fp64"}
    length = {} if {"epochs", "tokens"} & set(keys) else {"steps": 8}
    job = Job.load({**usual, **length, "mesh": f"dp={ranks}"}, **keys).resolve(None, "cpu", 0)
    heard = [[] for _ in range(ranks)]

    def rank(world):
        events = heard[world.rank]
        stop = lambda: stop_after is not None and events[-1].get("step") == stop_after
        train(job, world, events.append, stop, keep)

    run_threads(rank, ranks)
    return heard[0]


def of(kind, events):
    return [event for event in events if event["kind"] == kind]


def losses(events):
    return {event["step"]: event["loss"] for event in of("step", events)}
