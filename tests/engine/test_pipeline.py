"""Pipelines: any schedule on any mesh takes the step of one process."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from truth import apart, token_loss, train

from stretto.anatomy import DecoderShape
from stretto.comm.threads import run_threads
from stretto.comm.transport import World
from stretto.engine.engine import Engine
from stretto.errors import JobError
from stretto.job import Job
from stretto.layout.balance import PartTime, write_parts
from stretto.layout.zero import ZeroPolicy, calls
from stretto.models import library
from stretto.models.decoder import Decoder, fill, initial
from stretto.schedule.pipelines import PIPELINES

VOCAB, LENGTH, STEPS = 11, 4, 2
SHAPE = DecoderShape(hidden=8, blocks=4, heads=2, kv_heads=1, head_dim=4, ffn=6, vocab=VOCAB, init_std=0.3)


def batches(rows: int, steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    made = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(7 + step)
        ids = torch.randint(0, VOCAB, (rows, LENGTH), generator=draw)
        counted = torch.rand(rows, LENGTH, generator=draw) < torch.rand(rows, 1, generator=draw) + 0.2
        made.append({"input_ids": ids, "labels": torch.where(counted, ids, -100)})
    return made


@functools.cache
def expected(rows: int, **shape: Any) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """(loss, gradient norm) of each step and the parameters at the end, of one process."""
    return train(fill(Decoder(SHAPE.with_(shape)), 0), batches(rows), token_loss)


def job(mesh: str, schedule: str, rows: int, **keys: Any) -> Job:
    usual = {"batch.size": rows, "batch.seq_len": LENGTH, "batch.micro_size": 1, "precision": "fp64", "optimizer.lr": 1e-2}
    return Job.load({**usual, "schedule": "constant", "steps": STEPS, "mesh": mesh, "pipeline": schedule}, **keys)


def engine(asked: Job, world: World, **shape: Any) -> Engine:
    model = Decoder(SHAPE.with_(shape), device="meta")
    loaded = library.Loaded(model, initial, "", regular=library.regular_modules(model))
    return Engine(loaded, asked, world)


def apart_from_one_process(asked: Job, ranks: int, **shape: Any) -> float:
    """The largest relative error of a loss, a norm or a parameter after STEPS steps."""
    losses, parameters = expected(asked.batch.size, **shape)

    def rank(world: World) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
        with engine(asked, world, **shape) as mine:
            reports = [mine.step(batch) for batch in batches(asked.batch.size)]
            state = {name: value for name, value in mine.full_state() if value is not None}
        return [(report.loss, report.grad_norm) for report in reports], state

    found = run_threads(rank, ranks)
    assert all(seen == found[0][0] for seen, _ in found), "losses and norms are those of all ranks, on every rank"
    state = {name: value for name, value in found[0][1].items() if name in parameters}  # of tied names one
    errors = [abs(a - b) / b for mine, truth in zip(found[0][0], losses, strict=True) for a, b in zip(mine, truth, strict=True)]
    return max(*errors, apart(state, parameters))


# --- every schedule -------------------------------------------------------------------------------

AXES: dict[str, Sequence[Any]] = {
    "schedule": tuple(PIPELINES),
    "pp": (2, 4),
    "dp": (1, 2),
    "zero": ((0, "end", "microbatch"), (1, "end", "microbatch"), (2, "each", "microbatch"), (3, "each", "microbatch"), (3, "end", "step")),
    "tied": (False, True),
    "recompute": ("none", "full"),
    "microbatches": (1, 2, 5, 9),
}


def possible(row: dict[str, Any]) -> bool:
    return row["microbatches"] >= PIPELINES[row["schedule"]].least(row["pp"])


def pairwise_rows() -> list[dict[str, Any]]:
    """Rows in which any two values of two axes stand together somewhere, if they can; chosen greedily."""
    left = {
        (a, i, b, j)
        for a, b in itertools.combinations(AXES, 2)
        for i, x in enumerate(AXES[a])
        for j, y in enumerate(AXES[b])
        if {a, b} != {"schedule", "microbatches"} or possible({"schedule": x, "microbatches": y, "pp": 2})
    }
    rows: list[dict[str, Any]] = []
    numbered = [
        (dict(zip(AXES, values, strict=True)), index)
        for values, index in zip(itertools.product(*AXES.values()), itertools.product(*(range(len(v)) for v in AXES.values())), strict=True)
    ]
    candidates = [(row, dict(zip(AXES, index, strict=True))) for row, index in numbered if possible(row)]
    pairs_of = [{(a, at[a], b, at[b]) for a, b in itertools.combinations(AXES, 2)} & left for _, at in candidates]
    while True:
        gains = [len(pairs & left) for pairs in pairs_of]
        best = max(range(len(candidates)), key=gains.__getitem__)
        if not gains[best]:
            return rows
        rows.append(candidates[best][0])
        left -= pairs_of[best]


def check_row(row: dict[str, Any]) -> None:
    stage, gradients, params = row["zero"]
    mesh, ranks, rows = f"pp={row['pp']} dp={row['dp']}", row["pp"] * row["dp"], row["microbatches"] * row["dp"]
    zero = {"zero.stage": stage, "zero.gradients": gradients, "zero.params": params}
    asked = job(mesh, row["schedule"], rows, recompute=row["recompute"], **zero)
    blocks = 4 if row["pp"] == 2 else 8  # two stages a rank at most
    assert apart_from_one_process(asked, ranks, tied=row["tied"], blocks=blocks) < 1e-10


def named(row: dict[str, Any]) -> str:
    return " ".join(f"{axis}={value}" for axis, value in row.items())


@pytest.mark.parametrize("row", pairwise_rows(), ids=named)
def test_a_schedule_takes_the_step_of_one_process(row):
    check_row(row)


@pytest.mark.grid
@pytest.mark.parametrize("zero", AXES["zero"], ids=str)
@pytest.mark.parametrize("dp", AXES["dp"])
@pytest.mark.parametrize("pp", AXES["pp"])
@pytest.mark.parametrize("schedule", AXES["schedule"])
def test_every_schedule_takes_the_step_of_one_process(schedule, pp, dp, zero):
    for microbatches, (tied, recompute) in itertools.product(range(1, 10), [(False, "none"), (True, "full")]):
        values = (schedule, pp, dp, zero, tied, recompute, microbatches)
        row = dict(zip(AXES, values, strict=True))
        if possible(row):
            check_row(row)


@pytest.mark.parametrize(("schedule", "mesh", "zero"), [("1f1b", "pp=2 dp=2", 1), ("zb-v", "pp=2 dp=2", 3), ("interleaved", "pp=4", 2)])
def test_processes_take_the_same_step_as_threads(pool, schedule, mesh, zero):
    """Over the transport of real runs, where messages and collectives share memory."""
    asked = job(mesh, schedule, 6, zero=zero)
    losses, parameters = expected(6, tied=True, blocks=8)

    def rank(world: World) -> tuple[list[float], dict[str, torch.Tensor]]:
        with engine(asked, world, tied=True, blocks=8) as mine:
            found = [mine.step(batch).loss for batch in batches(6)]
            return found, {name: value for name, value in mine.full_state() if value is not None}

    found = pool.run(rank, 4)
    assert all(loss == pytest.approx([a for a, _ in losses], rel=1e-10) for loss, _ in found)
    assert apart({name: found[0][1][name] for name in parameters}, parameters) < 1e-10


# --- what a rank holds and sends --------------------------------------------------------------------

CHOICES = [
    (0, "end", "microbatch"),
    (1, "end", "microbatch"),
    (2, "each", "microbatch"),
    (2, "end", "microbatch"),
    (3, "each", "microbatch"),
    (3, "end", "microbatch"),
    (3, "each", "step"),
    (3, "end", "step"),
]


@pytest.mark.parametrize(
    ("schedule", "choice"), [*(("1f1b", choice) for choice in CHOICES), *(("zb-v", choice) for choice in CHOICES[2:7:2])]
)
def test_each_stage_gathers_and_reduces_what_the_table_of_zero_says(schedule, choice):
    """REFERENCE B9 for the parameters of each rank's stages, call for call; and one message a boundary and microbatch, each way."""
    stage, gradients, params = choice
    microbatches, zero = 3, {"zero.stage": stage, "zero.gradients": gradients, "zero.params": params}
    asked = job("pp=2 dp=2", schedule, 2 * microbatches, **zero)

    def rank(world: World) -> tuple[list[dict[tuple[str, int, str], int]], dict[tuple[str, int, str], int], dict[str, int], dict[str, int]]:
        with engine(asked, world) as mine:
            policy = ZeroPolicy.of(*choice)
            wanted: dict[tuple[str, int, str], int] = {}
            for part in mine.parallel.stages:
                for call in calls(policy, tuple(group.facts for group in part.walk.groups), microbatches, 1, 2, pipelined=True):
                    key = (call.collective, call.elements, call.reason)
                    wanted[key] = wanted.get(key, 0) + 1
            reports = [mine.step(batch) for batch in batches(asked.batch.size)]
            found = [
                {
                    (e.collective, e.elements, e.reason): n
                    for e, n in r.ledger
                    if e.collective != "send" and e.reason not in ("vote", "same rows")
                }
                for r in reports
            ]
            sent = {e.reason: n for e, n in reports[1].ledger if e.collective == "send"}
            rank_of, here = mine.parallel.split.rank_of, mine.parallel.pipeline.index
            crossing = {}
            for number in range(len(rank_of) - 1):
                if rank_of[number] != rank_of[number + 1]:
                    crossing |= {f"forward {number}": microbatches} if rank_of[number] == here else {}
                    crossing |= {f"backward {number + 1}": microbatches} if rank_of[number + 1] == here else {}
            return found, wanted, sent, crossing

    for found, wanted, sent, crossing in run_threads(rank, 4):
        assert found == [wanted] * STEPS
        assert sent == crossing


