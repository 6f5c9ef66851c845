"""Training that is started somewhere else than here: what `stretto train --on WHERE` asks for, one row a place."""

from __future__ import annotations

import contextlib
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from stretto.errors import JobError
from stretto.keys import nearest
from stretto.launch.placing import placing
from stretto.launch.training import check_data, elsewhere

if TYPE_CHECKING:
    from stretto.job import Job
    from stretto.launch.training import Starter

#: What was done, as --json prints it; "text" is what a person sees.
Done = Mapping[str, object]
#: Options that a place does not know, by the name of the place.
KNOWN: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "here": frozenset(),
        "ray": frozenset({"address", "max_failures", "num_workers", "cluster"}),
        "slurm": frozenset({"print", "nodes", "sbatch"}),
        "kubernetes": frozenset({"print", "nodes", "image", "claim", "kind"}),
    }
)


def options(parser: ArgumentParser) -> None:
    """What `stretto train` takes for runs elsewhere."""
    group = parser.add_argument_group("somewhere else")
    group.add_argument("--on", default="here", metavar="WHERE", help="here (default), ray, slurm or kubernetes")
    group.add_argument("--address", metavar="ADDR", help="head node of a Ray cluster (default RAY_ADDRESS, else one that is started here)")
    group.add_argument(
        "--max-failures", type=int, metavar="N", help="times that a run is started again from its newest checkpoint (ray; default 0)"
    )
    group.add_argument(
        "--num-workers", metavar="N-M", help="ranks, as many of this range as there is room for each time that it is started (ray)"
    )
    group.add_argument(
        "--cluster", metavar="CLUSTER", help="with --num-workers: devices for which a mesh is planned, as stretto plan takes it"
    )
    group.add_argument("--print", action="store_true", help="show what would be submitted, and do nothing (slurm, kubernetes)")
    group.add_argument("--nodes", type=int, metavar="N", help="machines that share the ranks evenly (default 1)")
    group.add_argument("--sbatch", metavar="OPTIONS", help="more options for sbatch, as --sbatch='--partition=gpu --time=2:00:00'")
    group.add_argument("--image", metavar="NAME", help="container image with stretto in it (kubernetes)")
    group.add_argument("--claim", metavar="NAME", help="volume claim for the run folder (kubernetes)")
    group.add_argument("--kind", metavar="KIND", help="jobset or pytorchjob alone (kubernetes; default both)")


def check_options(asked: Namespace) -> None:
    """Refuse a place that is none, and options that mean nothing there."""
    if asked.on not in KNOWN:
        raise JobError(f"--on {asked.on}: a job can run on {', '.join(KNOWN)}; write --on {nearest(asked.on, KNOWN) or 'slurm'}")
    given = {name for name in frozenset().union(*KNOWN.values()) if getattr(asked, name)}
    for name in sorted(given - KNOWN[asked.on]):
        places = " or ".join(f"--on {place}" for place, known in KNOWN.items() if name in known)
        raise JobError(
            f"--{name.replace('_', '-')} is for {places}, and this runs {'here' if asked.on == 'here' else f'on {asked.on}'}; leave it out"
        )


@contextlib.contextmanager
def starter(asked: Namespace) -> Iterator[Starter | None]:
    """What starts the ranks of a run that this process follows; None: this machine. Within it, a cluster is connected."""
    if asked.on != "ray":
        yield None
        return
    from stretto.launch.elastic import Workers
    from stretto.launch.ray import RayCluster
    from stretto.plan.asking import read_cluster

    workers = Workers.parse(asked.num_workers) if asked.num_workers else None
    devices = read_cluster(asked.cluster) if asked.cluster else None
    if devices and not workers:
        raise JobError(f"--cluster {asked.cluster} is for the choice of a mesh; write --num-workers N-M too, or leave it out")
    tell = lambda line: print(line, file=sys.stderr, flush=True)
    with RayCluster(asked.address, asked.max_failures or 0, tell, workers, devices) as cluster:
        yield cluster


def start(job: Job, asked: Namespace) -> Done:
    """Do it, or only say what would be done. job: not resolved. Raises JobError for what can be known to fail there."""
    return PLACES[asked.on](job, asked)


def _slurm(job: Job, asked: Namespace) -> Done:
    from stretto.launch.slurm import script, submit

    resolved = elsewhere(job)
    check_data(resolved)
    text = script(job.name, asked.words, placing(resolved, asked.nodes), asked.out, shlex.split(asked.sbatch or ""))
    if asked.print:
        return {"script": text, "text": text}
    number = submit(text)
    return {"script": text, "submitted": number, "text": f"submitted as {number}; its log: {job.name}-{number}.log\n"}


def _kubernetes(job: Job, asked: Namespace) -> Done:
    from stretto.launch.kubernetes import KINDS, Pods, manifest

    if not asked.print:
        raise JobError("--on kubernetes only prints: write --print, and hand it to kubectl apply -f -")
    if not asked.image:
        raise JobError("--on kubernetes needs a container image that has stretto in it; write --image NAME")
    if asked.out:
        raise JobError(f"--out {asked.out}: in a pod it is /runs/NAME, on the volume of --claim NAME; leave --out out")
    kinds = [asked.kind] if asked.kind else list(KINDS)
    text = manifest(job, placing(elsewhere(job), asked.nodes), Pods(asked.image, asked.claim), kinds)
    return {"manifest": text, "text": text}


PLACES: Mapping[str, Callable[[Job, Namespace], Done]] = MappingProxyType({"slurm": _slurm, "kubernetes": _kubernetes})
