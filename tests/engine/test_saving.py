"""Any mesh to any mesh: what is saved on one is, bit for bit, what another goes on from; and what cannot be is said in one line."""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from truth import apart, seeded, small, tokens, train

from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.engine.look import whole_tensors
from stretto.errors import Damaged, JobError
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.models import library

BATCHES = tokens(6, 12)
#: 12 meshes over 1 to 6 ranks, ZeRO 0-3 mixed, whole and cut at other places.
MESHES = (
    ("dp=1", {"zero": 0}),
    ("dp=1", {"zero": 3}),
    ("dp=2", {"zero": 0}),
    ("dp=2", {"zero": 1}),
    ("dp=2", {"zero": 3}),
    ("dp=3", {"zero": 2}),
    ("dp=3", {"zero": 3, "zero.granularity": "row"}),
    ("dp=4", {"zero": 1, "zero.granularity": "matrix"}),
    ("dp=4", {"zero": 3, "zero.keep": ["layers.1"]}),
    ("dp_replicate=2 dp=2", {"zero": 2}),
    ("dp_replicate=3 dp=2", {"zero": 3}),
    ("dp=6", {"zero": 2, "zero.gradients": "end"}),
)


def model(seed=0, tied=True, frozen=True):
    """Odd sizes, a tied pair, half the weights frozen, a buffer that belongs to the state and one that does not."""
    made = small(seed, tied=tied)
    made.register_buffer("seen", torch.full((3, 5), float(seed)))
    made.register_buffer("table", torch.full((4,), float(seed)), persistent=False)
    if frozen:
        for name, param in made.named_parameters():
            param.requires_grad = "layers.1" not in name and "up" not in name
    return made


def job(mesh, keys=None, **more):
    usual = {"precision": "fp32", "batch": 12, "optimizer.lr": 1e-2}
    return Job.load(mesh=mesh, schedule="constant", **{**usual, **(keys or {}), **more})


def on(ranks_or_mesh, work, keys=None, made=None, **more):
    """work(engine) on every rank of a mesh; results in rank order."""
    mesh = job(ranks_or_mesh, keys, **more)
    ranks = Mesh.parse(ranks_or_mesh).size

    def rank(world):
        with Engine(copy.deepcopy(made or model()), mesh, world, forward=lambda m, b: m(b["input_ids"])) as engine:
            return work(engine)

    return run_threads(rank, ranks)


def moments(engine):
    """Every optimizer state tensor, whole, by name of parameter and state; and the counts of steps."""
    found = {}
    for key in ("exp_avg", "exp_avg_sq"):

        def mine(group, key=key):
            flat = torch.zeros(group.update_high - group.update_low)
            for piece, (slot, start, stop) in zip(group.pieces, group.plan.pieces(group.update_low, group.update_high)):
                at = slot.start + start - group.update_low
                flat[at : at + stop - start] = engine.optimizer.state[piece.value][key].reshape(-1)
            return flat

        found |= {f"{name}/{key}": whole for name, whole in whole_tensors(engine.parallel, "test", mine, trainable=True)}
    counts = {float(values["step"]) for values in engine.optimizer.state.values()} if engine.optimizer else set()
    return found, counts


def contents(engine):
    """Everything that must survive: parameters and buffers, moments, counters, as rank 0 sees them."""
    state = dict(engine.full_state())
    tensors, counts = moments(engine)
    return state, tensors, counts, (engine.steps, engine.updates, engine.skips)


def same(a, b):
    assert a[0].keys() == b[0].keys() and a[1].keys() == b[1].keys()
    for one, other in ((a[0], b[0]), (a[1], b[1])):
        for name, tensor in one.items():
            assert (tensor is other[name] is None) or torch.equal(tensor, other[name]), name
    assert a[3] == b[3] and (a[2] == b[2] or set() in (a[2], b[2]))


def save_after(steps, folder, notes=None):
    def work(engine):
        for batch in BATCHES[:steps]:
            engine.step(batch)
        engine.save(folder, notes)
        return contents(engine)

    return work


