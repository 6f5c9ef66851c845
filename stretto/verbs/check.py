"""`stretto check`: hold a job on its mesh against one process."""

from __future__ import annotations

import argparse

from stretto.errors import JobError
from stretto.verbs.words import Verb, job_words, load, print_json, stdout_kept_for


def _check_options(parser: argparse.ArgumentParser) -> None:
    job_words(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps that are compared (default 3)")
    parser.add_argument("--blocks", type=int, metavar="N", help="shorten the model to N blocks, where one rank cannot hold it")
    parser.add_argument("--dtype", choices=("fp64", "job"), default="fp64", help="fp64 (default) or the job's own")
    parser.add_argument("--inject", metavar="FAULT@NAME", help="break it on purpose: the check must fail and name the tensor")


def _check(asked: argparse.Namespace) -> int:
    for name in ("steps", "blocks"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise JobError(f"--{name} {value} is not possible; write --{name} 1 or more")
    from stretto.errors import CheckFailed
    from stretto.launch.checking import failed_line, run_check, table

    job = load(asked.words)
    with stdout_kept_for(asked.json):
        findings = run_check(None, job, dtype=asked.dtype, steps=asked.steps, inject=asked.inject, blocks=asked.blocks)
    if findings is None:
        return 0
    print_json(findings) if asked.json else print(table(findings, job.name))
    if not findings["ok"]:
        raise CheckFailed(failed_line(findings))
    return 0


CHECK = Verb(
    "hold the job on its mesh against one process, tensor by tensor", "stretto check tiny mesh='dp=2' zero=3", _check_options, _check
)