def test_a_rank_holds_its_own_stages_and_nothing_of_others():
    parameters = dict(fill(Decoder(SHAPE), 0).named_parameters())

    def rank(world: World) -> tuple[dict[str, int], int, set[str]]:
        asked = job("pp=4", "1f1b", 4, zero=0)
        with engine(asked, world) as mine:
            mine.step(batches(4)[0])
            held = {name for group in mine.parallel.groups for name in group.names}
            elements = sum(group.plan.elements for group in mine.parallel.groups)
            live = sum(p.data.untyped_storage().nbytes() for n, p in mine.model.named_parameters() if n not in held)
            return mine.bytes_held(), elements, held | ({"others"} if live > 8 * len(parameters) else set())

    found = run_threads(rank, 4)
    names = [held for _, _, held in found]
    assert set().union(*names) == set(parameters) and sum(map(len, names)) == len(parameters)
    for held, elements, mine in found:
        assert elements == sum(parameters[name].numel() for name in mine)
        padding = 8 * len(mine) * 8
        assert 8 * elements <= held["parameters"] <= 8 * elements + padding
        assert 16 * elements <= held["optimizer"] <= 16 * elements + 2 * padding


# --- norms, ties, uneven rows -----------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "pp"), [("1f1b", 2), ("interleaved", 2), ("zb-v", 2)])
def test_the_norm_is_that_of_all_stages_and_clips_all_alike(schedule, pp):
    """C06: gradients set so that those of the ranks have norms 3 and 4: all report 5, and all are multiplied with 1/5."""

    def rank(world: World) -> tuple[float, list[float]]:
        with engine(job(f"pp={pp}", schedule, 2, optimizer="sgd", **{"optimizer.weight_decay": 0, "optimizer.lr": 1.0}), world) as mine:
            vote = mine.do["VOTE"]
            before = {}

            def set_norm(action: Any) -> None:
                count = sum(slot.elements for group in mine.parallel.groups for slot in group.plan.slots)
                for group in mine.parallel.groups:
                    for slot in group.plan.slots:
                        group.my_gradient()[slot.start : slot.stop] = (3.0 + world.rank) / count**0.5
                        before[slot.name] = group.master[slot.start : slot.stop].clone()
                vote(action)

            mine.do["VOTE"] = set_norm
            report = mine.step(batches(2)[0])
            moved = [
                float((before[slot.name] - group.master[slot.start : slot.stop]).norm()) ** 2
                for group in mine.parallel.groups
                for slot in group.plan.slots
            ]
            return report.grad_norm, sum(moved) ** 0.5

    for number, (norm, moved) in enumerate(run_threads(rank, pp)):
        assert norm == pytest.approx(5.0)
        assert moved == pytest.approx((3.0 + number) / 5, rel=1e-5)


