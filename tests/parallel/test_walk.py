"""Forwards that do not go straight through the model: gradients are those of plain torch, or there is an error, at every stage."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.errors import RunError
from stretto.job import Job

WIDTH, ROWS = 6, 4


class Blocks(nn.Module):
    """Three blocks in a row, `rounds` times over; `shared`: the last block's weight is used before the first block too."""

    def __init__(self, rounds=1, shared=False):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.rounds, self.shared = rounds, shared

    def forward(self, x):
        x = torch.tanh(self.layers[0](x))
        if self.shared:
            x = F.linear(x, self.layers[2].weight)
        for _ in range(self.rounds):
            for layer in self.layers[1:]:
                x = torch.tanh(layer(x))
        return x


def rows():
    return torch.randn(2 * ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


def job(stage, **keys):
    return Job.load("tiny", mesh="dp=2", zero=stage, precision="fp64", **{"batch.size": ROWS, "clip": 0, "steps": 1, **keys})


def worst(found, model, loss):
    """The largest error of a tensor, against torch alone on all rows."""
    model = copy.deepcopy(model).double()
    loss(model).backward()
    truth = dict(model.named_parameters())
    return max(float((grad - truth[name].grad).norm() / truth[name].grad.norm()) for name, grad in found.items())


def two_forwards(engine_model, x):
    """A loss of two forwards of one model, as in preference learning: neither ends before the other begins."""
    return (engine_model(x[::2]) * engine_model(x[1::2]).sin()).square().sum()


def own_loop(model, stage, loss, **keys):
    def rank(world):
        mine, found = rows().double()[ROWS * world.rank : ROWS * (world.rank + 1)], {}
        with Engine(copy.deepcopy(model), job(stage, **keys), world) as engine:
            update = engine.do["UPDATE"]
            engine.do["UPDATE"] = lambda action: (found.update(engine.full_gradients()), update(action))
            engine.backward(loss(engine.model, mine), ROWS)
            engine.update()
        return found

    return run_threads(rank, 2)[0]


@pytest.mark.parametrize("stage", [0, 1])
def test_blocks_that_run_several_times_in_one_forward_have_all_their_gradients(stage):
    model, loss = Blocks(rounds=3), lambda model, x: model(x).square().sum()
    found = own_loop(model, stage, loss)
    assert worst(found, model, lambda model: loss(model, rows().double()) / (2 * ROWS)) <= 1e-12


@pytest.mark.parametrize(("stage", "keys"), [(0, {}), (1, {}), (2, {"zero.gradients": "end"})])
def test_a_loss_of_two_forwards_has_the_gradients_of_both(stage, keys):
    model = Blocks()
    found = own_loop(model, stage, two_forwards, **keys)
    x = rows().double()
    assert worst(found, model, lambda m: (two_forwards(m, x[:ROWS]) + two_forwards(m, x[ROWS:])) / (2 * ROWS)) <= 1e-12


@pytest.mark.parametrize(("stage", "keys"), [(2, {"zero.gradients": "end"}), (3, {"zero.gradients": "end", "zero.params": "step"})])
def test_two_forwards_where_gradients_are_cut_are_told_what_to_write_and_with_it_have_the_gradients_of_both(stage, keys):
    model, x = Blocks(), rows().double()
    written = " ".join(f"{key}={value}" for key, value in keys.items())
    with pytest.raises(RunError, match=rf"two forwards, one backward.*write {written}$"):
        own_loop(model, stage, two_forwards)
    found = own_loop(model, stage, two_forwards, **keys)
    assert worst(found, model, lambda m: (two_forwards(m, x[:ROWS]) + two_forwards(m, x[ROWS:])) / (2 * ROWS)) <= 1e-12


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_weight_that_is_used_outside_its_module_is_an_error_or_right_and_never_lost(stage):
    model, loss = Blocks(shared=True), lambda model, x: model(x).square().sum()
    truth = lambda model: loss(model, rows().double()) / (2 * ROWS)
    try:
        found = own_loop(model, stage, loss)
    except RunError as error:
        assert 'zero.keep=["layers.2.weight"]' in str(error)
    else:
        assert worst(found, model, truth) <= 1e-12
    assert worst(own_loop(model, stage, loss, **{"zero.keep": ["layers.2.weight"]}), model, truth) <= 1e-12


def test_a_weight_used_outside_its_module_is_an_error_where_gradients_are_reduced_at_once():
    with pytest.raises(RunError, match=r'layers\.2\.weight comes after.*zero.keep=\["layers\.2\.weight"\]'):
        own_loop(Blocks(shared=True), 2, lambda model, x: model(x).square().sum())
