"""What a compiled block keeps for its backward: just what recompute says, under tensor parallelism too, and the step is the same."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from stretto.engine.engine import Engine
from stretto.engine.rehearse import rehearse
from stretto.job import Job
from stretto.models import library

HIDDEN, FFN, HEADS, ROWS, LENGTH, WIDTH = 32, 96, 4, 2, 8, 4
SIZES = {"blocks": 2, "hidden": HIDDEN, "ffn": FFN, "heads": HEADS, "kv_heads": HEADS, "vocab": 32}
#: Elements a token that a block keeps, before tp. selective: x, q, k, v, the output of attention, the second residual, gate and up,
#: and a logarithm a head; full: x. (REFERENCE B3)
KEPT = {"selective": 6 * HIDDEN + 2 * FFN + HEADS, "full": HIDDEN}


def train(world, mesh: str, recompute: str, compiled: bool):
    """(losses, gradient norms, bytes that the second block keeps; the first also keeps what all blocks share)."""
    keys = {"compile": {"mode": "block", "backend": "aot_eager"}} if compiled else {}
    job = Job.of({"mesh": mesh, "precision": "fp32", "device": "cpu", "batch": {"size": ROWS, "seq_len": LENGTH}, "recompute": recompute})
    engine = Engine(library.load("tiny", seed=0, overrides=SIZES), job.with_(**keys), world)
    batch = {"input_ids": torch.arange(ROWS * LENGTH).view(ROWS, LENGTH), "labels": torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)}
    first = engine.step(batch)  # compiles
    known = {group.whole.untyped_storage().data_ptr() for group in engine.parallel.groups}
    last, watching, kept, alive = engine.model.layers[1], [], [], []

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known and watching:
            kept.append(storage.nbytes())
        known.add(storage.data_ptr())
        alive.append(x)  # or another tensor could have its address
        return x

    last.register_forward_pre_hook(lambda *_: watching.append(True))
    last.register_forward_hook(lambda *_: watching.clear())
    with saved_tensors_hooks(pack, lambda x: x):
        second = engine.step(batch)
    return (first.loss, second.loss), (first.grad_norm, second.grad_norm), sum(kept)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
@pytest.mark.parametrize("recompute", KEPT)
def test_a_compiled_block_keeps_what_recompute_says_and_its_step_is_the_same(mesh: str, recompute: str, pool) -> None:
    losses, norms, kept = pool.run(lambda world: train(world, mesh, recompute, True), 2)[0]
    assert kept == ROWS * LENGTH * KEPT[recompute] * WIDTH / 2  # either mesh halves it: dp the rows, tp what a token has
    truth = pool.run(lambda world: train(world, mesh, recompute, False), 2)[0]
    assert losses == pytest.approx(truth[0], rel=1e-6) and norms == pytest.approx(truth[1], rel=1e-5)  # fp32, in another order


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
@pytest.mark.parametrize("recompute", KEPT)
def test_a_rehearsal_says_what_one_more_compiled_block_keeps(mesh: str, recompute: str) -> None:
    """At the fullest moment of a step: when the last block's backward begins, all blocks but it hold what they keep."""

    def activations(blocks: int) -> float:
        sizes = {f"model.{name}": size for name, size in {**SIZES, "blocks": blocks}.items()}
        keys = {"batch.size": ROWS, "batch.seq_len": LENGTH, "precision": "fp32", "compile": "block"}
        found = rehearse(Job.load("tiny", mesh=mesh, recompute=recompute, **sizes, **keys).resolve(2, "cpu", 0), 0)
        assert found.moment == "0B0"
        return found.bytes_["activations"]

    # of a product whose sum over ranks is kept in its place, an eager block still holds one number
    one = WIDTH if (recompute, mesh) == ("selective", "tp=2") else 0
    assert activations(7) - activations(6) == ROWS * LENGTH * KEPT[recompute] * WIDTH / 2 + one
