"""What the verbs share: how one is described, how [JOB] [KEY=VALUE ...] becomes a Job, how a result is printed."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from stretto.job import Job

LATER = "not in this version yet"
SAVED = "runs/first/checkpoints/step-00000050"


class Verb(NamedTuple):
    """One word of the command line. `run` is None for a verb that a later version brings.

    kinds: verbs of their own that are the next word, as `stretto draw collective`.
    """

    summary: str
    example: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int] | None
    kinds: Callable[[], Mapping[str, Verb]] | None = None


def load(words: Sequence[str]) -> Job:
    """[JOB] [KEY=VALUE ...] as a Job. Without JOB it is `tiny`, unless the keys name a model: then they say all that is asked."""
    from stretto.job import Job, parse_overrides

    given, texts = split(words)
    overrides = parse_overrides(texts)
    model = overrides.get("model")
    names_a_model = isinstance(model, Mapping) and "name" in model
    return Job.load(given or (None if names_a_model else "tiny"), **overrides)


def split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """JOB, if there is one, and the KEY=VALUE words."""
    first_is_job = bool(words) and ("=" not in words[0] or os.path.exists(words[0]))
    return (words[0], list(words[1:])) if first_is_job else (None, list(words))


@contextlib.contextmanager
def stdout_kept_for(result: bool) -> Iterator[None]:
    """Within it, if stdout is for one JSON object, whatever else is printed goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr) if result else contextlib.nullcontext():
        yield


def print_json(value: Any) -> None:
    from stretto.launch.runfolder import json_text

    print(json_text(value))


def job_words(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [JOB] [KEY=VALUE ...] [options]"
    parser.add_argument(
        "words", nargs="*", metavar="[JOB] [KEY=VALUE ...]", help="a TOML file or built-in name (default tiny), then keys to change"
    )


def anything(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="...", help=f"this verb is {LATER}")