@pytest.mark.parametrize(("schedule", "zero"), [("1f1b", 0), ("1f1b", 2), ("zb-v", 1), ("zb-v", 3)])
def test_both_copies_of_a_tied_weight_stay_bit_for_bit_the_same(schedule, zero):
    """C11: embedding and head in two stages, cut over dp; in zb-v both on one rank."""

    def rank(world: World) -> tuple[int, int, list[torch.Tensor]]:
        with engine(job("pp=2 dp=2", schedule, 8, zero=zero), world, tied=True) as mine:
            for batch in batches(8, 3):
                mine.step(batch)
            copies = [group.values().clone() for part in mine.parallel.stages for group in part.tied]
            names = [name for name, _ in mine.full_state()]
            assert names.count("embed.weight") == names.count("head.weight") == 1
            return mine.parallel.pipeline.index, mine.parallel.shard.index, copies

    found = run_threads(rank, 4)
    for dp in range(2):
        copies = [copy for _, index, mine in found for copy in mine if index == dp]
        assert len(copies) == 2 and torch.equal(*copies)


@pytest.mark.parametrize(("schedule", "zero"), [("gpipe", 2), ("1f1b", 1), ("zb-h1", 3)])
def test_ranks_with_rows_of_their_own_may_have_different_numbers_of_batches(schedule, zero):
    """C20: dp 0 has two batches and dp 1 one, of another length; the rows that are there count once each."""

    def rows(dp: int, step: int) -> dict[str, torch.Tensor] | None:
        whole = batches(4, 3)[step]
        length = LENGTH - dp
        return None if dp and step else {name: value[2 * dp : 2 * dp + 2, :length] for name, value in whole.items()}

    def rank(world: World) -> list[tuple[float, int]]:
        with engine(job("pp=2 dp=2", schedule, 4, zero=zero), world) as mine:
            dp = mine.rows.index
            return [(r.loss, r.samples) for step in range(2 - dp) if (r := mine.step(rows(dp, step), local=True))]

    model = fill(Decoder(SHAPE), 0).double()
    total, count = 0.0, 0
    for dp in range(2):
        batch = rows(dp, 0)
        assert batch is not None
        loss, number = token_loss(model, batch)
        total, count = total + float(loss.detach()), count + number
    found = run_threads(rank, 4)
    assert [seen[0] for seen in found] == [(pytest.approx(total / count, rel=1e-10), 4)] * 4
    assert [seen[1][1] for seen in found if len(seen) > 1] == [2, 2]


