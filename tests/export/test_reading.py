"""Nothing that a user asks for is passed over: each key changes what is written, or is listed as missing."""

import pytest

from stretto.errors import JobError
from stretto.export.catalog import EXPORTS, export, write
from stretto.export.reading import OURS, Reading, comments
from stretto.export.script import TAKEN
from stretto.job import Job
from stretto.launch.training import elsewhere

#: Every key, with another value than the one it has in BASE, and what must be true for that value to be possible.
CHANGED = {
    "mesh": "pp=2 dp=2 tp=2",
    "clip": 0.5,
    "recompute": "full",
    "seed": 7,
    "model.blocks": 3,
    "model.hidden": 64,
    "model.heads": 8,
    "model.kv_heads": 4,
    "model.ffn": 256,
    "model.head_dim": 16,
    "model.vocab": 512,
    "model.tied": True,
    "data.source": "topics",
    "data.seed": 3,
    "zero.stage": 3,
    "zero.gradients": "end",
    "zero.params": "step",
    "zero.granularity": "row",
    "zero.keep": ["layers.0.*"],
    "batch.size": 32,
    "batch.micro_size": 4,
    "batch.seq_len": 32,
    "pipeline.schedule": "interleaved",
    "pipeline.chunks": 3,
    "pipeline.split": ["layers.1"],
    "pipeline.balance": "memory",
    "precision.compute": "bf16",
    "precision.master": "bf16",
    "precision.reduce": "bf16",
    "precision.max_skips": 3,
    "precision.initial_scale": 1024.0,
    "precision.scale_window": 50,
    "optimizer.name": "sgd",
    "optimizer.lr": 1e-2,
    "optimizer.betas": [0.8, 0.9],
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.3,
    "optimizer.momentum": 0.9,
    "schedule.shape": "linear",
    "schedule.warmup": 3,
    "schedule.min_ratio": 0.3,
    "schedule.steps": 77,
    "compile.mode": "block",
    "compile.backend": "aot_eager",
    "tensor.sequence": False,
    "checkpoint.every": 5,
    "checkpoint.export": "huggingface",
    "eval.every": 5,
    "profile.steps": [3],
    "comm.step_timeout": 60.0,
    "comm.init_timeout": 60.0,
    "steps": 11,
}
#: What must hold as well for a key to mean anything.
WITH = {
    "pipeline.schedule": {"mesh": "pp=2 dp=2"},
    "pipeline.chunks": {"mesh": "pp=2 dp=2", "pipeline.schedule": "interleaved"},
    "pipeline.split": {"mesh": "pp=2 dp=2"},
    "pipeline.balance": {"mesh": "pp=2 dp=2"},
    "tensor.sequence": {"mesh": "dp=2 tp=2"},
    "zero.gradients": {"zero.stage": 3},
    "zero.params": {"zero.stage": 3},
    "zero.keep": {"zero.stage": 3},
    "precision.master": {"precision.compute": "bf16"},
    "precision.reduce": {"precision.compute": "bf16"},
    "precision.initial_scale": {"precision.compute": "fp16"},
    "precision.scale_window": {"precision.compute": "fp16"},
    "compile.backend": {"compile.mode": "block"},
    "optimizer.momentum": {"optimizer.name": "sgd"},
    "eval.every": {"data.split": 0.1, "data.source": "topics"},
    "schedule.warmup": {"schedule.shape": "cosine"},
    "schedule.min_ratio": {"schedule.shape": "cosine"},
    "schedule.steps": {"schedule.shape": "cosine"},
}
BASE = {"data.source": "random", "zero.stage": 2, "batch.size": 16, "batch.micro_size": 2, "schedule.shape": "constant", "steps": 10}


def exported(framework, **keys):
    return export(elsewhere(Job.load("tiny", **{"mesh": "dp=2", "device": "cpu", **BASE, **keys})), framework)


def told(made):
    """Everything that a framework's user sees, but the job itself."""
    return [file.text for file in made.files if file.name != "job.toml"], [(one.key, one.asked) for one in made.missing]


@pytest.mark.parametrize("framework", EXPORTS)
def test_every_key_that_is_changed_changes_what_is_written_or_is_listed(framework):
    by_script = {"batch.size", "batch.micro_size"} if framework == "fsdp2" else set()
    by_script |= {*TAKEN, *(key for key in CHANGED if key.startswith(("model.", "optimizer.", "schedule."))), "clip", "steps"}
    passed_over = []
    for key, value in CHANGED.items():
        if framework in ("deepspeed", "accelerate", "fsdp2") and key in by_script:
            continue  # train.py takes it from job.toml, as test_scripts sees
        before = told(exported(framework, **WITH.get(key, {})))
        if told(exported(framework, **{**WITH.get(key, {}), key: value})) == before:
            passed_over.append(key)
    # a momentum of SGD where there is no SGD: that it has none is listed already
    assert set(passed_over) <= ({"optimizer.momentum"} if framework == "torchtitan" else set())


def test_what_nobody_asked_for_is_listed_by_itself():
    reading = Reading(elsewhere(Job.load("tiny", clip=0.5, **{"log.every": 3})), "somebody")
    assert reading("zero.stage") == 1
    listed = {one.key: str(one) for one in reading.missing()}
    assert listed["clip"] == "clip=0.5: somebody has no counterpart" and "zero.stage" not in listed and not set(OURS) & set(listed)
    reading.lacks("clip", "is called otherwise")
    assert [str(one) for one in reading.missing() if one.key == "clip"] == ["clip=0.5: is called otherwise"]


def test_a_comment_lists_what_is_missing():
    reading = Reading(elsewhere(Job.load("30m", clip=0.5)), "somebody")
    text = comments("a job", reading.missing(), "run it")
    assert all(line.startswith("# ") for line in text.splitlines()) and "clip=0.5" in text and "# run: run it" in text


def test_files_are_written_once_and_what_a_user_changed_is_left_alone(tmp_path):
    made = exported("deepspeed")
    paths = write(made, tmp_path / "a" / "b")
    assert [path.name for path in paths] == ["ds_config.json", "train.py", "job.toml"] == [file.name for file in made.files]
    assert write(made, tmp_path / "a" / "b") == paths
    paths[1].write_text("my own\n")
    with pytest.raises(JobError, match="another train.py already"):
        write(made, tmp_path / "a" / "b")
    assert paths[1].read_text() == "my own\n" and paths[0].read_text() == made.files[0].text


def test_a_framework_that_is_none_is_refused_with_the_nearest():
    with pytest.raises(JobError, match="--to megatorn.*write --to megatron"):
        exported("megatorn")


def test_an_export_for_gpus_needs_none_here():
    assert "device" not in {one.key for one in exported("megatron", device="cuda", mesh="dp=64", **{"batch.size": 128}).missing}
    assert "device" in {one.key for one in exported("megatron").missing}
