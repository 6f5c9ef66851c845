"""CASES.md and PAINS.md: set-ups that broke other frameworks, tried here."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from truth import VOCAB, Small, apart, seeded, small, token_loss, tokens, train

from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.engine.runner import Culprit
from stretto.errors import NonFinite, RunError
from stretto.job import Job

EXACT = 1e-10


def job(ranks: int = 2, zero: int = 1, **keys) -> Job:
    usual = {"batch.size": 12, "batch.seq_len": 6, "precision": "fp64", "optimizer.lr": 1e-2, "schedule": "constant"}
    return Job.load({**usual, "mesh": f"dp={ranks}", "zero": zero}, **keys)


def counted(rows: int, numbers, length: int = 6):
    """Row i has numbers[i] counted targets."""
    mask = torch.zeros(rows, length, dtype=torch.bool)
    for row, number in enumerate(numbers):
        mask[row, 1 : 1 + number] = True
    return lambda step: mask


def steps(asked, ranks, model, batches, local=None, **keys):
    """(reports, gradients of the last step, parameters) of rank 0; local(rank, step) gives a rank's own rows."""

    def rank(world):
        engine = Engine(copy.deepcopy(model), asked, world, **keys)
        update, gradients = engine.do["UPDATE"], {}

        def look(action):
            gradients.update(engine.full_gradients())
            update(action)

        engine.do["UPDATE"] = look
        reports = [engine.step(b) if local is None else engine.step(local(world.rank, i), local=True) for i, b in enumerate(batches)]
        engine.close()
        return reports, gradients, dict(engine.full_state())

    return run_threads(rank, ranks)[0]


# -- A. loss and gradient scale ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [(2, 14), (8, 8), (1, 15)])
def test_c01_microbatches_of_unequal_tokens_give_the_gradient_of_one_batch(cut):
    batch = tokens(1, 2, 17, counted(2, cut, 17))
    _, gradients, _ = steps(job(1, 1, **{"batch.size": 2, "batch.micro_size": 1}), 1, small(), batch)
    model = copy.deepcopy(small()).double()
    total, count = token_loss(model, batch[0])
    (total / count).backward()
    assert count == 16
    assert apart(gradients, {n: p.grad for n, p in model.named_parameters()}) <= EXACT


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("numbers", [(5, 1), (5, 0)])
def test_c02_every_target_weighs_the_same_whichever_rank_has_it(zero, local, numbers):
    batch = tokens(1, 2, 6, counted(2, numbers))
    rows = (lambda rank, step: {k: v[rank : rank + 1] for k, v in batch[0].items()}) if local else None
    reports, _, state = steps(job(2, zero, **{"batch.size": 2}), 2, small(), batch, rows)
    truth, parameters = train(small(), batch)
    assert reports[0].tokens == sum(numbers)
    assert reports[0].loss == pytest.approx(truth[0][0], rel=EXACT) and reports[0].grad_norm == pytest.approx(truth[0][1], rel=EXACT)
    assert apart(state, parameters) <= EXACT


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("local", [False, True])
def test_c02_a_step_without_targets_is_empty_and_changes_nothing(zero, local):
    batch = tokens(1, 2, 6, counted(2, (0, 0)))
    rows = (lambda rank, step: {k: v[rank : rank + 1] for k, v in batch[0].items()}) if local else None
    (report,), gradients, state = steps(job(2, zero, **{"batch.size": 2}), 2, small(), batch, rows)
    assert (report.loss, report.grad_norm, report.tokens, report.status) == (0.0, 0.0, 0, "empty")
    assert all(g.count_nonzero() == 0 for g in gradients.values())
    assert apart(state, {n: p.double() for n, p in small().named_parameters()}) == 0


def test_c04_the_last_window_of_an_epoch_is_scaled_by_what_it_holds():
    one = tokens(1, 2)[0]
    window = lambda n: {k: v.repeat(n, 1) for k, v in one.items()}  # n identical microbatches of 2 rows
    epochs = [window(4), window(1)] * 2
    reports, _, state = steps(job(1, 1, **{"batch.size": 8, "batch.micro_size": 2}), 1, small(), epochs)
    _, parameters = train(small(), epochs)
    assert apart(state, parameters) <= EXACT
    assert [r.samples for r in reports] == [8, 2, 8, 2]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_c04_three_backwards_then_an_update_add_up_in_every_stage(zero):
    batches = tokens(3, 4)

    def rank(world):
        engine = Engine(small(), job(2, zero), world)
        for batch in batches:
            mine = {k: v[2 * world.rank : 2 * world.rank + 2] for k, v in batch.items()}
            engine.backward(*token_loss(engine.model, mine))
        report = engine.update()
        return report, dict(engine.full_state())

    report, state = run_threads(rank, 2)[0]
    joined = {k: torch.cat([b[k] for b in batches]) for k in batches[0]}
    truth, parameters = train(small(), [joined])
    assert report.loss == pytest.approx(truth[0][0], rel=EXACT) and report.grad_norm == pytest.approx(truth[0][1], rel=EXACT)
    assert apart(state, parameters) <= EXACT


