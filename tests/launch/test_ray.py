"""Runs on Ray. What needs a cluster is marked: `make frameworks` installs Ray and runs it on two raylets of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import stretto
from stretto.cli import main
from stretto.job import Job
from stretto.launch.ray import Actors, RayRank, Spot, _Lines
from stretto.layout.mesh import Mesh

SMALL = {
    "model.blocks": 2, "model.hidden": 32, "model.heads": 2, "model.kv_heads": 1, "model.ffn": 48, "batch.size": 8, "batch.seq_len": 16,
    "steps": 10, "device": "cpu", "mesh": "dp=2", "zero": 2, "checkpoint.every": 5,
}  # fmt: skip


# ---- without a cluster ----


class Actor:
    """An actor whose methods answer at once."""

    def __init__(self, spot):
        self.spot = SimpleNamespace(remote=lambda: spot)
        self.listen = SimpleNamespace(remote=lambda: 4242)


FAKE = SimpleNamespace(get=lambda value: value)
SPOTS = (
    Spot("n1", "a", "10.0.0.1", ("3",)),
    Spot("n2", "b", "10.0.0.2", ("0",)),
    Spot("n1", "a", "10.0.0.1", ("1",)),
    Spot("n2", "b", "10.0.0.2", ("5",)),
)


def test_ranks_are_numbered_node_by_node_and_meet_at_rank_0():
    actors = [Actor(spot) for spot in SPOTS]
    seated, variables = Actors(Mesh.of(dp=2, tp=2), True, None, actors=actors)._seat(FAKE)
    assert seated == [actors[i] for i in (0, 2, 1, 3)]
    told = [(v["RANK"], v["LOCAL_RANK"], v["GROUP_RANK"]) for v in variables]
    assert told == [("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1")]
    assert {(v["MASTER_ADDR"], v["MASTER_PORT"], v["WORLD_SIZE"], v["LOCAL_WORLD_SIZE"], v["GROUP_WORLD_SIZE"]) for v in variables} == {
        ("10.0.0.1", "4242", "4", "2", "2")
    }


def test_a_rank_finds_its_gpu_by_its_number_on_the_node():
    """Ray gave the ranks of node 1 GPUs 3 and 1: the first must take 3."""
    _, variables = Actors(Mesh.of(dp=4), True, None, actors=[Actor(spot) for spot in SPOTS])._seat(FAKE)
    taken = [v["CUDA_VISIBLE_DEVICES"].split(",")[int(v["LOCAL_RANK"])] for v in variables]
    assert taken == ["3", "1", "0", "5"]
    _, on_cpus = Actors(Mesh.of(dp=4), False, None, actors=[Actor(spot) for spot in SPOTS])._seat(FAKE)
    assert all("CUDA_VISIBLE_DEVICES" not in v for v in on_cpus)


def streamed(function, *args, monkeypatch):
    """What a rank says that runs function(rank, *args)."""
    from stretto.launch.payload import pack

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return list(RayRank().run({"RANK": "0", "WORLD_SIZE": "2"}, os.getcwd(), pack(function, args, function)))


def test_what_a_rank_says_comes_in_order_and_ends_with_how_it_ended(monkeypatch):
    def work(here, x):
        here.emit({"kind": "step", "step": x})
        print("a line")
        here.emit({"kind": "note", "text": "more"})

    said = streamed(work, 3, monkeypatch=monkeypatch)
    assert said == [
        ("event", {"kind": "step", "step": 3}),
        ("line", "a line"),
        ("event", {"kind": "note", "text": "more"}),
        ("finished", None),
    ]


def test_the_error_of_a_rank_is_its_own_with_the_place_where_it_was(monkeypatch):
    def work(here):
        here.emit({"kind": "at", "step": 4, "action": "0B1"})
        raise ValueError("boom")

    ((kind, failure),) = streamed(work, monkeypatch=monkeypatch)
    assert kind == "failure" and (failure["type"], failure["error"], failure["step"], failure["action"]) == ("ValueError", "boom", 4, "0B1")


def test_half_a_line_waits_for_its_other_half():
    told = []
    lines = _Lines(told.append)
    for text in ("a", "b\nc\n", "", "d"):
        lines.write(text)
    assert told == ["ab", "c"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--on ray", "pip install 'stretto[ray]'"),
        ("--max-failures 2", "--max-failures is for --on ray"),
        ("--on ray --nodes 2", "--nodes is for"),
        ("--num-workers 2-4", "--num-workers is for --on ray"),
        ("--on ray --num-workers 4-2", "--num-workers 4-2 is not possible"),
        ("--on ray --cluster h100", "write --num-workers N-M too"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_2(words, named, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["train", "tiny", *words.split()]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and named in said.err


# ---- on a cluster of two raylets ----


@pytest.fixture(scope="module")
def cluster():
    """Two raylets with one CPU each, so that two ranks are on two nodes."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made.address
    made.shutdown()


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The losses of the run on this machine alone, over the transport that two nodes have."""
    trained = stretto.train(Job.load("tiny", **SMALL), tmp_path_factory.mktemp("local") / "run")
    return list(trained.losses)


def begin(folder, address, *words):
    keys = [f"{key}={value}" for key, value in SMALL.items()]
    command = [
        sys.executable,
        "-m",
        "stretto",
        "train",
        "tiny",
        *keys,
        "--on",
        "ray",
        "--address",
        address,
        "--out",
        "run",
        "--json",
        *words,
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(stretto.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def steps_of(folder):
    rows = folder / "run" / "metrics.jsonl"
    return [json.loads(line)["step"] for line in rows.read_text().splitlines()] if rows.exists() else []


def rank_processes():
    """Worker processes of Ray in which a rank runs, by their titles."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if line.read_bytes().startswith(b"ray::RayRank"):
                found.append(int(line.parent.name))
    return sorted(found)


