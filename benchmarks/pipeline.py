"""How long does a pipeline's step take: stretto's schedules beside those of torch and Megatron-Core, and beside what is foretold?

    python benchmarks/pipeline.py                      # job 30m on 2 ranks, 4 and 8 microbatches of a row
    python benchmarks/pipeline.py 30m --microbatches 8 --schedules 1f1b zb-v

All take turns (benchmarks/turns.py), torch with each of two splits: that which is balanced by counted work, and equal numbers of
blocks; its better one counts. Megatron-Core's 1F1B takes part where it is installed, with CUDA's calls turned away. Foretold is the
schedule by `simulate`, told the seconds that each action was measured to take in that step. Ratios are of medians of the same round.
All start from one set of values, so their losses must agree.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from pipelines import TORCH
from turns import Answer, Team, TeamFailed

from stretto.anatomy import DECODERS, Anatomy
from stretto.errors import JobError
from stretto.job import Job
from stretto.launch.runfolder import environment_facts
from stretto.layout.balance import Item
from stretto.layout.stages import split_model
from stretto.schedule.action import LANE_OF, Action
from stretto.schedule.pipelines import PIPELINES
from stretto.schedule.request import requested
from stretto.schedule.timeline import Span, Timeline, simulate

HERE = Path(__file__).parent
WARMUP = 3  # steps
#: What a peer's best is to take of the time of our best.
WANTED = {"torch": 1.04, "megatron": 1.15}


@dataclass
class Row:
    """One variant. split: numbers of the blocks that begin later stages. seconds: of each step, by round. foretold: of each
    step of ours, all rounds; idle and idle_foretold: shares of a step, the mean of ranks, median of steps."""

    variant: str
    split: tuple[int, ...]
    seconds: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    foretold: list[float] = field(default_factory=list)
    idle: float = 0.0
    idle_foretold: float = 0.0

    @property
    def middle(self) -> float:
        return median(seconds for turn in self.seconds for seconds in turn)

    def ratios(self, peer: Row) -> list[float]:
        """Median step of mine / of the peer's, round by round."""
        return [median(mine) / median(theirs) for mine, theirs in zip(self.seconds, peer.seconds, strict=True)]


