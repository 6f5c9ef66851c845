"""The wings agree: what a step sends and holds, and what rehearsal and prediction say of it, are the same.

The truth is a real step: ranks as threads, real tensors, real messages. Its ledger is what it issued, its bytes are counted from
storages that operators made and that are still held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from families import model_of
from torch.utils._python_dispatch import _disable_current_modes

from stretto.comm.messages import Messages, Work
from stretto.comm.threads import Office, ThreadMail, run_threads
from stretto.comm.transport import World
from stretto.engine.engine import Engine
from stretto.engine.look import held_tensors
from stretto.engine.rehearse import rehearse
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.models import library
from stretto.parallel.memory import KINDS, Storages

SIZES = {"blocks": 4, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96, "vocab": 40}
#: Meshes and ways to cut. Each row has something that no other has.
JOBS: Mapping[str, dict[str, Any]] = {
    "one rank": {"mesh": "dp=1"},
    "microbatches": {"mesh": "dp=2", "batch.micro_size": 1},
    "zero 0": {"mesh": "dp=2", "zero": 0, "batch.micro_size": 2},
    "zero 1, 16 bits": {"mesh": "dp=3", "zero": 1, "precision": "bf16", "batch.micro_size": 2},
    "zero 2": {"mesh": "dp=2", "zero": 2, "batch.micro_size": 2},
    "zero 2, reduced at the end": {"mesh": "dp=2", "zero": {"stage": 2, "gradients": "end"}, "batch.micro_size": 2},
    "zero 3": {"mesh": "dp=2", "zero": 3, "precision": "bf16", "batch.micro_size": 2},
    "zero 3, kept for the step": {"mesh": "dp=2", "zero": {"stage": 3, "params": "step"}, "batch.micro_size": 2},
    "hybrid": {"mesh": "dp_replicate=2 dp=2", "zero": 3, "batch.micro_size": 3},
    "tensor": {"mesh": "tp=2", "recompute": "full"},
    "tensor, uneven": {"mesh": "tp=4", "model.vocab": 41, "model.ffn": 97, "recompute": "selective", "precision": "bf16"},
    "tensor, whole stream": {"mesh": "tp=2", "tensor.sequence": False, "batch.micro_size": 4},
    "pipeline": {"mesh": "pp=2", "recompute": "selective", "batch.micro_size": 2},
    "pipeline, many microbatches": {"mesh": "pp=2", "batch.size": 24, "batch.micro_size": 1, "batch.seq_len": 8},
    "interleaved": {"mesh": "dp=2 pp=2", "zero": 2, "pipeline": "interleaved", "precision": "bf16", "batch.micro_size": 1},
    "zero bubble": {"mesh": "pp=2 tp=2", "zero": 3, "pipeline": "zb-h1", "precision": "bf16", "batch.micro_size": 1},
    "everything": {"mesh": "pp=2 dp=2 tp=2", "zero": 3, "recompute": "full", "precision": "bf16", "batch.micro_size": 2},
    "another model": {"model": "gpt2-small", "model.positions": 32, "mesh": "dp=2 tp=2", "zero": 1, "model.kv_heads": 4},
}


def job(name: str) -> Job:
    sizes = {f"model.{key}": value for key, value in SIZES.items()}
    asked = Job.load("tiny", **{**sizes, "batch.size": 12, "batch.seq_len": 32, **JOBS[name]})
    ranks = Mesh.parse(asked.mesh).size
    return asked.resolve(ranks, "cpu", ranks)


@dataclass(frozen=True)
class Step:
    ledger: dict[Any, int]
    held: dict[str, int]
    peak: int
    bytes_: dict[str, int]


class AtOnce(Messages):
    """Collectives that are over when the call returns, and whose copies are not counted: a thread beside the caller may hold a tensor
    a moment longer, and threads hand over clones, which no other transport makes."""

    def _later(self, channel: int, work: Work, ranks: int, job: Callable[[], None]) -> None:
        with torch.no_grad():
            job()
        work.finish()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "send", "receive"):
            return found

        def unseen(*args: Any, **more: Any) -> Any:
            with _disable_current_modes():
                return found(*args, **more)

        return unseen


def steps(asked: Job) -> list[Step]:
    """The second real step, of each rank."""
    length = asked.batch.size * asked.batch.seq_len
    ids = (torch.arange(length) * 7 % SIZES["vocab"]).view(asked.batch.size, -1)

    def rank(world: World) -> Step:
        storages = Storages(torch.device("cpu"))
        with storages:
            loaded = library.load(asked.model.name, weights=asked.model.weights, overrides=asked.model.sizes())
            engine = Engine(loaded, asked, world)
            engine.step({"input_ids": ids, "shift_labels": ids})
            storages.name(held_tensors(engine.parallel, engine.optimizer))
            fullest: list[tuple[int, dict[str, int]]] = []

            def turn(step: int, action: str) -> None:
                fullest.append((storages.peak, storages.at_peak))
                storages.begin()

            engine.watch = turn
            report = engine.step({"input_ids": ids, "shift_labels": ids})
            fullest.append((storages.peak, storages.at_peak))
        peak, bytes_ = max(fullest[1:])
        return Step(dict(report.ledger.times), engine.bytes_held(), peak, bytes_)

    office = Office()
    ranks = Mesh.parse(asked.mesh).size
    return run_threads(rank, ranks, office=office, transport=lambda rank, ranks, store: AtOnce(ThreadMail(office, rank), rank))


def agree(asked: Job, on_host: int = 0) -> None:
    """The first, a middle and the last rank send and hold in a rehearsal what they do in a real step: call for call, and byte for byte
    at the fullest moment. on_host: bytes that a rehearsal does not count, since they lie beside the device."""
    every = steps(asked)
    for rank in sorted({0, len(every) // 2, len(every) - 1}):
        real, found = every[rank], rehearse(asked, rank)
        assert dict(found.ledger.times) == real.ledger
        assert dict(found.held) == real.held
        expected = {kind: real.bytes_.get(kind, 0) for kind in KINDS}
        assert found.bytes_ == {**expected, "working": expected["working"] - on_host}
        assert found.peak == sum(found.bytes_.values()) == real.peak - on_host


@pytest.mark.parametrize("name", JOBS)
def test_a_rehearsal_sends_and_holds_what_a_real_step_does(name: str) -> None:
    agree(job(name))


@pytest.mark.parametrize(("family", "mesh"), [("llama", "pp=2 tp=2"), ("gpt2", "dp=2 tp=2"), ("gemma3_text", "dp=2")])
def test_so_does_one_of_a_transformers_model(family: str, mesh: str, tmp_path: Path) -> None:
    model_of(family).config.save_pretrained(tmp_path)
    keys = {"model": f"hf:{tmp_path}", "model.weights": "random", "mesh": mesh, "zero": 1, "batch.size": 4, "batch.seq_len": 16}
    ranks = Mesh.parse(mesh).size
    zeros = 4 * 4 if family == "gpt2" else 0  # each of its row-parallel layers is given a zero for its bias, see tensor._hide_bias
    agree(Job.load(keys, **{"batch.micro_size": 1}).resolve(ranks, "cpu", ranks), on_host=zeros)
