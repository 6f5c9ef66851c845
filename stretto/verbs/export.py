"""`stretto export`: a job as another framework's own configuration."""

from __future__ import annotations

import argparse
import sys

from stretto.verbs.words import Verb, job_words, load, print_json


def _options(parser: argparse.ArgumentParser) -> None:
    job_words(parser)
    parser.add_argument("--to", required=True, metavar="FRAMEWORK", help="deepspeed, megatron, fsdp2, torchtitan or accelerate")
    parser.add_argument("--out", metavar="DIR", help="the folder for the files (default exports/NAME-FRAMEWORK)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")


def _export(asked: argparse.Namespace) -> int:
    from pathlib import Path

    from stretto.export.catalog import export, write
    from stretto.launch.training import elsewhere

    job = elsewhere(load(asked.words))
    made = export(job, asked.to)
    paths = write(made, Path(asked.out or f"exports/{job.name}-{asked.to}"))
    if asked.json:
        missing = [one._asdict() for one in made.missing]
        print_json({"framework": made.framework, "version": made.version, "files": paths, "run": made.run, "missing": missing})
        return 0
    print(made.files[0].text, end="")
    told = [f"{made.framework} {made.version}, on {job.device}: written to {', '.join(map(str, paths))}", f"run: {made.run}"]
    told += ["what has no counterpart:", *(f"  {one}" for one in made.missing)] if made.missing else []
    print("\n".join(told), file=sys.stderr)
    return 0


EXPORT = Verb("another framework's configuration of a job", "stretto export tiny --to deepspeed", _options, _export)
