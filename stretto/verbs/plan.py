"""`stretto plan`: what a run will take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.errors import JobError
from stretto.verbs.words import Verb, load, print_json, split

if TYPE_CHECKING:
    from stretto.plan.planning import Row


def _plan_options(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        f"{parser.prog} [JOB] [KEY=VALUE ...] --cluster CLUSTER [options], or {parser.prog} [JOB] --serve, "
        f"or {parser.prog} --validate ROWS.csv ..."
    )
    parser.add_argument(
        "words", nargs="*", metavar="[JOB] [KEY=VALUE ...]",
        help="the job; keys that are written here are kept, whatever else its file says may be changed",
    )  # fmt: skip
    parser.add_argument(
        "--cluster", metavar="CLUSTER", help='"64x8 h100": machines x devices, a device\'s name, or a file of stretto measure'
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--top", type=int, default=6, metavar="N", help="how many meshes that run are told (default 6)")
    parser.add_argument("--write", metavar="FILE", help="write the job of the best plan that runs")
    parser.add_argument("--pick", type=int, metavar="N", help="with --write: of plan number N")
    parser.add_argument("--gpus", metavar="N,N,...", help="how time and cost grow over these numbers of devices")
    parser.add_argument("--price", type=float, metavar="P", help="of a device-hour, for --gpus")
    parser.add_argument("--budget", type=float, metavar="B", help="what the run may cost (device-hours without --price), for --gpus")
    parser.add_argument("--serve", action="store_true", help="a page on this machine on which all of it can be moved, until Ctrl-C")
    parser.add_argument("--port", type=int, metavar="N", help="of --serve (default 8765, or any that is free; 0: any)")
    parser.add_argument(
        "--validate", nargs="+", metavar="ROWS.csv", help="foretell every run of tables of measured runs, and sum up the errors"
    )


def _plan(asked: argparse.Namespace) -> int:
    if asked.validate:
        return _validate(asked)
    if asked.serve:
        return _serve(asked)
    if asked.port is not None:
        raise JobError(f"--port is that of a page; write --serve --port {asked.port}")
    from stretto.draw.plans import grown_text, plan_text
    from stretto.plan.asking import kept, read_cluster, sizes_of
    from stretto.plan.grown import grow
    from stretto.plan.planning import plan_job

    if asked.cluster is None:
        raise JobError('plan needs to know where the job is to run; write --cluster "1x8 h100", or --cluster FILE of stretto measure')
    if asked.top < 1:
        raise JobError(f"--top {asked.top} is not possible; write --top 1 or more")
    job, cluster = load(asked.words), read_cluster(asked.cluster)
    keep = kept(job, split(asked.words)[1])
    if asked.gpus:
        grown = grow(job, cluster, sizes_of(asked.gpus), asked.price, asked.budget, keep)
        print_json({"gpus": [one.plain() for one in grown]}) if asked.json else print(grown_text(grown))
        return 0
    planned = plan_job(job, cluster, keep, asked.top)
    if asked.write:
        row = planned.best if asked.pick is None else _picked(planned.rows, asked.pick)
        assert row is not None
        Path(asked.write).write_text(row.job.to_toml(), encoding="utf-8")
    print_json(planned.plain()) if asked.json else print(plan_text(planned))
    return 0


def _serve(asked: argparse.Namespace) -> int:
    """Without a job or a cluster the page begins with the usual ones: it can be moved from there."""
    import sys

    from stretto.launch.planner import serve
    from stretto.plan.asking import read_cluster
    from stretto.plan.choices import Start

    if beside := [name for name in ("write", "pick", "gpus", "price", "budget") if getattr(asked, name) is not None]:
        raise JobError(f"--{beside[0]} has no place beside --serve, whose page has it; leave it out")
    start = Start(load(asked.words or ["llama3-8b"]), read_cluster(asked.cluster or "8x8 h100"))

    def tell(address: str) -> None:
        print_json({"url": address}) if asked.json else print(f"{address} (Ctrl-C ends it)")
        sys.stdout.flush()

    serve(start, asked.port, tell)
    return 0


def _picked(rows: Sequence[Row], number: int) -> Row:
    if not 1 <= number <= len(rows):
        raise JobError(f"--pick {number}: there are plans 1 to {len(rows)}; write one of them")
    return rows[number - 1]


def _validate(asked: argparse.Namespace) -> int:
    from stretto.plan.validate import table, validate

    found = validate([Path(path) for path in asked.validate])
    print_json(found) if asked.json else print(table(found))
    return 0


PLAN = Verb(
    "the meshes that fit a cluster, best first, and why the rest do not",
    'stretto plan llama3-8b --cluster "8x8 h100"',
    _plan_options,
    _plan,
)
