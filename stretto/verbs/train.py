"""`stretto train`: run a job, or go on with one."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from stretto.errors import JobError
from stretto.verbs.words import Verb, job_words, load, print_json, split, stdout_kept_for

if TYPE_CHECKING:
    from stretto.job import Job


def _train_options(parser: argparse.ArgumentParser) -> None:
    from stretto.launch.elsewhere import options

    job_words(parser)
    parser.add_argument("--out", metavar="DIR", help="the run folder (default runs/NAME-TIME)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")
    parser.add_argument("--until", type=int, metavar="STEP", help="stop after this step; the learning rate goes as if it went on")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="yes",
        default="no",
        metavar="auto",
        help="go on with the run in --out from its newest checkpoint; --resume=auto starts if there is none",
    )
    parser.add_argument(
        "--allow-missing",
        action="append",
        default=[],
        metavar="PATTERN",
        help="names that the checkpoint may lack, or have in excess, as 'head.*'; may be given several times",
    )
    options(parser)


def _train(asked: argparse.Namespace) -> int:
    from dataclasses import asdict

    from stretto.launch.elsewhere import PLACES, check_options, start, starter
    from stretto.launch.training import summary, train

    check_options(asked)
    if asked.on in PLACES:
        done = start(load(asked.words), asked)
        print_json({name: value for name, value in done.items() if name != "text"}) if asked.json else print(done["text"], end="")
        return 0
    job = load(asked.words) if asked.resume == "no" else _job_that_goes_on(asked)
    with stdout_kept_for(asked.json), starter(asked) as place:
        trained = train(job, asked.out, until=asked.until, resume=asked.resume, allow_missing=tuple(asked.allow_missing), place=place)
    if trained is None:
        return 0
    print_json(asdict(trained)) if asked.json else print(summary(trained, _shows(sys.stdout, "⣿│└")))
    return 0


def _job_that_goes_on(asked: argparse.Namespace) -> Job:
    """The job of the run in --out, with KEY=VALUE changed; what was asked, if there is no run yet and --resume=auto."""
    from stretto.job import parse_overrides
    from stretto.launch.resuming import job_of_run

    if asked.resume not in ("yes", "auto"):
        raise JobError(f"--resume={asked.resume} is not possible; write --resume, or --resume=auto to start if there is no checkpoint")
    if asked.out is None:
        raise JobError("--resume goes on with the run in a folder; write --out DIR")
    named, changes = split(asked.words)
    job = job_of_run(asked.out, parse_overrides(changes))
    if job is None:
        return load(asked.words)  # with --resume alone it is refused where the folder is looked at
    if named is not None:
        print(f"the job is that of {asked.out}, with {len(changes)} keys changed; {named} is not read again", file=sys.stderr)
    return job


def _shows(stream: Any, text: str) -> bool:
    """Whether the stream's encoding has these characters."""
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


TRAIN = Verb(
    "run a job on ranks of this machine, or under torchrun or srun",
    "stretto train tiny steps=40 mesh='dp=2' --out runs/first",
    _train_options,
    _train,
)
