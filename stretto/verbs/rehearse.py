"""`stretto rehearse`: the real step without hardware, peers or values, at any number of ranks."""

from __future__ import annotations

import argparse

from stretto.verbs.words import Verb, job_words, load, print_json, stdout_kept_for


def _rehearse_options(parser: argparse.ArgumentParser) -> None:
    job_words(parser)
    parser.add_argument(
        "--rank", metavar="N[,N...]", help="which ranks (default: of the first pipeline the first, a middle and the last one)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")


def _rehearse(asked: argparse.Namespace) -> int:
    from stretto.launch.rehearsing import run_rehearsal, table

    job = load(asked.words)
    with stdout_kept_for(asked.json):
        findings = run_rehearsal(job, asked.rank)
    print_json(findings) if asked.json else print(table(findings, job.name))
    return 0


REHEARSE = Verb(
    "what a rank holds and sends: the real step, without hardware, at any number of ranks",
    "stretto rehearse llama3-8b mesh='dp=64'",
    _rehearse_options,
    _rehearse,
)
