"""Batch scripts, with stand-ins for sbatch and srun: what they are given is what the real ones would be."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import warm

import stretto
from stretto.cli import main

SMALL = ("model.blocks=1", "batch.seq_len=16", "steps=3", "checkpoint.every=2", "device=cpu")
SRUN = """#!{python}
import os, subprocess, sys
command = [word for word in sys.argv[1:] if not word.startswith("--kill")]
tasks = int(os.environ["SLURM_NTASKS"])
ranks = [subprocess.Popen(command, env={{**os.environ, "SLURM_PROCID": str(n), "SLURM_LOCALID": str(n), "SLURM_STEP_ID": "0",
         "SLURM_STEP_NODELIST": "127.0.0.1"}}) for n in range(tasks)]
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a program of that name first in PATH."""

    def put(name, text):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod((folder / name).stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    monkeypatch.chdir(tmp_path)
    return put


def directives(text):
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(\S*)", text, re.MULTILINE))


def test_the_script_asks_for_the_ranks_of_the_mesh_and_hands_the_words_on(capsys):
    assert (
        main(
            ["train", "tiny", "mesh=dp=2 tp=2", "steps=7", "--on", "slurm", "--print", "--nodes", "2", "--sbatch=--time=2:00:00 --qos=low"]
        )
        == 0
    )
    text = capsys.readouterr().out
    asked = directives(text)
    assert (asked["nodes"], asked["ntasks-per-node"], asked["time"], asked["qos"]) == ("2", "2", "2:00:00", "low")
    assert "gpus-per-node" not in asked and asked["signal"].startswith("USR1@")
    (srun,) = re.findall(r"^srun .*", text, re.MULTILINE)
    assert "train tiny 'mesh=dp=2 tp=2' steps=7" in srun and '"runs/tiny-$SLURM_JOB_ID" --resume=auto' in srun
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_ranks_on_gpus_ask_for_one_each(capsys):
    assert main(["train", "llama3-8b", "device=cuda", "--on", "slurm", "--print", "--nodes", "2", "--out", "my run"]) == 0
    text = capsys.readouterr().out
    assert directives(text)["gpus-per-node"] == "4" and "--out 'my run' --resume=auto" in text


def test_the_script_goes_on_with_its_run_on_the_ranks_that_srun_starts(program, tmp_path, capsys, monkeypatch):
    """As a job does that is requeued: what is there is of the same command, two steps long."""
    main(["train", "tiny", *SMALL, "mesh=dp=2", "--on", "slurm", "--print"])
    text = capsys.readouterr().out
    program("srun", SRUN.format(python=sys.executable))
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    environment = {**kept, "PYTHONPATH": str(Path(stretto.__file__).parents[1])}
    out = f"runs/tiny-{os.getpid()}"
    words = ["-m", "stretto", "train", "tiny", *SMALL, "mesh=dp=2", "--out", out, "--until", "2"]
    first = warm.run(words, tmp_path, environment, tmp_path / "told", 120)
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "127.0.0.1"}
    again = subprocess.run(["bash"], input=text, env=environment | slurm, capture_output=True, text=True, timeout=120)
    assert first.returncode == again.returncode == 0, first.stderr + again.stderr
    rows = (tmp_path / out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3] and "going on from" in again.stderr


def test_sbatch_gets_the_script_and_its_number_comes_back(program, tmp_path, capsys):
    program("sbatch", '#!/bin/sh\ncat > got.sh\necho "$@" > options\necho "4711;cluster"\n')
    assert main(["train", "tiny", "--on", "slurm", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["submitted"] == "4711" and told["script"] == (tmp_path / "got.sh").read_text()
    assert (tmp_path / "options").read_text() == "--parsable\n"


def test_what_sbatch_says_against_it_is_told(program, capsys):
    program("sbatch", '#!/bin/sh\necho "invalid partition: x" >&2\nexit 1\n')
    assert main(["train", "tiny", "--on", "slurm"]) == 1
    assert capsys.readouterr().err == "stretto: sbatch refused the job: invalid partition: x\n"


REFUSED = {
    "--on slurm": "there is no sbatch here",
    "--on slrum": "write --on slurm",
    "--print": "--print is for --on slurm or --on kubernetes",
    "--nodes 2": "--nodes is for --on slurm",
    "--on slurm --image x": "--image is for --on kubernetes",
    "--on slurm --print --nodes 3": "--nodes in {1, 2}",
    "--on slurm --print data=text:nowhere": "nowhere",
    "--on slurm --print zero=9": "zero",
    "--on kubernetes": "write --print",
    "--on kubernetes --print": "write --image NAME",
    "--on kubernetes --print --image x --out y": "leave --out out",
    "--on kubernetes --print --image x --kind jobsset": "write --kind jobset",
}


@pytest.mark.parametrize(("words", "named"), REFUSED.items())
def test_a_wrong_request_is_one_line_and_exit_2(words, named, capsys, monkeypatch):
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    assert main(["train", "tiny", *words.split()]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and named in said.err, said.err
