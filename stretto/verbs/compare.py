"""`stretto compare`: one job on other frameworks."""

from __future__ import annotations

import argparse
import sys

from stretto.verbs.words import Verb, job_words, load, print_json, split, stdout_kept_for


def _compare_options(parser: argparse.ArgumentParser) -> None:
    from stretto.launch.comparing import options

    job_words(parser)
    options(parser)


def _compare(asked: argparse.Namespace) -> int:
    from stretto.job import parse_overrides
    from stretto.launch.comparing import compare, table
    from stretto.plan.asking import names_of, read_cluster

    names = [name.strip() for name in asked.runners.split(",") if name.strip()]
    with stdout_kept_for(asked.json):
        found = compare(
            load(asked.words),
            names,
            rounds=asked.rounds,
            until=asked.until,
            limit=asked.limit,
            minutes=asked.minutes,
            out=asked.out,
            cluster=read_cluster(asked.cluster) if asked.cluster is not None else None,
            keep=names_of(parse_overrides(split(asked.words)[1])),
            tell=lambda line: print(line, file=sys.stderr, flush=True),
        )
    print_json(found.plain()) if asked.json else print(table(found))
    return 1 if found.stopped else 0


COMPARE = Verb(
    "one job on other frameworks, same weights and batches", "stretto compare 30m --runners stretto,ddp,fsdp2", _compare_options, _compare
)
