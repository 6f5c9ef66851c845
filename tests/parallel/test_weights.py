"""Layers that write their weight gradients themselves: the gradient of plain torch, whatever is done with the layer."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from stretto.comm.transport import World
from stretto.engine.engine import Engine
from stretto.job import Job
from stretto.parallel.weights import Direct

ROWS, WIDTH, IDS = 6, 5, 11


class Model(nn.Module):
    """An embedding, two linear layers and `run`, which says what is done with them."""

    def __init__(self, run, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(IDS, WIDTH, padding_idx=3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=i == 0) for i in range(2))
        self.head = nn.Linear(WIDTH, IDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.run = run

    def forward(self, input_ids):
        return self.run(self, self.embed(input_ids))


def plain(model, h):
    for layer in model.layers:
        h = torch.tanh(layer(h))
    return model.head(h)


def used_beside(model, h):
    """The weight is used by the layer, and by a product that knows nothing of it, before and after."""
    weight = model.layers[1].weight
    return model.head(F.linear(torch.tanh(model.layers[1](torch.tanh(F.linear(h, weight)))), weight))


def twice(model, h):
    return plain(model, plain(model, h)[..., :WIDTH])


def recomputed(model, h):
    return model.head(checkpoint(lambda x: model.layers[1](torch.tanh(model.layers[0](x))), h, use_reentrant=False))


def penalised(model, h):
    """A gradient inside the forward, and its own gradient after: that of the inner one must not land in the buffer."""
    y = torch.tanh(model.layers[0](h))
    (slope, weight) = torch.autograd.grad(y.square().sum(), [h, model.layers[0].weight], create_graph=True)
    return model.head(model.layers[1](y) + slope.square()) + weight.square().sum()


def not_all(model, h):
    return model.head(model.layers[0](h))


RUNS = [plain, used_beside, twice, recomputed, penalised, not_all]


def expected(model, batches):
    """Gradients of the sum over batches of mean cross-entropies over all rows, by torch alone."""
    model = copy.deepcopy(model).double()
    count = sum(b["shift_labels"].numel() for b in batches)
    for b in batches:
        (F.cross_entropy(model(b["input_ids"]).flatten(0, 1), b["shift_labels"].flatten(), reduction="sum") / count).backward()
    return {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in model.named_parameters()}


def batch():
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(IDS, (2, ROWS, 4), generator=generator)
    return {"input_ids": ids, "shift_labels": labels}


def gradients(model, stage=0, **keys):
    """The engine's gradients of one step of three microbatches."""
    asked = {"mesh": "dp=1", "zero": stage, "precision": "fp64", "batch.size": ROWS, "batch.micro_size": 2, "clip": 0, "steps": 1, **keys}
    found: dict = {}
    with Engine(model, Job.load("tiny", **asked), World.alone("cpu")) as engine:
        update = engine.do["UPDATE"]
        engine.do["UPDATE"] = lambda action: (found.update(engine.full_gradients()), update(action))
        engine.step(batch())
    return found, model


