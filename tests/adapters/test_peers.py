"""Frameworks that are installed apart train what stretto trains, from the same values and batches (make frameworks)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stretto.adapters.catalog import RUNNERS
from stretto.job import Job
from stretto.launch.comparing import compare

SMALL: Mapping[str, Any] = {
    "model": {"name": "tiny", "blocks": 2, "hidden": 64, "ffn": 96},
    "batch": {"size": 8, "seq_len": 16},
    "data": "random",
    "schedule": {"shape": "linear", "warmup": 1},
    "steps": 4,
    "clip": 0.3,
    "device": "cpu",
}
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "deepspeed 0": ("deepspeed", {"mesh": "dp=2", "zero": 0}),
    "deepspeed 2": ("deepspeed", {"mesh": "dp=2", "zero": 2, "batch.micro_size": 2}),
    "deepspeed 3": ("deepspeed", {"mesh": "dp=2", "zero": 3, "clip": 0}),
    "megatron dp": ("megatron", {"mesh": "dp=2", "batch.micro_size": 2}),
    "megatron tp": ("megatron", {"mesh": "tp=2"}),
    "megatron pp": ("megatron", {"mesh": "pp=2", "batch.micro_size": 2, "recompute": "full"}),
    "megatron gelu": (
        "megatron",
        {"mesh": "tp=2", "model": {"name": "30m", "blocks": 2, "hidden": 64, "heads": 2, "ffn": 96, "vocab": 256}},
    ),
    "megatron tied": (
        "megatron",
        {"mesh": "tp=2", "model": {"name": "gpt2-small", "blocks": 2, "hidden": 64, "heads": 2, "ffn": 96, "vocab": 256}},
    ),
    "ray": ("ray", {"mesh": "dp=2"}),
    "ray+stretto": ("ray+stretto", {"mesh": "tp=2"}),
}


@pytest.mark.frameworks
@pytest.mark.parametrize("case", CASES)
def test_a_framework_trains_what_stretto_trains(case: str, tmp_path: Path) -> None:
    runner, keys = CASES[case]
    job = Job.load(
        {**SMALL, **{key: value for key, value in keys.items() if key == "model"}}, **{k: v for k, v in keys.items() if k != "model"}
    )
    found = compare(job, ["stretto", runner], rounds=1, until=None, limit=200, out=tmp_path / "found", tell=print)
    ours, theirs = found.rows
    assert (ours.status, theirs.status) == ("ok", "ok"), theirs.why
    assert theirs.losses == pytest.approx(ours.losses, abs=2e-5)
    assert ours.losses[-1] < ours.losses[0]
    if job.clip and theirs.grad_norms[0] is not None:
        assert theirs.grad_norms == pytest.approx(ours.grad_norms, rel=1e-3)


#: The benchmark's decoder, made small: what each line of frameworks must train alike.
THIRTY: Mapping[str, Any] = {"name": "30m", "blocks": 2, "hidden": 64, "heads": 2, "kv_heads": 2, "ffn": 96, "vocab": 256}
LINES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dp": ("stretto,ddp,fsdp2,deepspeed,megatron,accelerate,ray", {"mesh": "dp=2"}),
    "zero 3": ("stretto,ddp,fsdp2,deepspeed,megatron,accelerate,ray", {"mesh": "dp=2", "zero": 3}),
    "tp": ("stretto,fsdp2,megatron", {"mesh": "tp=2"}),
    "pp": ("stretto,fsdp2,megatron", {"mesh": "pp=2", "batch.micro_size": 2}),
}


@pytest.mark.frameworks
@pytest.mark.parametrize("line", LINES)
def test_frameworks_side_by_side_have_the_same_loss_to_five_digits_at_every_step(line: str, tmp_path: Path) -> None:
    runners, keys = LINES[line]
    job = Job.load({**SMALL, "model": dict(THIRTY), "steps": 8, "clip": 0}, **keys)
    found = compare(job, runners.split(","), rounds=1, until=None, limit=200, out=tmp_path / "found", tell=print)
    assert {row.runner: row.why for row in found.rows if row.status != "ok"} == {}
    for row in found.rows:
        assert row.losses == pytest.approx(found.rows[0].losses, abs=5e-6 * found.rows[0].losses[0]), row.runner
        assert len(row.losses) == 8 and row.apart_at is None


@pytest.mark.frameworks
def test_a_folder_of_hugging_face_in_bf16_is_trained_alike_and_what_cannot_says_why(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=64).save_pretrained(tmp_path / "model")
    keys = {"model": f"hf:{tmp_path}/model", "mesh": "dp=2", "zero": 3, "precision": "bf16", "clip": 0.5, "recompute": "full"}
    job = Job.load({key: value for key, value in SMALL.items() if key != "model"}, **keys)
    names = ["stretto", "ddp", "fsdp2", "deepspeed", "accelerate", "ray", "megatron"]
    found = {row.runner: row for row in compare(job, names, rounds=1, until=None, limit=200, out=tmp_path / "found", tell=print).rows}
    assert (found["megatron"].status, found["megatron"].log) == ("cannot", None)
    assert {name: row.why for name, row in found.items() if row.status != "ok"}.keys() == {"megatron"}
    for row in found.values():
        if row.status == "ok":
            assert row.losses == pytest.approx(found["stretto"].losses, abs=2e-2) and row.losses[-1] < row.losses[0]


@pytest.mark.parametrize("name", ["deepspeed", "megatron", "ray", "accelerate"])
def test_one_that_is_not_installed_is_a_row_with_the_command_that_installs_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import stretto.adapters.ability as ability
    from stretto.launch.comparing import _base

    def absent(package: str) -> str:
        raise ability.PackageNotFoundError(package)

    monkeypatch.setattr(ability, "version", absent)
    row = _base(RUNNERS[name], Job.load("tiny").resolve(2, "cpu", 0))
    assert (row.status, row.why) == ("not installed", f"{RUNNERS[name].package} is not installed; pip install 'stretto[{name}]'")


def test_deepspeed_is_told_not_to_clip_where_the_job_does_not() -> None:
    """Left out, gradient_clipping is 1.0 there."""
    from stretto.adapters.deepspeed import configuration

    job = Job.load("tiny", mesh="dp=2", clip=0, zero=2, **{"batch.micro_size": 3}).resolve(2, "cpu", 0)
    said = configuration(job)
    assert said["gradient_clipping"] == 0 and said["zero_optimization"] == {"stage": 2}
    assert said["train_batch_size"] == 12 == said["train_micro_batch_size_per_gpu"] * said["gradient_accumulation_steps"] * 2
