"""transformers models, unmodified, in pipelines: the step of one process."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, agrees, model_of, pairwise

from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.job import Job
from stretto.models import library
from stretto.schedule.pipelines import PIPELINES

PROMISED = ("llama", "qwen3", "gpt2", "gemma3_text")
OTHERS = tuple(family for family in FAMILIES if family not in PROMISED)
AXES = (PROMISED, ("pp=2", "pp=4", "pp=2 dp=2", "pp=2 tp=2"), (0, 1, 2, 3), (False, True), ("none", "full"))
CELLS = list(itertools.product(*AXES))


def blocks_of(family: str, tied: bool = False, blocks: int = 4) -> Any:
    """Four blocks; where kinds of attention differ by index, they take turns."""
    kinds = {"layer_types": (FAMILIES[family]["layer_types"] * blocks)[:blocks]} if "layer_types" in FAMILIES[family] else {}
    return model_of(family, tied, num_hidden_layers=blocks, **kinds)


def schedule_of(number: int, mesh: str) -> str:
    """One after the other, for a row of a table; with four stages one of those that have a stage a rank."""
    single = [name for name, known in PIPELINES.items() if known.chunks == 1]
    names = single if "pp=4" in mesh else list(PIPELINES)
    return names[number % len(names)]


def in_stages(family: str, mesh: str, zero: int, tied: bool, recompute: str, schedule: str, microbatches: int = 0) -> None:
    ranks, dp = (int(mesh[3]), 2 if "dp=2" in mesh else 1)
    rows = dp * max(microbatches or 3, PIPELINES[schedule].least(ranks))
    keys = {"batch.size": rows, "batch.micro_size": 1, "pipeline": schedule}
    agrees(blocks_of(family, tied), mesh, zero=zero, recompute=recompute, **keys)


ROWS = [(*cell, schedule_of(number, cell[1])) for number, cell in enumerate(pairwise(CELLS))]
ROWS += [
    (family, AXES[1][number % 4], number % 4, bool(number % 2), AXES[4][number % 2], schedule_of(number, AXES[1][number % 4]))
    for number, family in enumerate(OTHERS)
]


@pytest.mark.parametrize(("family", "mesh", "zero", "tied", "recompute", "schedule"), ROWS)
def test_a_transformers_model_in_stages_takes_the_step_of_one_process(family, mesh, zero, tied, recompute, schedule):
    in_stages(family, mesh, zero, tied, recompute, schedule)


@pytest.mark.grid
@pytest.mark.parametrize("zero", AXES[2])
@pytest.mark.parametrize("mesh", ["pp=2", "pp=4 dp=2", "pp=2 dp=2 tp=2"])
@pytest.mark.parametrize("schedule", PIPELINES)
@pytest.mark.parametrize("family", PROMISED)
def test_a_transformers_model_in_stages_takes_the_step_of_one_process_everywhere(family, schedule, mesh, zero):
    if "pp=4" in mesh and PIPELINES[schedule].chunks != 1:
        mesh = mesh.replace("pp=4", "pp=2")  # four blocks are four stages
    for microbatches, tied, recompute in ((1, False, "none"), (5, True, "full")):
        in_stages(family, mesh, zero, tied, recompute, schedule, microbatches)


# -- what the batch brings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_masks_and_positions_of_the_batch_reach_the_blocks_of_every_stage(family):
    """Rows padded on the left: without the mask, or with other positions, every loss would differ, as it does in the second part."""
    ids = torch.arange(24).view(4, 6) * 7 % 51
    mask = torch.ones(4, 6, dtype=torch.int64)
    mask[1, :3] = mask[3, :1] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    batch = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "labels": torch.where(mask > 0, ids, -100)}
    model = blocks_of(family)
    for keys in ({}, {"pipeline": "zb-v", "batch.micro_size": 2}):
        agrees(library.Task(model, batches=[batch, batch]), "pp=2", **keys)
    plain, masked = (whole_loss(model, {k: v for k, v in batch.items() if k != left}) for left in ("attention_mask", ""))
    assert abs(plain - masked) > 1e-4


def whole_loss(model: Any, batch: dict[str, torch.Tensor]) -> float:
    """Mean loss of next tokens, by the model alone."""
    with torch.no_grad():
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits[:, :-1]
    return float(F.cross_entropy(logits.reshape(-1, 51).double(), batch["labels"][:, 1:].reshape(-1)))


# -- evaluation, saving ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_evaluation_in_stages_gives_the_loss_of_the_whole_model(family):
    model = blocks_of(family).eval()
    ids = torch.arange(24).view(4, 6) * 5 % 51

    def rank(world):
        job = Job.load({"batch.size": 4, "batch.seq_len": 6, "mesh": "pp=2", "batch.micro_size": 1, "zero": 1})
        with Engine(copy.deepcopy(model), job, world) as engine:
            return engine.evaluate([{"input_ids": ids, "labels": ids}])["loss"]

    assert run_threads(rank, 2) == [pytest.approx(whole_loss(model, {"input_ids": ids, "labels": ids}), rel=1e-6)] * 2


@pytest.mark.parametrize(
    ("family", "saved", "loaded"),
    [
        ("llama", ("pp=2 dp=2", "zb-v", 3, 4), ("tp=2", "1f1b", 1, 2)),
        ("gpt2", ("dp=2", "1f1b", 2, 2), ("pp=2 tp=2", "1f1b", 1, 4)),
        ("gemma3_text", ("pp=4", "gpipe", 0, 4), ("dp=1", "1f1b", 0, 1)),
    ],
)
def test_what_one_mesh_saved_another_goes_on_with_under_the_models_own_names(family, saved, loaded, tmp_path):
    """Tied. Against a run of one rank that was never interrupted, two steps of AdamW in float64."""
    model, ids = blocks_of(family, tied=True), torch.arange(24).view(4, 6) * 5 % 51
    batch = {"input_ids": ids, "labels": ids}

    def engine(world, mesh: str, schedule: str, zero: int) -> Engine:
        usual = {"batch.size": 4, "batch.seq_len": 6, "batch.micro_size": 1, "precision": "fp64", "schedule": "constant", "steps": 9}
        return Engine(copy.deepcopy(model), Job.load({**usual, "mesh": mesh, "pipeline": schedule, "zero": zero}), world)

    def first(world):
        with engine(world, *saved[:3]) as mine:
            mine.step(batch)
            mine.save(tmp_path / "one")

    def second(world):
        with engine(world, *loaded[:3]) as mine:
            mine.load(tmp_path / "one")
            return mine.step(batch).loss, [name for name, _ in mine.full_state()]

    def never_interrupted(world):
        with engine(world, "dp=1", "1f1b", 0) as mine:
            mine.step(batch)
            return mine.step(batch).loss

    run_threads(first, saved[-1])
    found = run_threads(second, loaded[-1])
    truth = run_threads(never_interrupted, 1)[0]
    assert [loss for loss, _ in found] == [pytest.approx(truth, rel=1e-6)] * len(found)
    assert set(found[0][1]) == set(model.state_dict())
