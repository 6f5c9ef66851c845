"""Head and loss some tokens at a time: the step of one process, and logits of all tokens are never made."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM
from truth import small, tokens

from stretto.comm.threads import run_threads
from stretto.engine import check
from stretto.engine.engine import Engine
from stretto.errors import JobError, RunError
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.models import library

EXACT = 1e-10
SHAPE = {"blocks": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 37, "vocab": 51}
SIZES = {"name": "tiny", **SHAPE}


def job(mesh: str, **keys) -> Job:
    return Job.load({"batch.size": 4, "batch.seq_len": 7, "optimizer.lr": 1e-2, "schedule": "constant", "mesh": mesh}, **keys)


def agrees(mesh: str, own=None, **keys) -> None:
    told, ranks = {}, Mesh.parse(mesh).size
    asked = job(mesh, **keys).resolve(ranks, "cpu", 0, own_model=own is not None)

    def rank(world):
        check.run(asked, world, lambda e: told.update(e) if world.rank == 0 else None, steps=2, model=copy.deepcopy(own))

    run_threads(rank, ranks)
    assert told["ok"] and max(value for key, value in told.items() if key.endswith("_error")) <= EXACT, told


@pytest.mark.parametrize(
    ("mesh", "zero", "sequence", "tied", "chunk", "keys"),
    [
        ("dp=1", 0, None, False, 5, {}),
        ("dp=2", 3, None, True, 3, {}),
        ("tp=2", 0, True, False, 1, {}),
        ("tp=4", 1, False, True, 1000, {}),
        ("dp=2 tp=2", 3, True, False, 4, {"recompute": "full"}),
        ("dp=2 tp=2", 2, True, True, 4, {"batch.micro_size": 1}),
        ("pp=2", 1, None, True, 5, {"batch.micro_size": 2}),
        ("pp=2 tp=2", 0, True, False, 5, {"batch.micro_size": 1, "pipeline": "zb-h1"}),
    ],
)
def test_any_mesh_takes_the_step_of_one_process(mesh, zero, sequence, tied, chunk, keys):
    agrees(mesh, model={**SIZES, "tied": tied}, zero=zero, tensor=sequence, loss_chunk=chunk, **keys)


def of_transformers(family: str, **sizes):
    usual = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 51,
             "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**usual, **sizes}, use_cache=False)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
@pytest.mark.parametrize(("mesh", "zero"), [("tp=2", 0), ("dp=2", 3)])
def test_transformers_models_too(family, mesh, zero):
    agrees(mesh, of_transformers(family), zero=zero, loss_chunk=4, optimizer="sgd")


class Largest(TorchDispatchMode):
    """The most rows of any tensor whose last dim is a rank's part of the vocabulary; but for the head's weight, turned round."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.rows = columns, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for x in tree_iter(output):
            if isinstance(x, torch.Tensor) and x.ndim and x.shape[-1] == self.columns and x.shape != (24, self.columns):
                self.rows = max(self.rows, x.numel() // self.columns)
        return output


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("chunk", "most"), [(0, 28), (5, 5)])
def test_logits_of_more_tokens_than_a_chunk_are_never_made(tp, chunk, most):
    """28 tokens; 62 ids, so that no other tensor has as many columns as a rank's part has."""

    def rank(world):
        engine = Engine(library.load("tiny", overrides={**SHAPE, "vocab": 62}), asked, world)
        with Largest(62 // tp) as largest:
            engine.step(tokens(1, 4, 7)[0])
        return largest.rows

    asked = job(f"tp={tp}", loss_chunk=chunk)
    assert run_threads(rank, tp) == [most] * tp


@pytest.mark.parametrize("tp", [1, 2])
def test_what_head_and_loss_keep_for_backward_is_what_the_head_reads_and_a_few_numbers_a_token(tp):
    """REFERENCE B6: without chunks also logits, tokens x vocab / tp."""
    kept: dict[int, int] = {}

    def rank(world, chunk):
        engine = Engine(library.load("tiny", overrides={**SHAPE, "vocab": 512}), job(f"tp={tp}", loss_chunk=chunk, tensor=False), world)
        seen: dict[int, int] = {}
        head = engine.model.head.weight.untyped_storage().data_ptr()

        def pack(x):
            if x.untyped_storage().data_ptr() != head:
                seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        inner = engine.criterion
        saved = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
        engine.model.head.register_forward_pre_hook(lambda *_: saved.__enter__())
        engine.criterion = lambda *given: (inner(*given), saved.__exit__())[0]
        engine.step(tokens(1, 4, 7)[0])
        return sum(seen.values())

    for chunk in (0, 5):
        kept[chunk] = run_threads(lambda world, chunk=chunk: rank(world, chunk), tp)[0]
    hidden, logits = 4 * 28 * 24, 4 * 28 * 512 // tp
    assert logits <= kept[0] and kept[5] <= hidden + 28 * 40
    assert kept[0] - kept[5] >= logits - 28 * 40


def test_evaluation_metrics_and_ones_own_forward_see_logits():
    def rank(world):
        engine = Engine(library.load("tiny", overrides=SHAPE), asked, world)
        batch = tokens(1, 4, 7)[0]
        plain = Engine(library.load("tiny", overrides=SHAPE), job("tp=2", precision="fp64"), world)
        metrics = lambda output, b: {"top": (output.argmax(-1).sum(), 1)}
        return [e.evaluate([batch], m) for e in (engine, plain) for m in (None, metrics)], engine.model(batch["input_ids"]).shape

    asked = job("tp=2", loss_chunk=5, precision="fp64")
    (loss, both, plain_loss, plain_both), shape = run_threads(rank, 2)[0]
    assert loss["loss"] == pytest.approx(plain_loss["loss"], rel=1e-12) and both == pytest.approx(plain_both, rel=1e-12)
    assert shape == (4, 7, 51)


def test_a_model_that_changes_logits_after_its_head_is_refused():
    model = of_transformers("gemma3_text", head_dim=8, final_logit_softcapping=5.0)
    with pytest.raises(RunError, match="changes logits after its head"):
        run_threads(lambda world: Engine(model, job("dp=1", loss_chunk=4), world).step(tokens(1, 4, 7)[0]), 1)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"loss": lambda output, batch: (output.sum(), 1)}, "another loss was given"),
        ({}, "nothing says which layer of Small makes logits"),
    ],
)
def test_where_it_cannot_be_one_line_says_why(keys, match):
    with pytest.raises(JobError, match=match):
        run_threads(lambda world: Engine(small(), job("dp=1", loss_chunk=4), world, **keys), 1)