def test_a_microbatch_of_another_length_has_its_shape_told_once():
    def rank(world: World) -> list[dict[str, int]]:
        with engine(job("pp=2", "1f1b", 2), world) as mine:
            found = []
            for length in (4, 4, 3, 4, 3):
                report = mine.step({name: value[:, :length] for name, value in batches(2)[0].items()})
                found.append({e.reason: n for e, n in report.ledger if e.reason.startswith("shape")})
            return found

    assert run_threads(rank, 2)[0] == [{"shape 0": 1}, {}, {"shape 0": 1}, {}, {}]


# --- evaluation and other uses ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "mesh", "ranks", "zero"), [("1f1b", "pp=2 dp=2", 4, 3), ("zb-v", "pp=2", 2, 1), ("zb-h2", "pp=2", 2, 3)]
)
def test_evaluation_gives_the_mean_of_all_rows_on_every_rank(schedule, mesh, ranks, zero):
    asked = job(mesh, schedule, 6, zero=zero)
    given = [*batches(6, 2), {name: value[:1] for name, value in batches(6, 3)[2].items()}]

    def rank(world: World) -> tuple[dict[str, float], float]:
        with engine(asked, world) as mine:
            count_ids = lambda output, batch: {"ids": (batch["input_ids"].sum(), batch.rows)}
            return mine.evaluate(given, metrics=count_ids), mine.step(batches(6)[0]).loss

    model = fill(Decoder(SHAPE), 0).double()
    with torch.no_grad():
        sums = [token_loss(model, batch) for batch in given]
    loss = sum(float(total) for total, _ in sums) / sum(count for _, count in sums)
    ids = sum(float(batch["input_ids"].sum()) for batch in given) / sum(len(batch["input_ids"]) for batch in given)
    for found, step_loss in run_threads(rank, ranks):
        assert found == {"ids": pytest.approx(ids), "loss": pytest.approx(loss, rel=1e-10)}
        assert step_loss == pytest.approx(expected(6)[0][0][0], rel=1e-10)


