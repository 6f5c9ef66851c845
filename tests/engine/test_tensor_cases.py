"""CASES.md under tensor parallelism: what broke other frameworks, tried here."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from truth import Small, apart, seeded, tokens, train

from stretto.comm.threads import run_threads
from stretto.engine import check
from stretto.engine.engine import Engine
from stretto.errors import JobError
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.models import library

EXACT = 1e-10


def job(mesh: str, **keys) -> Job:
    usual = {"batch.size": 12, "batch.seq_len": 7, "optimizer.lr": 1e-2, "schedule": "constant", "precision": "fp64"}
    return Job.load({**usual, "mesh": mesh}, **keys)


# -- C07, C10 ------------------------------------------------------------------------------------------------------------------


class Headed(nn.Module):
    """Attention-like: queries of four heads, a norm weight that all heads share, and a learnable number a head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm = nn.RMSNorm(3)
        self.scale = nn.Parameter(torch.linspace(1.0, 40.0, 4))

    def forward(self, x):
        heads = self.norm(self.q(x).unflatten(-1, (-1, 3))) * self.scale[:, None]
        return self.o(heads.flatten(-2).tanh())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(8), Headed()

    def forward(self, x):
        return x + self.attn(self.norm(x))


class Heads(Small):
    def __init__(self) -> None:
        super().__init__(width=8)
        self.layers = nn.ModuleList(Block() for _ in range(2))


RULES = {
    "embed": "embedding_rowwise",
    "layers.*.norm": "replicated",
    "layers.*.attn.q": "colwise:4",
    "layers.*.attn.o": "rowwise",
    "layers.*.attn.norm": "replicated_with_grad_allreduce",
    "layers.*.attn.scale": "colwise:4",
    "norm": "replicated",
    "head": "head",
}


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize(("mesh", "zero"), [("tp=2", 0), ("tp=4", 1), ("dp=2 tp=2", 3)])
def test_c07_c10_replicated_and_head_sharded_parameters_count_once_in_norm_and_gradient(mesh, zero, sequence):
    """A norm that each rank applies to its own heads, a number a head, norms on the stream, a row-parallel bias."""
    model, batches = seeded(Heads), tokens(2, 12, 7)

    def rank(world):
        engine = Engine(copy.deepcopy(model), job(mesh, zero=zero, tensor=sequence), world, rules=RULES)
        norms = [engine.step(batch).grad_norm for batch in batches]
        held = {n: p.detach().clone() for n, p in engine.model.named_parameters() if not engine.tensors.places[n].axis and zero < 3}
        return norms, dict(engine.full_state()), held

    found = run_threads(rank, Mesh.parse(mesh).size)
    truth, parameters = train(model, batches)
    norms, state, first = found[0]
    assert norms == pytest.approx([norm for _, norm in truth], rel=EXACT)
    assert apart({name: state[name] for name in parameters}, parameters) <= EXACT
    assert all(torch.equal(held[name], first[name]) for _, _, held in found for name in held)


def test_c07_a_number_a_head_that_no_rule_places_is_refused_by_name():
    rules = {pattern: style for pattern, style in RULES.items() if not pattern.endswith("scale")}
    with pytest.raises(JobError, match=r"no rule says how to cut layers\.\*\.attn"):
        run_threads(lambda world: Engine(seeded(Heads), job("tp=2"), world, rules=rules), 2)


# -- C32 -----------------------------------------------------------------------------------------------------------------------


