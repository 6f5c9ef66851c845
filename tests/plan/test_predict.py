"""A foretold step: the ground's schedule with seconds, ZeRO's collectives beside it, and the bytes each rank holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.anatomy import DECODERS, Anatomy
from stretto.job import Job
from stretto.layout.balance import Item
from stretto.layout.mesh import Mesh
from stretto.layout.stages import split_model
from stretto.plan.hardware import Cluster
from stretto.plan.known import Known, Schedules
from stretto.plan.predict import Predictor, predict
from stretto.plan.setting import Setting
from stretto.plan.software import STACKS, STRETTO, Software
from stretto.schedule.pipelines import PIPELINES, chunks_of, pipeline
from stretto.schedule.request import requested
from stretto.schedule.timeline import simulate

LLAMA = Anatomy.of_decoder(DECODERS["llama3-8b"])
CLUSTER = Cluster.of("2x8 h100")
SCHEDULES = Schedules()


def setting(words: str = "dp=16", **sizes: object) -> Setting:
    given: dict[str, object] = {"batch": 64, "micro_size": 1, "seq_len": 2048, "mesh": Mesh.parse(words), "recompute": "full", **sizes}
    return Setting(**given)  # type: ignore[arg-type]


def predictor(words: str = "dp=16", **sizes: object) -> Predictor:
    return Predictor(LLAMA, setting(words, **sizes), CLUSTER, STRETTO, SCHEDULES)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2), ("bfs", 2)]
)
@pytest.mark.parametrize("batch", [64, 128, 208])
def test_a_long_step_is_foretold_from_short_ones_as_if_simulated_whole(schedule: str, chunks: int, batch: int) -> None:
    chosen = predictor("pp=4 dp=4", schedule=schedule, chunks=chunks, batch=batch)
    seconds = chosen.seconds()
    whole = simulate(chosen.schedule(chosen.setting.microbatches), lambda a: seconds.get((a.kind, a.stage), 0.0)).seconds
    assert chosen.makespan(seconds) == pytest.approx(whole, rel=2e-3)


def test_one_stage_takes_its_microbatches_one_after_the_other() -> None:
    chosen = predictor("dp=16", batch=64)
    f, b = chosen.work(0)
    assert chosen.predict().pipeline == pytest.approx(4 * (f.seconds + b.seconds))
    assert chosen.predict().bubble == pytest.approx(0)


def test_the_bubble_of_1f1b_is_that_of_the_formula_where_stages_are_equal() -> None:
    """(p - 1) / (m + p - 1) (Narayanan et al. 2021); the ends of the model make them a little unequal."""
    blocks = Anatomy(LLAMA.blocks)
    chosen = Predictor(blocks, setting("pp=4 dp=4", batch=64), CLUSTER, STRETTO, SCHEDULES)
    assert chosen.predict().bubble == pytest.approx(3 / 19, abs=0.02)


@pytest.mark.parametrize("software", [STRETTO, STACKS["Megatron-LM 2021"]], ids=lambda stack: stack.name)
def test_stages_hold_every_part_once_in_order(software: Software) -> None:
    stages = Known(LLAMA, CLUSTER, software).stages(setting("pp=8 dp=2"))
    assert [part for stage in stages for part in stage.parts] == list(LLAMA.parts)
    assert stages[0].parts[0].name == "embed" and stages[-1].parts[-1].name == "head"
    assert [sum(count for _, count in stage.kinds) for stage in stages] == [len(stage.parts) for stage in stages]
    given = Known(LLAMA, CLUSTER, software).stages(setting("pp=2 dp=8", layers=(20, 12)))
    assert [sum(part.is_block for part in stage.parts) for stage in given] == [20, 12]


def test_our_stages_are_those_of_the_engine_and_others_have_as_many_blocks_each() -> None:
    """The head of Llama 3 is worth more than two blocks, so the engine's last stage has fewer."""
    chosen = setting("pp=4 dp=4", recompute="none")
    ours, others = (Known(LLAMA, CLUSTER, software).stages(chosen) for software in (STRETTO, STACKS["Megatron-LM 2021"]))
    split = split_model([Item(*part) for part in LLAMA.work(2048, "none")], range(4))
    assert [[part.name for part in stage.parts] for stage in ours] == [[i.name for i in split.parts(s)] for s in range(4)]
    assert [sum(part.is_block for part in stage.parts) for stage in others] == [8, 8, 8, 8]
    assert sum(part.is_block for part in ours[-1].parts) < 8


def test_more_devices_are_faster_but_never_by_more_than_their_number() -> None:
    four, sixteen = (
        predict(LLAMA, setting(f"dp={n}"), Cluster.of(f"1x{n} h100") if n <= 8 else CLUSTER, STRETTO, SCHEDULES).seconds for n in (4, 16)
    )
    assert sixteen < four < 4.2 * sixteen