def splits_of(job: Job, schedule: str, ranks: int, microbatches: int) -> list[tuple[int, ...]]:
    """Balanced by counted work, as the engine does it, then by number of blocks."""
    anatomy = Anatomy.of_decoder(DECODERS[job.model.name])
    step = requested(schedule, ranks, microbatches)
    counted = split_model([Item(*part) for part in anatomy.work(job.batch.seq_len)], step.rank_of)
    cuts = tuple(int(counted.parts(stage)[0].name.rpartition(".")[2]) for stage in range(1, step.stages))
    blocks = len(anatomy.blocks)
    even = tuple(blocks * stage // step.stages for stage in range(1, step.stages))
    return list(dict.fromkeys([cuts, even]))


def run(name: str, microbatches: int, args: argparse.Namespace, deadline: float) -> list[Row]:
    """All variants of one number of microbatches, in turn."""
    job = Job.load(name)
    rows: list[Row] = []
    with ExitStack() as stack:
        teams: list[Team] = []
        for schedule in args.schedules:
            if microbatches < PIPELINES[schedule].least(args.ranks):
                continue
            splits = splits_of(job, schedule, args.ranks, microbatches)
            rows += [Row(f"torch:{schedule}", cuts) for cuts in (splits if schedule in TORCH else ())]
            rows.append(Row(f"stretto:{schedule}", splits[0]))
        if importlib.util.find_spec("megatron") is not None:
            rows.insert(0, Row("megatron:1f1b", splits_of(job, "1f1b", args.ranks, microbatches)[-1]))
        for row in rows:
            words = [row.variant, name, str(microbatches), ",".join(map(str, row.split))]
            command = [sys.executable, str(HERE / "pipelines.py"), *words]
            teams.append(stack.enter_context(Team(" ".join(words), command, args.ranks, deadline)))
            keep(row, teams[-1].ask(steps=WARMUP))
        answers: list[list[list[Answer]]] = [[] for _ in rows]
        for number in range(args.rounds):
            for row, team, told in zip(rows, teams, answers, strict=True):
                told.append(team.ask(steps=args.steps))
                row.seconds.append(keep(row, told[-1]))
            print(f"round {number + 1}: " + ", ".join(f"{row.variant} {median(row.seconds[-1]):.3f} s" for row in rows), flush=True)
    for row, told in zip(rows, answers, strict=True):
        if row.variant.startswith("stretto:"):
            foretell(row, row.variant.partition(":")[2], args.ranks, microbatches, told)
    return rows


def keep(row: Row, answers: Sequence[Answer]) -> list[float]:
    """Seconds of each step: from when the last rank has ended the one before until the last rank has ended it. The losses are added to
    the row's."""
    told = zip(*(answer["losses"] for answer in answers), strict=True)
    row.losses += [fmean({loss for loss in losses if loss is not None}) for losses in told]
    ends = [max(moments) for moments in zip(*(answer["clock"] for answer in answers), strict=True)]
    return [after - before for before, after in pairwise(ends)]


def foretell(row: Row, schedule: str, ranks: int, microbatches: int, rounds: Sequence[Sequence[Answer]]) -> None:
    """Of ours: what `simulate` makes of the measured seconds of actions, and how long ranks were idle."""
    step = requested(schedule, ranks, microbatches)
    timelines = [
        Timeline(spans=[Span(rank, Action.parse(name), start, stop) for rank, spans in enumerate(ranks_) for name, start, stop in spans])
        for answers in rounds
        for ranks_ in zip(*(answer["spans"] for answer in answers), strict=True)
    ]
    foretold = [simulate(step, seconds_of(timeline)) for timeline in timelines]
    row.foretold = [timeline.seconds for timeline in foretold]
    row.idle_foretold, row.idle = (
        median(fmean(timeline.bubble(rank) for rank in range(ranks)) / timeline.seconds for timeline in some)
        for some in (foretold, timelines)
    )


def seconds_of(step: Timeline) -> Callable[[Action], float]:
    """What each action took in this very step. Messages take no time, and in the vote ranks wait for each other, so the shortest is
    what it takes."""
    took = {span.action: span.stop - span.start for span in step.spans}
    vote = min(seconds for action, seconds in took.items() if action.kind == "VOTE")
    return lambda action: vote if action.kind == "VOTE" else took[action] if LANE_OF[action.kind] == "compute" else 0.0


def of_foretold(row: Row) -> float:
    """A step of what its own actions foretell, the median of steps."""
    return median(took / foretold for took, foretold in zip((s for turn in row.seconds for s in turn), row.foretold, strict=True))


def best(rows: Sequence[Row], peer: str, schedule: str = "") -> Row | None:
    """The fastest of a peer's, of one schedule or all."""
    mine = [row for row in rows if row.variant.startswith(f"{peer}:{schedule}") and (not schedule or row.variant == f"{peer}:{schedule}")]
    return min(mine, key=lambda row: row.middle, default=None)


def table(rows: Sequence[Row]) -> str:
    titles = ["", "split", "s a step (quartiles)", "of torch's same (rounds)", "foretold s", "of foretold", "idle", "idle foretold"]
    lines = [titles, ["---"] * len(titles)]
    for row in rows:
        peer, _, schedule = row.variant.partition(":")
        low, middle, high = quantiles([s for turn in row.seconds for s in turn], n=4, method="inclusive")
        theirs = best(rows, "torch", schedule) if peer == "stretto" else None
        cells = [row.variant, ",".join(map(str, row.split)), f"{middle:.3f} ({low:.3f}-{high:.3f})", spread(row, theirs)]
        cells += (
            [f"{median(row.foretold):.3f}", f"{of_foretold(row):.3f}", f"{row.idle:.1%}", f"{row.idle_foretold:.1%}"]
            if row.foretold
            else [""] * 4
        )
        lines.append(cells)
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    ours = best(rows, "stretto")
    for peer in ("torch", "megatron"):
        theirs = best(rows, peer)
        if ours and theirs:
            text += f"\n\n{theirs.variant} takes {spread(theirs, ours)} times as long as {ours.variant}; wanted: {WANTED[peer]:g}"
    return text + "\n"


def spread(row: Row, peer: Row | None) -> str:
    if peer is None:
        return ""
    ratios = row.ratios(peer)
    return f"{median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


def losses_agree(rows: Sequence[Row]) -> bool:
    """Whether every step's loss is the same in five digits."""
    return all(max(step) - min(step) <= 2e-5 * max(step) for step in zip(*(row.losses for row in rows), strict=True))


def main() -> int:
    args = _arguments()
    signal.alarm(args.limit + 10)
    deadline = time.monotonic() + args.limit
    machine: Mapping[str, Any] = environment_facts(["python", "benchmarks/pipeline.py", *sys.argv[1:]], "cpu", 0)
    told = f"python {machine['python']}, torch {machine['versions'].get('torch')}, commit {machine['commit']}; {machine['time']}"
    text = f"# A pipeline's step: {args.ranks} ranks x 1 thread, fp32; {args.rounds} rounds of {args.steps} steps in turn\n\n"
    text += f"`{machine['command']}` on {machine['cpu']}, {machine['cores']} cores; {told}\n"
    found: dict[str, list[dict[str, Any]]] = {}
    agree = True
    for microbatches in args.microbatches:
        rows = run(args.job, microbatches, args, deadline)
        text += f"\n## {args.job}: {microbatches} microbatches of a row\n\n{table(rows)}\n"
        agree = agree and losses_agree(rows)
        found[str(microbatches)] = [asdict(row) for row in rows]
    text += "" if agree else "\nThe losses differ.\n"
    print(text)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in machine.items() if key not in ("host", "gpus", "threads")}
    args.out.write_text(json.dumps({"machine": kept, "microbatches": found}, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0 if agree else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("job", nargs="?", default="30m", help="a built-in job with a built-in decoder (default: 30m)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--schedules", nargs="+", choices=list(PIPELINES), default=["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--limit", type=int, default=3600, help="seconds after which everything is stopped")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "pipeline.json", help="a table in markdown is written beside it")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (JobError, TeamFailed) as problem:
        sys.exit(f"pipeline.py: {problem}")
