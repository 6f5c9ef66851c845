"""What a rehearsal leaves out would have been alike. That it is true to a real step is held in tests/test_agreement.py."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from unittest import mock

import pytest
import torch

from stretto.engine import rehearse as rehearsing
from stretto.engine.rehearse import rehearse
from stretto.engine.unreal import META, Unreal
from stretto.job import Job
from stretto.layout.mesh import Mesh

SIZES = {"model.blocks": 4, "model.hidden": 32, "model.heads": 2, "model.ffn": 48, "batch.seq_len": 8, "batch.micro_size": 1}


def job(**keys: Any) -> Job:
    asked = Job.load("tiny", **{**SIZES, **keys})
    ranks = Mesh.parse(asked.mesh).size
    return asked.resolve(ranks, "cpu", ranks)


@pytest.mark.parametrize(
    ("schedule", "mesh", "zero"), [("1f1b", "dp=1", 1), ("1f1b", "pp=4", 1), ("gpipe", "pp=2", 2), ("interleaved", "pp=2 dp=2", 3)]
)
def test_a_step_of_rounds_that_are_alike_is_the_whole_step(schedule: str, mesh: str, zero: int) -> None:
    asked = job(mesh=mesh, zero=zero, pipeline=schedule, **{"batch.size": 24 * Mesh.parse(mesh)["dp"]})
    for rank in range(0, Mesh.parse(mesh).size, Mesh.parse(mesh)["dp"]):
        short = rehearse(asked, rank)
        with mock.patch.object(rehearsing, "FEW", 1000):
            whole = rehearse(asked, rank)
        assert short.rehearsed < whole.rehearsed == 24
        for name in ("peak", "bytes_", "held", "ledger", "microbatches"):
            assert getattr(short, name) == getattr(whole, name), name


def test_rows_that_make_unequal_microbatches_are_all_run() -> None:
    found = rehearse(job(mesh="dp=1", **{"batch.size": 11, "batch.micro_size": 2}), 0)
    assert found.rehearsed == found.microbatches == 6


def test_any_world_is_answered_for_without_its_memory() -> None:
    found = rehearse(job(mesh="pp=2 dp=4096 tp=2", zero=3, **{"batch.size": 4096}), 8191)
    assert (found.world_size, found.rank) == (16384, 8191)
    assert {entry.axes for entry, _ in found.ledger} >= {("tp",), ("dp", "cp")}
    assert found.bytes_["parameters"] < 4096  # a 4096th


def test_operators_of_alike_arguments_make_alike_results() -> None:
    """The second time a result is made without asking the operator; its shape, strides, dtype and bytes are those of a real one."""
    x, y = torch.arange(12.0).view(3, 4), torch.arange(8.0).view(4, 2)
    calls = [
        lambda a, b: a @ b,
        lambda a, b: a.t() + 1,
        lambda a, b: a.to(torch.bfloat16),
        lambda a, b: torch.cat([a.t(), b], 1),
        lambda a, b: a.amax(0),
        lambda a, b: torch.nn.functional.layer_norm(a, (4,)),
        lambda a, b: a.clone().mul_(2),
        lambda a, b: a.expand(2, 3, 4).reshape(6, 4),
    ]
    for call in calls:
        real = call(x, y)
        with Unreal(META):
            for _ in range(3):
                made = call(x.to(META), y.to(META))
                assert (made.shape, made.stride(), made.dtype) == (real.shape, real.stride(), real.dtype)
                assert made.untyped_storage().nbytes() == real.untyped_storage().nbytes()


def test_a_model_of_ones_own_is_rehearsed(tmp_path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\nimport stretto\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))\n"
        "    def forward(self, x):\n"
        "        for layer in self.layers: x = layer(x).relu()\n        return x\n"
        "def make():\n"
        "    loss = lambda out, batch: ((out - batch['y']).square().sum(), float(len(out)))\n"
        "    batch = {'x': torch.zeros(4, 8), 'y': torch.zeros(4, 8)}\n"
        "    return stretto.Task(Net(), forward=lambda model, batch: model(batch['x']), loss=loss, batches=[batch])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = Job.load({"model": "python:mine:make", "mesh": "dp=4", "zero": 0, "batch.size": 4}).resolve(4, "cpu", 4)
    found = rehearse(asked, 3)
    assert found.held["parameters"] >= 3 * (8 * 8 + 8) * 4
    assert asdict(found)["world_size"] == 4
