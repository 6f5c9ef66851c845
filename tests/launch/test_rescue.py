"""A rank of a run is killed between two checkpoints: the run goes on from its last step, which another rank's memory had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stretto

MORTAL = '''
"""A model of which one rank dies in the sixth step, once."""
import os
import signal
from pathlib import Path

import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.forwards = nn.Embedding(256, 8), nn.Linear(8, 256), 0

    def forward(self, input_ids):
        self.forwards += self.training
        mark = Path(__file__).parent / "died"
        if self.forwards == 6 and os.environ["RANK"] == os.environ["DIES"] and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.head(self.embed(input_ids))


def mortal():
    return Model()
'''
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
KEYS = ("model=python:mortal:mortal", "data=text:text.txt", "mesh=dp=2", "zero=2", "batch.size=4", "batch.seq_len=8", "steps=9")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("rescue")
    (made / "mortal.py").write_text(MORTAL)
    (made / "text.txt").write_text("all is well that ends well. " * 200)
    return made


@pytest.fixture(scope="module")
def train(folder):
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**kept, "PYTHONPATH": str(Path(stretto.__file__).parents[1]), "GLOO_SOCKET_IFNAME": "lo"}

    def run(*words, out, dies="", through=()):
        (folder / "died").unlink(missing_ok=True)
        command = [sys.executable, *through, "-m", "stretto", "train", *words, "--out", out, "--json"]
        return subprocess.run(command, cwd=folder, env={**environment, "DIES": dies}, capture_output=True, text=True, timeout=120)

    return run


def losses(folder):
    return {row["step"]: row["loss"] for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())}


@pytest.fixture(scope="module")
def whole(train, folder):
    """Losses of a run in which nobody died."""
    ended = train(*KEYS, out="whole")
    assert ended.returncode == 0, ended.stderr
    return losses(folder / "whole")


def test_the_run_goes_on_from_the_step_that_memory_had_though_the_rank_that_keeps_the_store_is_gone(train, folder, whole):
    lost = train(*KEYS, "checkpoint.memory=1", out="run", dies="0")
    assert lost.returncode == 1 and "rank 0 failed at step 6, action 0F0: killed by signal 9" in lost.stderr, lost.stderr
    (saved,) = os.listdir(folder / "run/checkpoints")
    assert saved in ("step-00000005", "step-00000004")  # of the fifth not all may have been kept
    again = train("--resume", out="run")
    assert again.returncode == 0 and f"going on from run/checkpoints/{saved}" in again.stderr, again.stderr
    assert losses(folder / "run") == whole


def test_torchrun_starts_the_ranks_again_and_they_go_on_from_there_by_themselves(train, folder, whole):
    ended = train(*KEYS, "checkpoint.memory=1", "--resume=auto", out="torchrun", dies="1", through=TORCHRUN)
    assert ended.returncode == 0 and "is saved in torchrun/checkpoints/step-0000000" in ended.stderr, ended.stderr
    assert "going on from torchrun/checkpoints/step-0000000" in ended.stderr and losses(folder / "torchrun") == whole
