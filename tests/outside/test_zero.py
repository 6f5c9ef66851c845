"""Folders that DeepSpeed itself has written: the run goes on here with its losses. (`make frameworks` installs it.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from outside import zero

from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.job import Job

pytestmark = pytest.mark.frameworks
CASES = [
    ("1", ()),
    ("2", ()),
    ("2", ("round_robin_gradients=true", "bf16")),
    ("1", ("bf16",)),
    ("3", ()),
    ("3", ("sub_group_size=100",)),
]


@pytest.mark.parametrize(("stage", "keys"), CASES)
def test_a_run_of_deepspeed_goes_on_here_with_the_same_losses(stage, keys, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(Path(zero.__file__)), stage]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run([*command, str(tmp_path), *keys], env=environment, capture_output=True, text=True, timeout=200)
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("loss ")]
    assert len(losses) == zero.STEPS, run.stdout + run.stderr
    precision = "bf16" if "bf16" in keys else "fp32"
    options = {"optimizer.lr": 1e-2, "optimizer.betas": (0.9, 0.95), "optimizer.weight_decay": 0.1, "clip": 1.0}
    asked = Job.load(mesh="dp=2", zero=2, precision=precision, batch=zero.ROWS, schedule="constant", **options)

    def go_on(world):
        with Engine(zero.net(5), asked, world, forward=lambda model, b: model(b["input_ids"])) as engine:
            engine.load(tmp_path / f"global_step{zero.SAVED}")
            batches = [dict(zip(("input_ids", "shift_labels"), zero.batch(step), strict=True)) for step in range(zero.SAVED, zero.STEPS)]
            return [engine.step(batch).loss for batch in batches]

    assert run_threads(go_on, 2)[0] == pytest.approx(losses[zero.SAVED :], rel=2e-6 if precision == "fp32" else 5e-3)