# -- B. clipping ---------------------------------------------------------------------------------------------------------------


class Branches(Small):
    """An encoder that runs only when a batch has images, as often as there are; and a weight that no forward uses."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.encoder = nn.Linear(10, 10)
        if listed:
            self.layers = nn.ModuleList([*self.layers, self.encoder])
            del self.encoder
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, input_ids, images=None):
        x = self.embed(input_ids)
        for layer in list(self.layers)[:3]:
            x = layer(x)
        encoder = self.encoder if hasattr(self, "encoder") else self.layers[3]
        for image in images or ():
            x = x + encoder(image.to(x.dtype))
        return self.head(self.norm(x))


def branches(listed: bool = False) -> Branches:
    return seeded(lambda: Branches(listed), 5)


@pytest.mark.parametrize("mesh", ["dp=4", "dp_replicate=2 dp=2"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_c09_clipping_really_scales_whatever_is_cut_or_has_no_gradient(zero, mesh):
    batches = tokens(2, 12)
    asked = job(4, zero, mesh=mesh, clip=0.01, optimizer={"name": "sgd", "lr": 1.0, "weight_decay": 0.0})
    groups_as_generators = lambda groups: torch.optim.SGD(({**g, "params": (p for _, p in g["params"])} for g in groups), lr=1.0)
    reports, _, state = steps(asked, 4, branches(), batches, optimizer=groups_as_generators)
    truth, parameters = train(
        branches(), batches, clip=0.01, lr=1.0, make=lambda groups: torch.optim.SGD([{**g, "weight_decay": 0} for g in groups], lr=1.0)
    )
    assert [r.grad_norm for r in reports] == pytest.approx([norm for _, norm in truth], rel=EXACT)
    assert apart(state, parameters) <= EXACT
    moved = math.sqrt(sum(float((state[n] - p.double()).norm()) ** 2 for n, p in branches().named_parameters()))
    assert moved <= 0.02 * (1 + 1e-6)  # two steps of at most 0.01


# -- D. hangs and failures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_c18_a_module_that_only_some_ranks_run_trains_as_in_one_process(zero, recompute):
    draw = torch.Generator().manual_seed(7)
    image = lambda: torch.randn(6, 10, generator=draw)
    plan = [([image()], [image()]), ([], [image()]), ([image()], [image(), image()]), ([], [])]  # images of rank 0, of rank 1, by step
    batches = tokens(4, 4)
    rows = lambda rank, step: {k: v[2 * rank : 2 * rank + 2] for k, v in batches[step].items()} | {"images": plan[step][rank]}
    reports, _, state = steps(job(2, zero, recompute=recompute, **{"batch.size": 4}), 2, branches(), batches, rows)

    def loss(model, step):
        parts = [model(rows(r, step)["input_ids"], [i.double() for i in plan[step][r]]) for r in (0, 1)]
        targets = batches[step]["labels"][:, 1:].reshape(-1)
        return F.cross_entropy(torch.cat(parts)[:, :-1].reshape(-1, VOCAB), targets, reduction="sum"), int((targets != -100).sum())

    truth, parameters = train(branches(), range(4), loss)
    assert [r.loss for r in reports] == pytest.approx([value for value, _ in truth], rel=EXACT)
    assert apart(state, parameters) <= EXACT


@pytest.mark.parametrize("zero", [2, 3])
def test_c18_a_block_that_only_some_ranks_run_is_caught_up_on(zero):
    draw = torch.Generator().manual_seed(7)
    plan = [([], [torch.randn(6, 10, generator=draw)]), ([], [])]
    batches = tokens(2, 4)
    rows = lambda rank, step: {k: v[2 * rank : 2 * rank + 2] for k, v in batches[step].items()} | {"images": plan[step][rank]}
    reports, _, state = steps(job(2, zero, **{"batch.size": 4}), 2, branches(listed=True), batches, rows)

    def loss(model, step):
        parts = [model(rows(r, step)["input_ids"], [i.double() for i in plan[step][r]]) for r in (0, 1)]
        targets = batches[step]["labels"][:, 1:].reshape(-1)
        return F.cross_entropy(torch.cat(parts)[:, :-1].reshape(-1, VOCAB), targets, reduction="sum"), int((targets != -100).sum())

    _, parameters = train(branches(listed=True), range(2), loss)
    assert apart(state, parameters) <= EXACT


def test_c18_a_block_that_runs_twice_is_named_with_what_to_write():
    two = [torch.ones(6, 10), torch.ones(6, 10)]
    batch = tokens(1, 2)
    rows = lambda rank, step: {k: v[rank : rank + 1] for k, v in batch[0].items()} | {"images": two if rank else []}
    with pytest.raises(RunError, match=r'rank 1, step 0: layers\.3 runs a second time.*zero.keep=\["layers\.3"\]'):
        steps(job(2, 3, **{"batch.size": 2}), 2, branches(listed=True), batch, rows)
    kept = job(2, 3, **{"batch.size": 2, "zero.keep": ["layers.3"]})
    steps(kept, 2, branches(listed=True), batch, rows)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_c20_ranks_with_unequal_numbers_of_batches_finish_and_weigh_samples_alike(zero):
    batches, own = tokens(5, 4), {0: 3, 1: 5}

    def rows(rank, step):
        return {k: v[2 * rank : 2 * rank + 2] for k, v in batches[step].items()}

    def rank(world):
        with Engine(small(), job(2, zero, **{"batch.size": 4}), world) as engine:
            reports = [engine.step(rows(world.rank, step), local=True) for step in range(own[world.rank])]
        return reports, dict(engine.full_state())

    results = run_threads(rank, 2)
    joined = [b if step < 3 else {k: v[2:] for k, v in b.items()} for step, b in enumerate(batches)]
    truth, parameters = train(small(), joined)
    assert [r.loss for r in results[1][0]] == pytest.approx([value for value, _ in truth], rel=EXACT)
    assert apart(results[0][1], parameters) <= EXACT


@pytest.mark.parametrize("zero", [1, 3])
def test_c20_evaluation_over_unequal_numbers_of_batches_is_the_mean_over_real_samples(zero):
    batches, own = tokens(5, 4), {0: 3, 1: 5}

    def rows(rank, step):
        return {k: v[2 * rank : 2 * rank + 2] for k, v in batches[step].items()}

    def rank(world):
        engine = Engine(small(), job(2, zero, **{"batch.size": 4}), world)
        return engine.evaluate((rows(world.rank, step) for step in range(own[world.rank])), local=True)["loss"]

    model = small().double()
    seen = [rows(r, s) for r in (0, 1) for s in range(own[r])]
    totals = [token_loss(model, b) for b in seen]
    mean = float(sum(t for t, _ in totals)) / sum(c for _, c in totals)
    assert run_threads(rank, 2) == pytest.approx([mean, mean], rel=EXACT)


@pytest.mark.parametrize("zero", [1, 3])
def test_pains_21_nine_samples_on_two_ranks_have_the_mean_of_nine_samples(zero):
    class Identity(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Parameter(torch.ones(()))

        def forward(self, value):
            return value * self.one

    batches = [{"value": torch.arange(0.0, 5).double()}, {"value": torch.arange(5.0, 9).double()}]

    def rank(world):
        engine = Engine(Identity(), job(2, zero), world, loss=lambda out, b: (out.sum(), len(out)), forward=lambda m, b: m(b["value"]))
        return engine.evaluate(batches, metrics=lambda out, b: {"largest": (out.max() if len(out) else 0, 1)} if world.rank else {})

    assert run_threads(rank, 2) == [{"largest": (4.0 + 8.0) / 2, "loss": 4.0}] * 2


# -- F. precision --------------------------------------------------------------------------------------------------------------


class Sum(nn.Module):
    """Its gradient is the input: what 64 microbatches add is known exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("reduce", "expected"), [("fp32", 1.064), ("bf16", 1.0)])
