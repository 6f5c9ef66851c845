"""What `stretto rehearse` prints, for programs and for people."""

from __future__ import annotations

import json

import pytest

from stretto.cli import main
from stretto.errors import JobError
from stretto.job import Job
from stretto.launch.rehearsing import ranks_of, resolved
from stretto.layout.mesh import Mesh

WORDS = ["tiny", "mesh=pp=2 dp=2 tp=2", "model.blocks=2", "batch.micro_size=1", "batch.size=8"]


def test_of_a_pipeline_the_first_a_middle_and_the_last_rank_are_rehearsed() -> None:
    assert ranks_of(Mesh.of(pp=16, dp=128, tp=8), None) == [0, 8192, 15360]
    assert ranks_of(Mesh.of(pp=2, dp=2), None) == [0, 2] and ranks_of(Mesh.of(dp=8), None) == [0]
    assert ranks_of(Mesh.of(dp=8), "7, 3,7") == [7, 3]


@pytest.mark.parametrize("asked", ["8", "x", "-1", ""])
def test_a_rank_that_is_not_there_is_refused_with_those_that_are(asked: str) -> None:
    with pytest.raises(JobError, match="has ranks 0 to 7"):
        ranks_of(Mesh.of(dp=8), asked)


def test_gpus_are_rehearsed_where_there_are_none() -> None:
    job = resolved(Job.load("tiny", mesh="dp=4", device="cuda"))
    assert (job.device, job.precision.compute, job.precision.master) == ("cuda", "bf16", "fp32")


def test_a_pipeline_that_cannot_be_is_refused_before_torch_is_loaded() -> None:
    with pytest.raises(JobError, match="more than the 8 blocks"):
        resolved(Job.load("tiny", mesh="pp=9", **{"batch.size": 9}))


def test_json_holds_what_was_promised(capsys) -> None:
    assert main(["rehearse", *WORDS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"world_size", "rank", "peak_bytes", "bytes", "ledger", "seconds"} <= set(found)
    assert (found["world_size"], found["rank"], [one["rank"] for one in found["ranks"]]) == (8, 0, [0, 4])
    assert sum(found["bytes"].values()) == found["peak_bytes"]
    assert set(found["bytes"]) == {"parameters", "gradients", "optimizer", "buffers", "activations", "working"}
    for entry in found["ledger"]:
        assert {"collective", "axes", "calls", "bytes", "reason"} <= set(entry)
        assert entry["bytes"] % (entry["calls"] * entry["elements"]) == 0
    assert {"all_reduce", "all_gather", "reduce_scatter", "send"} == {entry["collective"] for entry in found["ledger"]}


def test_on_gpus_the_same_is_counted_in_16_bits(capsys) -> None:
    assert main(["rehearse", *WORDS, "device=cuda", "--rank", "7"]) == 0
    out = capsys.readouterr().out
    assert "8 ranks in bf16, as on cuda" in out and "rank 7" in out and "peak" in out
