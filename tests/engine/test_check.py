"""`check` holds what is right and finds what is wrong, by name."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from truth import Small, seeded

from stretto.comm.threads import run_threads
from stretto.engine import check
from stretto.engine.faults import FAULTS
from stretto.errors import JobError
from stretto.job import Job
from stretto.models.library import Task

SIZES = {"name": "tiny", "blocks": 2, "hidden": 32, "heads": 4, "ffn": 48}
#: Faults of what crosses between tp ranks.
OVER_TP = {"missing-tp-sum"}


def findings(ranks, *, own=None, inject=None, dtype="fp64", steps=3, blocks=None, **keys):
    usual = {
        "model": keys.pop("model", SIZES),
        "batch.size": 12,
        "batch.seq_len": 16,
        "optimizer.lr": 3e-3,
        "schedule": "constant",
        "mesh": f"dp={ranks}",
    }
    job = Job.load(usual, **keys).resolve(ranks, "cpu", 0)
    told = {}

    def rank(world):
        check.run(
            job,
            world,
            lambda e: told.update(e) if world.rank == 0 else None,
            inject=inject,
            dtype=dtype,
            steps=steps,
            blocks=blocks,
            model=copy.deepcopy(own),
        )

    run_threads(rank, ranks)
    return told


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - OVER_TP))
@pytest.mark.parametrize(
    ("zero", "micro", "name"),
    [(0, None, "embed.weight"), (1, 2, "layers.1.mlp.up.weight"), (2, 3, "layers.0.norm1.weight"), (3, 2, "head.weight")],
)
def test_every_fault_is_found_and_its_tensor_named(fault, zero, micro, name):
    found = findings(2, inject=f"{fault}@{name}", zero=zero, **{"batch.micro_size": micro})
    assert not found["ok"] and found["worst_parameter"] == name


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - OVER_TP))
def test_every_fault_in_one_stage_of_a_pipeline_is_found_and_its_tensor_named(fault):
    keys = {"mesh": "pp=2 dp=2", "pipeline": "zb-h1", "zero": 2, "batch.micro_size": 3}
    found = findings(4, inject=f"{fault}@layers.1.mlp.up.weight", **keys)
    assert not found["ok"] and found["worst_parameter"] == "layers.1.mlp.up.weight"


@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.parametrize(("mesh", "zero", "name"), [("dp=2 tp=2", 0, "norm.weight"), ("dp=2 tp=2", 3, "layers.1.norm2.weight")])
def test_every_fault_under_tensor_parallelism_is_found_and_its_tensor_named(fault, mesh, zero, name):
    found = findings(4, inject=f"{fault}@{name}", mesh=mesh, zero=zero, **{"batch.micro_size": 2})
    assert not found["ok"] and found["worst_parameter"] == name


def test_a_fault_over_tp_of_a_gradient_that_is_complete_is_refused():
    with pytest.raises(JobError, match="is complete on each tp rank; name one that is summed over tp"):
        findings(2, inject="missing-tp-sum@layers.0.attn.q.weight", mesh="tp=2")


@pytest.mark.parametrize(("mesh", "ranks"), [("dp=1", 1), ("pp=2", 2)])
def test_a_tied_model_is_held_against_a_tied_one(mesh, ranks):
    found = findings(ranks, mesh=mesh, model={**SIZES, "tied": True})
    assert found["ok"] and found["compared"] == findings(ranks, mesh=mesh)["compared"] - 1


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("nonsense@embed.weight", "missing-reduction"),
        ("wrong-scale", "FAULT@PARAMETER"),
        ("wrong-scale@embed.wieght", "wrong-scale@embed.weight"),
    ],
)
def test_a_fault_that_cannot_be_is_refused_with_what_to_write(asked, says):
    with pytest.raises(JobError, match=says):
        findings(1, inject=asked)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("zero", [0, 3])
def test_the_jobs_own_precision_agrees_to_its_rounding_and_a_fault_does_not(dtype, zero):
    assert findings(2, dtype="job", precision=dtype, zero=zero)["ok"]
    assert not findings(2, dtype="job", precision=dtype, zero=zero, inject="wrong-scale@head.weight")["ok"]


def test_a_model_can_be_shortened():
    whole, one = findings(1), findings(1, blocks=1)
    assert one["ok"] and one["compared"] < whole["compared"]
    with pytest.raises(JobError, match="--blocks 0"):
        findings(1, blocks=0)


def test_a_module_of_ones_own_is_checked_with_tokens_below_its_vocabulary():
    assert findings(2, own=seeded(Small), zero=3)["compared"] == 19


def test_a_task_brings_its_own_loss_and_batches():
    draw = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(12, 3, 6, 6, generator=draw), "y": torch.randint(0, 4, (12,), generator=draw)} for _ in range(3)]
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)))
    task = Task(model, lambda m, b: m(b["x"]), lambda out, b: (F.cross_entropy(out, b["y"], reduction="sum"), len(b["y"])), batches)
    for zero in (0, 1, 2, 3):
        assert findings(3, own=task, zero=zero, **{"batch.micro_size": 2})["gradient_error"] <= 1e-10
    with pytest.raises(JobError, match="Task"):
        findings(1, own=seeded(lambda: nn.Linear(2, 2)))


FAMILIES = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},  # its default dropout of 0.1 stays: check turns it off
}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("families")
    for name, sizes in FAMILIES.items():
        for tied in (False, True):
            config = transformers.AutoConfig.for_model(
                name, vocab_size=96, bos_token_id=0, eos_token_id=1, tie_word_embeddings=tied, **sizes
            )
            config.save_pretrained(folder / f"{name}-{tied}")
    return folder


CELLS = list(itertools.product(sorted(FAMILIES), (1, 2, 3, 4), (0, 1, 2, 3), (1, 3), ("none", "full"), (False, True)))


def check_family(families, family, ranks, zero, microbatches, recompute, tied):
    model = {"name": f"hf:{families / f'{family}-{tied}'}"}
    rows = 12 // ranks
    found = findings(ranks, zero=zero, recompute=recompute, **{"model": model, "batch.micro_size": -(-rows // microbatches)})
    assert found["ok"] and max(found[key] for key in found if key.endswith("_error")) <= 1e-10


@pytest.mark.parametrize("number", range(0, len(CELLS), 27))
def test_transformers_models_take_the_step_of_one_process(families, number):
    check_family(families, *CELLS[number])


@pytest.mark.grid
@pytest.mark.parametrize("cell", CELLS)
def test_transformers_models_take_the_step_of_one_process_everywhere(families, cell):
    check_family(families, *cell)


@pytest.mark.grid
@pytest.mark.parametrize("cell", list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3), (1, 3), ("none", "full"))))
def test_the_tiny_decoder_takes_the_step_of_one_process_everywhere(cell):
    ranks, zero, microbatches, recompute = cell
    found = findings(ranks, zero=zero, recompute=recompute, **{"batch.micro_size": -(-(12 // ranks) // microbatches)})
    assert found["ok"]