def test_c34_small_gradients_are_added_in_the_dtype_of_the_reduction(zero, reduce, expected):
    rows = torch.full((65, 4), 1e-3)
    rows[0] = 1.0
    asked = job(
        1, zero, precision={"compute": "bf16", "reduce": reduce, "master": "fp32"}, clip=0.0, **{"batch.size": 65, "batch.micro_size": 1}
    )
    loss = lambda out, b: (out.float().sum(), 1 / 65)
    norms = []
    reports, gradients, _ = steps(asked, 1, Sum(), [{"x": rows}] * 2, loss=loss, forward=lambda m, b: m(b["x"]))
    norms = [r.grad_norm for r in reports]
    assert float(gradients["weight"][0]) == pytest.approx(expected, rel=2e-3)  # 1e-3 itself is rounded to bf16
    assert norms[0] == pytest.approx(2 * expected, rel=2e-3) and norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_c34_rotary_tables_keep_their_precision_when_the_model_computes_in_16_bits():
    from stretto.models.attention import rotation

    for dtype, positions, width in ((torch.float16, 2048, 32), (torch.bfloat16, 4096, 128)):
        at = torch.arange(positions)
        cos, sin = rotation(at, width, 10000.0, dtype)
        exact = at.double()[:, None] * 10000.0 ** (-torch.arange(0, width, 2).double() / width)
        half = width // 2
        assert (cos.double().reshape(positions, -1)[:, :half] - exact.cos()).abs().max() < 1e-2
        assert (sin.double().reshape(positions, -1)[:, :half].abs() - exact.sin().abs()).abs().max() < 1e-2


