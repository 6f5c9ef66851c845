"""A plan of a job: what is asked is foretold, what is better is said, and what cannot be is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest

from stretto.cli import main
from stretto.draw.plans import grown_text, plan_text
from stretto.errors import JobError
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.plan.asking import ask, names_of, read_cluster, telling
from stretto.plan.grown import grow
from stretto.plan.hardware import Cluster
from stretto.plan.planning import Planned, plan_job
from stretto.schedule.pipelines import PIPELINES
from stretto.schedule.request import requested

JOB = Job.load("llama3-8b", mesh="dp=16 tp=2", **{"batch.size": 64, "batch.seq_len": 4096})
CLUSTER = Cluster.of("4x8 h100")


@pytest.fixture(scope="module")
def planned() -> Planned:
    return plan_job(JOB, CLUSTER)


def test_plans_fit_and_stand_best_first(planned: Planned) -> None:
    seconds = [row.plan.seconds for row in planned.rows]
    assert seconds == sorted(seconds) and len(seconds) >= 5
    assert all(row.plan.memory.peak <= CLUSTER.device.memory for row in planned.rows)
    assert len({row.plain()["mesh"] for row in planned.rows}) == len(seconds)


def test_a_row_adds_up(planned: Planned) -> None:
    """Rates and shares against the formulas: tokens over seconds and devices, model flops over peak, bytes over kinds."""
    for row in planned.rows:
        plain = row.plain()
        tokens = 64 * 4096 / plain["step_seconds"] / 32
        assert plain["tokens_per_second_per_device"] == pytest.approx(tokens)
        assert plain["mfu"] == pytest.approx(planned.asked.anatomy.flops_per_token(4096) * tokens / 989e12)
        assert plain["peak_bytes"] == pytest.approx(sum(plain["bytes"].values()) + row.plan.memory.context)
        assert sum(plain["where"].values()) == pytest.approx(plain["step_seconds"], rel=0.02)


def test_each_plan_is_a_job_that_resolves_to_its_mesh(planned: Planned) -> None:
    for row in planned.rows:
        if row.runs:
            resolved = row.job.with_(device="cpu").resolve(None, "cpu", 0)
            assert Mesh.parse(resolved.mesh) == row.plan.setting.mesh
            assert (resolved.zero.stage, resolved.recompute) == (row.plan.setting.zero, row.plan.setting.recompute)


def test_the_job_as_written_is_foretold_by_action_and_its_family_is_among_the_plans(planned: Planned) -> None:
    own = planned.own
    assert own is not None and str(own.plan.setting.mesh) == "dp=16 tp=2"
    assert set(planned.actions) == {"F", "B", "REDUCE", "UPDATE"}
    m = own.plan.setting.microbatches
    whole = m * (planned.actions["F"][0] + planned.actions["B"][0]) + planned.actions["REDUCE"][0] + planned.actions["UPDATE"][0]
    assert own.plan.seconds == pytest.approx(whole, rel=0.03)  # beside it only the slowest machine
    assert any(row.plan.setting.size["tp"] == 2 and row.plan.setting.size["pp"] == 1 for row in planned.rows)


def test_every_mesh_is_a_plan_or_has_its_reason(planned: Planned) -> None:
    assert len(planned.rows) + len(planned.rejected) == planned.families
    assert all(one.why and "\n" not in one.why for one in planned.rejected)
    assert all(one.at_least >= planned.rows[0].plan.seconds for one in planned.rejected if one.fits)


def test_the_text_names_every_plan_and_the_json_is_plain(planned: Planned) -> None:
    text = plan_text(planned)
    assert all(str(row.plan.setting.mesh) in text for row in planned.rows)
    plain = json.loads(json.dumps(planned.plain()))
    needed = {"mesh", "zero", "pipeline", "micro_size", "recompute", "step_seconds", "tokens_per_second_per_device", "mfu", "bytes"}
    assert needed | {"peak_bytes", "bubble", "exposed_seconds", "why"} <= set(plain["plans"][0])
    assert {"plans", "rejected", "searched", "seconds"} <= set(plain)


def test_a_layout_that_does_not_fit_is_told_with_what_would() -> None:
    planned = plan_job(JOB.with_(mesh="dp=32", zero=1, recompute="none", **{"batch.micro_size": 2}), CLUSTER, top=1)
    assert "GB over, activations" in planned.own_why and "at microbatch 2; fits with " in planned.own_why


def test_keys_that_were_written_are_kept() -> None:
    asked = Job.load("llama3-8b", mesh="pp=4 dp=8", zero=3, recompute="full", **{"batch.size": 64})
    planned = plan_job(asked, CLUSTER, names_of({"mesh": "pp=4 dp=8", "zero": {"stage": 3}, "recompute": "full"}))
    assert {(str(r.plan.setting.mesh), r.plan.setting.zero, r.plan.setting.recompute) for r in planned.rows} == {("pp=4 dp=8", 3, "full")}


def test_names_of_keys_are_full() -> None:
    assert names_of({"mesh": "dp=2", "zero": {"stage": 3, "gradients": "end"}}) == {"mesh", "zero.stage", "zero.gradients"}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_short_step_tells_of_a_long_one_whether_it_can_be(name: str) -> None:
    def told(ranks: int, microbatches: int, chunks: int | None, compiled: bool) -> str:
        try:
            return f"{requested(name, ranks, microbatches, chunks, compiled=compiled).stages} stages"
        except JobError as error:
            return str(error)

    for ranks, microbatches, chunks, compiled in product((1, 2, 3, 4), (1, 2, 3, 5, 8, 13), (None, 1, 2, 3), (False, True)):
        asked = (ranks, telling(name, ranks, microbatches), chunks, compiled)
        assert told(*asked) == told(ranks, microbatches, chunks, compiled), asked


def test_more_devices_take_less_time_and_each_hour_costs() -> None:
    job = JOB.with_(steps=1000)
    grown = grow(job, CLUSTER, [8, 16, 32], 2.0, 1000.0)
    hours = [one.hours for one in grown]
    assert hours == sorted(hours, reverse=True) and hours[0] < 4.4 * hours[2]  # a little more than by number: ZeRO cuts finer
    for one in grown:
        assert one.cost == pytest.approx(2.0 * one.hours * one.devices)
        assert one.why == ("within the budget" if one.cost <= 1000 else one.why) and one.why
    assert all(str(one.devices) in grown_text(grown) for one in grown)


def test_a_mixture_is_planned_with_its_experts_and_marked() -> None:
    job = Job(model="mixtral-8x7b", precision="bf16", **{"batch.size": 64, "batch.seq_len": 4096})
    planned = plan_job(job, CLUSTER)
    assert any(not row.runs and row.plan.setting.size["ep"] > 1 for row in planned.rows)
    assert "not run yet" in plan_text(planned)


def test_long_rows_ask_for_pieces_of_them() -> None:
    job = JOB.with_(mesh="", **{"batch.size": 4, "batch.seq_len": 131072})
    planned = plan_job(job, CLUSTER)
    assert any(row.plan.setting.size["cp"] > 1 for row in planned.rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["llama3-8b"], 'write --cluster "1x8 h100"'),
        (["llama3-8b", "--cluster", "8x8 h900"], "there is no device 'h900'"),
        (["llama3-8b", "--cluster", "0x8 h100"], "has no devices"),
        (["llama3-8b", "--cluster", "nowhere.toml"], "cannot be read"),
        (["llama3-8b", "--cluster", "8x8 h100", "mesh=dp=3"], "is of 3 ranks, and the cluster has 64 devices"),
        (["llama3-8b", "--cluster", "8x8 v100"], "has no bf16 units"),
        (["model=hf:nowhere", "--cluster", "8x8 h100"], "no such folder with a config.json"),
        (["model=python:a.b:c", "--cluster", "8x8 h100"], "a plan builds nothing"),
        (["tiny", "batch.size=3", "--cluster", "1024x8 h100"], "no mesh of 8192 devices"),
        (["llama3-8b", "--cluster", "1x8 h100", "--top", "0"], "write --top 1 or more"),
        (["llama3-8b", "--cluster", "1x8 h100", "--gpus", "some"], "write --gpus 8,16,32"),
        (["llama3-8b", "--serve", "--cluster", "8x8 h900"], "there is no device 'h900'"),
        (["llama3-9b", "--serve"], "llama3-9b"),
        (["llama3-8b", "--serve", "--gpus", "8,16"], "--gpus has no place beside --serve"),
        (["llama3-8b", "--cluster", "1x8 h100", "--port", "80"], "write --serve --port 80"),
        (["tiny", "--cluster", "1x2 h100", "--pick", "99", "--write", "x.toml"], "there are plans 1 to"),
    ],
)
def test_a_wrong_request_is_one_line_that_says_what_to_write(words: Sequence[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    out, err = capsys.readouterr()
    assert said in err and len(err.splitlines()) == 1 and not out


def test_where_nothing_fits_the_nearest_that_would_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "model=llama3-70b", "precision=bf16", "batch.size=64", "batch.seq_len=4096", "--cluster", "1x4 h100"]
    assert main(words) == 2
    _, err = capsys.readouterr()
    assert "nothing fits: llama3-70b" in err and "it fits on 32 of them" in err and len(err.splitlines()) == 1
    assert main([*words[:-1], "4x8 h100", "--json"]) == 0


def test_write_makes_a_job_file_of_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "best.toml"
    assert main(["plan", "tiny", "batch.size=16", "--cluster", "1x4 h100", "--write", str(file), "--json"]) == 0
    plans = [plan for plan in json.loads(capsys.readouterr().out)["plans"] if plan["runs"]]
    job = Job.load(file)
    assert (str(Mesh.parse(job.mesh)), job.zero.stage, job.batch.micro_size) == (plans[0]["mesh"], plans[0]["zero"], plans[0]["micro_size"])


def test_a_job_whose_mesh_is_of_other_ranks_is_still_planned() -> None:
    asked = ask(Job.load("llama3-8b"), read_cluster("4x8 h100"))
    assert asked.setting is None and "8 ranks, and the cluster has 32" in asked.why
    with pytest.raises(JobError, match="8 ranks"):
        ask(Job.load("llama3-8b"), read_cluster("4x8 h100"), {"mesh"})
