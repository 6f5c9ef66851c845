"""One loss through the models of several engines, against plain torch; and models that write while their parameters are cut."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from truth import apart

import stretto
from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.errors import JobError, RunError
from stretto.job import Job
from stretto.models import library

EXACT, ROWS, RANKS = 1e-10, 8, 2
LR, BETAS = 1e-2, (0.8, 0.9)


def mlp(seed: int, *sizes: int, listed: bool = True) -> nn.Module:
    """Layers in a ModuleList, which are units of their own, or in one Sequential, which is none."""
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
    made = Layers(layers).double() if listed else nn.Sequential(*layers).double()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            p.normal_(0.0, 0.5, generator=draw)
    return made


class Layers(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def job(zero: int, **keys: object) -> Job:
    options = {"optimizer.lr": LR, "optimizer.betas": list(BETAS), "optimizer.weight_decay": 0.0, "schedule": "constant", "clip": 0.0}
    return Job.of({"mesh": f"dp={RANKS}", "precision": "fp64", "device": "cpu", "batch.size": ROWS, **options}).with_(zero=zero, **keys)


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), LR, BETAS, weight_decay=0.0)


def rows(steps: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(3)
    return [(torch.randn(ROWS, 4, generator=draw).double(), torch.randn(ROWS, 3, generator=draw).double()) for _ in range(steps)]


def mine(x: torch.Tensor, rank: int) -> torch.Tensor:
    return x.chunk(RANKS)[rank]


def real(odds: torch.Tensor, is_real: bool) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(odds, torch.full_like(odds, float(is_real)), reduction="sum")


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_generator_learns_through_a_discriminator_that_learns_nothing_of_it(zero: int, listed: bool) -> None:
    """PAINS 42. Listed layers run twice in one loss, which ZeRO 3 is told of."""
    keys = {"zero": {"stage": zero, "params": "step", "gradients": "end"}} if listed and zero == 3 else {"zero": zero}
    maker, judge = (lambda: mlp(1, 4, 8, 3, listed=listed)), (lambda: mlp(2, 3, 8, 1, listed=listed))

    def rank(world):
        making, judging = Engine(maker(), job(**keys), world), Engine(judge(), job(**keys), world)
        losses = []
        for noise, truth in rows():
            noise, truth = mine(noise, world.rank), mine(truth, world.rank)
            told = real(judging.model(truth), True) + real(judging.model(making.model(noise).detach()), False)
            judging.backward(told, len(noise))
            losses.append(judging.update().loss)
            making.backward(real(judging.model(making.model(noise)), True), len(noise), through=[judging])
            losses.append(making.update().loss)
        return losses, dict(making.full_state()), dict(judging.full_state())

    losses, made, judged = run_threads(rank, RANKS)[0]
    making, judging, expected = maker(), judge(), []
    updates = plain(making), plain(judging)
    for noise, truth in rows():
        judging.zero_grad()
        told = (real(judging(truth), True) + real(judging(making(noise).detach()), False)) / ROWS
        told.backward()
        updates[1].step()
        making.zero_grad()
        fooled = real(judging(making(noise)), True) / ROWS
        fooled.backward()
        updates[0].step()
        expected += [told.item(), fooled.item()]
    assert losses == pytest.approx(expected, rel=EXACT)
    assert apart(made, {n: p.detach() for n, p in making.named_parameters()}) <= EXACT
    assert apart(judged, dict(judging.named_parameters())) <= EXACT


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_one_loss_trains_two_engines(zero: int) -> None:
    """PAINS 42."""

    def rank(world):
        first, second = Engine(mlp(1, 4, 8, 3), job(zero), world), Engine(mlp(2, 3, 8, 1), job(zero), world)
        for noise, _ in rows():
            x = mine(noise, world.rank)
            first.backward(second.model(first.model(x)).square().sum(), len(x), also=[second])
            reports = first.update(), second.update()
        return [report.loss for report in reports], dict(first.full_state()), dict(second.full_state())

    losses, *states = run_threads(rank, RANKS)[0]
    models = mlp(1, 4, 8, 3), mlp(2, 3, 8, 1)
    updates = [plain(model) for model in models]
    for noise, _ in rows():
        loss = models[1](models[0](noise)).square().sum() / ROWS
        loss.backward()
        for update in updates:
            update.step()
            update.zero_grad()
    assert losses == pytest.approx([loss.item()] * 2, rel=EXACT)
    assert all(apart(state, dict(model.named_parameters())) <= EXACT for state, model in zip(states, models, strict=True))


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("zero", [1, 3])
def test_a_gradient_that_no_engine_was_told_of_is_an_error_and_never_a_part_of_the_next_step(zero: int, listed: bool) -> None:
    def rank(world):
        first, second = (Engine(mlp(1, 4, 8, 3, listed=listed), job(zero), world) for _ in range(2))
        x = mine(rows(1)[0][0], world.rank)
        with pytest.raises(RunError, match=r"engine\.backward\(loss"):
            first.backward(first.model(x).sum() + second.model(x).sum(), len(x))
        third = Engine(mlp(1, 4, 8, 3, listed=listed), job(zero), world)
        with pytest.raises(RunError, match=r"engine\.backward\(loss"):
            third.model(x).sum().backward()

    run_threads(rank, RANKS)


def test_engines_that_do_not_fit_together_are_refused() -> None:
    first, second = Engine(mlp(1, 4, 3), job(1, mesh="dp=1")), Engine(mlp(1, 4, 3), job(1, mesh="dp=1", **{"batch.size": 4 * ROWS}))
    loss = first.model(rows(1)[0][0]).sum()
    with pytest.raises(JobError, match="same batch.size"):
        first.backward(loss, ROWS, also=[second])
    with pytest.raises(JobError, match="once"):
        first.backward(loss, ROWS, through=[first])


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, pad_token_id=0, eos_token_id=0, bos_token_id=1)).double()


PROMPTS, LENGTHS = ([[5, 6, 7]], [[9, 10, 11, 12, 13]]), (2, 5)


def written(model: nn.Module, rank: int, **options: object) -> list[list[int]]:
    ids = torch.tensor(PROMPTS[rank])
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=LENGTHS[rank], do_sample=False, **options).tolist()


def write(zero: int, synced: bool) -> list[list[int]]:
    with Engine(llama(), job(zero, **{"batch.seq_len": 16})) as engine:
        engine.train(False)
        return written(engine.model, engine.world.rank, **({"synced_gpus": True} if synced else {}))


@pytest.mark.usefixtures("warm_ranks")
def test_ranks_that_write_texts_of_different_lengths_end_together() -> None:
    """PAINS 25: with ZeRO 3 every forward gathers parameters, so a rank that is done goes on until all are."""
    texts = [written(llama().eval(), rank) for rank in range(RANKS)]
    assert stretto.launch(write, RANKS, (3, True), timeout=60) == texts
    assert stretto.launch(write, RANKS, (1, False), timeout=60) == texts


@pytest.mark.parametrize(("mesh", "zero"), [("dp=2", 0), ("dp=2", 1), ("dp=2", 3), ("tp=2", 1), ("pp=2", 2)])
def test_an_engine_that_is_gone_holds_no_memory(mesh: str, zero: int) -> None:
    """Of one after another, as in a notebook, each leaves its buffers, and its threads, when it is dropped."""

    def rank(world):
        sizes = {"blocks": 2, "hidden": 16, "ffn": 16, "heads": 2, "kv_heads": 2, "vocab": 32}
        keys = {"mesh": mesh, "precision": "fp64", "device": "cpu", "batch.size": 2, "batch.seq_len": 6}
        engine = Engine(library.load("tiny", overrides=sizes), Job.load("tiny", **keys, zero=zero), world)
        engine.step({"input_ids": torch.arange(12).view(2, 6), "labels": torch.arange(12).view(2, 6)})
        buffers = [engine] + [kept for group in engine.parallel.groups for kept in (group, group.master, group.grad, *group.params)]
        return [weakref.ref(kept) for kept in buffers]

    held = [ref for found in run_threads(rank, RANKS) for ref in found]
    gc.collect()
    assert held and not [ref() for ref in held if ref() is not None]
