"""Folders that megatron-core itself has written: the run goes on here with its losses. (`make frameworks` installs it.)"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from outside import mcore

from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.models import library

pytestmark = pytest.mark.frameworks
#: Their mesh, whether their optimizer is cut (DistributedOptimizer), precision, whether blocks are numbered; our mesh and ZeRO.
CASES = [
    ("tp=2", 0, "fp32", "stacked", "dp=2", 3),
    ("dp=2", 1, "bf16", "numbered", "tp=2", 1),
    ("pp=2", 0, "fp32", "stacked", "pp=2", 0),
    ("tp=2", 1, "bf16", "stacked", "dp=1", 0),
]


@pytest.mark.parametrize(("there", "cut", "precision", "blocks", "here", "zero"), CASES)
def test_a_run_of_megatron_goes_on_here_with_the_same_losses(there, cut, precision, blocks, here, zero, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(Path(mcore.__file__))]
    roots = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(roots)}
    keys = [str(tmp_path), there, str(cut), precision, blocks]
    run = subprocess.run([*command, *keys], env=environment, capture_output=True, text=True, timeout=200)
    losses = [float(line.split()[-1]) for line in run.stdout.splitlines() if line.startswith("loss ")]
    assert len(losses) == mcore.STEPS, run.stdout + run.stderr
    asked = mcore.job(here, zero=zero, precision=precision)

    def go_on(world):
        with Engine(library.load("tiny", seed=5, overrides=asked.model.sizes()), asked, world) as engine:
            engine.load(tmp_path / f"iter_{mcore.SAVED:07d}")
            return [engine.step(mcore.batch(step)).loss for step in range(mcore.SAVED, mcore.STEPS)]

    ranks = 1 if here == "dp=1" else 2
    assert run_threads(go_on, ranks)[0] == pytest.approx(losses[mcore.SAVED :], rel=2e-5 if precision == "fp32" else 5e-3)