def parts(whole):
    return [{key: value[i : i + 2] for key, value in whole.items()} for i in range(0, ROWS, 2)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_gradients_are_those_of_plain_torch_however_a_layer_is_used(run, stage, tied):
    keys = (
        {"zero.keep": ["layers.*"]} if run in (twice, used_beside, penalised) and stage == 3 else {}
    )  # else there only while their module runs, once
    model = Model(run, tied)
    truth = expected(model, parts(batch()))
    found, _ = gradients(model, stage, **keys)
    assert set(found) - {"head.weight"} == set(truth) - {"head.weight"}
    for name in truth:
        grad = found[name]
        assert torch.allclose(grad, truth[name], rtol=1e-12, atol=1e-14), name


def test_linear_and_embedding_layers_write_directly_and_torch_sees_no_gradient_of_their_weights():
    seen = []
    model = Model(plain)
    with Engine(model, Job.load("tiny", mesh="dp=1", **{"batch.size": ROWS, "clip": 0, "steps": 1}), World.alone("cpu")) as engine:
        for group in engine.parallel.groups:
            usual = group._add
            group._add = lambda i, grad, group=group, usual=usual: (seen.append(group.names[i]), usual(i, grad))
        engine.step(batch())
    assert seen == ["layers.0.bias"]
    assert all(isinstance(layer.forward, Direct) for layer in (model.embed, *model.layers, model.head))


def test_who_listens_to_a_weights_gradient_still_hears_it_and_may_change_it():
    model = Model(plain)
    truth = expected(model, parts(batch()))
    model.layers[1].weight.register_hook(lambda grad: 2 * grad)
    found, _ = gradients(model)
    assert torch.allclose(found["layers.1.weight"], 2 * truth["layers.1.weight"], rtol=1e-12)


def test_a_layer_that_is_not_torchs_own_is_left_alone():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = Model(plain)
    model.layers[1] = Doubled(WIDTH, WIDTH)
    replaced = model.layers[0].forward
    model.layers[0].forward = lambda x: 3 * replaced(x)
    truth = expected(Tripled(model), parts(batch()))
    found, _ = gradients(model)
    for name, grad in found.items():
        assert torch.allclose(grad, truth[f"model.{name}"], rtol=1e-12, atol=1e-14), name


class Tripled(nn.Module):
    """What `model` above computes, written without a replaced forward, which a copy would not take along."""

    def __init__(self, model):
        super().__init__()
        model = copy.copy(model)
        model._modules = dict(model._modules)
        self.model = model

    def forward(self, input_ids):
        h = self.model.embed(input_ids)
        first, second = self.model.layers
        h = torch.tanh(3 * F.linear(h, first.weight, first.bias))
        return self.model.head(torch.tanh(second(h)))


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_bf16_products_land_in_the_buffer_of_the_reduction(reduce):
    """Another dtype than the product's: added as autograd's own would be. Truth: torch in bf16, microbatch by microbatch."""
    model = Model(plain)
    truth = copy.deepcopy(model).bfloat16()
    whole = batch()
    for b in parts(whole):
        loss = F.cross_entropy(truth(b["input_ids"]).flatten(0, 1).float(), b["shift_labels"].flatten(), reduction="sum") / (ROWS * 4)
        loss.backward()
    found, _ = gradients(model, 2, precision="bf16", **{"precision.reduce": reduce})
    for name, p in truth.named_parameters():
        assert (found[name].float() - p.grad.float()).norm() <= 2**-7 * p.grad.float().norm() + 1e-6, name


def test_an_autocast_region_goes_the_usual_way():
    def cast(model, h):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(model, h).to(h.dtype)

    model = Model(cast)
    plainly = copy.deepcopy(model)
    for b in parts(batch()):
        (F.cross_entropy(plainly(b["input_ids"]).flatten(0, 1), b["shift_labels"].flatten(), reduction="sum") / (ROWS * 4)).backward()
    found, _ = gradients(model, precision="fp32")
    for name, p in plainly.named_parameters():
        assert torch.allclose(found[name], p.grad, rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("stage", [0, 2])
def test_weight_gradients_can_be_put_off_and_come_to_the_same(stage):
    """A backward in halves, two microbatches of them open at a time; between the halves no gradient buffer is touched."""
    model = Model(plain)
    truth = expected(model, parts(batch()))
    job = Job.load("tiny", mesh="dp=1", zero=stage, precision="fp64", **{"batch.size": ROWS, "batch.micro_size": 1, "clip": 0, "steps": 1})
    with Engine(model, job, World.alone("cpu")) as engine:
        update, found, (walk,) = engine.do["UPDATE"], {}, (stage.walk for stage in engine.parallel.stages)
        left = []

        def halves(action):
            untouched = [group.grad.clone() for group in walk.groups]
            engine.do["I"](action._replace(kind="I"))
            assert all(torch.equal(group.grad, was) for group, was in zip(walk.groups, untouched, strict=True))
            left.append(action._replace(kind="W"))
            last = action.microbatch == len(engine.now.microbatches) - 1
            engine.now.lasts = {0: left[-1] if last else None}
            while len(left) > (0 if last else 1):
                engine.do["W"](left.pop(0))

        engine.do["B"] = halves
        engine.do["UPDATE"] = lambda action: (found.update(engine.full_gradients()), update(action))
        engine.step(batch())
    for name, grad in found.items():
        assert torch.allclose(grad, truth[name], rtol=1e-12, atol=1e-14), name
