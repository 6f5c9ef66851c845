"""CASES C22: a rank of a real training run fails at step 3; and requests that only a rank can find wrong."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import warm

import stretto

WRONG = '''
"""A model and datasets that go wrong on rank 1 at step 3."""
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

HERE, RANK = Path(__file__).parent, int(os.environ["RANK"])
(HERE / f"pid-{RANK}").write_text(str(os.getpid()))


def now():
    (HERE / "failed").write_text(repr(time.time()))


class Model(nn.Module):
    def __init__(self, fail):
        super().__init__()
        self.embed = nn.Embedding(256, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 256)
        self.fail, self.forwards = fail, 0

    def forward(self, input_ids):
        self.forwards += self.training
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        if RANK == 1 and self.forwards == 3:
            self.fail()
        return self.head(x)


def shout():
    now()
    raise ValueError("the third batch is green")


def die():
    now()
    os.kill(os.getpid(), signal.SIGKILL)


def raising():
    return Model(shout)


def dying():
    return Model(die)


def sound():
    return Model(lambda: None)


class Rows:
    def __init__(self, twice=False):
        self.read, self.twice = 0, twice

    def __len__(self):
        return 1000

    def __getitem__(self, i):
        self.read += 1
        if RANK == 1 and self.read == 5 and not self.twice:  # two rows a step
            now()
            raise OSError("the disk is gone")
        ids = torch.arange(i, i + 9) % 256
        return {"input_ids": ids, "labels": ids} | ({"shift_labels": ids} if self.twice else {})


def unreadable():
    return Rows()


def labelled_twice():
    return Rows(twice=True)


class Stuck(Rows):
    def __getitem__(self, i):
        if RANK == 1 and self.read == 4:
            time.sleep(100)
        return super().__getitem__(i)


def stuck():
    return Stuck()
'''
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


class Ended(NamedTuple):
    """A command that is over: what it left, and how many seconds after the failure it was gone."""

    code: int
    out: str
    err: str
    after: float
    folder: Path


@pytest.fixture
def train(tmp_path):
    """`stretto train` on two ranks, with the module above beside it."""
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "text.txt").write_text("all is well. " * 200)
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**kept, "TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": str(Path(stretto.__file__).parents[1])}

    def run(*words, through=(), fresh=False):
        """fresh: by a `python` that is started for it, as torchrun is; else by one that has torch loaded."""
        usual = {"data": "text:text.txt", "mesh": "dp=2", "batch.size": "4", "batch.seq_len": "8", "steps": "60"}
        keys = [f"{name}={value}" for name, value in (usual | dict(word.split("=", 1) for word in words)).items()]
        command = [*through, "-m", "stretto", "train", *keys, "--out", "run", "--json"]
        if through or fresh:
            found = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        else:
            found = warm.run(command, tmp_path, environment, tmp_path / "told", 120)
        failed = tmp_path / "failed"
        after = time.time() - float(failed.read_text()) if failed.exists() else math.nan
        return Ended(found.returncode, found.stdout, found.stderr, after, tmp_path)

    return run


def nobody_left(folder):
    """Whether both ranks had started, and no process and no temporary file of theirs is there (torch makes a cache folder of its own)."""
    pids = [file.read_text() for file in folder.glob("pid-*")]
    kept = [file.name for file in (folder / "tmp").iterdir() if not file.name.startswith(("torchinductor_", "torchelastic_"))]
    return len(pids) == 2 and not any(alive(pid) for pid in pids) and not kept


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


FAILURES = {
    "forward": (["model=python:wrong:raising", "zero=3"], "action 0F0: ValueError: the third batch is green", "in shout"),
    "data": (
        ["model=python:wrong:sound", "data=python:wrong:unreadable"],
        "reading data: OSError: the disk is gone",
        "raise OSError",
    ),
    "death": (["model=python:wrong:dying"], "action 0F0: killed by signal 9 (SIGKILL), perhaps out of memory", "rank-00001.log"),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_c22_the_first_failure_ends_the_run_and_is_told_once(kind, train):
    words, error, line = FAILURES[kind]
    ended = train(*words, fresh=kind == "death")
    assert ended.code == 1 and ended.out == "" and ended.after < 10, ended.err
    assert nobody_left(ended.folder)
    assert ended.err.count("failed at step") == 1 and f"stretto: rank 1 failed at step 3, {error}" in ended.err, ended.err
    assert ended.err.count("Traceback") == (kind != "death") and line in ended.err
    assert "rank 0 failed" not in ended.err and "PeerLost" not in ended.err
    status = json.loads((ended.folder / "run" / "status.json").read_text())
    assert (status["status"], status["step"]) == ("failed", 2) and "rank 1 failed at step 3" in status["why"]
    assert (ended.folder / "run" / "report.html").exists()


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_rank_that_stands_still_is_named_with_the_line_where_it_is(transport, train):
    """PAINS 5: those who wait are not the ones to blame."""
    ended = train("model=python:wrong:sound", "data=python:wrong:stuck", "comm.step_timeout=2", f"comm.transport={transport}")
    assert ended.code == 1 and ended.out == "" and nobody_left(ended.folder), ended.err
    said = [line for line in ended.err.splitlines() if line.startswith("stretto: ")]
    assert len(said) == 1 and said[0].startswith("stretto: rank 1 failed at step 3, reading data: it stood still, and rank 0 waited"), said
    assert "in __getitem__" in ended.err and ended.err.count("Traceback") == 0


def test_c22_under_torchrun_too_the_first_failure_is_told_once(train):
    ended = train("model=python:wrong:raising", "zero=2", through=TORCHRUN)
    assert ended.code == 1 and nobody_left(ended.folder), ended.err
    told = [line for line in ended.err.splitlines() if line.startswith("stretto: ")]
    assert told == ["stretto: rank 1 failed at step 3, action 0F0: ValueError: the third batch is green"], ended.err


def test_a_mesh_of_more_ranks_than_torchrun_started_is_told_once_before_anything_is_written(train):
    ended = train("model=python:wrong:sound", "mesh=dp=2 tp=2", through=TORCHRUN)
    assert ended.code == 1  # the agent's own: ours was 2, as test_cli has it
    told = [line for line in ended.err.splitlines() if line.startswith("stretto: ")]
    assert len(told) == 1 and 'mesh="dp=2 tp=2" makes 4 ranks, and 2 started' in told[0], ended.err
    assert not (ended.folder / "run").exists()


def test_what_only_a_rank_finds_wrong_is_one_line_and_leaves_nothing(train):
    ended = train("model=python:wrong:sound", "data=python:wrong:labelled_twice")
    assert ended.code == 2 and ended.out == "" and "Traceback" not in ended.err, ended.err
    assert [line for line in ended.err.splitlines() if "shift_labels" in line] == ended.err.splitlines()[-1:], ended.err
    assert ended.err.splitlines()[-1].startswith("stretto: the batch has both labels and shift_labels")
    assert nobody_left(ended.folder) and not (ended.folder / "run").exists()
