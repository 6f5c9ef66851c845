"""The scripts that are written run as they are, and train the job: their losses are those of stretto."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from exported import SMALL, losses_of

import stretto
from stretto.export.catalog import EXPORTS, export, write
from stretto.job import Job
from stretto.launch.training import elsewhere

SCRIPTS = [(name, stage) for name in EXPORTS for stage in range(4) if name in ("deepspeed", "fsdp2", "accelerate")]


@pytest.mark.parametrize(("framework", "stage"), SCRIPTS)
def test_a_script_names_only_what_there_is(framework, stage):
    """Every name it imports of stretto exists, and every name that it uses is made somewhere in it."""
    made = export(elsewhere(Job.load("tiny", zero=stage, **SMALL)), framework)
    (text,) = (file.text for file in made.files if file.name == "train.py")
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("stretto"):
            module = __import__(node.module, fromlist=[alias.name for alias in node.names])
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
    # what pyflakes would say: unused and undefined names
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", "-"], input=text, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout


def test_the_script_for_fsdp2_has_the_losses_of_stretto(tmp_path):
    """Two microbatches, warm-up, clipping; stage 3."""
    job = Job.load("tiny", zero=3, **SMALL)
    write(export(elsewhere(job), "fsdp2"), tmp_path / "fsdp2")
    theirs = losses_of(tmp_path / "fsdp2", "train.py")
    environment = {**os.environ, "PYTHONPATH": str(Path(stretto.__file__).parents[1])}
    (tmp_path / "job.toml").write_text(job.to_toml())
    ours = warm.run(["-m", "stretto", "train", "job.toml", "--out", "ours", "--json"], tmp_path, environment, tmp_path / "told", 100)
    assert ours.returncode == 0 and len(theirs) == 4, ours.stderr
    assert theirs == pytest.approx(json.loads(ours.stdout)["losses"], rel=1e-5)


def test_the_command_writes_files_that_are_named_and_says_what_is_missing(tmp_path):
    command = [sys.executable, "-m", "stretto", "export", "30m", "--to", "megatron", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(stretto.__file__).parents[1])}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    told = json.loads(run.stdout)
    assert told["files"] == ["exports/30m-megatron/megatron.args"] and "--num-layers 8" in (tmp_path / told["files"][0]).read_text()
    assert {"key", "asked", "why"} == set(told["missing"][0]) and "pretrain_gpt.py" in told["run"]
    shown = subprocess.run([*command[:-1], "--out", "here"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert shown.stdout == (tmp_path / "here" / "megatron.args").read_text() and "what has no counterpart:" in shown.stderr
