"""A stage of anybody's model: the step of one process, or a refusal. Never a wrong step without a word."""

from __future__ import annotations

import copy
from typing import Any

import families
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from truth import VOCAB, Small, apart, seeded, small, token_loss, tokens, train

from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.errors import JobError, RunError
from stretto.job import Job
from stretto.models.library import Task

STEPS = 2


def job(mesh: str, schedule: str = "1f1b", **keys: Any) -> Job:
    usual = {"batch.size": 4, "batch.seq_len": 6, "batch.micro_size": 1, "precision": "fp64", "optimizer.lr": 1e-2, "steps": STEPS}
    return Job.load({**usual, "schedule": "constant", "mesh": mesh, "pipeline": schedule}, **keys)


def agrees(model: nn.Module, asked: Job, ranks: int = 2, **given: Any) -> None:
    """Losses, norms and parameters after two steps are those of a plain loop."""
    batches = tokens(STEPS, asked.batch.size)
    losses, parameters = train(model, batches)

    def rank(world):
        with Engine(copy.deepcopy(model), asked, world, **given) as engine:
            return [engine.step(batch) for batch in batches], dict(engine.full_state())

    reports, state = run_threads(rank, ranks)[0]
    for report, (loss, norm) in zip(reports, losses, strict=True):
        assert report.loss == pytest.approx(loss, rel=1e-10) and report.grad_norm == pytest.approx(norm, rel=1e-10)
    assert apart({name: state[name] for name in parameters}, parameters) < 1e-10


def refused(model: nn.Module, says: str, error: type[Exception] = RunError, split: tuple[str, ...] = (), **given: Any) -> None:
    """One line says why, at the first step or before it."""

    def rank(world):
        engine = Engine(copy.deepcopy(model), job("pp=2", **({"pipeline.split": split} if split else {})), world, **given)
        engine.step(tokens(1, 4)[0])

    with pytest.raises(error, match=says):
        run_threads(rank, 2)


# -- models that can be cut --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "ranks", "schedule", "zero", "recompute", "tied"),
    [
        ("pp=2", 2, "1f1b", 0, "none", True),
        ("pp=2 dp=2", 4, "zb-h1", 2, "full", False),
        ("pp=4", 4, "gpipe", 1, "none", True),
        ("pp=2 dp=2", 4, "interleaved", 3, "selective", True),
    ],
)
def test_a_module_of_ones_own_takes_the_step_of_one_process(mesh, ranks, schedule, zero, recompute, tied):
    agrees(small(blocks=5, tied=tied), job(mesh, schedule, zero=zero, recompute=recompute), ranks)


class Asked(Small):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for number, layer in enumerate(self.layers):
            x = layer(x) * (1.0 + 0.1 * number * layer.kind)
        return self.head(self.norm(x))


def test_what_the_forward_does_around_its_blocks_is_done_once_and_attributes_of_absent_blocks_are_there():
    model = seeded(Asked)
    for number, layer in enumerate(model.layers):
        layer.kind = 1 + number % 2
    agrees(model, job("pp=2"))
    agrees(model, job("pp=2", **{"pipeline.split": ["head"]}))


ORDER = ("embed", "first", "layers", "head")


class Odd(nn.Module):
    """What runs last is defined first; positions are in no module; the first block's input is scaled."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.head = nn.Linear(width, VOCAB)
        self.first = nn.Parameter(torch.randn(6, width))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.embed = nn.Embedding(VOCAB, width)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = 3.0 * (self.embed(input_ids) + self.first)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_an_order_that_is_not_that_of_definition_is_noticed_and_can_be_said():
    model = seeded(Odd)
    refused(model, r"stage 0: embed runs where layers.0 should; .* say the order of the other parts with stages=\[...\]")
    agrees(model, job("pp=2"), stages=ORDER)
    families.agrees(Task(model, stages=ORDER), "pp=2")


class Chain(nn.Module):
    """No list of blocks: modules under names of their own, and functions between them."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.first = nn.Linear(width, width)
        self.body = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = F.gelu(self.first(self.embed(input_ids)))
        return self.head(x + self.body(x))


PLAN = ["embed", "first", "body", "head"]


@pytest.mark.parametrize(
    ("plan", "split", "mesh", "ranks", "schedule"),
    [
        (PLAN, ["first"], "pp=2", 2, "1f1b"),
        (PLAN, ["head"], "pp=2 dp=2", 4, "zb-h1"),
        (["embed", "first", "body.0", "body.2", "head"], ["first"], "pp=2", 2, "gpipe"),
    ],
)
def test_a_model_without_a_list_of_blocks_is_cut_by_the_plan_that_one_says(plan, split, mesh, ranks, schedule):
    agrees(seeded(Chain), job(mesh, schedule, zero=1, **{"pipeline.split": split}), ranks, stages=plan)


def test_a_plan_that_cuts_through_a_sum_is_refused_at_the_first_step():
    """x goes around body, so that no stage may begin with it. What embed would make is not known there, not even its shape."""
    refused(seeded(Chain), "must match the size of tensor", RuntimeError, split=("body",), stages=PLAN)


class Around(nn.Module):
    """Nothing stands before the blocks, and what the first made goes around the others."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        first = x = self.layers[0](F.one_hot(input_ids % 6, 6).to(torch.float64))
        for layer in self.layers[1:]:
            x = layer(x)
        return x + first


def test_what_goes_around_blocks_is_noticed_where_nothing_stands_before_them_too():
    """A block that a stage lacks has to make NaN itself there: the batch is finite."""
    refused(seeded(Around), "it made NaN of finite weights and values", split=("layers.2",))


class Between(nn.Module):
    """A weight of the first stage, of one in the middle and of the last (C11, second part)."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(Predicts(width) for _ in range(3))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].guess.weight = self.embed.weight

    forward = Small.forward


