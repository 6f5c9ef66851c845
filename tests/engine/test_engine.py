"""The promise: the step of one process, on any number of ranks, in every stage of ZeRO."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from truth import VOCAB, Small, apart, seeded, small, token_loss, tokens, train

from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.errors import JobError, RunError
from stretto.job import Job

EXACT = 1e-10  # float64 carries 16 digits; sums of a few hundred terms in another order move the last three or four


def job(ranks: int = 2, zero: int = 1, **keys) -> Job:
    usual = {"batch.size": 12, "batch.seq_len": 6, "precision": "fp64", "optimizer.lr": 1e-2, "schedule": "constant"}
    return Job.load({**usual, "mesh": f"dp={ranks}", "zero": zero}, **keys)


def run(asked: Job, ranks: int, model, batches, **engine_keys):
    """(reports, whole parameters, bytes held) of thread-ranks, after checking that all ranks report the same step."""

    def rank(world):
        engine = Engine(copy.deepcopy(model), asked, world, **engine_keys)
        reports = [engine.step(batch) for batch in batches]
        return reports, dict(engine.full_state()), engine.bytes_held(), engine

    results = run_threads(rank, ranks)
    for reports, *_ in results:
        assert [(r.loss, r.grad_norm, r.tokens, r.status) for r in reports] == [
            (r.loss, r.grad_norm, r.tokens, r.status) for r in results[0][0]
        ]
    return results


def agree(asked: Job, ranks: int, model, batches, truth_loss=token_loss, clip=1.0, **engine_keys):
    results = run(asked, ranks, model, batches, **engine_keys)
    reports, state, *_ = results[0]
    truth, parameters = train(model, batches, truth_loss, clip=clip)
    for report, (value, norm) in zip(reports, truth):
        assert report.loss == pytest.approx(value, rel=EXACT)
        assert report.grad_norm == pytest.approx(norm, rel=EXACT)
    assert apart({n: state[n] for n in parameters}, parameters) <= EXACT
    return results


GRID = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3), (None, 1, 2), ("none", "full", "selective"), (0.0, 1.0), (False, True)))


def cell(ranks, zero, micro, recompute, clip, tied):
    asked = job(ranks, zero, recompute=recompute, clip=clip, **{"batch.micro_size": micro})
    agree(asked, ranks, small(tied=tied), tokens(3, 12), clip=clip)


@pytest.mark.parametrize("number", range(0, len(GRID), 23))
def test_any_mesh_gives_the_step_of_one_process(number):
    cell(*GRID[number])


@pytest.mark.grid
@pytest.mark.parametrize("values", GRID)
def test_any_mesh_gives_the_step_of_one_process_everywhere(values):
    cell(*values)


@pytest.mark.parametrize(
    ("zero", "gradients", "params"), [(2, "end", "microbatch"), (3, "end", "microbatch"), (3, "each", "step"), (3, "end", "step")]
)
@pytest.mark.parametrize("tied", [False, True])
def test_how_often_zero_communicates_does_not_change_the_step(zero, gradients, params, tied):
    asked = job(2, zero, **{"zero.gradients": gradients, "zero.params": params, "batch.micro_size": 2})
    agree(asked, 2, small(tied=tied), tokens(2, 12))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", ["dp_replicate=2 dp=2", "dp_replicate=2 dp=1", "dp_replicate=4"])
def test_hybrid_sharding_gives_the_step_of_one_process(zero, mesh):
    ranks = 4 if "4" in mesh or "dp=2" in mesh else 2
    agree(job(ranks, zero, mesh=mesh, **{"batch.micro_size": 1}), ranks, small(), tokens(2, 12))


@pytest.mark.parametrize("granularity", ["row", "matrix"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_cut_can_respect_rows_and_matrices(granularity, zero):
    results = agree(job(3, zero, **{"zero.granularity": granularity}), 3, small(), tokens(2, 12))
    for *_, engine in results:
        for group in engine.parallel.groups:
            for piece in group.pieces:
                row = math.prod(piece.shape[1:])
                assert len(piece.shape) < 2 or (piece.start % row == 0 and piece.stop % row == 0)
                if granularity == "matrix":
                    assert piece.value.shape == piece.shape


def test_an_optimizer_that_needs_whole_matrices_gives_its_own_step():
    def muon(groups):
        whole = [p[1] if isinstance(p, tuple) else p for group in groups for p in group["params"]]
        matrices = [p for p in whole if p.ndim == 2]
        return torch.optim.Muon(matrices, lr=1e-2) if matrices else torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-2)

    model = small()
    for name, p in model.named_parameters():
        p.requires_grad_(p.ndim == 2 and "layers" in name)
    asked = job(2, 2, **{"zero.granularity": "matrix"})
    results = run(asked, 2, model, tokens(2, 12), optimizer=muon)
    _, parameters = train(model, tokens(2, 12), make=muon)
    # torch's Muon runs its iteration in bfloat16: the same whole matrix gives the same bits, a piece of it would be far off
    assert apart({n: results[0][1][n] for n in parameters}, parameters) <= 1e-3


def test_sgd_with_momentum_gives_its_own_step():
    model, batches = small(), tokens(3, 12)
    results = run(job(2, 3, **{"optimizer.name": "sgd", "optimizer.momentum": 0.9}), 2, model, batches)
    _, parameters = train(model, batches, make=lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9))
    assert apart(results[0][1], parameters) <= EXACT


def test_the_learning_rate_follows_updates_on_any_number_of_ranks():  # CASES C35
    asked = {"schedule": {"shape": "linear", "warmup": 2, "min_ratio": 0.0}, "steps": 10}
    rates = [(n + 1) / 2 if n < 2 else 1 - (n - 2) / 8 for n in range(5)]
    _, parameters = train(small(), tokens(5, 12), rates=rates)
    for ranks in (1, 2, 4):
        results = run(job(ranks, 1, **asked), ranks, small(), tokens(5, 12))
        assert [r.lr for r in results[0][0]] == pytest.approx([1e-2 * rate for rate in rates])
        assert apart(results[0][1], parameters) <= EXACT


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_parameters_cost_no_gradient_no_optimizer_and_no_reduction(zero):
    model = small()
    for name, p in model.named_parameters():
        p.requires_grad_("up" in name or name == "layers.1.down.weight")
    results = agree(job(2, zero, **{"batch.micro_size": 2}), 2, model, tokens(2, 12))
    reports, _, held, engine = results[0]
    trainable = sum(g.plan.total for g in engine.parallel.groups if g.trainable)
    assert held["gradients"] == 8 * trainable // (2 if zero >= 2 else 1)
    assert held["optimizer"] <= 2 * 8 * trainable // (2 if zero >= 1 else 1)
    reduced = [
        entry for entry, _ in reports[-1].ledger if entry.collective in ("reduce_scatter", "all_reduce") and "backward" in entry.reason
    ]
    assert reduced and not any("frozen" in entry.reason for entry in reduced)
    if zero < 3:
        assert not any("frozen" in entry.reason for entry, _ in reports[-1].ledger)


def test_a_parameter_frozen_later_is_refused_by_name():
    engine = Engine(small(), job(1, 1), None)
    engine.model.head.weight.requires_grad_(False)
    with pytest.raises(JobError, match="head.weight"):
        engine.step(tokens(1, 12)[0])


@pytest.mark.parametrize("zero", [0, 3])
def test_rows_that_do_not_divide_are_shared_unevenly(zero):
    batches = [tokens(1, rows)[0] for rows in (12, 7, 2, 5)]
    agree(job(3, zero, **{"batch.micro_size": 2}), 3, small(), batches)


def test_every_other_key_of_a_batch_is_cut_by_rows_and_reaches_forward_by_name():
    class Weighted(Small):
        def forward(self, input_ids, scale, unit):
            return super().forward(input_ids) * scale[:, None, None] * unit

    model = seeded(Weighted, 1)
    batches = [b | {"scale": torch.linspace(0.1, 1, 12, dtype=torch.float64), "unit": 2.0} for b in tokens(2, 12)]

    def loss(m, b):
        logits = m(b["input_ids"], b["scale"], b["unit"])
        targets = b["labels"][:, 1:].reshape(-1)
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), targets, reduction="sum"), int((targets != -100).sum())

    agree(job(2, 1, **{"batch.micro_size": 2}), 2, model, batches, loss)


class Cnn(nn.Module):
    """A classifier of 7 x 7 images: two blocks of convolution and GroupNorm, a mean over the image, a linear head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.ReLU()) for i, o in ((1, 4), (4, 6))
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


