"""One layout from all sides, its frontier, and what can be chosen of a job and a cluster one by one."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.plan.asking import ask
from stretto.plan.choices import NAMES, Start, choices_of, choose
from stretto.plan.clusters import cluster_of
from stretto.plan.frontier import STEP, frontier
from stretto.plan.hardware import Cluster
from stretto.plan.measured import Copy, DeviceFacts, LinkTime, Measured, Product
from stretto.plan.planning import Row, plan_job
from stretto.plan.predict import Predictor
from stretto.plan.search import OURS, USABLE
from stretto.plan.view import KINDS, view

JOB, CLUSTER = Job.load("llama3-8b"), Cluster.of("4x8 h100")
START = Start(JOB, CLUSTER)
SMALL, SMALLER = JOB.with_(**{"batch.size": 16}), Cluster.of("1x8 h100")


def test_a_view_has_each_ranks_bytes_and_seconds_that_add_up() -> None:
    asked = ask(JOB.with_(mesh="pp=4 dp=4 tp=2", zero=1), CLUSTER, {"mesh"})
    seen = view(asked)
    assert asked.setting
    alone = Predictor(asked.anatomy, asked.setting, CLUSTER, OURS[asked.compiled])
    assert seen.memory == tuple(alone.memory(rank) for rank in range(4))
    assert max(one.peak for one in seen.memory) == seen.row.plan.memory.peak
    assert sum(part.seconds for part in seen.where) == pytest.approx(alone.predict().seconds, rel=0.02)
    plain = json.loads(json.dumps(seen.plain()))
    assert [sum(rank.values()) for rank in plain["ranks"]] == pytest.approx([one.peak for one in seen.memory])
    assert plain["room_bytes"] == pytest.approx(0.95 * 80e9)


def test_the_nearest_that_fits_fits() -> None:
    seen = view(ask(JOB.with_(mesh="dp=32", zero=1, recompute="none", **{"batch.micro_size": 2}), CLUSTER, {"mesh"}))
    assert seen.over and seen.nearest
    keys = {"zero": "zero.stage"}
    changed = seen.asked.job.with_(**{keys.get(key, key): json.loads(v) if v.isdigit() else v for key, v in seen.nearest.items()})
    again = view(ask(changed, CLUSTER, {"mesh"}))
    assert again.over == "" and again.nearest == {} and again.row.plan.memory.peak <= again.room


@pytest.fixture(scope="module")
def points() -> tuple[Row, ...]:
    return frontier(SMALL, SMALLER)


def test_a_frontier_has_the_fastest_first_and_each_next_one_is_smaller(points: tuple[Row, ...]) -> None:
    seconds, peaks = [row.plan.seconds for row in points], [row.plan.memory.peak for row in points]
    assert len(points) > 3 and seconds == sorted(seconds)
    assert all(after <= (1 - STEP) * before for before, after in pairwise(peaks))
    best = plan_job(SMALL, SMALLER, top=1).best
    assert best and points[0].plan.seconds == best.plan.seconds


def test_no_layout_is_both_faster_and_smaller_than_a_point_of_the_frontier(points: tuple[Row, ...]) -> None:
    """Against the plans of all meshes: whatever fits in a point's bytes is not faster."""
    plans = plan_job(SMALL, SMALLER, top=40).rows
    for point in points:
        fitting = [row.plan.seconds for row in plans if row.runs and row.plan.memory.peak <= point.plan.memory.peak]
        assert all(seconds >= point.plan.seconds * (1 - 1e-9) for seconds in fitting)


def test_where_nothing_fits_there_is_no_frontier() -> None:
    assert frontier(Job.load("llama3-405b", mesh="", **{"batch.size": 64}), Cluster.of("1x4 h100")) == ()


def test_what_is_not_said_stays_as_the_job_has_it() -> None:
    chosen = choose(START, {})
    assert chosen.error == "" and chosen.asked and chosen.asked.cluster.name == CLUSTER.name
    job = chosen.asked.job
    assert (job.zero, job.recompute, job.batch, job.compile) == (JOB.zero, JOB.recompute, JOB.batch, JOB.compile)
    assert chosen.choices.keys() == set(NAMES) and chosen.options.keys() == set(NAMES)


def test_each_choice_reaches_the_layout() -> None:
    wanted = {
        "device": "a100", "nodes": "2", "per_node": "8", "inside": "pcie4", "across": "hdr4", "blocks": "16", "hidden": "2048",
        "seq_len": "4096", "batch": "64", "tp": "2", "pp": "2", "dp_replicate": "2", "zero": "2", "micro": "2", "schedule": "interleaved",
        "chunks": "4", "recompute": "selective", "precision": "fp16", "words": "optimizer=sgd",
    }  # fmt: skip
    chosen = choose(START, wanted)
    assert chosen.error == "" and chosen.notes == [] and chosen.asked and chosen.asked.setting
    setting, cluster, anatomy = chosen.asked.setting, chosen.asked.cluster, chosen.asked.anatomy
    assert {**chosen.choices, **wanted} == chosen.choices
    assert setting.mesh == Mesh.of(pp=2, dp_replicate=2, dp=2, tp=2)
    assert (setting.batch, setting.micro_size, setting.seq_len, setting.zero) == (64, 2, 4096, 2)
    assert (setting.schedule, setting.chunks, setting.recompute, setting.compute) == ("interleaved", 4, "selective", "fp16")
    assert (setting.optimizer, len(anatomy.blocks), anatomy.blocks[0].weights[0].shape[0]) == ("sgd", 16, 2048)
    assert (cluster.device.name, cluster.nodes, cluster.inside.name, cluster.across.name) == ("a100", 2, "pcie4", "hdr4")