def test_zero_1_costs_no_more_than_zero_0_and_zero_3_fetches_for_every_microbatch() -> None:
    seconds = [predictor("dp=16", zero=stage, batch=128).predict().seconds for stage in (0, 1, 3)]
    assert seconds[1] <= seconds[0] * 1.01
    assert seconds[2] > seconds[1]
    slow = replace(CLUSTER, across=replace(CLUSTER.across, bandwidth=1e9))
    bound = [Predictor(LLAMA, setting("dp=16", zero=stage, batch=128), slow, STRETTO, SCHEDULES).predict().seconds for stage in (1, 3)]
    assert bound[1] > 3 * bound[0]  # REFERENCE B9: 3m against 2, with m = 8


@pytest.mark.parametrize(("stage", "bytes_"), [(0, 18), (1, 6 + 12 / 16), (2, 2 + 16 / 16), (3, 18 / 16)])
def test_bytes_between_steps_are_those_of_the_table(stage: int, bytes_: float) -> None:
    """REFERENCE B1, bf16 with fp32 sums, masters and two moments."""
    memory = predictor("dp=16", zero=stage).memory(0)
    held = memory.parameters + memory.gradients + memory.optimizer
    assert held == pytest.approx(bytes_ * LLAMA.parameters(), rel=1e-6)


def test_tp_and_pp_share_the_parameters_out() -> None:
    chosen = predictor("pp=2 tp=8", zero=0)
    both = [chosen.memory(rank).parameters for rank in (0, 1)]
    norms = sum(w.elements for w in LLAMA.weights() if "norm" in w.name)
    assert sum(both) == pytest.approx(2 * ((LLAMA.parameters() - norms) / 8 + norms), rel=1e-6)


def test_activations_are_the_formulas_times_the_microbatches_under_way() -> None:
    """Full recompute keeps a block's input, 2 s b h bytes; 1f1b has p - q microbatches under way on rank q."""
    chosen = predictor("pp=4 dp=4", batch=64, layers=(8, 8, 8, 8))
    kept = 2048 * 4096 * 2
    first, second = chosen.memory(0).activations, chosen.memory(1).activations
    assert first - second == pytest.approx(kept * (8 + 1) + 2048 * 8 * 4, rel=0.02)  # 8 blocks, the handed state; 4 times the ids


def test_recompute_trades_memory_for_seconds() -> None:
    none, full = (predictor("dp=16", recompute=mode) for mode in ("none", "full"))
    assert none.memory(0).activations > 2 * full.memory(0).activations
    assert none.predict().seconds < full.predict().seconds


@pytest.mark.parametrize("name", PIPELINES)
def test_a_rank_is_said_to_hold_at_least_what_its_schedule_holds_however_many_microbatches(name: str) -> None:
    """gpipe and bfs hold all of them; the others, at most a few more than they will."""
    for ranks, microbatches in ((2, 64), (4, 16), (4, 17), (4, 63), (3, 10)):
        chunks = chunks_of(name, ranks, None)
        schedule = pipeline(name, ranks, microbatches, chunks)
        for rank in range(ranks):
            told = max(sum(moment.held) for moment in SCHEDULES.moments(name, ranks, microbatches, chunks, rank))
            assert schedule.peak(rank) <= told <= schedule.peak(rank) + (chunks - 1) * (ranks - 1)


@pytest.mark.parametrize("by", ["work", "memory", "both"])
@pytest.mark.parametrize(("mesh", "schedule"), [("pp=4", "1f1b"), ("pp=2 dp=2", "zb-v"), ("pp=4 dp=2", "gpipe")])
def test_stages_that_are_balanced_by_bytes_are_those_of_the_engine_too(mesh: str, schedule: str, by: str) -> None:
    """The same balance out of a job and out of a setting, and the same cut of the module's parts and of the anatomy's."""
    keys = {"zero": 2, "precision": "bf16", "recompute": "selective", "batch.size": 32, "batch.micro_size": 2}
    job = Job.load("tiny", mesh=mesh, pipeline={"schedule": schedule, "balance": by}, **keys).resolve(Mesh.parse(mesh).size, "cpu", 8)
    step = requested(schedule, Mesh.parse(mesh)["pp"], job.microbatches)
    assert Setting.of(job).balanced(step.held) == job.balance(step.held)
    anatomy = Anatomy.of_decoder(DECODERS["tiny"])
    split = split_model([Item(*part) for part in anatomy.work(job.batch.seq_len, "selective", 2)], step.rank_of, (), job.balance(step.held))
    ours = Known(anatomy, CLUSTER, STRETTO).stages(Setting.of(job))
    assert [[part.name for part in stage.parts] for stage in ours] == [[i.name for i in split.parts(s)] for s in range(split.stages)]