CNN_GRID = list(itertools.product((1, 2, 3, 4), (0, 1, 2, 3), (None, 1, 2), ("none", "full", "selective"), (0.0, 1.0)))


def cnn_cell(ranks, zero, micro, recompute, clip):
    draw = torch.Generator().manual_seed(0)
    batches = [{"x": torch.randn(12, 1, 7, 7, generator=draw).double(), "y": torch.randint(0, 3, (12,), generator=draw)} for _ in range(3)]
    agree(
        job(ranks, zero, recompute=recompute, clip=clip, **{"batch.micro_size": micro}),
        ranks,
        seeded(Cnn),
        batches,
        lambda m, b: (F.cross_entropy(m(b["x"]), b["y"], reduction="sum"), len(b["y"])),
        clip=clip,
        forward=lambda m, b: m(b["x"]),
        loss=lambda out, b: (F.cross_entropy(out, b["y"], reduction="sum"), len(b["y"])),
    )


@pytest.mark.parametrize("number", range(0, len(CNN_GRID), 23))
def test_a_cnn_with_a_loss_of_its_own_gives_the_step_of_one_process(number):
    cnn_cell(*CNN_GRID[number])


@pytest.mark.grid
@pytest.mark.parametrize("values", CNN_GRID)
def test_a_cnn_with_a_loss_of_its_own_gives_the_step_of_one_process_everywhere(values):
    cnn_cell(*values)


