"""Folders of torch.distributed.checkpoint, as FSDP2 scripts write them: the run goes on here, and there again."""

from __future__ import annotations

import copy
import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import Pool
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from truth import small, tokens

from stretto.checkpoint.convert import convert
from stretto.checkpoint.kinds import inspect
from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.errors import Damaged, JobError
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.models import library

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # torch's own words where a process reads alone

BATCHES = tokens(9, 12, counted=lambda step: torch.ones(12, 6, dtype=torch.bool))
LR, DECAY, BETAS = 1e-2, 0.1, (0.9, 0.95)


def model(seed=0, tied=True):
    """Sizes that 2 does not divide, frozen weights, a buffer, a tied pair."""
    made = small(seed, tied=tied)
    made.register_buffer("seen", torch.full((3, 5), float(seed + 1)))
    for name, param in made.named_parameters():
        param.requires_grad = "layers.1" not in name
    return made


def script(world, source, target, steps, tied=True, flat=False, groups=2, seed=0):
    """A training script with FSDP2 and DCP: go on from `source` with these steps, save in `target`; the losses."""
    mesh = init_device_mesh("cpu", (world.size,))
    net = model(seed, tied)
    for layer in net.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    trained = [p for p in net.parameters() if p.requires_grad]
    asked = [{"params": trained}]
    if groups == 2:
        asked = [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(asked, lr=LR, betas=BETAS, weight_decay=DECAY)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    if source:
        weights, state = get_state_dict(net, optimizer, options=options)
        held = {**weights, "optimizer": state} if flat else {"model": weights, "optimizer": state}
        dcp.load(held, checkpoint_id=source)
        set_state_dict(net, optimizer, model_state_dict=weights, optim_state_dict=held["optimizer"], options=options)
        for group in optimizer.param_groups:
            assert (group["lr"], group["betas"], group["eps"]) == (LR, BETAS, 1e-8)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY, 0.0][:groups]
    losses = []
    for number in steps:
        rows = {name: x.chunk(world.size)[world.rank] for name, x in BATCHES[number].items()}
        logits, labels = net(rows["input_ids"])[:, :-1], rows["labels"][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world.size)
    if target:
        weights, state = get_state_dict(net, optimizer, options=options)
        step = torch.tensor(len(steps))
        held = {**weights, "optimizer": state, "train_state": {"step": step}} if flat else {"model": weights, "optimizer": state}
        dcp.save(held, checkpoint_id=target)
    full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    return losses, {name: x.clone() for name, x in full.items()}


def on(mesh, work, made=None, optimizer=None, **keys):
    usual = {"precision": "fp32", "batch": 12, "optimizer.lr": LR, "optimizer.weight_decay": DECAY, "optimizer.betas": BETAS, "clip": 1.0}
    asked = Job.load(mesh=mesh, schedule="constant", **usual, **keys)

    def rank(world):
        with Engine(copy.deepcopy(made or model(5)), asked, world, forward=lambda m, b: m(b["input_ids"]), optimizer=optimizer) as engine:
            return work(engine)

    return run_threads(rank, Mesh.parse(mesh).size)


