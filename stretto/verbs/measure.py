"""`stretto measure`: how fast this machine computes and talks."""

from __future__ import annotations

import argparse
import sys

from stretto.verbs.words import Verb, print_json, stdout_kept_for


def _measure_options(parser: argparse.ArgumentParser) -> None:
    from stretto.launch.measuring import options

    options(parser)


def _measure(asked: argparse.Namespace) -> int:
    from stretto.launch.measuring import measure, ranks_of, table

    with stdout_kept_for(asked.json):
        found = measure(ranks_of(asked.ranks), asked.out, quick=asked.quick, tell=lambda line: print(line, file=sys.stderr, flush=True))
    if found is not None:
        print_json({**found.plain(), "file": str(asked.out)}) if asked.json else print(f"{table(found)}\n\nwritten to {asked.out}")
    return 0


MEASURE = Verb(
    "how fast this machine computes and talks, as a table and a file for plan",
    "stretto measure --out cluster.toml",
    _measure_options,
    _measure,
)