def test_batch_norm_is_refused_by_name_on_more_than_one_rank():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(JobError, match=r"1 is a BatchNorm1d.*SyncBatchNorm"):
        run_threads(lambda world: Engine(copy.deepcopy(model), job(2, 1), world), 2)
    Engine(model, job(1, 1), None)


def test_ranks_that_drew_other_values_train_the_values_of_rank_0():
    batches = tokens(2, 12)

    models = [small(seed=0), small(seed=1)]

    def rank(world):
        engine = Engine(models[world.rank], job(2, 3), world)
        reports = [engine.step(batch) for batch in batches]
        return reports, dict(engine.full_state())

    _, parameters = train(small(seed=0), batches)
    assert apart(run_threads(rank, 2)[0][1], parameters) <= EXACT


def test_ranks_that_were_given_other_models_are_told_which_parameter_differs():
    models = [small(blocks=2), small(blocks=3)]
    with pytest.raises(JobError, match="another model"):
        run_threads(lambda world: Engine(models[world.rank], job(2, 1), world), 2)


def test_labels_and_shift_labels_together_are_refused():
    engine = Engine(small(), job(1, 1), None)
    batch = tokens(1, 12)[0]
    with pytest.raises(JobError, match="shift_labels"):
        engine.step(batch | {"shift_labels": batch["labels"]})
    with pytest.raises(JobError, match="neither labels nor shift_labels"):
        engine.step({"input_ids": batch["input_ids"]})


def test_shifted_labels_give_the_same_step():
    batch = tokens(1, 12)[0]
    shifted = torch.full_like(batch["labels"], -100)
    shifted[:, :-1] = batch["labels"][:, 1:]
    one = run(job(2, 1), 2, small(), [batch])[0][0][0]
    two = run(job(2, 1), 2, small(), [{"input_ids": batch["input_ids"], "shift_labels": shifted}])[0][0][0]
    assert (one.loss, one.grad_norm) == (two.loss, two.grad_norm)


def test_a_parameter_that_is_cut_reads_as_nan_and_keeps_its_shape():
    *_, engine = run(job(2, 3), 2, small(), tokens(1, 12))[0]
    weight = engine.model.layers[0].up.weight
    assert weight.shape == (20, 10) and weight.isnan().all()


def test_compiled_blocks_give_the_same_step(pool):
    def rank(world):
        asked = job(1, 1, compile={"mode": "block", "backend": "aot_eager"})
        engine = Engine(small(), asked, world)
        reports = [engine.step(batch) for batch in tokens(2, 12)]
        return [(r.loss, r.grad_norm) for r in reports], dict(engine.full_state())

    (seen, state) = pool.run(rank, ranks=1)[0]
    truth, parameters = train(small(), tokens(2, 12))
    assert [x for pair in seen for x in pair] == pytest.approx([x for pair in truth for x in pair], rel=EXACT)
    assert apart(state, parameters) <= EXACT


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_processes_over_gloo_give_the_step_of_one_process(pool, zero):
    def rank(world):
        engine = Engine(small(), job(3, zero, **{"batch.micro_size": 2}), world)
        reports = [engine.step(batch) for batch in tokens(2, 12)]
        return [(r.loss, r.grad_norm) for r in reports], dict(engine.full_state())

    (seen, state), *_ = pool.run(rank, ranks=3)
    truth, parameters = train(small(), tokens(2, 12))
    assert [x for pair in seen for x in pair] == pytest.approx([x for pair in truth for x in pair], rel=EXACT)
    assert apart(state, parameters) <= EXACT


def test_a_block_called_outside_of_its_forward_is_an_error_that_names_it():
    class Odd(Small):
        def forward(self, input_ids):
            x = self.embed(input_ids)
            for layer in self.layers:
                x = x + layer.down(layer.up(x))
            return self.head(x)

    with pytest.raises(RunError, match=r"layers\.\d.*zero.keep"):
        run(job(2, 3), 2, Odd(), tokens(1, 12))
    run(job(2, 3, **{"zero.keep": ["layers.*"]}), 2, Odd(), tokens(1, 12))


def test_two_models_train_side_by_side():  # PAINS 42
    models = [small(seed=0), small(seed=1)]

    def rank(world):
        one = Engine(copy.deepcopy(models[0]), job(2, 2), world)
        two = Engine(copy.deepcopy(models[1]), job(2, 3), world)
        for batch in tokens(2, 12):
            one.step(batch)
            two.step(batch)
        return dict(one.full_state()), dict(two.full_state())

    for state, seed in zip(run_threads(rank, 2)[0], (0, 1)):
        assert apart(state, train(small(seed=seed), tokens(2, 12))[1]) <= EXACT
