"""With dropout on, every mesh takes the step of one process: the masks are the same."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from truth import VOCAB, Small, apart, seeded, tokens

from stretto.comm.threads import run_threads
from stretto.engine import check
from stretto.engine.engine import Engine
from stretto.errors import JobError, RunError
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.models import library

EXACT = 1e-10
SIZES = {"blocks": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 37, "vocab": 51, "dropout": 0.5, "attention_dropout": 0.3}


def job(mesh: str, **keys) -> Job:
    usual = {"batch.size": 12, "batch.seq_len": 7, "optimizer.lr": 1e-2, "schedule": "constant", "precision": "fp64", "seed": 5}
    return Job.load({**usual, "mesh": mesh}, **keys)


def checked(mesh: str, own=None, **keys) -> dict:
    asked, told = job(mesh, **keys), {}
    asked = asked.resolve(Mesh.parse(mesh).size, "cpu", 0, own_model=own is not None)

    def rank(world):
        model = copy.deepcopy(own)
        check.run(asked, world, lambda e: told.update(e) if world.rank == 0 else None, steps=2, model=model)

    run_threads(rank, Mesh.parse(mesh).size)
    return told


def agrees(mesh: str, own=None, **keys) -> None:
    told = checked(mesh, own, **keys)
    assert told["dropout"] == "named", told
    assert told["ok"] and max(value for key, value in told.items() if key.endswith("_error")) <= EXACT, told


@pytest.mark.parametrize(
    ("mesh", "zero", "sequence", "recompute", "micro"),
    [
        ("dp=1", 0, None, "none", None),
        ("dp=2", 3, None, "none", 2),
        ("dp=3", 1, None, "full", None),
        ("tp=2", 0, True, "none", None),
        ("tp=2", 0, False, "none", 5),
        ("tp=4", 1, True, "full", None),
        ("dp=2 tp=2", 3, True, "selective", 4),
        ("dp=2 tp=2", 2, False, "full", 3),
        ("pp=2", 0, None, "none", 3),
        ("pp=2 tp=2", 1, True, "full", 4),
    ],
)
def test_our_decoder_drops_the_same_on_every_mesh(mesh, zero, sequence, recompute, micro):
    keys = {"model": {"name": "tiny", **SIZES}, "zero": zero, "tensor": sequence, "recompute": recompute, "batch.micro_size": micro}
    agrees(mesh, **{k: v for k, v in keys.items() if v is not None})


GPT2 = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 51, "max_position_embeddings": 64,
        "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip


def of_transformers(family: str, **sizes):
    config = AutoConfig.for_model(family, **{**GPT2, **sizes}, use_cache=False)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("gpt2", {}),  # its own dropout of 0.1, in the embedding, attention and after both layers
        ("llama", {"attention_dropout": 0.4, "intermediate_size": 44, "num_key_value_heads": 2}),
        ("gpt_neox", {"attention_dropout": 0.2, "hidden_dropout": 0.3, "intermediate_size": 44}),
        ("phi3", {"attention_dropout": 0.2, "resid_pdrop": 0.3, "intermediate_size": 44, "num_key_value_heads": 4, "pad_token_id": 2}),
    ],
)
@pytest.mark.parametrize(
    ("mesh", "zero", "recompute"), [("dp=2", 3, "none"), ("tp=2", 0, "none"), ("dp=2 tp=2", 1, "full"), ("pp=2 tp=2", 0, "none")]
)
def test_a_transformers_model_drops_the_same_on_every_mesh(family, sizes, mesh, zero, recompute):
    agrees(mesh, of_transformers(family, **sizes), zero=zero, recompute=recompute, optimizer="sgd")


RULES = {"embed": "embedding_rowwise", "layers.*.norm": "replicated", "layers.*.up": "colwise", "layers.*.down": "rowwise",
         "norm": "replicated", "head": "head"}  # fmt: skip


def after(mesh: str, model, steps: int = 3, **keys):
    """The parameters after some steps."""

    def rank(world):
        engine = Engine(copy.deepcopy(model), job(mesh, **keys), world, rules=RULES)
        reports = [engine.step(batch) for batch in tokens(steps, 12, 7)]
        return [r.loss for r in reports], dict(engine.full_state())

    return run_threads(rank, Mesh.parse(mesh).size)[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(10), nn.Linear(10, 21), nn.Linear(21, 10, bias=False)
        self.drop, self.inner = nn.Dropout(0.4), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.drop(self.down(self.inner(F.gelu(self.up(self.norm(x)))))))


class Own(Small):
    """Dropout on the stream, between a column and a row layer (21 features on two ranks: 11 and 10), and one module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))


@pytest.mark.parametrize(("mesh", "sequence"), [("dp=2", None), ("tp=2", None), ("tp=2", True), ("dp=2 tp=2", True)])
def test_a_module_of_ones_own_drops_the_same_on_every_mesh(mesh, sequence):
    model = seeded(Own)
    losses, truth = after("dp=1", model)
    found, state = after(mesh, model, tensor=sequence)
    assert found == pytest.approx(losses, rel=EXACT) and apart(state, truth) <= EXACT
    assert after("dp=1", model.eval())[0] != losses  # something is dropped at all


