"""The command line: `stretto VERB [JOB] [KEY=VALUE ...] [options]`.

Only what the asked verb needs is imported, when it is needed: `stretto --help` answers before pydantic or torch could load.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from stretto.errors import JobError, StrettoError

if TYPE_CHECKING:
    from stretto.checkpoint.convert import Told
    from stretto.job import Job

LATER = "not in this version yet"


class Verb(NamedTuple):
    """One word of the command line. `run` is None for a verb that a later version brings.

    kinds: verbs of their own that are the next word, as `stretto draw collective`.
    """

    summary: str
    example: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int] | None
    kinds: Callable[[], Mapping[str, Verb]] | None = None


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

    here = seat(os.environ)
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
        _load([word for word in kept if "=" in word and not word.startswith("-")] + foreign)  # names our key for each
        raise JobError(f"{foreign[0].partition('=')[0]} is no option of {parser.prog}; `{parser.prog} --help` lists them")
    return kept


def _load(words: Sequence[str]) -> Job:
    """[JOB] [KEY=VALUE ...] as a Job. Without JOB it is `tiny`, unless the keys name a model: then they say all that is asked."""
    from stretto.job import Job, parse_overrides

    given, texts = _split(words)
    overrides = parse_overrides(texts)
    model = overrides.get("model")
    names_a_model = isinstance(model, Mapping) and "name" in model
    return Job.load(given or (None if names_a_model else "tiny"), **overrides)


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """JOB, if there is one, and the KEY=VALUE words."""
    first_is_job = bool(words) and ("=" not in words[0] or os.path.exists(words[0]))
    return (words[0], list(words[1:])) if first_is_job else (None, list(words))


@contextlib.contextmanager
def _stdout_kept_for(result: bool) -> Iterator[None]:
    """Within it, if stdout is for one JSON object, whatever else is printed goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr) if result else contextlib.nullcontext():
        yield


def _print_json(value: Any) -> None:
    from stretto.launch.runfolder import json_text

    print(json_text(value))


# ----------------------------------------------------------------------------------------------------------------- train


def _train_options(parser: argparse.ArgumentParser) -> None:
    _job_words(parser)
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


def _train(asked: argparse.Namespace) -> int:
    from dataclasses import asdict

    from stretto.launch.training import summary, train

    job = _load(asked.words) if asked.resume == "no" else _job_that_goes_on(asked)
    with _stdout_kept_for(asked.json):
        trained = train(job, asked.out, until=asked.until, resume=asked.resume, allow_missing=tuple(asked.allow_missing))
    if trained is None:
        return 0
    _print_json(asdict(trained)) if asked.json else print(summary(trained, _shows(sys.stdout, "⣿│└")))
    return 0


def _job_that_goes_on(asked: argparse.Namespace) -> Job:
    """The job of the run in --out, with KEY=VALUE changed; what was asked, if there is no run yet and --resume=auto."""
    from stretto.job import parse_overrides
    from stretto.launch.resuming import job_of_run

    if asked.resume not in ("yes", "auto"):
        raise JobError(f"--resume={asked.resume} is not possible; write --resume, or --resume=auto to start if there is no checkpoint")
    if asked.out is None:
        raise JobError("--resume goes on with the run in a folder; write --out DIR")
    named, changes = _split(asked.words)
    job = job_of_run(asked.out, parse_overrides(changes))
    if job is None:
        return _load(asked.words)  # with --resume alone it is refused where the folder is looked at
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


# ----------------------------------------------------------------------------------------------------------------- check


def _check_options(parser: argparse.ArgumentParser) -> None:
    _job_words(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="steps that are compared (default 3)")
    parser.add_argument("--blocks", type=int, metavar="N", help="shorten the model to N blocks, where one rank cannot hold it")
    parser.add_argument("--dtype", choices=("fp64", "job"), default="fp64", help="fp64 (default) or the job's own")
    parser.add_argument("--inject", metavar="FAULT@NAME", help="break it on purpose: the check must fail and name the tensor")