def test_a_step_can_be_skipped_because_of_a_gradient_in_one_stage():
    def rank(world: World) -> tuple[str, tuple[tuple[int, str], ...]]:
        with engine(job("pp=2", "1f1b", 2), world) as mine:
            for group in mine.parallel.groups:
                if "layers.3.mlp.up.weight" in group.names:
                    group.params[group.names.index("layers.3.mlp.up.weight")].data.fill_(float("inf"))
            report = mine.step(batches(2)[0])
            return report.status, report.nonfinite

    for status, culprits in run_threads(rank, 2):
        assert status == "skipped"
        assert any(rank == 1 for rank, _ in culprits)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("pp=2", "zb-v", 1, 2), ("pp=2", "1f1b", 3, 2)),
        (("pp=2 dp=2", "1f1b", 3, 4), ("dp=1", "1f1b", 0, 1)),
        (("dp=2", "1f1b", 2, 2), ("pp=2 dp=2", "zb-v", 1, 4)),
        (("pp=2", "interleaved", 0, 2), ("pp=2", "zb-v", 0, 2)),
    ],
)
def test_what_a_pipeline_saved_goes_on_on_any_other_mesh(saved, loaded, tmp_path):
    """Tied, so that a weight has two copies, and in zb-v both on one rank. The truth: a run that was never interrupted."""
    losses, parameters = expected(4, tied=True)

    def first(world: World) -> None:
        mesh, schedule, zero, _ = saved
        with engine(job(mesh, schedule, 4, zero=zero), world, tied=True) as mine:
            mine.step(batches(4)[0])
            mine.save(tmp_path / "one")

    def second(world: World) -> tuple[float, dict[str, torch.Tensor]]:
        mesh, schedule, zero, _ = loaded
        with engine(job(mesh, schedule, 4, zero=zero, seed=5), world, tied=True) as mine:
            mine.load(tmp_path / "one")
            loss = mine.step(batches(4)[1]).loss
            return loss, {name: value for name, value in mine.full_state() if value is not None}

    run_threads(first, saved[-1])
    found = run_threads(second, loaded[-1])
    assert all(loss == pytest.approx(losses[1][0], rel=1e-10) for loss, _ in found)
    assert apart({name: found[0][1][name] for name in parameters}, parameters) < 1e-10


@pytest.mark.parametrize(("schedule", "tied", "recompute"), [("1f1b", True, "none"), ("zb-v", False, "full"), ("zb-v", True, "selective")])
def test_stages_whose_weights_are_cut_over_tp_take_the_step_of_one_process(schedule, tied, recompute):
    """Between stages goes each tp rank's part of the tokens."""
    assert apart_from_one_process(job("pp=2 tp=2", schedule, 3, zero=1, recompute=recompute), 4, tied=tied) < 1e-10


