"""stretto under torchrun on two machines: the losses are those of one, and a machine that is cut off is named by those that are left."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import warm
from hosts import Hosts, two_hosts

import stretto
from stretto.job import Job

SMALL = {
    "model.blocks": 2, "model.hidden": 32, "model.heads": 2, "model.kv_heads": 1, "model.ffn": 48, "batch.size": 8, "batch.seq_len": 16,
    "steps": 6, "device": "cpu",
}  # fmt: skip
MESHES = [
    (1, {"mesh": "dp=2", "zero": 2}),
    pytest.param(2, {"mesh": "dp=4", "zero": 2}, marks=pytest.mark.grid),
    pytest.param(2, {"mesh": "pp=2 dp=2", "batch.micro_size": 2}, marks=pytest.mark.grid),
]


def run(hosts: Hosts, ranks: int, folder: Path, **keys):
    """Two nodes of some ranks each; the first node's run folder is folder/run."""
    port = hosts.free_port()
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GLOO_SOCKET_IFNAME")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(stretto.__file__).parents[1])}
    words = [f"{key}={json.dumps(value) if isinstance(value, bool) else value}" for key, value in {**SMALL, **keys}.items()]
    train = ["-m", "stretto", "train", "tiny", *words, "--out", "run", "--json"]
    meet = ["--nnodes", "2", "--nproc-per-node", str(ranks), "--master-addr", hosts.address, "--master-port", str(port)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *meet]
    return [hosts.start(node, [*torchrun, "--node-rank", str(node), *train], environment, cwd=folder) for node in (0, 1)]


@pytest.mark.parametrize(("ranks", "keys"), MESHES)
def test_two_nodes_have_the_losses_of_one(ranks, keys, tmp_path):
    with two_hosts() as hosts:
        nodes = run(hosts, ranks, tmp_path, **keys)
        said = [node.communicate(timeout=120) for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], said
    there = json.loads(said[0][0])
    (tmp_path / "job.toml").write_text(Job.load("tiny", **{**SMALL, **keys, "comm.transport": "gloo"}).to_toml())
    words = ["-m", "stretto", "train", "job.toml", "--out", "here", "--json"]
    here = warm.run(words, tmp_path, {**os.environ, "PYTHONPATH": str(Path(stretto.__file__).parents[1])}, tmp_path / "told", 120)
    assert here.returncode == 0 and there["losses"] == json.loads(here.stdout)["losses"], here.stderr
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert not hosts.separate or environment["host"] == "left"


def test_when_the_link_is_cut_each_side_names_the_node_that_it_has_lost_and_ends(tmp_path):
    with two_hosts() as hosts:
        nodes = run(hosts, 2, tmp_path, mesh="dp=4", zero=2, steps=1000000, **{"comm.step_timeout": 5})
        rows = tmp_path / "run" / "metrics.jsonl"
        limit = time.monotonic() + 120
        while not rows.exists() or len(rows.read_text().splitlines()) < 5:
            assert time.monotonic() < limit and nodes[0].poll() is None, nodes[0].communicate(timeout=5)
            time.sleep(0.05)
        hosts.cut()
        out, err = nodes[0].communicate(timeout=60)
        hosts.thaw()
        other_out, other_err = nodes[1].communicate(timeout=60)
    left, right = hosts.names()
    assert nodes[0].returncode != 0 and f"node 1 ({right}: ranks 2 to 3)" in err, err
    assert nodes[1].returncode != 0 and f"node 0 ({left}: ranks 0 to 1)" in other_err, other_err
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["status"] == "failed" and "node 1" in status["why"]
