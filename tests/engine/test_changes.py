"""What may differ between a run and the one that goes on from it, what is said of it, and what is refused."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from running import of, run
from truth import small, tokens

from stretto.checkpoint.shelf import Keep, Shelf
from stretto.checkpoint.store import LocalStore, open_store
from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.errors import JobError
from stretto.job import Job
from stretto.models import library

BATCHES = tokens(8, 12)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("a text that is long enough for some steps; " * 12)
    return path


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "checkpoints")


# -- the model -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model.heads": 8, "model.kv_heads": 4}, "heads is 4 there and 8 here, kv_heads is 2 there and 4 here"),
        ({"model.heads": 2, "model.kv_heads": 1}, "heads is 4 there and 2 here"),
    ],
)
def test_a_model_with_the_same_tensors_that_computes_otherwise_is_refused_unless_asked_for(change, match, text, place):
    shape = {"model.hidden": 32, "model.heads": 4, "model.kv_heads": 2}
    run(text, Keep(place), stop_after=1, **shape)
    with pytest.raises(JobError, match=f"computes otherwise with the same tensors: {match}.* --allow-missing 'config/"):
        run(text, Keep(place, "yes"), **{**shape, **change})
    events = run(text, Keep(place, "yes", allow=("config/*",)), **{**shape, **change})
    assert of("done", events)[0]["steps"] == 8


def test_a_model_of_transformers_that_computes_otherwise_is_refused_too(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": 31}

    def folder(name, **keys):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**sizes, **keys)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        return f"hf:{tmp_path / name}"

    asked = Job.load({"batch": 4, "mesh": "dp=1"})

    def load(model):
        return run_threads(lambda world: Engine(library.load(model), asked, world).load(tmp_path / "c"), 1)

    first = folder("first", num_attention_heads=2)
    run_threads(lambda world: Engine(library.load(first), asked, world).save(tmp_path / "c"), 1)
    load(first)
    load(folder("longer", num_attention_heads=2, max_position_embeddings=77, attention_dropout=0.1))
    with pytest.raises(JobError, match="rms_norm_eps is 1e-06 there and 0.001 here"):
        load(folder("other", num_attention_heads=2, rms_norm_eps=1e-3))


# -- the data ------------------------------------------------------------------------------------------------------------


def test_other_data_another_seed_or_length_is_gone_on_with_and_said(text, place, tmp_path):
    other = tmp_path / "other.txt"
    shutil.copy(text, other)
    run(text, Keep(place), stop_after=2, seed=3)

    def told(path, **keys):
        events = run(path, Keep(place, "yes"), stop_after=3, **keys)
        shutil.rmtree(f"{place}/step-00000003")
        return [event["text"] for event in of("note", events) if "data is not as it was" in event["text"]]

    assert told(text, seed=3) == []
    (line,) = told(other, seed=4)
    assert f"data.source was text:{text} and is text:{other}" in line and "seed of the data was 3 and is 4" in line
    assert line.endswith("it goes on at sample 24")
    (line,) = told(text, **{"seed": 3, "batch.seq_len": 4})
    assert "batch.seq_len was 8 and is 4" in line


# -- the place -----------------------------------------------------------------------------------------------------------


def test_two_runs_cannot_save_in_one_place_at_once_and_the_first_goes_on(text, place, monkeypatch):
    inside, go = threading.Event(), threading.Event()
    claimed = LocalStore.claim

    def claim(self):
        held = claimed(self)
        inside.set()
        go.wait(30)
        return held

    monkeypatch.setattr(LocalStore, "claim", claim)
    found = []
    first = threading.Thread(target=lambda: found.extend(run(text, Keep(place), ranks=1, **{"checkpoint.every": 3})))
    first.start()
    assert inside.wait(30)
    with pytest.raises(JobError, match="another run saves its checkpoints there now; wait for its end, or write checkpoint.folder=DIR"):
        run(text, Keep(place, "auto"), ranks=1, **{"checkpoint.every": 3})
    go.set()
    first.join()
    assert [event["step"] for event in of("saved", found)] == [3, 6, 8]
    run(text, Keep(place, "yes"), ranks=1, steps=9, **{"checkpoint.every": 3})  # and now it is free


def test_a_new_run_does_not_save_among_the_checkpoints_of_another(text, place):
    """Its own, of lower steps, would be removed as the older ones; and a later resume would take the other run's."""
    run(text, Keep(place), **{"checkpoint.every": 4, "checkpoint.keep": 1})
    with pytest.raises(JobError, match="holds checkpoints of a run already, up to step 8; write another checkpoint.folder, --resume"):
        run(text, Keep(place), **{"checkpoint.every": 1, "checkpoint.keep": 1})
    assert os.listdir(place) == ["step-00000008"]