def test_sliders_of_the_mesh_offer_what_the_search_looks_at() -> None:
    options, families = choose(START, {}).options, ask(JOB, CLUSTER).space.families
    for axis in ("tp", "pp", "cp", "ep"):
        assert [int(text) for text in options[axis]] == sorted({family[axis] for family in families})


def test_a_degree_that_cannot_be_beside_the_one_that_moved_becomes_the_nearest_and_that_is_said() -> None:
    chosen = choose(START, {"tp": "8", "pp": "16"}, "tp")
    assert chosen.choices["tp"] == "8" and chosen.choices["pp"] == "4"
    assert len(chosen.notes) == 1 and chosen.notes[0].startswith("pp=16 became 4: no mesh of 32 devices")
    other = choose(START, {"tp": "8", "pp": "16"}, "pp")
    assert (other.choices["tp"], other.choices["pp"]) == ("2", "16")
    rows = choose(START, {"batch": "32", "micro": "4"})
    assert rows.choices["micro"] == "1" and rows.notes == ["micro_size=4 became 1: a dp rank has 1 row a step"]


def test_every_layout_of_a_plan_can_be_chosen_and_comes_out_the_same() -> None:
    for row in plan_job(JOB, CLUSTER, top=8).rows:
        chosen = choose(START, choices_of(row.plan))
        assert chosen.asked and chosen.notes == []
        again = view(chosen.asked).row
        assert again.plan.setting == row.plan.setting and again.plan.seconds == row.plan.seconds and again.runs == row.runs


def test_a_mixture_has_expert_groups_to_choose() -> None:
    chosen = choose(START, {"model": "mixtral-8x7b", "ep": "8"})
    assert chosen.options["ep"] == ["1", "2", "4", "8"] and chosen.asked
    assert not view(chosen.asked).row.runs


def test_a_config_in_a_folder_is_a_model_to_choose(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 1024, "vocab_size": 1000}))
    chosen = choose(START, {"model": f"hf:{tmp_path}", "tp": "4"})
    assert chosen.asked and len(chosen.asked.anatomy.blocks) == 6 and "blocks" not in chosen.choices
    assert chosen.options["tp"] == ["1", "2", "4", "8"]


def test_a_machine_that_was_measured_stays_as_it_is() -> None:
    rates = tuple(Product("fp32", rows, 512, 512, 2 * rows * 512 * 512 / 50e9) for rows in (128, 1024))
    facts = DeviceFacts("a machine", "cpu", 2, 1, 2, 8 * 10**9, 1e-5, rates, (Copy(2**20, 2**20 / 20e9), Copy(2**28, 2**28 / 8e9)))
    cluster = cluster_of(Measured(facts, (LinkTime("shm", 2, "all_reduce", 2**20, True, 1e-3),), {}))
    chosen = choose(Start(Job.load("tiny"), cluster), {"nodes": "7", "precision": "fp32"})
    assert chosen.choices["device"] == "given" and chosen.asked and chosen.asked.cluster is cluster
    assert chosen.notes == ["nodes=7 became 1: a cluster that a file describes stays as it is"]


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"device": "h900"}, "there is no device 'h900'"),
        ({"across": "string"}, "there is no link 'string'"),
        ({"nodes": "0"}, "has no devices"),
        ({"blocks": "99999"}, "blocks=99999 is more than a page asks for; write blocks=2000 or less"),
        ({"nodes": "many"}, "nodes=many is no whole number; write for example nodes=4"),
        ({"model": "llama9"}, "there is no model 'llama9'"),
        ({"model": "hf:nowhere"}, "no such folder with a config.json"),
        ({"colour": "red"}, "there is nothing 'colour' to choose"),
        ({"zero": "4"}, "zero=4 is not possible here; write one of 0, 1, 2, 3"),
        ({"device": "v100"}, "v100 has no bf16 units"),
        ({"words": "zero=1"}, "zero.stage has a control of its own here"),
        ({"words": "optimiser=sgd"}, "optimizer"),
        ({"words": '"'}, "cannot be read"),
        ({"hidden": "4095"}, "model.heads=32 does not divide model.hidden=4095"),
        ({"batch": "7", "blocks": "1", "seq_len": "128", "words": "model.heads=1 model.kv_heads=1"}, "no mesh of 32 devices shares 7 rows"),
        ({"pp": "4", "schedule": "zb-h1", "compile": "block"}, "splits the backward"),
        ({"pp": "32", "schedule": "zb-v", "batch": "32"}, "more than the 32 blocks"),
        ({"model": "gpt2-small", "seq_len": "4096"}, "is longer than the 1024 learned positions"),
    ],
)
def test_what_cannot_be_chosen_is_said_and_what_can_be_is_there_as_far_as_known(wanted: dict[str, str], said: str) -> None:
    chosen = choose(START, wanted)
    assert said in chosen.error and chosen.asked is None
    assert all(name in chosen.options for name in chosen.choices)


def test_usable_memory_is_what_the_search_takes_it_to_be() -> None:
    assert view(ask(JOB.with_(mesh="dp=32"), CLUSTER, {"mesh"})).room == USABLE * CLUSTER.device.memory
    assert KINDS[:5] == tuple(view(ask(JOB.with_(mesh="dp=32"), CLUSTER, {"mesh"})).row.plain()["bytes"])