def _check(asked: argparse.Namespace) -> int:
    for name in ("steps", "blocks"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            raise JobError(f"--{name} {value} is not possible; write --{name} 1 or more")
    from stretto.errors import CheckFailed
    from stretto.launch.checking import failed_line, run_check, table

    job = _load(asked.words)
    with _stdout_kept_for(asked.json):
        findings = run_check(None, job, dtype=asked.dtype, steps=asked.steps, inject=asked.inject, blocks=asked.blocks)
    if findings is None:
        return 0
    _print_json(findings) if asked.json else print(table(findings, job.name))
    if not findings["ok"]:
        raise CheckFailed(failed_line(findings))
    return 0


# --------------------------------------------------------------------------------------------------------------- measure


def _measure_options(parser: argparse.ArgumentParser) -> None:
    from stretto.launch.measuring import options

    options(parser)


def _measure(asked: argparse.Namespace) -> int:
    from stretto.launch.measuring import measure, ranks_of, table

    with _stdout_kept_for(asked.json):
        found = measure(ranks_of(asked.ranks), asked.out, quick=asked.quick, tell=lambda line: print(line, file=sys.stderr, flush=True))
    if found is not None:
        _print_json({**found.plain(), "file": str(asked.out)}) if asked.json else print(f"{table(found)}\n\nwritten to {asked.out}")
    return 0


# ------------------------------------------------------------------------------------------------------------------ draw


def _drawings() -> Mapping[str, Verb]:
    """What `stretto draw` can draw, as verbs of their own."""
    from stretto.launch.drawing import DRAWINGS, Drawing

    def verb(drawing: Drawing) -> Verb:
        def options(parser: argparse.ArgumentParser) -> None:
            drawing.options(parser)
            parser.add_argument("--out", metavar="FILE", help=f"{drawing.files} (default: a page named by what it shows)")
            parser.add_argument("--json", action="store_true", help="one JSON object on stdout: the file")

        def run(asked: argparse.Namespace) -> int:
            file = str(drawing.draw(asked, _load))
            _print_json({"file": file}) if asked.json else print(file)
            return 0

        return Verb(drawing.summary, drawing.example, options, run)

    return {kind: verb(drawing) for kind, drawing in DRAWINGS.items()}


# ------------------------------------------------------------------------------------------------------ convert, inspect


def _convert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a checkpoint, a run folder (its newest is taken) or a Hugging Face folder")
    parser.add_argument(
        "target", metavar="DST", help="the folder that is made: a Hugging Face folder of a checkpoint, or a checkpoint of such a folder"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _convert(asked: argparse.Namespace) -> int:
    from stretto.checkpoint.convert import convert

    with _stdout_kept_for(asked.json):
        told = convert(asked.source, asked.target)
    _print_json(told.as_json()) if asked.json else print(_holding(told))
    return 0


def _inspect_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="DIR", help="a checkpoint, a run folder (its newest is taken) or a Hugging Face folder")
    parser.add_argument("--verify", action="store_true", help="read all of it, and hold every block of bytes against its checksum")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _inspect(asked: argparse.Namespace) -> int:
    from stretto.checkpoint.convert import inspect

    told = inspect(asked.place, verify=asked.verify)
    _print_json(told.as_json()) if asked.json else print(_holding(told))
    return 0


def _holding(told: Told) -> str:
    """What a folder holds, for a person."""
    from stretto.draw.numbers import bytes_

    about = {key: value for key, value in told.about.items() if key not in ("path", "kinds")}
    lines = [f"{told.about['path']}: {told.kind}, {told.tensors} tensors, {bytes_(told.bytes_)}"]
    lines += [f"  {key}: {value}" for key, value in about.items()]
    lines += [f"  {kind}/: {bytes_(size)}" for kind, size in told.about.get("kinds", {}).items()]
    return "\n".join([*lines, *(f"  {name}  {bytes_(size)}" for name, size in told.files.items())])


# ------------------------------------------------------------------------------------------------------------------ plan


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
    _print_json(found) if asked.json else print(table(found))
    return 0


# ------------------------------------------------------------------------------------------------------------ jobs, keys


def _jobs_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this job as commented TOML")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _jobs(asked: argparse.Namespace) -> int:
    from stretto.job import Job

    jobs = {job.name: job for job in Job.builtins()}
    if asked.name is None:
        wide = max(map(len, jobs))
        lines = "\n".join(f"{job.name:<{wide}}  {job.summary}" for job in jobs.values())
        _print_json({"jobs": [{"name": job.name, "summary": job.summary} for job in jobs.values()]}) if asked.json else print(lines)
        return 0
    job = Job.load(asked.name)
    about = f"# {jobs[asked.name].summary}\n" if asked.name in jobs else ""
    _print_json(job.model_dump()) if asked.json else print(about + job.to_toml(), end="")
    return 0


def _keys_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pattern", nargs="?", metavar="PATTERN", help="only keys with this in their name (* stands for anything)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _keys(asked: argparse.Namespace) -> int:
    from fnmatch import fnmatch

    from stretto.job import Job
    from stretto.keys import nearest

    everything = Job.keys()
    found = [key for key in everything if asked.pattern is None or fnmatch(key.name, f"*{asked.pattern}*")]
    if not found:
        near = nearest(asked.pattern, [key.name for key in everything])
        raise JobError(f"no key is called like {asked.pattern!r}; write stretto keys {near or '(alone, for all of them)'}")
    if asked.json:
        _print_json({"keys": [key._asdict() for key in found]})
        return 0
    wide, deep = (max(len(getattr(key, part)) for key in found) for part in ("name", "default"))
    for key in found:
        print(f"{key.name:<{wide}}  {key.default:<{deep}}  {key.description}")
    return 0


def _job_words(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [JOB] [KEY=VALUE ...] [options]"
    parser.add_argument(
        "words", nargs="*", metavar="[JOB] [KEY=VALUE ...]", help="a TOML file or built-in name (default tiny), then keys to change"
    )


def _anything(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="...", help=f"this verb is {LATER}")


SAVED = "runs/first/checkpoints/step-00000050"
VERBS: Mapping[str, Verb] = {
    "train": Verb(
        "run a job on ranks of this machine, or under torchrun or srun",
        "stretto train tiny steps=40 mesh='dp=2' --out runs/first",
        _train_options,
        _train,
    ),
    "check": Verb(
        "hold the job on its mesh against one process, tensor by tensor", "stretto check tiny mesh='dp=2' zero=3", _check_options, _check
    ),
    "plan": Verb("what a run will take: foretold beside what others measured", "stretto plan --validate rows.csv", _plan_options, _plan),
    "rehearse": Verb("the real step on fake tensors, at any number of ranks", "stretto rehearse llama3-8b mesh='dp=64'", _anything, None),
    "compare": Verb("one job on other frameworks, same weights and batches", "stretto compare 30m", _anything, None),
    "measure": Verb(
        "how fast this machine computes and talks, as a table and a file for plan",
        "stretto measure --out cluster.toml",
        _measure_options,
        _measure,
    ),
    "convert": Verb("a checkpoint as a Hugging Face folder, and back", f"stretto convert {SAVED} model", _convert_options, _convert),
    "inspect": Verb("what a checkpoint holds", f"stretto inspect {SAVED}", _inspect_options, _inspect),
    "export": Verb("another framework's configuration of a job", "stretto export tiny --to deepspeed", _anything, None),
    "draw": Verb(
        "a schedule, a run's timeline or a collective as a picture", "stretto draw collective --out ring.svg", _anything, None, _drawings
    ),
    "jobs": Verb("the jobs that ship with stretto; with a name, that one as TOML", "stretto jobs tiny > my.toml", _jobs_options, _jobs),
    "keys": Verb("every key of a job with its default and unit", "stretto keys zero", _keys_options, _keys),
}