def load(folder, steps=(), **options):
    def work(engine):
        notes = engine.load(folder, **options)
        state = contents(engine)
        return state, [engine.step(batch).loss for batch in steps], notes

    return work


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, contents) of a run of 2 steps saved on each mesh."""
    made = {}

    def get(number):
        if number not in made:
            folder = tmp_path_factory.mktemp("saved") / "step-00000002"
            mesh, keys = MESHES[number]
            made[number] = folder, on(mesh, save_after(2, folder), keys)[0]
        return made[number]

    return get


PAIRS = [(i, (i * 5 + 3) % 12) for i in range(12)] + [(0, 10), (10, 0), (4, 5), (8, 1)]


def check_pair(saved, source, target):
    folder, before = saved(source)
    mesh, keys = MESHES[target]
    after = on(mesh, load(folder), keys, made=model(seed=9))
    same(before, after[0][0])


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_what_one_mesh_saves_another_has_bit_for_bit(source, target, saved):
    check_pair(saved, source, target)


@pytest.mark.grid
@pytest.mark.parametrize(("source", "target"), [pair for pair in itertools.permutations(range(12), 2) if pair not in PAIRS])
def test_every_mesh_saves_for_every_other(source, target, saved):
    check_pair(saved, source, target)


def test_resumed_on_other_meshes_the_last_losses_are_those_of_one_process(tmp_path):
    """CASES C27: AdamW, ZeRO-3 on 4 ranks, sizes that do not divide; saved at 3 of 6."""
    truth, parameters = train(small(), BATCHES)
    on("dp=4", save_after(3, tmp_path / "c"), {"zero": 3}, made=small(), precision="fp64")
    for mesh, stage in (("dp=3", 3), ("dp=2", 3), ("dp=1", 3), ("dp=4", 1), ("dp_replicate=2 dp=2", 3)):

        def go_on(engine):
            engine.load(tmp_path / "c")
            return [engine.step(batch).loss for batch in BATCHES[3:]], dict(engine.full_state()), moments(engine)[1]

        losses, state, counts = on(mesh, go_on, {"zero": stage}, made=small(seed=4), precision="fp64")[0]
        assert losses == pytest.approx([loss for loss, _ in truth[3:]], rel=1e-12) and counts == {6.0}
        assert apart(state, parameters) < 1e-10


def test_on_the_same_mesh_the_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path):
    keys = {"zero": 3, "batch.micro_size": 2}
    run = lambda engine: ([engine.step(batch).loss for batch in BATCHES], contents(engine))
    losses, whole = on("dp=2", run, keys)[0]
    on("dp=2", save_after(3, tmp_path / "c"), keys)
    go_on = lambda engine: (engine.load(tmp_path / "c"), [engine.step(batch).loss for batch in BATCHES[3:]], contents(engine))
    _, rest, resumed = on("dp=2", go_on, keys, made=model(seed=5))[0]
    assert rest == losses[3:]
    same(whole, resumed)


#: Heads that 4 tp ranks share in pairs, a vocabulary and a width that nothing divides.
CUT = {"name": "tiny", "blocks": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 37, "vocab": 51}


def decoder(mesh, work, seed=0, tied=False, **keys):
    """work(engine) of our decoder on every rank of a mesh with tp."""
    asked = Job.load({"model": {**CUT, "tied": tied}, "batch": 12, "batch.seq_len": 6, "schedule": "constant", "mesh": mesh}, **keys)
    rank = lambda world: work(Engine(library.load("tiny", seed=seed, overrides=asked.model.sizes()), asked, world))
    return run_threads(rank, Mesh.parse(mesh).size)


TP_MESHES = (("tp=2", 0), ("dp=2 tp=2", 3), ("tp=4", 1), ("dp_replicate=2 tp=2", 2), ("dp=3", 3), ("dp=1", 0))


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (2, 5), (5, 2), (1, 1)])
@pytest.mark.parametrize("tied", [False, True])
def test_what_tp_has_cut_is_put_together_and_cut_otherwise(source, target, tied, tmp_path):
    batches = [{name: rows % 51 for name, rows in batch.items()} for batch in BATCHES]

    def save(engine):
        engine.step(batches[0])
        engine.save(tmp_path / "c")
        return contents(engine), engine.step(batches[1]).loss

    def load(engine):
        engine.load(tmp_path / "c")
        return contents(engine), engine.step(batches[1]).loss

    before = decoder(TP_MESHES[source][0], save, zero=TP_MESHES[source][1], tied=tied)[0]
    after = decoder(TP_MESHES[target][0], load, zero=TP_MESHES[target][1], tied=tied, seed=8)[0]
    same(before[0], after[0])
    assert after[1] == (before[1] if source == target else pytest.approx(before[1], rel=1e-6))


def test_where_ranks_share_memory_every_rank_has_every_value_after_loading(pool, tmp_path):
    """Stages 1 and 2 keep one copy of the parameters a machine, of which each rank writes its part."""
    made = model()

    def work(world, keys, folder, batches, load):
        with Engine(copy.deepcopy(made), job(f"dp={world.size}", keys), world, forward=lambda m, b: m(b["input_ids"])) as engine:
            if load:
                for name, param in engine.model.named_parameters():
                    param.data.add_(len(name))  # so that nothing is right by having been right before
                engine.everybody.objects(None, reason="all have")
                engine.load(folder)
            seen = [engine.step(batch).loss for batch in batches]
            if not load:
                engine.save(folder)
            return world.transport.name, seen, contents(engine), {name: p.detach().clone() for name, p in engine.model.named_parameters()}

    saved = pool.run(work, ranks=2, args=({"zero": 2}, tmp_path / "c", BATCHES[:2], False))
    for ranks, stage in ((2, 1), (3, 2), (2, 2)):
        loaded = pool.run(work, ranks=ranks, args=({"zero": stage}, tmp_path / "c", [], True))
        same(saved[0][2], loaded[0][2])
        for transport, _, _, params in loaded:
            assert transport == "shm" and all(torch.equal(p, saved[0][3][name]) for name, p in params.items())


def test_parameters_may_change_their_precision_on_the_way(tmp_path):
    before = on("dp=2", save_after(2, tmp_path / "c"), {"zero": 2}, precision="bf16")[0]
    after, _, _ = on("dp=3", load(tmp_path / "c"), {"zero": 3}, made=model(seed=1), precision="fp64")[0]
    frozen = {name for name, p in model().named_parameters() if not p.requires_grad}
    for name, tensor in before[0].items():
        assert torch.equal(tensor.double(), after[0][name].double()), name  # fp32 masters; frozen ones as bf16 held them
        assert tensor.dtype == (torch.bfloat16 if name in frozen else torch.float32)


def test_no_tensor_is_lost_and_tied_names_are_there(tmp_path):
    """CASES C28: half frozen, a buffer, a tied pair, sizes that 4 does not divide; into a fresh, differently initialised model."""
    for stage in (1, 2, 3):
        folder = tmp_path / f"zero-{stage}"
        before = on("dp=4", save_after(1, folder), {"zero": stage})[0]
        after = on("dp=4", load(folder), {"zero": stage}, made=model(seed=3))[0][0]
        same(before, after)
        assert {"embed.weight", "head.weight", "seen"} <= set(after[0]) and torch.equal(after[0]["embed.weight"], after[0]["head.weight"])
        assert set(after[0]) == set(model().state_dict())


def test_a_tensor_is_stored_once_and_by_all_ranks_about_evenly(tmp_path):
    wide = lambda: seeded(lambda: nn.Sequential(nn.Embedding(17, 256), nn.Linear(256, 256), nn.Linear(256, 17)))
    for mesh, keys in (("dp=3", {"zero": 0}), ("dp_replicate=2 dp=2", {"zero": 3}), ("dp=4", {"zero": 1})):
        folder = tmp_path / mesh.replace(" ", "-")
        on(mesh, save_after(1, folder), keys, made=wide())
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        held = 3 * 4 * sum(p.numel() for p in wide().parameters())  # fp32 values and two moments
        assert held < sum(sizes) < held + 60_000 * len(sizes)  # random streams and headers come on top
        assert max(sizes) < 1.25 * min(sizes)


def test_the_random_streams_go_on_where_they_were_on_the_same_mesh_and_begin_anew_on_another(tmp_path):
    def draws():
        return [*torch.rand(2).tolist(), random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]

    def work(engine):
        torch.manual_seed(1)
        random.seed(2)
        np.random.seed(3)
        draws()
        engine.save(tmp_path / "c")
        return draws()

    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        (expected,) = on("dp=1", work)
        assert on("dp=1", lambda engine: (engine.load(tmp_path / "c"), draws())[1]) == [expected]
        before = torch.get_rng_state()
        on("dp=2", lambda engine: engine.load(tmp_path / "c") and None)
        assert torch.equal(before, torch.get_rng_state())
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])


def test_the_loss_scale_and_its_count_go_on(tmp_path):
    keys = {"precision": "fp16", "precision.scale_window": 2}

    def work(engine):
        engine.scale.scale, engine.scale.good = 512.0, 1
        engine.skips = 3
        engine.save(tmp_path / "c")

    on("dp=2", work, keys)
    look = lambda engine: (engine.load(tmp_path / "c"), engine.scale.scale, engine.scale.good, engine.skips)[1:]
    assert on("dp=1", look, keys) == [(512.0, 1, 3)]


def test_an_optimizer_of_ones_own_goes_on_with_its_state_and_what_it_changed_in_its_options(tmp_path):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
            return super().step(closure)

    def on_with(mesh, work):
        make = lambda groups: Counting(groups, lr=1e-2, momentum=0.9)
        rank = lambda world: work(Engine(small(), job(mesh, zero=2), world, forward=lambda m, b: m(b["input_ids"]), optimizer=make))
        return run_threads(rank, int(mesh[-1]))

    def first(engine):
        losses = [engine.step(batch).loss for batch in BATCHES[:4]]
        return losses[2:]

    def half(engine):
        [engine.step(batch) for batch in BATCHES[:2]]
        engine.save(tmp_path / "c")

    def rest(engine):
        engine.load(tmp_path / "c")
        losses = [engine.step(batch).loss for batch in BATCHES[2:4]]
        return losses, {group["k"] for group in engine.optimizer.param_groups}

    whole = on_with("dp=2", first)[0]
    on_with("dp=2", half)
    for losses, counts in on_with("dp=3", rest):
        assert losses == pytest.approx(whole, rel=1e-6) and counts == {4}


def test_state_that_belongs_to_whole_tensors_moves_where_tensors_are_whole_and_is_refused_elsewhere(tmp_path):
    class Factored(torch.optim.Optimizer):
        """Keeps one number a row, as Adafactor does."""

        def __init__(self, groups):
            super().__init__(groups, {"lr": 1e-2})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if p.dim() > 1:
                        state["rows"] = state.get("rows", torch.zeros(p.shape[0])) + p.grad.square().mean(1)
                    p -= group["lr"] * p.grad

    def on_with(mesh, granularity, work):
        keys = job(mesh, zero=1, **{"zero.granularity": granularity})
        rank = lambda world: work(Engine(small(), keys, world, forward=lambda m, b: m(b["input_ids"]), optimizer=Factored))
        return run_threads(rank, int(mesh[-1]))

    def rows(engine):
        pieces = [piece for group in engine.parallel.groups for piece in group.pieces]
        return {piece.name: engine.optimizer.state[piece.value]["rows"] for piece in pieces if len(piece.shape) > 1}

    save = lambda engine: (engine.step(BATCHES[0]), engine.save(tmp_path / "c"), rows(engine))[2]
    before = {name: x for found in on_with("dp=2", "matrix", save) for name, x in found.items()}
    after = {name: x for found in on_with("dp=3", "matrix", lambda e: (e.load(tmp_path / "c"), rows(e))[1]) for name, x in found.items()}
    assert before.keys() == after.keys() and all(torch.equal(x, after[name]) for name, x in before.items())
    with pytest.raises(JobError, match='optimizer/.*/rows is .* write zero.granularity="matrix"'):
        on_with("dp=3", "element", lambda engine: engine.load(tmp_path / "c"))


def test_where_loaders_stand_and_notes_come_back(tmp_path):
    class Rows:
        def __len__(self):
            return 7

        def __getitem__(self, i):
            return {"input_ids": torch.arange(6) % 17, "labels": torch.arange(6) % 17, "number": i}

    def work(engine, load=False):
        loader = engine.loader(Rows())
        if load:
            return engine.load(tmp_path / "c"), loader.state()
        engine.step(next(iter(loader)))
        engine.save(tmp_path / "c", {"epoch": 1, "name": "x"})
        return None

    on("dp=2", work, batch=4)
    assert on("dp=1", lambda engine: work(engine, True), batch=4) == [({"epoch": 1, "name": "x"}, {"position": 4})]


# -- what cannot be ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    on("dp=2", save_after(2, tmp_path / "c"), made=small())
    return tmp_path / "c"


def refused(mesh, folder, kind, match, made=None, **options):
    """Loading raises on every rank, and the engine is as it was before."""

    def work(engine):
        [engine.step(batch) for batch in BATCHES[3:5]]
        before = contents(engine)
        with pytest.raises(kind, match=match):
            engine.load(folder, **options)
        same(before, contents(engine))
        return engine.step(BATCHES[5]).loss

    assert len(set(on(mesh, work, made=made or small()))) == 1


def test_a_flipped_bit_is_an_error_on_every_rank_and_changes_nothing(folder):
    manifest = json.loads((folder / "manifest.json").read_text())
    number, start, *_ = manifest["tensors"]["optimizer/layers.1.up.weight/exp_avg"]["boxes"][0]
    file = folder / list(manifest["files"])[number]
    content = bytearray(file.read_bytes())
    content[start + 5] ^= 4
    file.write_bytes(content)
    refused("dp=3", folder, Damaged, rf"optimizer/layers.1.up.weight/exp_avg is damaged.*{file.name}")


@pytest.mark.parametrize(
    ("harm", "kind", "match"),
    [
        (lambda f: (f / "rank-00001.safetensors").unlink(), Damaged, "rank-00001.safetensors is missing"),
        (lambda f: os.truncate(f / "rank-00000.safetensors", 5000), Damaged, "rank-00000.safetensors has 5000 bytes"),
        (lambda f: os.truncate(f / "manifest.json", 500), Damaged, "manifest.json cannot be read"),
        (lambda f: (f / "manifest.json").unlink(), JobError, "holds no checkpoint"),
        (
            lambda f: (f / "manifest.json").write_text((f / "manifest.json").read_text().replace('"version": 1', '"version": 9')),
            JobError,
            "schema version 9.*install a newer stretto",
        ),
    ],
)
def test_what_is_missing_or_newer_is_one_clear_error_and_changes_nothing(folder, harm, kind, match):
    harm(folder)
    refused("dp=2", folder, kind, match)


def test_the_checkpoint_of_another_model_is_refused_by_name_and_parts_of_it_can_be_allowed(folder):
    other = small(width=10, blocks=4)
    refused("dp=2", folder, JobError, r"another model: \d+ not in it: model/layers.3.down.weight .*--allow-missing", made=other)
    refused(
        "dp=2",
        folder,
        JobError,
        r"another model: other shapes: model/embed.weight is \[17, 10\] there and \[17, 12\]",
        made=small(width=12),
    )
    refused("dp=2", folder, JobError, r"not in the model: model/layers.2.down.weight", made=small(blocks=2))

    def grow(engine):
        fresh = {name: tensor.clone() for name, tensor in engine.full_state() if tensor is not None}
        engine.load(folder, allow_missing="*layers.3.*")
        now = dict(engine.full_state())
        return fresh, now, engine.step(BATCHES[2]).committed

    fresh, now, committed = on("dp=2", grow, made=other)[0]
    assert all(torch.equal(now[name], fresh[name]) for name in now if "layers.3" in name) and committed
    assert any(not torch.equal(now[name], fresh[name]) for name in now if "layers.0" in name)


def test_a_parameter_that_was_frozen_has_no_moments_and_that_is_said(tmp_path):
    on("dp=2", save_after(2, tmp_path / "c"), made=model())
    free = model(frozen=False)
    refused("dp=2", tmp_path / "c", JobError, r"not in it: .*optimizer/layers.0.up.weight/\* ", made=free)
    losses = on("dp=2", lambda e: (e.load(tmp_path / "c", allow_missing="optimizer/*"), e.step(BATCHES[2]).committed)[1], made=free)
    assert losses == [True, True]


def test_another_optimizer_is_refused(folder):
    with pytest.raises(JobError, match="has the state of AdamW, and this engine has SGD"):
        on("dp=2", lambda engine: engine.load(folder), made=small(), **{"optimizer.name": "sgd"})


def test_nothing_is_saved_over_anything(folder):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(JobError, match="holds a checkpoint already; write another folder"):
        on("dp=2", lambda engine: engine.save(folder), made=small())
    (folder.parent / "mine").mkdir()
    with pytest.raises(JobError, match="is there already and holds no checkpoint"):
        on("dp=2", lambda engine: engine.save(folder.parent / "mine"), made=small())
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()} and sorted(os.listdir(folder.parent)) == ["c", "mine"]


def test_saving_on_some_ranks_only_says_which_called_and_which_did_not(tmp_path, monkeypatch):
    """CASES C24: inside "if rank is 0"; then only rank 1."""
    monkeypatch.setattr("stretto.engine.saving.PATIENCE", 0.5)
    for alone in (0, 1):

        def work(engine, alone=alone):
            if engine.world.rank != alone:
                return None
            with pytest.raises(JobError, match=rf"engine.save: rank {alone} called it, and rank {1 - alone} did not within 0.5 s"):
                engine.save(tmp_path / "c")
            return True

        assert on("dp=2", work, {"zero": 3})[alone]
    assert not list(Path(tmp_path).iterdir())


def test_ranks_that_name_different_folders_are_told(tmp_path):
    with pytest.raises(JobError, match=r"rank 0 saves step 0 in .*/0 and rank 1 step 0 in .*/1; give every rank one folder"):
        on("dp=2", lambda engine: engine.save(tmp_path / str(engine.world.rank)))