def test_a_check_notices_a_mask_that_differs(monkeypatch):
    """One tp rank that takes its tokens for the first ones."""
    from stretto.parallel import dropout

    real = dropout.lines_of_tokens
    monkeypatch.setattr(dropout, "lines_of_tokens", lambda low, high, *rest: real(0, high - low, *rest))
    told = checked("tp=2", model={"name": "tiny", **SIZES, "attention_dropout": 0.0}, tensor=True)
    assert told["dropout"] == "named" and not told["ok"]


@pytest.mark.parametrize(("first", "second"), [("dp=2", "tp=2"), ("tp=2", "pp=2"), ("pp=2", "dp=2")])
def test_masks_go_on_where_they_were_on_another_mesh(first, second, tmp_path):  # CASES C31
    batches = tokens(4, 12, 7)
    sizes = {**SIZES, "attention_dropout": 0.5}
    make = lambda: library.load("tiny", seed=5, overrides=sizes)

    def whole(world):
        engine = Engine(make(), job("dp=1"), world)
        begins = dict(engine.full_state())
        return begins, [engine.step(batch).loss for batch in batches]

    def begin(world):
        engine = Engine(make(), job(first), world)
        begins = dict(engine.full_state())
        losses = [engine.step(batch).loss for batch in batches[:2]]
        engine.save(tmp_path / "c")
        return begins, losses

    def go_on(world):
        engine = Engine(library.load("tiny", seed=9, overrides=sizes), job(second), world)
        engine.load(tmp_path / "c")
        return [engine.step(batch).loss for batch in batches[2:]]

    values, truth = run_threads(whole, 1)[0]
    begins, losses = run_threads(begin, 2)[0]
    assert all(torch.equal(begins[name], x) for name, x in values.items())  # first values are the same bits
    assert losses + run_threads(go_on, 2)[0] == pytest.approx(truth, rel=EXACT)
    shards = {name: x.chunk(2) for name, x in values.items() if x.ndim > 1}
    assert not any(torch.equal(*parts) for parts in shards.values())  # tp shards are no copies of each other


def test_ones_own_loop_drops_by_name_too():
    batch = tokens(1, 12, 7)[0]

    def rank(world):
        engine = Engine(seeded(Own), job(f"dp={world.size}"), world)
        rows = [12 // world.size * world.rank + i for i in range(12 // world.size)]
        for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            logits = engine.model(batch["input_ids"][part])
            engine.backward(F.cross_entropy(logits.view(-1, VOCAB), batch["input_ids"][part].view(-1), reduction="sum"), len(part) * 7)
        return engine.update().loss

    assert run_threads(rank, 2)[0] == pytest.approx(run_threads(rank, 1)[0], rel=EXACT)


# -- what has no name ----------------------------------------------------------------------------------------------------------


class Functional(Small):
    def forward(self, input_ids):
        return super().forward(input_ids) + F.dropout(torch.ones(1), 0.5, self.training)


def test_a_forward_that_draws_from_torchs_own_stream_is_refused_under_tp(pool):
    batch = tokens(1, 4, 7)[0]

    def rank(world):
        Engine(Functional(), Job.load({"batch": 4, "mesh": "tp=2"}), world, rules=RULES).step(batch)

    with pytest.raises(RunError, match="draws from torch's own random stream"):
        pool.run(rank, ranks=2)


class Odd(Small):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, input_ids):
        return super().forward(input_ids) * self.drop(torch.ones(3, 5)).sum()


def test_a_dropout_whose_elements_cannot_be_numbered_is_refused_under_tp_and_off_in_a_check():
    batch = tokens(1, 12, 7)[0]
    with pytest.raises(RunError, match=r"dropout drop is given \[3, 5\], and there are 12 rows of 7 tokens"):
        run_threads(lambda world: Engine(Odd(), job("tp=2"), world, rules=RULES).step(batch), 2)
    told = checked("dp=2", seeded(Odd))
    assert told["ok"] and told["dropout"] == "off: the masks of drop have no names"


class Alpha(Small):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.AlphaDropout(0.5)


def test_other_kinds_of_dropout_are_refused_under_tp_by_name():
    with pytest.raises(JobError, match="drop is a AlphaDropout"):
        run_threads(lambda world: Engine(Alpha(), job("tp=2"), world, rules=RULES), 2)
    told = checked("dp=2", seeded(Alpha))
    assert told["ok"] and told["dropout"].startswith("off: the masks of drop")


def test_dropout_under_compile_is_refused_where_tp_ranks_would_differ():
    asked = job("tp=2", compile={"mode": "block", "backend": "aot_eager"})
    with pytest.raises(JobError, match="dropout under compile would differ on tp ranks"):
        run_threads(lambda world: Engine(library.load("tiny", overrides=SIZES), asked, world), 2)