class Predicts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.guess = nn.Linear(width, VOCAB, bias=False)
        self.up = nn.Linear(VOCAB, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(torch.tanh(self.guess(x)))


@pytest.mark.parametrize("zero", [0, 3])
def test_c11_a_weight_of_three_stages_gets_the_gradients_of_all(zero):
    model = seeded(Between)
    model.norm = nn.Identity()
    agrees(model, job("pp=3", zero=zero), 3)


# -- odd plans: C25 ----------------------------------------------------------------------------------------------------


def test_c25_one_microbatch_on_four_ranks():
    agrees(small(blocks=4), job("pp=4", **{"batch.micro_size": 4}), 4)


def test_c25_eight_rows_in_three_microbatches():
    agrees(small(blocks=4), job("pp=2", **{"batch.size": 8, "batch.micro_size": 3}))


def test_c25_seven_blocks_on_four_ranks():
    agrees(small(blocks=7), job("pp=4"), 4)


@pytest.mark.parametrize("begins", ["norm", "head"])
def test_c25_a_last_stage_with_nothing_but_the_head_and_the_loss(begins):
    agrees(small(), job("pp=2", zero=1, **{"pipeline.split": [begins]}))


def test_c25_a_stage_with_nothing_is_refused_before_a_step():
    with pytest.raises(JobError, match=r"4 pipeline stages are more than the 3 blocks .*; write a mesh with fewer pp"):
        run_threads(lambda world: Engine(small(), job("pp=4"), world), 4)


# -- models that cannot be cut -----------------------------------------------------------------------------------------


class Skips(Small):
    """The embedding goes past the blocks."""

    def forward(self, input_ids: Tensor) -> Tensor:
        first = x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x + first))


class Again(nn.Module):
    """A block of two arguments."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return x + self.up(x) * first


class Feeds(Small):
    """The embedding goes to each block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Again(10) for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        first = x = self.embed(input_ids).detach()
        for layer in self.layers:
            x = layer(x, first)
        return self.head(self.norm(x))


class Pairs(Feeds):
    """Two values go from block to block."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        residual = torch.ones_like(x)
        for layer in self.layers:
            x, residual = layer(x, residual), x
        return self.head(self.norm(x))


class Backwards(Small):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for number in reversed(range(3)):
            x = self.layers[number](x)
        return self.head(self.norm(x))


class Twice(Small):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in (*self.layers, *self.layers):
            x = layer(x)
        return self.head(self.norm(x))


class Jumps(Small):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in (self.layers[0], self.layers[2]):
            x = layer(x)
        return self.head(self.norm(x))


class Outside(Odd):
    """The residual sums stand outside the blocks."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Shares(Small):
    """Tied by use: nobody can see it from the parameters."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x) + self.head(x).mean(), self.embed.weight)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Skips, "stage 1: it made NaN of finite weights and values: it uses what only another stage has"),
        (Outside, r"stage 1: it made NaN .*\(a weight in two places, or a residual sum outside the blocks\)"),
        (Feeds, r"stage 1: layers.\d is given a value made with weights of another stage"),
        (Pairs, r"stage 0: layers.\d is given a second value with a gradient"),
        (Backwards, r"stage 0: layers.2 runs where layers.0 should"),
        (Twice, r"stage 1: layers.\d, which an earlier stage has, runs after"),
        (Jumps, r"stage [01]: layers.2 runs where layers.1 should"),
        (Shares, "stage 1: it made NaN"),
    ],
)
def test_a_forward_that_stages_would_change_is_refused(kind, says):
    given = {"stages": ORDER} if issubclass(kind, Odd) else {}
    refused(seeded(kind), says, split=("layers.1",) if kind is Feeds else (), **given)


def test_a_model_that_is_called_twice_for_a_microbatch_is_refused():
    both = lambda model, batch: model(batch["input_ids"]) + model(batch["input_ids"].flip(0))
    refused(small(), r"stage 1: layers.\d.* runs", forward=both)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_weight_that_is_nan_is_not_taken_for_one_that_is_missing(zero):
    """The step is skipped, and says whose gradient was not finite."""
    model = small()
    with torch.no_grad():
        model.layers[2].up.bias[0] = float("nan")

    def rank(world):
        return Engine(copy.deepcopy(model), job("pp=2", zero=zero), world).step(tokens(1, 4)[0])

    reports = run_threads(rank, 2)
    assert [report.status for report in reports] == ["skipped"] * 2 and reports[0].nonfinite


def test_statistics_of_what_a_stage_lacks_stay_as_they_are():
    """A norm before the blocks runs in every stage, with NaN in all but the first; its running mean is that of the first."""

    class Normed(Small):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Sequential(nn.Embedding(VOCAB, 10), Flat())

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(10)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.transpose(1, 2)).transpose(1, 2)

    model, batches = seeded(Normed), tokens(1, 4)

    def rank(world):
        with Engine(copy.deepcopy(model), job("pp=2", "1f1b", **{"batch.micro_size": 4}), world) as engine:
            engine.step(batches[0])
            return dict(engine.full_state())

    state = run_threads(rank, 2)[0]
    truth = copy.deepcopy(model).double()
    token_loss(truth, batches[0])
    assert torch.allclose(state["embed.1.norm.running_mean"].double(), truth.embed[1].norm.running_mean)