def test_c34_buffers_keep_their_dtype_when_parameters_do_not():
    model = small()
    model.register_buffer("table", torch.arange(4.0))
    engine = Engine(model, job(1, 1, precision="bf16"), None)
    assert engine.model.table.dtype == torch.float32 and engine.model.embed.weight.dtype == torch.bfloat16


def infinite_at(rank, wrong):
    """A forward that gives rank `rank` an infinite loss in the steps of `wrong`."""

    def forward(model, batch):
        logits = model(batch["input_ids"])
        return logits * math.inf if batch["bad"] else logits

    return forward


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_c35_a_skipped_step_moves_nothing_on_any_rank_and_names_tensor_and_rank(zero, precision):
    asked = job(2, zero, precision=precision, schedule="linear", steps=100, clip=1.0, **{"batch.size": 4})
    batches = tokens(5, 4)
    bad = {1, 2}
    rows = lambda rank, step: {k: v[2 * rank : 2 * rank + 2] for k, v in batches[step].items()} | {"bad": rank == 1 and step in bad}

    def rank(world):
        engine = Engine(small(), asked, world, forward=infinite_at(1, bad))
        before = []
        reports = []
        for step in range(5):
            before.append(dict(engine.full_state()))
            reports.append(engine.step(rows(world.rank, step), local=True))
        engine.close()
        return reports, before, engine.updates, engine.scale and engine.scale.scale

    results = run_threads(rank, 2)
    for reports, *_ in results:
        assert [r.status for r in reports] == ["committed", "skipped", "skipped", "committed", "committed"]
        assert reports[0].lr == 1e-2 and reports[1].lr == reports[2].lr == reports[3].lr > reports[4].lr
        assert all(c.rank == 1 for c in reports[1].nonfinite)
        assert Culprit(1, "head.weight") in reports[1].nonfinite and "on rank 1" in reports[1].why
    _, before, updates, scale = results[0]
    assert updates == 3
    assert (
        apart(before[2], {n: p.double() for n, p in before[1].items()})
        == apart(before[3], {n: p.double() for n, p in before[1].items()})
        == 0
    )
    if precision == "fp16":
        assert scale == 65536 / 4


def test_c35_after_too_many_skips_in_a_row_the_run_stops_and_names_the_first_bad_tensor():
    asked = job(2, 1, precision={"compute": "fp32", "max_skips": 3}, **{"batch.size": 4})
    batch = tokens(1, 4)[0]

    def rank(world):
        engine = Engine(small(), asked, world, forward=infinite_at(1, None))
        for _ in range(5):
            engine.step({k: v[2 * world.rank : 2 * world.rank + 2] for k, v in batch.items()} | {"bad": world.rank == 1}, local=True)

    with pytest.raises(NonFinite, match=r"3 steps in a row.*on rank 1"):
        run_threads(rank, 2)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bf16_with_fp32_masters_learns_what_updates_below_its_resolution_teach(zero):
    """Updates of 1e-3 on a weight of 1 vanish in bf16 (resolution 2^-8) and add up in the fp32 master copy."""

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x):
            return x * self.weight

    asked = job(2, zero, precision="bf16", clip=0.0, optimizer={"name": "sgd", "lr": 1e-3, "weight_decay": 0.0}, **{"batch.size": 2})
    _, _, state = steps(
        asked, 2, One(), [{"x": torch.ones(2, 8)}] * 20, loss=lambda out, b: (out.float().sum(), len(out)), forward=lambda m, b: m(b["x"])
    )
    assert state["weight"] == pytest.approx(torch.full((8,), 0.98), abs=1e-6)
