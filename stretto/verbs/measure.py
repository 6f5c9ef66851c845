"""`stretto measure`: how fast this machine computes and talks, and how long each part of a model takes on it."""

from __future__ import annotations

import argparse
import sys

from stretto.errors import JobError
from stretto.verbs.words import Verb, job_words, load, print_json, stdout_kept_for


def _measure_options(parser: argparse.ArgumentParser) -> None:
    from stretto.launch.measuring import options

    job_words(parser)
    options(parser)
    parser.add_argument("--parts", metavar="FILE", help="time the parts of JOB's model instead, for pipeline.measured=FILE")
    parser.add_argument("--blocks", type=int, metavar="N", help="with --parts: only N blocks of it, where one device cannot hold all")


def _measure(asked: argparse.Namespace) -> int:
    if asked.parts:
        return _measure_parts(asked)
    from stretto.launch.measuring import measure, ranks_of, table

    if asked.words:
        raise JobError(f"measure {asked.words[0]} would time the machine, which is the same for any job; leave it out, or add --parts FILE")
    with stdout_kept_for(asked.json):
        found = measure(ranks_of(asked.ranks), asked.out, quick=asked.quick, tell=lambda line: print(line, file=sys.stderr, flush=True))
    if found is not None:
        print_json({**found.plain(), "file": str(asked.out)}) if asked.json else print(f"{table(found)}\n\nwritten to {asked.out}")
    return 0


def _measure_parts(asked: argparse.Namespace) -> int:
    from pathlib import Path

    from stretto.launch.parts import measure_parts

    with stdout_kept_for(asked.json):
        plain, text = measure_parts(load(asked.words), Path(asked.parts), asked.blocks)
    print_json(plain) if asked.json else print(text)
    return 0


MEASURE = Verb(
    "how fast this machine computes and talks, as a table and a file for plan",
    "stretto measure --out cluster.toml",
    _measure_options,
    _measure,
)