def test_c32_a_file_is_loaded_without_copies_and_shapes_are_those_of_the_whole(pool, tmp_path):
    """100 MB on four ranks with ZeRO 3: each holds its quarter and no more than 32 MB beside it at any moment (a megabyte of elements
    on the way, and the model's own objects), and reads its quarter of the file."""
    config = AutoConfig.for_model(
        "llama", hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=4000, bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    size = sum(4 * p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path / "its")
    place = str(tmp_path / "its")

    def rank(world):
        from stretto.checkpoint import values
        from stretto.engine.watch import MemoryWatch

        asked = Job.load({"batch": 4, "batch.seq_len": 8, "mesh": "dp=4", "zero": 3})
        library.load(f"hf:{place}")  # what is imported for a first model is not what is measured
        gc.collect()
        kept, made = [], values.FolderValues.__init__

        def noted(self, *given):
            made(self, *given)
            kept.append(self)

        values.FolderValues.__init__ = noted
        try:
            before = MemoryWatch()
            before._look()
            with MemoryWatch() as watch:
                engine = Engine(library.load(f"hf:{place}"), asked, world)
        finally:
            values.FolderValues.__init__ = made
        found = {name: tuple(p.shape) for name, p in engine.model.named_parameters()}
        return watch.private_bytes - before.private_bytes, sum(one.bytes_read for one in kept), found

    told = pool.run(rank, ranks=4, timeout=120)
    assert sum(read for _, read, _ in told) <= 1.01 * size
    for grown, _, found in told:
        assert grown <= size / 4 + 32e6
        assert found == shapes


def test_c32_a_model_is_resized_before_the_engine_and_refused_after(tmp_path):
    config = AutoConfig.for_model("llama", hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2,
                                  num_key_value_heads=2, vocab_size=17, bos_token_id=0, eos_token_id=1, pad_token_id=2)  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "its")
    larger = AutoModelForCausalLM.from_pretrained(tmp_path / "its")
    larger.resize_token_embeddings(20)
    asked = Job.load({"batch": 4, "batch.seq_len": 6, "mesh": "dp=2", "zero": 3})
    state = run_threads(lambda world: dict(Engine(copy.deepcopy(larger), asked, world).full_state()), 2)[0]
    assert all(torch.equal(state[name], p) for name, p in larger.named_parameters())

    def rank(world):
        engine = Engine(library.load(f"hf:{tmp_path / 'its'}"), asked, world)
        engine.model.resize_token_embeddings(20, mean_resizing=False)
        engine.step(tokens(1, 4)[0])

    with pytest.raises(JobError, match="is another parameter than when the engine was made .was the model resized"):
        run_threads(rank, 2)


# -- C39 -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "keys"),
    [
        ("tp=2", {"batch.seq_len": 13, "vocab": 151, "tensor": True}),
        ("tp=4", {"batch.seq_len": 13, "vocab": 151}),  # two kv heads on four ranks
        ("dp=3", {"zero": 3}),
        ("dp=3 tp=2", {"batch.seq_len": 13, "zero": 2, "vocab": 151}),
        ("pp=3", {"blocks": 10, "batch.micro_size": 4}),
    ],
)
def test_c39_sizes_that_do_not_divide_give_the_step_of_one_process(mesh, keys):
    sizes = {"name": "tiny", "blocks": 2, "hidden": 20, "heads": 4, "kv_heads": 2, "head_dim": 6, "ffn": 37, "vocab": 51}
    sizes |= {name: value for name, value in keys.items() if name in sizes}
    asked, told = job(mesh, model=sizes, **{k: v for k, v in keys.items() if k not in sizes}).resolve(Mesh.parse(mesh).size, "cpu", 0), {}

    def rank(world):
        check.run(asked, world, lambda e: told.update(e) if world.rank == 0 else None, steps=2)

    run_threads(rank, Mesh.parse(mesh).size)
    assert told["ok"] and max(value for key, value in told.items() if key.endswith("_error")) <= EXACT, told


@pytest.mark.parametrize(
    ("mesh", "sizes", "words"),
    [
        ("tp=4", {"hidden": 24, "heads": 6, "kv_heads": 6}, r"mesh.tp=4 does not divide heads=6 of tiny; use tp in \{1, 2, 3, 6\}"),
        ("tp=3", {"hidden": 24, "heads": 6, "kv_heads": 2}, r"mesh.tp=3 does not divide kv_heads=2 .* use tp in \{1, 2, 6\}"),
    ],
)
def test_c39_heads_that_do_not_divide_are_refused_before_any_rank_starts(mesh, sizes, words):
    with pytest.raises(JobError, match=words):
        job(mesh, model={"name": "tiny", **sizes}).resolve(Mesh.parse(mesh).size, "cpu", 0)
