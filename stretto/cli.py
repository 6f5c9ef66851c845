"""The command line: `stretto VERB [JOB] [KEY=VALUE ...] [options]`.

Only what the asked verb needs is imported, when it is needed: `stretto --help` answers before pydantic or torch could load.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from stretto.errors import JobError, StrettoError
from stretto.verbs.check import CHECK
from stretto.verbs.compare import COMPARE
from stretto.verbs.draw import DRAW
from stretto.verbs.export import EXPORT
from stretto.verbs.listing import JOBS, KEYS
from stretto.verbs.measure import MEASURE
from stretto.verbs.plan import PLAN
from stretto.verbs.rehearse import REHEARSE
from stretto.verbs.saved import CONVERT, INSPECT
from stretto.verbs.train import TRAIN
from stretto.verbs.words import LATER, Verb, load


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 failed, 2 the request is wrong, 3 a check did not hold."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # for python:module:function, as `python -m stretto` has it
    try:
        return _dispatch(words)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # whoever read us has enough; the exit must not complain either
        return 0
    except KeyboardInterrupt:
        print("stretto: stopped at once; every rank is gone", file=sys.stderr)
        return 1
    except Exception as error:
        return _tell(error)


def _tell(error: Exception) -> int:
    """Print why it failed, once for all ranks; returns the exit code."""
    from stretto.comm.environment import seat

    try:
        here = seat(os.environ)
    except JobError:  # of the variables: then nobody can say which rank this is
        here = None
    if here is not None:
        from stretto.launch.outside import tell

        return tell(error, here, sys.stderr)
    if not isinstance(error, StrettoError):
        raise error
    from stretto.launch.failure import RankFailed

    text = str(error) if isinstance(error, RankFailed) else "; ".join(str(error).splitlines())
    print(f"stretto: {text}", file=sys.stderr)
    return error.exit_code


def _dispatch(words: list[str]) -> int:
    verb, *rest = words or ["--help"]
    if verb in ("--help", "-h", "help"):
        print(_overview())
        return 0
    if verb == "--version":
        from importlib.metadata import version

        print(f"stretto {version('stretto')}")
        return 0
    if verb not in VERBS:
        from stretto.keys import nearest

        near = nearest(verb, VERBS)
        raise JobError(f"{verb!r} is no verb of stretto; the verbs are {', '.join(VERBS)}; write stretto {near or '--help'}")
    chosen, prog = VERBS[verb], f"stretto {verb}"
    if chosen.kinds and {"-h", "--help"} & set(rest[:1]):
        print(_kinds_page(prog, chosen.summary, chosen.kinds()))
        return 0
    if chosen.kinds:
        kind, *rest = rest or [""]
        chosen, prog = _kind(kind, verb, chosen.kinds()), f"{prog} {kind}"
    parser = _Parser(prog=prog, description=chosen.summary, epilog=f"example:\n  {chosen.example}", formatter_class=_Help)
    parser.allow_abbrev = False
    chosen.options(parser)
    rest = ["--resume=yes" if word == "--resume" else word for word in rest]  # else it would take the word after it
    if chosen.run is None:
        if {"-h", "--help"} & set(rest):
            parser.print_help()
            return 0
        raise JobError(f"{prog} is {LATER}; `stretto --help` lists what is")
    return chosen.run(parser.parse_intermixed_args(_foreign_options_as_keys(rest, parser)))


def _kind(word: str, verb: str, kinds: Mapping[str, Verb]) -> Verb:
    """The kind of that name, as `collective` of `draw`."""
    if word not in kinds:
        from stretto.keys import nearest

        wanted = f"{word!r} is nothing that {verb} knows" if word else f"{verb} what?"
        raise JobError(f"{wanted}; there is {', '.join(kinds)}; write {kinds[nearest(word, kinds) or next(iter(kinds))].example}")
    return kinds[word]


def _kinds_page(prog: str, summary: str, kinds: Mapping[str, Verb]) -> str:
    """The page of `stretto draw --help`."""
    examples = [f"  {kind.example}" for kind in kinds.values()]
    return "\n".join([f"usage: {prog} KIND [options]", "", summary, "", "kinds:", *_listed(kinds), "", "for example:", *examples])


def _listed(verbs: Mapping[str, Verb]) -> list[str]:
    wide = max(map(len, verbs))
    return [f"  {name:<{wide}}  {verb.summary}{'' if verb.run or verb.kinds else f' ({LATER})'}" for name, verb in verbs.items()]


def _overview() -> str:
    """The page of `stretto --help`."""
    return "\n".join(
        [
            "usage: stretto VERB [JOB] [KEY=VALUE ...] [options]",
            "",
            "The same training step on any mesh of ranks: same loss, same gradient, same update as one process.",
            "JOB is a TOML file or a built-in name; KEY=VALUE changes one of its keys. A value is TOML, or else text.",
            "",
            "verbs:",
            *_listed(VERBS),
            "",
            "examples:",
            *(f"  {verb.example}" for verb in VERBS.values() if verb.run or verb.kinds),
            "",
            "`stretto VERB --help` says more.",
            "Exit codes: 0 done, 1 it failed while running, 2 the request is wrong, 3 a check did not hold.",
        ]
    )


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the example's line as it is."""


class _Parser(argparse.ArgumentParser):
    """argparse, but a wrong option is a wrong request like any other."""

    def error(self, message: str) -> NoReturn:
        raise JobError(f"{message}; `{self.prog} --help` shows what there is")


def _foreign_options_as_keys(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """The words, with `--learning-rate 1` as `--learning-rate=1` among the keys, where it is refused with ours.

    Raises JobError for an option that is nearly one of the verb's own.
    """
    known = [option for action in parser._actions for option in action.option_strings]
    kept: list[str] = []
    foreign: list[str] = []
    taken = False
    for index, word in enumerate(words):
        if taken:
            taken = False
            continue
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or name == "--" or name in known:
            kept.append(word)
            continue
        from stretto.keys import nearest

        if near := nearest(name, known, cutoff=0.8):
            raise JobError(f"{parser.prog} has no option {name}; write {near}")
        following = words[index + 1] if index + 1 < len(words) else ""
        taken = not equals and bool(following) and not following.startswith("--") and "=" not in following
        foreign.append(word if equals else f"{name}={following if taken else 'true'}")
    if foreign:
        load([word for word in kept if "=" in word and not word.startswith("-")] + foreign)  # names our key for each
        raise JobError(f"{foreign[0].partition('=')[0]} is no option of {parser.prog}; `{parser.prog} --help` lists them")
    return kept


VERBS: Mapping[str, Verb] = {
    "train": TRAIN,
    "check": CHECK,
    "plan": PLAN,
    "rehearse": REHEARSE,
    "compare": COMPARE,
    "measure": MEASURE,
    "convert": CONVERT,
    "inspect": INSPECT,
    "export": EXPORT,
    "draw": DRAW,
    "jobs": JOBS,
    "keys": KEYS,
}