@pytest.mark.frameworks
def test_two_raylets_have_the_losses_of_this_machine_to_the_last_bit(cluster, local, tmp_path):
    run = begin(tmp_path, cluster)
    out, err = run.communicate(timeout=200)
    assert run.returncode == 0, err
    told = json.loads(out)
    assert told["losses"] == local and told["status"] == "done" and "step 10/10" in err
    assert sorted(path.name for path in (tmp_path / "run" / "logs").iterdir()) == ["rank-00000.log", "rank-00001.log"]


@pytest.mark.frameworks
def test_a_worker_that_is_killed_is_started_again_from_the_newest_checkpoint_and_the_losses_are_the_same(cluster, local, tmp_path):
    run = begin(tmp_path, cluster, "--max-failures", "1", "comm.step_timeout=20")
    limit = time.monotonic() + 120
    while len(steps_of(tmp_path)) < 7:
        assert run.poll() is None and time.monotonic() < limit, run.communicate(timeout=5)
        time.sleep(0.01)
    os.kill(rank_processes()[-1], signal.SIGKILL)
    out, err = run.communicate(timeout=200)
    assert run.returncode == 0, err
    assert json.loads(out)["losses"] == local and steps_of(tmp_path) == list(range(1, 11))
    assert "its process died" in err and "all ranks are started again" in err and "going on from" in err


@pytest.mark.frameworks
def test_the_error_of_a_rank_is_shown_once_and_what_nobody_could_do_is_not_tried_again(cluster, tmp_path):
    (tmp_path / "own.py").write_text("def model():\n    raise ValueError('boom of mine')\n")
    for words, code, named in (
        (("model=python:own:model",), 1, "ValueError: boom of mine"),
        (("mesh=dp=8",), 2, 'mesh="dp=8" needs 8 times 1 CPUs on one node each'),
    ):
        run = begin(tmp_path, cluster, *words, *(f"{key}=auto" for key in SMALL if key.startswith("model.")))
        out, err = run.communicate(timeout=200)
        assert run.returncode == code and err.count(named) == 1, err


@pytest.mark.frameworks
def test_when_a_node_is_lost_the_run_goes_on_with_the_ranks_that_are_left_on_a_mesh_that_is_planned(local, tmp_path):
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        second = made.add_node(num_cpus=1)
        elastic = ("--num-workers", "1-2", "--cluster", "1x2 h100", "--max-failures", "1")
        run = begin(tmp_path, made.address, *elastic, "comm.step_timeout=20")
        limit = time.monotonic() + 120
        while len(steps_of(tmp_path)) < 7:
            assert run.poll() is None and time.monotonic() < limit, run.communicate(timeout=5)
            time.sleep(0.01)
        made.remove_node(second, allow_graceful=False)
        out, err = run.communicate(timeout=200)
    finally:
        made.shutdown()
    assert run.returncode == 0, err
    assert 'there is room for 1 ranks: mesh="dp=1"' in err and steps_of(tmp_path) == list(range(1, 11))
    assert json.loads(out)["losses"] == pytest.approx(local, rel=1e-5)


@pytest.mark.frameworks
def test_ctrl_c_ends_a_run_after_its_step_and_ranks_do_not_outlive_a_driver_that_is_killed(cluster, tmp_path):
    def two_more_steps(run):
        before, limit = len(steps_of(tmp_path)), time.monotonic() + 120
        while len(steps_of(tmp_path)) < before + 2:
            assert run.poll() is None and time.monotonic() < limit, run.communicate(timeout=5)
            time.sleep(0.01)

    run = begin(tmp_path, cluster, "steps=1000000", "checkpoint.every=0")
    two_more_steps(run)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    told = json.loads(out)
    assert run.returncode == 0 and told["status"] == "interrupted" and told["saved"].endswith(f"step-{told['steps']:08d}"), err
    run = begin(tmp_path, cluster, "--resume")
    two_more_steps(run)
    assert len(rank_processes()) == 2
    run.kill()
    run.communicate(timeout=10)
    limit = time.monotonic() + 30
    while rank_processes() and time.monotonic() < limit:
        time.sleep(0.1)
    assert rank_processes() == []
