"""Each framework is foretold with what the table of capabilities lets it combine, and with nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stretto.adapters.capabilities import TABLE, Cell
from stretto.adapters.catalog import RUNNERS
from stretto.adapters.foretold import foretell
from stretto.adapters.restrictions import AXIS_ROWS, PEERS, PIPELINE_ZERO, ZERO_ROWS, combines, narrowed, reaches, spaces
from stretto.errors import JobError
from stretto.job import Job
from stretto.limits import LATER
from stretto.plan.asking import ask
from stretto.plan.hardware import Cluster
from stretto.plan.planning import plan_job

EIGHT = Cluster.of("1x8 h100")
ALL = tuple(RUNNERS)


def job(name: str = "llama3-8b", **keys: Any) -> Job:
    return Job.load(name, **keys)


def test_every_runner_can_be_foretold_and_nobody_else() -> None:
    assert set(PEERS) == set(RUNNERS)


def test_no_layout_that_is_tried_uses_what_the_table_denies() -> None:
    for peer in PEERS.values():
        if peer.framework == "Ray Train":  # what it lacks is torch's
            continue
        space = ask(job(), Cluster.of("2x8 h100")).space
        for way in peer.ways:
            for part in spaces(peer, way, space):
                for family in part.families:
                    for mesh, zero in part.shardings(family):
                        denied = [axis for axis, row in AXIS_ROWS.items() if mesh[axis] > 1 and not peer.has(row)]
                        assert denied == [], (peer.runner, way.name, mesh)
                        if mesh.extent("dp", "dp_replicate", "cp") > 1 and zero:
                            assert peer.has(ZERO_ROWS[zero])
                            assert zero == 1 or mesh["pp"] == 1 or peer.cell(PIPELINE_ZERO).can == "yes", (peer.runner, mesh, zero)
                assert not part.base.sequence or peer.has("tokens cut between tensor-parallel layers")


def test_a_no_in_the_table_takes_the_axis_away(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = PEERS["fsdp2"]
    assert "tp" in narrowed(torch, torch.ways[0]).axes and reaches(torch, AXIS_ROWS["tp"])
    row = {**TABLE[AXIS_ROWS["tp"]], "torch": Cell("no", "gone")}
    monkeypatch.setattr("stretto.adapters.restrictions.TABLE", {**TABLE, AXIS_ROWS["tp"]: row})
    assert "tp" not in narrowed(torch, torch.ways[0]).axes and not reaches(torch, AXIS_ROWS["tp"])


def test_ours_are_the_meshes_that_the_engine_runs_and_the_best_is_the_one_that_a_plan_names() -> None:
    for cluster in ("1x8 h100", "4x8 a100"):
        ours = foretell(job(), Cluster.of(cluster), ["stretto"]).rows[0]
        planned = plan_job(job(), Cluster.of(cluster)).best
        assert planned is not None and ours.status == "fits"
        assert ours.step_seconds == planned.plan.seconds and ours.mesh == str(planned.plan.setting.mesh)
        assert all(f"{axis}=" not in (ours.mesh or "") for axis in LATER)


def test_ddp_keeps_everything_so_it_does_not_fit_where_zero_3_does() -> None:
    found = {row.runner: row for row in foretell(job(), EIGHT, ALL).rows}
    assert found["ddp"].status == "does not fit" and found["fsdp2"].status == "fits" and found["fsdp2"].zero == 3
    assert found["ddp"].why.startswith("needs at least ") and found["ddp"].why.endswith("however it is cut with dp and ZeRO 0, 1")
    assert found["fsdp2"].peak_bytes is not None and found["fsdp2"].peak_bytes <= 0.95 * EIGHT.device.memory
    # 8 billion parameters in 16 bits, gradients and three copies of optimizer state in 32, cut over 8 (REFERENCE B1)
    assert found["fsdp2"].kept_bytes == pytest.approx((2 + 4 + 12) * 8.03e9 / 8, rel=0.01)


def test_deepspeed_has_no_zero_2_beside_its_pipeline_nor_tp() -> None:
    peer = PEERS["deepspeed"]
    assert combines(peer).endswith("dp, pp and ZeRO 0, 1 beside pp") and not reaches(peer, PIPELINE_ZERO)
    kept = foretell(job(mesh="pp=2 dp=4", zero=3), EIGHT, ["stretto", "deepspeed"], {"mesh", "zero.stage"})
    ours, theirs = kept.rows
    assert ours.status == "fits" and ours.zero == 3
    assert theirs.status == "cannot" and theirs.why.startswith('no layout for mesh="pp=2 dp=4" zero=3 with ')
    assert theirs.lacks == ("a pipeline with ZeRO 2 or 3: stages 0 and 1 alone",)


def test_what_is_written_is_kept_for_all() -> None:
    found = foretell(job(mesh="dp=4 tp=2", zero=1, recompute="full"), EIGHT, ALL, {"mesh", "zero.stage", "recompute"})
    rows = {row.runner: row for row in found.rows}
    assert {name for name, row in rows.items() if row.status == "fits"} == {"stretto", "ray+stretto", "deepspeed", "megatron"}
    assert all((row.mesh, row.zero, row.recompute) == ("dp=4 tp=2", 1, "full") for row in rows.values() if row.status == "fits")


def test_fully_shard_that_keeps_parameters_for_the_step_is_what_torch_has_for_zero_2() -> None:
    row = foretell(job("gpt2-small", zero=2), EIGHT, ["fsdp2"], {"zero.stage"}).rows[0]
    assert (row.status, row.way) == ("fits", "fully_shard, parameters kept for the step")
    assert foretell(job("gpt2-small", zero=1), EIGHT, ["fsdp2"], {"zero.stage"}).rows[0].status == "cannot"


def test_the_verdict_names_the_fastest_the_equals_and_why_others_are_slower() -> None:
    found = foretell(job("llama3-70b"), Cluster.of("8x8 h100"), ["ddp", "accelerate", "megatron"])
    ddp, accelerate, megatron = found.rows
    assert found.said[0].startswith("Foretold for 8x8 h100 (64 devices): megatron would be fastest, ")
    assert accelerate.step_seconds is not None and megatron.step_seconds is not None
    times = accelerate.step_seconds / megatron.step_seconds
    assert times > 1.08 and any(
        f"accelerate would take {times:.2f} times as long: its best is mesh {accelerate.mesh}" in s for s in found.said
    )
    assert any(line.startswith("ddp does not fit: needs at least") for line in found.said)
    assert found.said[-1] == "For this job there: megatron."
    assert accelerate.ratio == 1.0  # to the first that fits


def test_frameworks_of_one_speed_are_told_apart_by_what_else_they_can() -> None:
    said = foretell(job(), Cluster.of("2x8 h100"), ["stretto", "fsdp2"]).said
    assert any(line.startswith("Within what a prediction can tell (8%): ") for line in said)
    assert any(line.startswith("- a model as it is: ") and "stretto yes" in line and "torch partly" in line for line in said)


def test_a_model_that_a_plan_cannot_know_is_refused_in_a_line() -> None:
    with pytest.raises(JobError, match="is built by its function, and a plan builds nothing"):
        foretell(job("tiny", model="python:mine:model"), EIGHT, ["stretto"])


def test_what_a_framework_holds_follows_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept for the step, gathered parameters lie there whole: two bytes of each more."""
    from stretto.adapters import foretold

    peer = PEERS["fsdp2"]
    peaks = []
    for way in peer.ways:
        monkeypatch.setattr(foretold, "PEERS", {"fsdp2": replace(peer, ways=(way,))})
        small = job("gpt2-small", mesh="dp=8", recompute="none", **{"batch.micro_size": 1, "compile": "none"})
        keep = {"mesh", "recompute", "batch.micro_size", "compile.mode"}
        row = foretold.foretell(small, EIGHT, ["fsdp2"], keep).rows[0]
        assert row.peak_bytes is not None
        peaks.append(row.peak_bytes)
    assert peaks[1] > peaks[0]
