"""A Hugging Face folder goes straight into any mesh and back, bit for bit, and no rank ever holds the whole of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from stretto.comm.threads import run_threads
from stretto.engine import check
from stretto.engine import engine as engine_module
from stretto.engine.engine import Engine
from stretto.errors import JobError
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.models import library

SIZES = {
    "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 51, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
MORE = {"gemma3_text": {"head_dim": 8}, "phi3": {"num_key_value_heads": 4}, "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2}}
IDS = torch.arange(24).view(4, 6)


def write(path: Path, family: str, tied: bool = False, shard: str = "5GB", dtype: torch.dtype = torch.float32) -> Path:
    """A folder as transformers itself writes it."""
    config = AutoConfig.for_model(family, **{**SIZES, **MORE.get(family, {})}, tie_word_embeddings=tied)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(path, max_shard_size=shard)
    return path


def files(path: Path) -> dict[str, torch.Tensor]:
    return {name: x for file in sorted(path.glob("*.safetensors")) for name, x in load_file(file).items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(x.dtype == b[name].dtype and torch.equal(x, b[name]) for name, x in a.items())


def through(path: Path, mesh: str, work, **keys):
    """work(engine) on every rank of an engine that was loaded from the folder."""
    asked = Job.load({"batch": 12, "batch.seq_len": 6, "mesh": mesh, "model": f"hf:{path}"}, **keys)

    def rank(world):
        loaded = library.load(asked.model.name)
        assert all(p.is_meta for p in loaded.model.parameters()), loaded.describe
        with Engine(loaded, asked, world) as engine:
            return work(engine)

    return run_threads(rank, Mesh.parse(mesh).size)


@pytest.mark.parametrize(
    ("family", "mesh", "zero", "tied", "shard"),
    [
        ("llama", "tp=2", 0, False, "5GB"),
        ("llama", "dp=2 tp=2", 3, True, "8KB"),
        ("qwen2", "tp=4", 1, False, "8KB"),  # two ranks share a kv head
        ("qwen3", "dp=2", 3, True, "5GB"),
        ("mistral", "dp=2", 0, False, "8KB"),
        ("gemma3_text", "tp=2", 2, True, "5GB"),
        ("phi3", "tp=2", 1, False, "5GB"),
        ("gpt2", "dp=2 tp=2", 2, True, "8KB"),
        ("gpt_neox", "tp=2", 0, False, "5GB"),
        ("olmo2", "dp=3", 3, False, "8KB"),
        ("gpt_oss", "tp=2", 0, False, "5GB"),
    ],
)
def test_a_folder_comes_back_bit_for_bit_from_any_mesh(family, mesh, zero, tied, shard, tmp_path):
    source = write(tmp_path / "its", family, tied, shard)
    assert (source / "model.safetensors.index.json").exists() is (shard == "8KB")
    through(source, mesh, lambda engine: engine.save_pretrained(tmp_path / "ours"), zero=zero)
    same(files(source), files(tmp_path / "ours"))
    its, ours = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("its", "ours"))
    assert torch.equal(its(input_ids=IDS).logits, ours(input_ids=IDS).logits)


def test_values_of_sixteen_bits_are_trained_in_32_and_can_be_written_in_16_again(tmp_path):
    source = write(tmp_path / "its", "llama", dtype=torch.bfloat16)

    def work(engine):
        engine.save_pretrained(tmp_path / "narrow", dtype=torch.bfloat16)
        engine.save_pretrained(tmp_path / "wide")

    through(source, "tp=2", work, zero=1)
    same(files(source), files(tmp_path / "narrow"))
    same({name: x.float() for name, x in files(source).items()}, files(tmp_path / "wide"))
    assert json.loads((tmp_path / "narrow/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(("mesh", "zero", "tied"), [("pp=2", 0, True), ("pp=2 tp=2", 1, False), ("dp=2", 3, True), ("tp=2", 0, True)])
def test_our_own_decoder_goes_into_a_folder_and_from_there_into_any_mesh(mesh, zero, tied, tmp_path):
    shape = {"blocks": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 37, "vocab": 51, "tied": tied}
    asked = Job.load({"batch": 4, "batch.seq_len": 6, "mesh": "dp=2"})

    def save(world):
        with Engine(library.load("tiny", overrides=shape, seed=3), asked, world) as engine:
            engine.save_pretrained(tmp_path / "its")
            return dict(engine.full_state())

    state = run_threads(save, 2)[0]
    found = through(tmp_path / "its", mesh, lambda e: (e.save_pretrained(tmp_path / "ours"), dict(e.full_state()))[1], zero=zero)[0]
    same(state, found)
    same(files(tmp_path / "its"), files(tmp_path / "ours"))


def test_each_rank_reads_its_own_bytes_and_no_others(tmp_path, monkeypatch):
    """In tp what is cut is read once in all, and by each rank what all have; in ZeRO 3 everything once."""
    source, read = write(tmp_path / "its", "llama"), []
    monkeypatch.setattr("stretto.checkpoint.values.SHORT", 1)  # rows of these models are short

    def noted(loaded, seed, made=engine_module.values_of):
        read.append(made(loaded, seed))
        return read[-1]

    monkeypatch.setattr(engine_module, "values_of", noted)
    stored = files(source)
    norms = sum(4 * x.numel() for x in stored.values() if x.ndim == 1)
    everything = sum(4 * x.numel() for x in stored.values())
    for mesh, zero, expected in (("tp=2", 0, everything + norms), ("dp=2", 3, everything), ("dp=2 tp=2", 3, everything + norms)):
        read.clear()
        through(source, mesh, lambda engine: None, zero=zero)
        total = sum(values.bytes_read for values in read)
        rows = 2 * 44 * 4 * 2 if mesh == "dp=2 tp=2" else 0  # where dp cuts inside a part of a row, both read it
        assert expected <= total <= expected + 64 * rows


@pytest.mark.parametrize("tied", [False, True])
def test_a_check_runs_from_a_folder(tied, tmp_path):
    source, told = write(tmp_path / "its", "llama", tied), {}
    job = Job.load({"batch": 4, "batch.seq_len": 6, "mesh": "tp=2", "model": f"hf:{source}"}).resolve(2, "cpu", 0)
    run_threads(lambda world: check.run(job, world, lambda e: told.update(e) if world.rank == 0 else None, steps=1), 2)
    assert told["ok"], told


def test_values_that_only_transformers_can_put_together_are_read_whole(tmp_path):
    """Files hold experts one by one; the model has them as one tensor."""
    config = AutoConfig.for_model("qwen3_moe", **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, head_dim=8)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "its")
    assert any(".experts.3." in name for name in files(tmp_path / "its"))
    loaded = library.load(f"hf:{tmp_path / 'its'}")
    assert loaded.stored is None and "read whole" in loaded.describe
    same(dict(model.state_dict()), dict(loaded.model.state_dict()))


def test_a_tied_weight_that_is_there_twice_is_left_to_transformers(tmp_path):
    from safetensors.torch import save_file

    source = write(tmp_path / "its", "llama", tied=True)
    stored = files(source)
    save_file(
        {**stored, "lm_head.weight": stored["model.embed_tokens.weight"] + 1}, source / "model.safetensors", metadata={"format": "pt"}
    )
    loaded = library.load(f"hf:{source}")
    assert loaded.stored is None
    assert not torch.equal(loaded.model.lm_head.weight, loaded.model.model.embed_tokens.weight)


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    """transformers itself goes on with random values in its place."""
    source = write(tmp_path / "its", "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    with pytest.raises(JobError, match=r"down_proj.weight is \[32, 44\] there, \[32, 48\] by config.json"):
        library.load(f"hf:{source}")
