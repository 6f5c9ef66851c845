"""Why a framework cannot run a job is known before its ranks start, without importing it, in one line that says what to write."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from stretto.adapters.catalog import RUNNERS, chosen
from stretto.errors import JobError
from stretto.job import Job


def resolved(**keys: Any) -> Job:
    from math import prod
    from re import findall

    ranks = prod(map(int, findall(r"=(\d+)", keys.get("mesh", ""))))
    return Job.load("tiny", **{"mesh": f"dp={ranks}", **keys}).resolve(ranks, "cpu", 0)


REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "ddp tp": ({"mesh": "tp=2"}, 'mesh="tp=2": ddp has no tp, but dp, dp_replicate; write mesh="dp=2"'),
    "fsdp2 both": ({"mesh": "pp=2 tp=2", "batch.micro_size": 6}, "fsdp2 runs pp or tp here, not both"),
    "fsdp2 schedule": ({"mesh": "pp=2", "pipeline": "zb-h1", "batch.micro_size": 6}, 'pipeline="zb-h1": fsdp2 has 1f1b, gpipe'),
    "fsdp2 tied": ({"mesh": "pp=2", "model": "gpt2-small", "batch.micro_size": 6}, "gpt2-small ties its head to its embedding"),
    "fsdp2 uneven": ({"mesh": "pp=2", "batch.size": 11, "batch.micro_size": 4}, "11 rows in 3 microbatches are of different sizes"),
    "deepspeed tp": ({"mesh": "tp=2"}, 'mesh="tp=2": deepspeed has no tp, but dp; write mesh="dp=2"'),
    "megatron heads": (
        {"mesh": "tp=4", "model.kv_heads": 2},
        "mesh.tp=4: megatron cuts kv_heads=2 of tiny evenly; write a tp that divides it",
    ),
    "megatron blocks": ({"mesh": "pp=3", "batch.micro_size": 6}, "mesh.pp=3: megatron shares the 8 blocks of tiny evenly"),
    "megatron model": ({"mesh": "dp=2", "model": "python:mine:model"}, "megatron builds the model itself"),
    "accelerate pp": ({"mesh": "pp=2", "batch.micro_size": 6}, "accelerate has no pp, but dp"),
    "ray tp": ({"mesh": "tp=2"}, 'ray has no tp, but dp; write mesh="dp=2"'),
    "ddp fp16": ({"mesh": "dp=2", "precision": "fp16"}, 'precision="fp16" with master="fp32": ddp is run here in fp32, bf16 or fp64'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_framework_cannot_do_is_refused_in_a_line_that_says_what_to_write(case: str) -> None:
    keys, says = REFUSED[case]
    refusal = RUNNERS[case.split()[0]].refusal(resolved(**keys))
    assert says in refusal and "\n" not in refusal
    assert RUNNERS["stretto"].refusal(resolved(**keys)) == ""


def test_what_runs_otherwise_than_asked_is_noted() -> None:
    assert RUNNERS["ddp"].notes(resolved(mesh="dp=2", zero=3)) == (
        "zero=3 has no counterpart: keeps all parameters, gradients and optimizer state on every rank",
    )
    assert RUNNERS["ddp"].notes(resolved(mesh="dp=2", zero=0)) == () == RUNNERS["stretto"].notes(resolved(mesh="dp=2", zero=3))
    assert RUNNERS["fsdp2"].notes(resolved(mesh="pp=2", **{"batch.micro_size": 6})) == ("pipeline 1f1b is its Schedule1F1B",)


def test_an_unknown_runner_is_named_with_the_nearest() -> None:
    assert [can.name for can in chosen(["ddp", "stretto", "ddp"])] == ["ddp", "stretto"]
    with pytest.raises(JobError, match=r"'fsdp3': no such runner; there are stretto, ddp, .*; write --runners fsdp2"):
        chosen(["stretto", "fsdp3"])


def test_the_catalog_loads_neither_torch_nor_a_framework() -> None:
    blocked = "import sys; [sys.modules.update({name: None}) for name in ('torch', 'deepspeed', 'megatron', 'accelerate', 'ray')]"
    code = f"{blocked}; import stretto.adapters.catalog, stretto.adapters.summary, stretto.adapters.verdict, stretto.launch.comparing"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stderr == ""