def test_a_place_that_cannot_be_written_is_told_before_the_first_step(text, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(JobError, match=r"file/c cannot be written \(Not a directory\); write checkpoint.folder=DIR"):
        run(text, Keep(str(tmp_path / "file/c")), **{"checkpoint.every": 3})


def test_a_checkpoint_behind_a_symlink_is_gone_on_from_and_of_one_that_goes_only_the_link_does(text, place, tmp_path):
    run(text, Keep(place), stop_after=4)
    shutil.move(f"{place}/step-00000004", tmp_path / "archive")
    os.symlink(tmp_path / "archive", f"{place}/step-00000004")
    events = run(text, Keep(place, "yes"), **{"checkpoint.every": 2, "checkpoint.keep": 1})
    assert of("resumed", events)[0]["step"] == 4 and os.listdir(place) == ["step-00000008"]
    assert (tmp_path / "archive/manifest.json").exists()
    shutil.move(place, tmp_path / "moved")
    os.symlink(tmp_path / "moved", place)
    assert of("resumed", run(text, Keep(place, "yes"), steps=9))[0]["step"] == 8


def test_clocks_decide_nothing(text, place, monkeypatch):
    run(text, Keep(place), stop_after=4, **{"checkpoint.every": 2})
    os.utime(f"{place}/step-00000002", (2e9, 2e9))
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert of("resumed", run(text, Keep(place, "yes")))[0]["step"] == 4


def test_where_only_one_is_kept_an_older_one_stays_until_the_newer_is_known_to_be_whole(text, place):
    """A crash came between the save of step 4 and the end of step 2; then step 4 turns out to be damaged."""
    run(text, Keep(place), stop_after=4, **{"checkpoint.every": 2, "checkpoint.keep": 2})
    file = Path(place, "step-00000004", "rank-00000.safetensors")
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    events = run(text, Keep(place, "yes"), stop_after=3, **{"checkpoint.keep": 1})
    assert of("resumed", events)[0]["step"] == 2
    assert Shelf(open_store(place)).steps() == [3]


# -- the optimizer -------------------------------------------------------------------------------------------------------


class Orthogonal(torch.optim.Optimizer):
    """As Muon: the momentum of a whole matrix, made orthogonal by Newton and Schulz's iteration; other tensors by plain steps."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": 1e-2, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() < 2:
                    p -= group["lr"] * p.grad
                    continue
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(group["beta"]).add_(p.grad)
                x = momentum / (momentum.norm() + 1e-7)
                for _ in range(5):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                p -= group["lr"] * x


def with_own(mesh, work, make, **keys):
    asked = Job.load({"batch": 12, "schedule": "constant", "mesh": mesh, "precision": "fp64"}, **keys)
    build = lambda world: Engine(small().double(), asked, world, forward=lambda m, b: m(b["input_ids"]), optimizer=make)
    return run_threads(lambda world: work(build(world)), int(mesh[-1]))


@pytest.mark.parametrize(("source", "target"), [("dp=2", "dp=2"), ("dp=2", "dp=3"), ("dp=3", "dp=1")])
def test_an_optimizer_that_needs_whole_matrices_goes_on_on_any_mesh_that_leaves_them_whole(source, target, tmp_path):
    keys = {"zero": 1, "zero.granularity": "matrix"}
    half = lambda engine: ([engine.step(batch).loss for batch in BATCHES[:3]], engine.save(tmp_path / "c"))[0]
    rest = lambda engine: (engine.load(tmp_path / "c"), [engine.step(batch).loss for batch in BATCHES[3:6]])[1]
    whole = with_own(source, lambda engine: [engine.step(batch).loss for batch in BATCHES[:6]], Orthogonal, **keys)[0]
    seen = with_own(source, half, Orthogonal, **keys)[0] + with_own(target, rest, Orthogonal, **keys)[0]
    assert seen == whole if source == target else seen == pytest.approx(whole, rel=1e-12)


def test_groups_of_ones_own_with_rates_of_their_own_go_on(tmp_path):
    def make(groups):
        named = [pair for group in groups for pair in group["params"]]
        heads = [p for name, p in named if "head" in name or "embed" in name]
        norms = [p for name, p in named if "norm" in name]
        rest = [p for name, p in named if not any(p is other for other in (*heads, *norms))]
        groups = [{"params": heads, "lr": 3e-3}, {"params": norms, "lr": 1e-3, "weight_decay": 0.0}, {"params": rest}]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, betas=(0.8, 0.9))

    half = lambda engine: ([engine.step(batch).loss for batch in BATCHES[:3]], engine.save(tmp_path / "c"))[0]
    rest = lambda engine: (engine.load(tmp_path / "c"), [engine.step(batch).loss for batch in BATCHES[3:6]])[1]
    whole = with_own("dp=2", lambda engine: [engine.step(batch).loss for batch in BATCHES[:6]], make, zero=3)[0]
    seen = with_own("dp=2", half, make, zero=3)[0]
    assert seen + with_own("dp=2", rest, make, zero=3)[0] == whole
    assert seen + with_own("dp=3", rest, make, zero=2)[0] == pytest.approx(whole, rel=1e-12)
