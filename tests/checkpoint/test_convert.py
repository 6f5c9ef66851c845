"""Checkpoints and Hugging Face folders, one as the other: the same bits under the names that the other side expects."""

from __future__ import annotations

import itertools
import json
import os

import pytest
import torch
from safetensors.torch import load_file
from truth import small

from stretto.checkpoint.convert import convert
from stretto.checkpoint.huggingface import INDEX, Listed, read_folder, write_folder
from stretto.checkpoint.kinds import inspect
from stretto.checkpoint.shelf import Keep
from stretto.checkpoint.store import LocalStore, place_of
from stretto.cli import main
from stretto.comm.threads import run_threads
from stretto.comm.transport import World
from stretto.engine.engine import Engine
from stretto.engine.loop import train
from stretto.errors import Damaged, JobError, RunError
from stretto.job import Job
from stretto.models import library

SHAPE = {"name": "tiny", "blocks": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 37, "vocab": 51}
IDS = torch.arange(12).view(2, 6)


def job(mesh, **keys):
    return Job.load({"model": SHAPE, "batch": 12, "batch.seq_len": 6, "schedule": "constant", "mesh": mesh}, **keys)


def decoder(mesh, work, tied=False, seed=0, **keys):
    asked = job(mesh, **{"model.tied": tied}, **keys)
    rank = lambda world: work(Engine(library.load("tiny", seed=seed, overrides=asked.model.sizes()), asked, world))
    return run_threads(rank, 2)


def step(engine):
    engine.step({"input_ids": torch.arange(72).view(12, 6) % 51, "labels": torch.arange(72).view(12, 6) % 51})


def whole(engine):
    return dict(engine.full_state())


def same(a, b):
    assert a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


def logits_there(folder):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("mesh", "zero"), [("dp=2", 3), ("tp=2", 0), ("pp=2", 0)])
def test_our_decoder_is_a_llama_to_transformers_and_comes_back_bit_for_bit(mesh, zero, tied, tmp_path):
    def save(engine):
        step(engine)
        engine.save(tmp_path / "c")
        engine.save_pretrained(tmp_path / "direct")
        return whole(engine)

    state = decoder(mesh, save, tied, zero=zero)[0]
    convert(str(tmp_path / "c"), str(tmp_path / "hf"))
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("direct", "hf")]
    same(*files)
    assert json.loads((tmp_path / "direct/config.json").read_text()) == json.loads((tmp_path / "hf/config.json").read_text())
    assert ("lm_head.weight" in files[0]) is not tied and torch.equal(files[0]["model.embed_tokens.weight"], state["embed.weight"])
    model = library.load("tiny", overrides=job("dp=2", **{"model.tied": tied}).model.sizes()).model.to_empty(device="cpu")
    model.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(logits_there(tmp_path / "hf"), model(IDS), rtol=1e-4, atol=1e-5)
    convert(str(tmp_path / "hf"), str(tmp_path / "back"))
    same(state, decoder("dp=2", lambda engine: (engine.load(tmp_path / "back"), whole(engine))[1], tied, seed=3, zero=2)[0])


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_of_transformers_is_written_as_it_writes_it_and_comes_back_bit_for_bit(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":  # tied, with layers that hold their matrices the other way round
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=31, n_positions=16)
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = transformers.LlamaConfig(**sizes, vocab_size=31)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        truth = model(input_ids=IDS).logits
    model.save_pretrained(tmp_path / "its")

    def load(world):
        with Engine(library.load(f"hf:{tmp_path / 'its'}", weights="random", seed=world.rank + 5), asked, world) as engine:
            engine.load(tmp_path / "c")
            engine.save_pretrained(tmp_path / "ours")
            engine.save(tmp_path / "again")

    asked = Job.load({"batch": 4, "mesh": "dp=2", "zero": 3})
    convert(str(tmp_path / "its"), str(tmp_path / "c"))
    run_threads(load, 2)
    convert(str(tmp_path / "again"), str(tmp_path / "converted"))
    its = load_file(tmp_path / "its/model.safetensors")
    for name in ("ours", "converted"):
        same(its, load_file(tmp_path / name / "model.safetensors"))
        torch.testing.assert_close(logits_there(tmp_path / name), truth, rtol=1e-5, atol=1e-6)


def test_many_files_with_an_index_are_written_and_read(tmp_path):
    values = {f"t{i}": torch.randn(3 + i, 4) for i in range(5)} | {"one": torch.tensor(2.0)}
    listed = [Listed(name, "F32", tuple(x.shape)) for name, x in values.items()]
    store, name = place_of(tmp_path / "hf")
    files = write_folder(store, name, {"a": 1}, listed, values.values(), shard=200)
    index = json.loads((tmp_path / "hf" / INDEX).read_text())
    assert len(set(index["weight_map"].values())) == 3 and set(files) == {*index["weight_map"].values(), INDEX, "config.json"}
    assert index["metadata"]["total_size"] == sum(4 * x.numel() for x in values.values())
    found = {key: x for file in files if file.endswith("safetensors") for key, x in load_file(tmp_path / "hf" / file).items()}
    same(values, found)
    assert {file: (tmp_path / "hf" / file).stat().st_size for file in files} == files
    assert {key: item.shape for key, (_, item) in read_folder(store, name).tensors.items()} == {
        key: tuple(x.shape) for key, x in values.items()
    }
    with pytest.raises(JobError, match="is there already"):
        write_folder(store, name, {}, listed, values.values())


