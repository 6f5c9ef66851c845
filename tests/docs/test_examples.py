"""Each example runs as its first lines say: plainly, and under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SECONDS = 120  # far more than they take, for a machine that is busy


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs_and_its_ranks_tell_once_that_it_learned(example: Path, tmp_path: Path) -> None:
    done = warm.run([str(example)], tmp_path, ENVIRONMENT, tmp_path / "told", SECONDS)
    assert done.returncode == 0 and done.stdout.count("it learned") == 1, done.stdout[-2000:] + done.stderr[-3000:]


def test_an_example_runs_under_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*torchrun, str(ROOT / "examples" / "quickstart.py")]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0 and done.stdout.count("it learned") == 1, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_says_how_it_is_run(example: Path) -> None:
    assert f"python examples/{example.name}" in example.read_text(encoding="utf-8").split('"""')[1]
