"""`stretto jobs` and `stretto keys`: what ships with stretto and what a job can say."""

from __future__ import annotations

import argparse

from stretto.errors import JobError
from stretto.verbs.words import Verb, print_json


def _jobs_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print this job as commented TOML")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _jobs(asked: argparse.Namespace) -> int:
    from stretto.job import Job

    jobs = {job.name: job for job in Job.builtins()}
    if asked.name is None:
        wide = max(map(len, jobs))
        lines = "\n".join(f"{job.name:<{wide}}  {job.summary}" for job in jobs.values())
        print_json({"jobs": [{"name": job.name, "summary": job.summary} for job in jobs.values()]}) if asked.json else print(lines)
        return 0
    job = Job.load(asked.name)
    about = f"# {jobs[asked.name].summary}\n" if asked.name in jobs else ""
    print_json(job.model_dump()) if asked.json else print(about + job.to_toml(), end="")
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
        print_json({"keys": [key._asdict() for key in found]})
        return 0
    wide, deep = (max(len(getattr(key, part)) for key in found) for part in ("name", "default"))
    for key in found:
        print(f"{key.name:<{wide}}  {key.default:<{deep}}  {key.description}")
    return 0


JOBS = Verb("the jobs that ship with stretto; with a name, that one as TOML", "stretto jobs tiny > my.toml", _jobs_options, _jobs)
KEYS = Verb("every key of a job with its default and unit", "stretto keys zero", _keys_options, _keys)
