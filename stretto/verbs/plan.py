"""`stretto plan`: what a run will take."""

from __future__ import annotations

import argparse

from stretto.errors import JobError
from stretto.verbs.words import LATER, Verb, print_json


def _plan_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} --validate ROWS.csv [ROWS.csv ...] [--json]"
    parser.add_argument(
        "--validate", nargs="+", metavar="ROWS.csv", help="foretell every run of tables of measured runs, and sum up the errors"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("words", nargs="*", metavar="[JOB] [KEY=VALUE ...]", help=f"a job to plan ({LATER})")


def _plan(asked: argparse.Namespace) -> int:
    if not asked.validate:
        raise JobError(f"planning a job is {LATER}; write stretto plan --validate ROWS.csv")
    from pathlib import Path

    from stretto.plan.validate import table, validate

    found = validate([Path(path) for path in asked.validate])
    print_json(found) if asked.json else print(table(found))
    return 0


PLAN = Verb("what a run will take: foretold beside what others measured", "stretto plan --validate rows.csv", _plan_options, _plan)