@pytest.fixture(scope="module")
def pair():
    """Two ranks whose default process group is gloo's, as of any script."""
    with Pool(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def theirs(pair, tmp_path_factory):
    """(folder after 3 steps, losses of 9 steps, parameters after 3) of the script alone, by its flavour."""
    made = {}

    def get(tied=True, flat=False, groups=2):
        key = (tied, flat, groups)
        if key not in made:
            folder = tmp_path_factory.mktemp("theirs") / "step-3"
            first, state = pair.run(script, 2, ("", str(folder), range(3), tied, flat, groups))[0]
            rest, _ = pair.run(script, 2, (str(folder), "", range(3, 9), tied, flat, groups, 9))[0]
            made[key] = folder, first + rest, state
        return made[key]

    return get


@pytest.mark.parametrize(("tied", "flat", "groups"), [(True, False, 2), (False, True, 2), (False, False, 1)])
def test_a_script_with_fsdp2_goes_on_here_and_there_again_with_the_same_losses(tied, flat, groups, theirs, pair, tmp_path):
    folder, losses, state = theirs(tied, flat, groups)
    decay_all = lambda made: torch.optim.AdamW([{**group, "weight_decay": DECAY} for group in made], lr=LR, betas=BETAS)

    def go_on(engine):
        engine.load(folder)
        now = dict(engine.full_state())
        seen = [engine.step(batch).loss for batch in BATCHES[3:6]]
        engine.save(tmp_path / "ours")
        return now, seen, (engine.steps, engine.updates)

    now, seen, counts = on("dp=2", go_on, model(5, tied), decay_all if groups == 1 else None, zero=3)[0]
    assert counts == (6, 6)
    assert now.keys() == state.keys() and all(torch.equal(x, state[name]) for name, x in now.items() if x is not None)
    assert seen == pytest.approx(losses[3:6], rel=2e-6)
    if groups == 1:
        with pytest.raises(JobError, match="the options of an optimizer of one's own .* are not in its checkpoint"):
            convert(str(tmp_path / "ours"), str(tmp_path / "back"), "dcp")
        assert os.listdir(tmp_path) == ["ours"]
        return
    convert(str(tmp_path / "ours"), str(tmp_path / "back"), "torchtitan" if flat else "dcp")
    again, _ = pair.run(script, 2, (str(tmp_path / "back"), "", range(6, 9), tied, flat, groups, 9))[0]
    assert again == pytest.approx(losses[6:], rel=2e-6)


@pytest.mark.parametrize(("mesh", "zero"), [("dp=1", 0), ("dp=3", 2), ("dp_replicate=2 dp=2", 3)])
def test_any_mesh_reads_it_and_all_of_it_bit_for_bit(mesh, zero, theirs, tmp_path):
    folder, losses, state = theirs()

    def look(engine):
        engine.load(folder)
        engine.save(tmp_path / "ours")
        return dict(engine.full_state()), engine.step(BATCHES[3]).loss

    found, loss = on(mesh, look, zero=zero)[0]
    assert all(torch.equal(found[name], x) for name, x in state.items()) and loss == pytest.approx(losses[3], rel=2e-6)
    convert(str(folder), str(tmp_path / "converted"))
    for path in ("ours", "converted"):
        convert(str(tmp_path / path), str(tmp_path / f"{path}-back"), "dcp")
    assert everything(tmp_path / "ours-back").keys() == everything(tmp_path / "converted-back").keys()
    truth = everything(folder)
    for path in ("ours-back", "converted-back"):
        back = everything(tmp_path / path)
        assert truth.keys() <= back.keys() and all(torch.equal(x, back[key]) for key, x in truth.items())


def everything(folder):
    """Every tensor of a folder of DCP, read by torch alone in one process."""
    listed = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items()
    found = {key: torch.zeros(about.size, dtype=about.properties.dtype) for key, about in listed if hasattr(about, "size")}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def test_what_a_folder_holds_and_what_is_not_taken_is_told(theirs):
    told = inspect(str(theirs(tied=False, flat=True)[0]), verify=True)
    sizes = [p.numel() for p in model(tied=False).parameters()]
    trained = [p.numel() for p in model(tied=False).parameters() if p.requires_grad]
    assert told.kind == "dcp" and told.about["step"] == 3 and told.about["not taken"] == "train_state.step"
    assert told.about["kinds"] == {"model": 4 * (sum(sizes) + 15), "optimizer": 8 * sum(trained)}


def refused(folder, kind, match, **made):
    with pytest.raises(kind, match=match):
        on("dp=2", lambda engine: engine.load(folder), model(5, **made))


def copied(folder, tmp_path):
    os.makedirs(tmp_path / "c")
    for path in folder.iterdir():
        (tmp_path / "c" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "c"


def test_a_flipped_bit_in_any_tensor_is_an_error_that_names_it_though_torch_itself_reads_on(theirs, tmp_path):
    folder = copied(theirs()[0], tmp_path)
    truth = everything(folder)
    for key in ("model.layers.0.up.weight", "optimizer.state.layers.2.up.weight.exp_avg"):
        file = folder / "__1_0.distcp"
        clean = file.read_bytes()
        mine = truth[key].chunk(2)[1].numpy().tobytes()
        at = clean.index(mine) + 7
        broken = bytearray(clean)
        broken[at] ^= 16
        file.write_bytes(broken)
        assert not torch.equal(everything(folder)[key], truth[key])
        name = key.replace("optimizer.state.", "optimizer/").replace("weight.exp", "weight/exp").replace("model.", "model/")
        refused(folder, Damaged, rf"{name} is damaged.*__1_0\.distcp")
        file.write_bytes(clean)


@pytest.mark.parametrize(
    ("harm", "kind", "match"),
    [
        (lambda f: (f / "__1_0.distcp").unlink(), Damaged, r"__1_0\.distcp is missing"),
        (lambda f: os.truncate(f / "__0_0.distcp", 900), Damaged, r"__0_0\.distcp has 900 bytes, and \.metadata says"),
        (lambda f: os.truncate(f / ".metadata", 300), Damaged, r"\.metadata cannot be read"),
        (lambda f: (f / ".metadata").write_bytes(pickle.dumps({"a": 1})), Damaged, "no metadata of torch.distributed.checkpoint"),
    ],
)
def test_what_is_missing_or_cut_short_is_one_clear_error(harm, kind, match, theirs, tmp_path):
    folder = copied(theirs()[0], tmp_path)
    harm(folder)
    refused(folder, kind, match)


def test_the_folder_of_another_model_and_ends_that_are_not_tied_there_are_refused(theirs, tmp_path):
    refused(theirs(tied=False)[0], JobError, "head.weight and embed.weight are one tied weight of this model, and have different values")
    with pytest.raises(JobError, match=r"another model: .*not in it: model/layers\.3"):
        on("dp=2", lambda engine: engine.load(theirs()[0]), small(blocks=4, tied=True))
    with pytest.raises(JobError, match="has the state of AdamW, and this engine has SGD"):
        on("dp=1", lambda engine: engine.load(theirs()[0]), **{"optimizer.name": "sgd"})
    dcp.save({"lr": torch.ones(2), "model": {"state": 3}}, checkpoint_id=tmp_path / "c", no_dist=True)
    refused(tmp_path / "c", JobError, "holds no tensors of a model; its keys are")


def test_nothing_that_the_metadata_names_is_run(tmp_path):
    class Harm:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    os.makedirs(tmp_path / "c")
    (tmp_path / "c/.metadata").write_bytes(pickle.dumps(Harm()))
    refused(tmp_path / "c", Damaged, "no metadata of torch.distributed.checkpoint")
    assert os.listdir(tmp_path) == ["c"]


def test_moments_of_a_parameter_that_was_frozen_there_are_missing_and_that_is_said(theirs):
    free = model(5)
    for param in free.parameters():
        param.requires_grad = True
    with pytest.raises(JobError, match=r"not in it: optimizer/layers\.1\."):
        on("dp=2", lambda engine: engine.load(theirs()[0]), free)


@pytest.mark.parametrize(("mesh", "zero", "tied"), [("tp=2", 1, False), ("pp=2", 2, True), ("pp=2", 0, False)])
def test_what_tp_cuts_and_stages_share_out_goes_out_and_comes_in(mesh, zero, tied, tmp_path):
    sizes = {"name": "tiny", "blocks": 4, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 37, "vocab": 51, "tied": tied}
    ids = torch.arange(72).view(12, 6) % 51
    batch = {"input_ids": ids, "labels": ids}

    def run(mesh, zero, work, seed=0):
        keys = {"model": sizes, "batch": 12, "batch.seq_len": 6, "schedule": "constant", "precision": "fp32"}
        asked = Job.load(keys, mesh=mesh, zero=zero)
        rank = lambda world: work(Engine(library.load("tiny", seed=seed, overrides=asked.model.sizes()), asked, world))
        return run_threads(rank, Mesh.parse(mesh).size)[0]

    def save(engine):
        engine.step(batch)
        engine.save(tmp_path / "c")
        return dict(engine.full_state()), engine.step(batch).loss

    state, loss = run(mesh, zero, save)
    convert(str(tmp_path / "c"), str(tmp_path / "dcp"), "dcp")
    for other, stage in ((mesh, zero), ("dp=2", 3)):
        found, again = run(
            other, stage, lambda engine: (engine.load(tmp_path / "dcp"), dict(engine.full_state()), engine.step(batch).loss)[1:], 4
        )
        assert found.keys() == state.keys() and all(torch.equal(x, found[name]) for name, x in state.items() if x is not None)
        assert again == pytest.approx(loss, rel=1e-6)