@pytest.mark.parametrize(
    ("harm", "kind", "match"),
    [
        (lambda f: os.truncate(f / "model.safetensors", 300), Damaged, "model.safetensors was cut short"),
        (lambda f: (f / "model.safetensors").unlink(), JobError, "model.safetensors is not there; complete the folder"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), Damaged, "is no safetensors file"),
    ],
)
def test_a_folder_that_is_not_whole_is_one_clear_error_and_nothing_is_written(harm, kind, match, tmp_path):
    store, name = place_of(tmp_path / "hf")
    write_folder(store, name, {}, [Listed("x", "F32", (100,))], [torch.zeros(100)])
    harm(tmp_path / "hf")
    with pytest.raises(kind, match=match):
        convert(str(tmp_path / "hf"), str(tmp_path / "c"))
    assert os.listdir(tmp_path) == ["hf"]


def test_a_model_that_transformers_does_not_know_is_refused_with_what_can_be_done(tmp_path):
    def save(world):
        with Engine(small(), Job.load({"batch": 4, "mesh": "dp=2"}), world, forward=lambda m, b: m(b["input_ids"])) as engine:
            engine.save(tmp_path / "c")
            with pytest.raises(JobError, match="Small cannot be written as a Hugging Face folder.*engine.save"):
                engine.save_pretrained(tmp_path / "hf")

    run_threads(save, 2)
    with pytest.raises(JobError, match=r"c cannot be a Hugging Face folder: Small cannot"):
        convert(str(tmp_path / "c"), str(tmp_path / "hf"))
    assert os.listdir(tmp_path) == ["c"]


def test_an_error_of_the_rank_that_writes_is_everybodys_and_nothing_is_left(tmp_path, monkeypatch):
    written = LocalStore.write

    def full(self, name, chunks):
        written(self, name, itertools.islice(chunks, 3))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStore, "write", full)

    def save(engine):
        with pytest.raises(RunError, match="no space left for .*hf"):
            engine.save_pretrained(tmp_path / "hf")
        return True

    assert decoder("dp=2", save, zero=3) == [True, True] and os.listdir(tmp_path) == []


def test_a_run_is_told_of_at_its_newest_checkpoint_and_a_flipped_bit_is_found_if_asked(tmp_path):
    def save(engine):
        step(engine)
        for number in (1, 2):
            engine.save(tmp_path / f"checkpoints/step-{number:08d}")

    decoder("dp=2", save)
    told = inspect(str(tmp_path), verify=True).as_json()
    folder = tmp_path / "checkpoints/step-00000002"
    assert told["path"] == str(folder) and (told["step"], told["mesh"], told["ranks"], told["model"]) == (1, "dp=2", 2, "tiny")
    assert {file["name"]: file["bytes"] for file in told["files"]} == {
        path.name: path.stat().st_size for path in folder.glob("*.safetensors")
    }
    parameters = sum(p.numel() for p in library.load("tiny", overrides=job("dp=2").model.sizes()).model.parameters())
    assert told["kinds"]["model"] == 4 * parameters and told["kinds"]["optimizer"] == 8 * parameters
    assert told["bytes"] == sum(told["kinds"].values())
    path = folder / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    inspect(str(folder))
    with pytest.raises(Damaged, match="rank-00000.safetensors"):
        inspect(str(folder), verify=True)
    with pytest.raises(JobError, match="is no checkpoint .*, no Hugging Face folder .* and no run folder"):
        inspect(str(tmp_path / "none"))


def test_with_export_the_end_of_training_leaves_a_folder_once_and_a_stop_or_until_none(tmp_path):
    asked = job("dp=2", steps=2, data="random", **{"checkpoint.export": "huggingface"}).resolve(None, "cpu", 0)
    rank = lambda keep, stop: lambda world: train(asked, world, lambda event: None, stop, keep)
    place = tmp_path / "huggingface"
    run_threads(rank(Keep(str(tmp_path / "c"), last=True, export=str(place)), lambda: False), 2)
    assert not place.exists()
    for _ in range(2):
        (place / ".step-00000002.of-a-crash.tmp").mkdir(parents=True)
        run_threads(rank(Keep(str(tmp_path / "c"), "auto", export=str(place)), lambda: False), 2)
        assert os.listdir(place) == ["step-00000002"]
    assert set(read_folder(LocalStore(place), "step-00000002").files) == {"model.safetensors"}
    other = Job.load(
        {"model": {**SHAPE, "name": "30m"}}, **{**{"batch": 4, "data": "random", "steps": 1}, "checkpoint.export": "huggingface"}
    )
    with pytest.raises(JobError, match="learned positions, rms norm and gelu has no match in transformers"):
        train(other.resolve(1, "cpu", 0), World.alone("cpu"), lambda event: None, lambda: False, Keep())


def test_the_commands_tell_tensors_bytes_and_files(tmp_path, capsys):
    decoder("dp=2", lambda engine: engine.save(tmp_path / "c"))
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "hf"), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert main(["inspect", str(tmp_path / "hf"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == made and made["kind"] == "huggingface" and made["model"] == "LlamaForCausalLM"
    held = load_file(tmp_path / "hf/model.safetensors")
    size = (tmp_path / "hf/model.safetensors").stat().st_size
    assert made["files"] == [{"name": "model.safetensors", "bytes": size}]
    assert made["tensors"] == len(held) and made["bytes"] == sum(4 * x.numel() for x in held.values())
    assert main(["inspect", str(tmp_path / "c"), "--verify"]) == 0
    told = capsys.readouterr().out
    assert "mesh: dp=2" in told and "rank-00001.safetensors" in told and "\n  model/: " in told
    assert main(["convert", str(tmp_path / "c"), str(tmp_path / "hf")]) == 2 and "is there already" in capsys.readouterr().err
