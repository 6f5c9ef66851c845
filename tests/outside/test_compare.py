"""The script that stands outside the package, run as a user would run it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("compare.py")
SECONDS = 120


def test_engine_under_torchrun_gives_the_losses_and_parameters_of_a_plain_loop() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parents[2]), os.environ.get("PYTHONPATH", "")]),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        told, _ = run.communicate(timeout=SECONDS)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)  # torchrun and its ranks
            run.wait()
    assert run.returncode == 0, told
    error = re.search(r"maximal relative error: (\S+)", told)
    assert error is not None, told
    assert float(error[1]) <= 1e-10, told