# --- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "mesh", "schedule", "says"),
    [
        ({}, "pp=2", "zb-h2", "needs at least 3 microbatches"),
        ({}, "pp=2", "dualpipe-v", "needs at least 4 microbatches"),
        ({"pipeline.chunks": 5}, "pp=2", "interleaved", "10 pipeline stages are more than the 4 blocks"),
        ({"compile": "block", "compile.backend": "eager"}, "pp=2", "zb-h1", "splits the backward"),
        ({"pipeline.split": ["layers.9"]}, "pp=2", "1f1b", "no stage can begin with 'layers.9'"),
        ({"pipeline.split": ["layers.2", "layers.4"]}, "pp=2", "1f1b", "makes 3 stages, and there are 2"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_with_what_could(keys, mesh, schedule, says):
    with pytest.raises(JobError, match=says):
        run_threads(lambda world: engine(job(mesh, schedule, 2, **keys), world), 2)


def test_a_loop_of_ones_own_is_refused_where_a_rank_sees_one_stage():
    def rank(world: World) -> None:
        engine(job("pp=2", "1f1b", 2), world).backward(torch.zeros(()), 1)

    with pytest.raises(JobError, match="sees only its rank's"):
        run_threads(rank, 2)


@pytest.mark.parametrize(("by", "cut"), [("work", 4), ("memory", 3)])
def test_the_cut_that_is_asked_for_takes_the_same_step(by, cut):
    """The first rank of 1f1b holds two microbatches, here of more bytes than the weights, so by memory it gets fewer blocks."""
    asked = job("pp=2", "1f1b", 8, **{"pipeline.balance": by, "batch.micro_size": 4, "zero": 0})
    seen = run_threads(lambda world: engine(asked, world, blocks=8).parallel.split, 2)[0]
    assert sum(item.block for item in seen.parts(0)) == cut
    assert apart_from_one_process(asked, 2, blocks=8) < 1e-10


def test_a_cut_by_measured_seconds_takes_the_same_step(tmp_path):
    """The head as long as two blocks."""
    parts = {"embed": PartTime(0.0), "norm": PartTime(0.0), "head": PartTime(2.0), **{f"layers.{i}": PartTime(1.0) for i in range(4)}}
    write_parts(tmp_path / "parts.json", parts, {})
    asked = job("pp=2", "1f1b", 3, **{"pipeline.measured": str(tmp_path / "parts.json")})
    found = run_threads(lambda world: str(engine(asked, world).parallel.split), 2)
    assert found == ["embed to layers.2 | layers.3 to head (seconds 50% 50%, 1.00 of an even split)"] * 2
    assert apart_from_one_process(asked, 2) < 1e-10


@pytest.mark.parametrize("split", [["layers.0"], ["layers.3"], ["head"]])
def test_a_split_by_hand_may_leave_a_stage_without_blocks(split):
    """C25 (d): a stage that has only the embedding, or only the loss."""
    assert apart_from_one_process(job("pp=2", "1f1b", 3, **{"pipeline.split": split}), 2) < 1e-10


def test_a_step_of_few_rows_goes_through_a_schedule_that_needs_many_microbatches():
    """C25 (b): the last batch of an epoch may have fewer rows than the schedule has microbatches; some are then empty."""

    def rank(world: World) -> list[float]:
        with engine(job("pp=2", "dualpipe-v", 4), world) as mine:
            return [mine.step({name: value[:3] for name, value in batches(4)[0].items()}).loss]

    batch = {name: value[:3] for name, value in batches(4)[0].items()}
    loss, count = token_loss(fill(Decoder(SHAPE), 0).double(), batch)
    assert run_threads(rank, 2) == [[pytest.approx(float(loss.detach()) / count, rel=1e-10)]] * 2


def test_what_is_measured_is_in_the_order_of_the_schedule():
    def rank(world: World) -> bool:
        with engine(job("pp=2", "zb-h1", 3), world) as mine:
            report = mine.step(batches(3)[0])
            return [span.action for span in report.timeline.spans] == list(mine.schedule_of(3).order[world.rank])

    assert run_threads(rank, 2) == [True, True]
