"""Checkpoints of what is trained: frozen weights stay out, and must be the same where training goes on. (CASES C28, PAINS 16.)"""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors import safe_open
from truth import seeded, small, tokens

from stretto.checkpoint.convert import convert
from stretto.checkpoint.kinds import inspect
from stretto.checkpoint.parts import Part
from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.engine.frozen import numbers
from stretto.errors import JobError
from stretto.job import Job
from stretto.layout.layout import Flat, Layout
from stretto.layout.mesh import Mesh

BATCHES = tokens(4, 12)


def model(seed=0, tied=True):
    made = small(seed, tied=tied)
    made.register_buffer("seen", torch.full((3, 5), float(seed)))
    for name, param in made.named_parameters():
        param.requires_grad = name in ("norm.weight", "layers.1.up.weight", "layers.1.up.bias")
    return made


def on(mesh, work, made=None, precision="fp32", **keys):
    asked = Job.load(mesh=mesh, precision=precision, batch=12, schedule="constant", **{"checkpoint.weights": "trained", **keys})

    def rank(world):
        with Engine(copy.deepcopy(made or model()), asked, world, forward=lambda m, b: m(b["input_ids"])) as engine:
            return work(engine)

    return run_threads(rank, Mesh.parse(mesh).size)


def save(folder):
    def work(engine):
        [engine.step(batch) for batch in BATCHES[:2]]
        engine.save(folder)
        return dict(engine.full_state()), [engine.step(batch).loss for batch in BATCHES[2:]]

    return work


def load(folder):
    return lambda engine: (engine.load(folder), dict(engine.full_state()), [engine.step(batch).loss for batch in BATCHES[2:]])[1:]


@pytest.mark.parametrize(("mesh", "zero"), [("dp=4", 1), ("dp=4", 2), ("dp=4", 3), ("dp_replicate=2 dp=2", 3)])
def test_only_trained_tensors_are_saved_and_said_to_be_and_with_the_same_frozen_ones_the_run_goes_on(mesh, zero, tmp_path):
    state, losses = on(mesh, save(tmp_path / "c"), zero=zero)[0]
    keys = set()
    for path in (tmp_path / "c").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            keys |= {key.partition("[")[0] for key in file.keys() if not key.startswith("rng/")}  # noqa: SIM118
    trained = [name for name, p in model().named_parameters() if p.requires_grad]
    moments = {f"optimizer/{name}/{key}" for name in trained for key in ("exp_avg", "exp_avg_sq")}
    assert keys == {f"model/{name}" for name in trained} | moments | {"buffer/seen"}
    frozen = sum(not p.requires_grad for p in model().parameters())
    assert inspect(str(tmp_path / "c")).about["holds"] == f"trained tensors only; {frozen} frozen ones are left out"
    base = model()
    with torch.no_grad():
        for name in trained:
            base.get_parameter(name).add_(1)
        base.seen.add_(1)
    for other, stage in ((mesh, zero), ("dp=3", 2), ("dp=1", 0)):
        found, again = on(other, load(tmp_path / "c"), base, zero=stage)[0]
        assert found.keys() == state.keys() and all(torch.equal(x, found[name]) for name, x in state.items())
        assert again == (losses if other == mesh else pytest.approx(losses, rel=1e-6))


def test_other_frozen_weights_are_refused_by_name_and_nothing_changes(tmp_path):
    on("dp=2", save(tmp_path / "c"), zero=2)
    made = model()
    with torch.no_grad():
        made.layers[2].down.weight[3, 5] += 1e-6

    def refused(engine):
        before = dict(engine.full_state())
        with pytest.raises(
            JobError, match=r"frozen weights of this model are not those .*: model/layers\.2\.down\.weight differs \(1 in all\)"
        ):
            engine.load(tmp_path / "c")
        return before, dict(engine.full_state())

    for mesh in ("dp=2", "dp=3"):
        before, after = on(mesh, refused, made, zero=3)[0]
        assert all(torch.equal(x, after[name]) for name, x in before.items())
    thawed = model()
    thawed.layers[0].norm.weight.requires_grad = True
    with pytest.raises(JobError, match=r"not in it: model/layers\.0\.norm\.weight"):
        on("dp=2", load(tmp_path / "c"), thawed, zero=3)
    with pytest.raises(JobError, match="holds what was trained, and no frozen weights"):
        convert(str(tmp_path / "c"), str(tmp_path / "hf"), "huggingface")


def test_frozen_weights_of_another_precision_are_held_against_those_it_was_trained_with(tmp_path):
    on("dp=2", save(tmp_path / "c"), zero=2, precision="bf16")
    wide = model()
    with torch.no_grad():
        for param in wide.parameters():
            if not param.requires_grad:
                param.copy_(param.bfloat16())
    assert on("dp=2", load(tmp_path / "c"), wide, zero=2)
    wide.head.weight.data[0, 0] += 1.0
    with pytest.raises(JobError, match="model/embed.weight differs"):
        on("dp=2", load(tmp_path / "c"), wide, zero=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float64])
def test_the_number_of_a_tensor_is_the_same_however_it_is_cut_and_other_for_another(dtype, monkeypatch):
    monkeypatch.setattr("stretto.engine.frozen.PIECE", 7)
    shape = (5, 3, 4)
    values = seeded(lambda: torch.randn(shape) * 3).to(dtype)

    def number(values, layout, mesh):
        found = []
        for rank in range(mesh.size):
            boxes = layout.boxes(shape, mesh, rank)
            mine = [values[tuple(slice(o, o + n) for o, n in zip(b.offset, b.shape))].reshape(-1) for b in boxes]
            flat = torch.cat(mine) if mine else values.new_empty(0)
            part = Part("model/w", shape, boxes, flat, (0, len(flat)), speaks=layout.first_holder(mesh, rank))
            found += numbers([part], lambda mine: [mine], {}).values()
        return sum(found) % 2**64

    truth = number(values, Layout.whole(shape), Mesh.of())
    for layout, mesh in (
        (Layout.whole(shape), Mesh.of(dp=2)),
        (Layout((("tp",), (), ())), Mesh.of(tp=2)),
        (Layout(((), (), ("tp",))), Mesh.of(tp=3)),
        (Layout(((), (), ()), flat=Flat(("dp",), 0, 60, (0, 13, 37, 60))), Mesh.of(dp=3)),
    ):
        assert number(values, layout, mesh) == truth
    seen = {truth}
    for at in range(60):
        other = values.clone().reshape(-1)
        other[at] = other[at] == 0
        seen.add(number(other.view(shape), Layout.whole(shape), Mesh.of()))
    assert len(seen) == 61
    swapped = values.clone()
    swapped[0, 0, 0], swapped[4, 2, 3] = values[4, 2, 3], values[0, 0, 0]
    assert torch.equal(swapped, values) or number(swapped, Layout.whole(shape), Mesh.of()) != truth
