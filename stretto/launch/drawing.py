"""What `stretto draw` can draw, one row a kind: what is asked becomes an object of the ground, its picture a file."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from stretto.errors import JobError

if TYPE_CHECKING:
    from stretto.job import Job

#: [JOB] [KEY=VALUE ...] as a Job.
Load = Callable[[Sequence[str]], "Job"]


class Drawing(NamedTuple):
    """A word after `stretto draw`.

    options: adds what it takes to the command line, beside --out. files: what --out may be, in words.
    draw: makes the file of what was asked, and returns its path.
    """

    summary: str
    example: str
    options: Callable[[ArgumentParser], None]
    draw: Callable[[Namespace, Load], Path]
    files: str = "a page (.html) or a picture alone (.svg)"


def _mesh_options(parser: ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [JOB] [KEY=VALUE ...] [options]"
    parser.add_argument("words", nargs="*", metavar="[JOB] [KEY=VALUE ...]", help="the job whose mesh it is (default tiny)")
    parser.add_argument("--per-node", type=int, default=8, metavar="N", help="how many ranks share a machine (default 8)")


def _mesh(asked: Namespace, load: Load) -> Path:
    from stretto.draw.mesh import draw_mesh
    from stretto.layout.mesh import Mesh

    job = load(asked.words)
    return draw_mesh(job.name, Mesh.parse(job.mesh), asked.per_node, Path(asked.out or f"{job.name}-mesh.html"))


def _schedule_options(parser: ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [JOB] [KEY=VALUE ...] [options]"
    parser.add_argument("words", nargs="*", metavar="[JOB] [KEY=VALUE ...]", help="the job whose schedule it is (default tiny)")


def _schedule(asked: Namespace, load: Load) -> Path:
    from stretto.draw.schedule import draw_schedule

    job = load(asked.words)
    return draw_schedule(job, Path(asked.out or f"{job.name}-schedule.html"))


def _timeline_options(parser: ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="DIR", help="a run folder with a timeline.json (see profile.steps)")


def _timeline(asked: Namespace, load: Load) -> Path:
    from stretto.draw.schedule import draw_timeline

    if len(asked.words) != 1:
        example = DRAWINGS["timeline"].example
        raise JobError(f"draw timeline takes one run folder, and {len(asked.words)} were given; write {example}")
    return draw_timeline(Path(asked.words[0]), Path(asked.out or Path(asked.words[0], "timeline.html")))


def _collective_options(parser: ArgumentParser) -> None:
    parser.add_argument("--collective", default="all_reduce", metavar="NAME", help="broadcast, all_gather ... (default all_reduce)")
    parser.add_argument("--algorithm", default="ring", metavar="NAME", help="ring, tree, halving-doubling, hierarchical ... (default ring)")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="how many ranks take part (default 4)")
    parser.add_argument("--root", type=int, default=0, metavar="RANK", help="of broadcast, scatter, gather and reduce (default 0)")
    parser.add_argument("--nodes", type=int, metavar="N", help="into how many nodes, or rows, hierarchical and torus divide the ranks")
    parser.add_argument("--pieces", type=int, metavar="N", help="into how many pieces data that goes along trees is cut")


def _collective(asked: Namespace, load: Load) -> Path:
    from stretto.draw.collective import check_countable, svg
    from stretto.draw.collective_page import page
    from stretto.draw.files import save
    from stretto.schedule.algorithms import program
    from stretto.schedule.collective import prove

    check_countable(asked.ranks, asked.pieces or 1)
    one = program(asked.collective, asked.algorithm, asked.ranks, root=asked.root, nodes=asked.nodes, pieces=asked.pieces)
    prove(one)
    path = Path(asked.out or f"{one.collective}-{one.algorithm}-{one.ranks}.html")
    return save(path, {".svg": lambda: svg(one), ".html": lambda: page(one)})


def _plan_options(parser: ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [JOB] [KEY=VALUE ...] --cluster CLUSTER [options]"
    parser.add_argument("words", nargs="*", metavar="[JOB] [KEY=VALUE ...]", help="as of stretto plan: keys that are written are kept")
    parser.add_argument("--cluster", metavar="CLUSTER", help='as of stretto plan: "8x8 h100", or a file of stretto measure')
    parser.add_argument("--part", metavar="NAME", help="frontier, memory, timeline or growth alone")
    parser.add_argument("--gpus", metavar="N,N,...", help="how speed and cost grow over these numbers of devices")
    parser.add_argument("--price", type=float, metavar="P", help="of a device-hour, for --gpus")


def _plan(asked: Namespace, load: Load) -> Path:
    from stretto.draw.plan_page import PlanDrawing
    from stretto.plan.asking import kept, read_cluster, sizes_of

    if asked.cluster is None:
        raise JobError(f"draw plan needs to know where the job is to run; write {DRAWINGS['plan'].example}")
    job, cluster = load(asked.words), read_cluster(asked.cluster)
    drawing = PlanDrawing(
        job, cluster, kept(job, [word for word in asked.words if "=" in word]), sizes_of(asked.gpus) if asked.gpus else (), asked.price
    )
    return drawing.save(Path(asked.out or f"{job.name}-plan.html"), asked.part)


def _memory_options(parser: ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [JOB] [KEY=VALUE ...] --cluster CLUSTER [options]"
    parser.add_argument("words", nargs="*", metavar="[JOB] [KEY=VALUE ...]", help="the job, as it is to run")
    parser.add_argument("--cluster", metavar="CLUSTER", help='as of stretto plan: "8x8 h100", or a file of stretto measure')


def _memory(asked: Namespace, load: Load) -> Path:
    from stretto.draw.memory import draw_memory
    from stretto.plan.asking import ask, read_cluster
    from stretto.plan.view import view

    if asked.cluster is None:
        raise JobError(f"draw memory needs to know of which devices; write {DRAWINGS['memory'].example}")
    job = load(asked.words)
    return draw_memory(view(ask(job, read_cluster(asked.cluster), {"mesh"})), Path(asked.out or f"{job.name}-memory.html"))


DRAWINGS: Mapping[str, Drawing] = {
    "mesh": Drawing(
        "the ranks of a mesh, node by node: who talks to whom along which axis",
        "stretto draw mesh tiny mesh='pp=2 dp=2 tp=4'",
        _mesh_options,
        _mesh,
    ),
    "schedule": Drawing(
        "what each pipeline rank does when, foretold: who waits, and for how long",
        "stretto draw schedule tiny pipeline=interleaved mesh='pp=4' batch.size=8 batch.micro_size=1",
        _schedule_options,
        _schedule,
        "a page (.html), a picture alone (.svg), or a Chrome trace for Perfetto (.json)",
    ),
    "timeline": Drawing(
        "the same of a step of a run, as measured and as foretold", "stretto draw timeline runs/first", _timeline_options, _timeline
    ),
    "plan": Drawing(
        "a plan: the frontier of speed and memory, and the best layout's bars of memory and foretold step",
        'stretto draw plan llama3-8b --cluster "8x8 h100" --out plan.html',
        _plan_options,
        _plan,
        "a page (.html), or with --part a picture alone (.svg)",
    ),
    "memory": Drawing(
        "what a device of each pipeline rank holds, foretold for the job as it is written, whether it fits or not",
        'stretto draw memory llama3-8b "mesh=pp=4 dp=2" zero=1 --cluster "1x8 h100"',
        _memory_options,
        _memory,
    ),
    "collective": Drawing(
        "who sends what to whom in each round of a collective",
        "stretto draw collective --algorithm ring --ranks 4 --out ring.html",
        _collective_options,
        _collective,
        "a page that plays the rounds (.html) or a picture of them all (.svg)",
    ),
}
