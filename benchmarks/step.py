"""How long does a training step take on ranks of this machine: stretto's ZeRO stages beside torch's DDP and FSDP2?

    python benchmarks/step.py                          # jobs 30m and 120m on 2 ranks
    python benchmarks/step.py 30m --ranks 4 --variants ddp zero1

The variants take turns (benchmarks/turns.py), so that a machine that gets slower does so for all of them. Ratios are of medians of
the same round; the time of a step ends when its last rank is done. All start from one set of values, so their losses must agree.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from turns import Answer, Team, TeamFailed

from stretto.anatomy import DECODERS, Anatomy
from stretto.errors import JobError
from stretto.job import Job
from stretto.launch.runfolder import environment_facts

HERE = Path(__file__).parent
#: Variants, and the ZeRO stage whose model state each holds.
STAGES: Mapping[str, int] = {
    "ddp": 0,
    "ddp-view": 0,
    "fsdp2": 3,
    "zero0": 0,
    "zero1": 1,
    "zero2": 2,
    "zero3": 3,
    "zero0-gloo": 0,
    "zero1-gloo": 1,
    "zero2-gloo": 2,
    "zero3-gloo": 3,
    "compute": 0,
}
DEFAULT = [name for name in STAGES if name != "ddp-view"]
PEERS = ("ddp", "fsdp2")
WARMUP = 3  # steps
LOSS_STEP = 20  # the step whose loss is compared, counted from 1
MEMORY_STEPS = 2  # at the end, not timed, with a watch on memory
#: Seconds a step, of DDP's, foretold for 2 ranks in fp32: peers as measured before on another machine of 2 cores; ours as promised
#: (stages 0 and 1 no slower than DDP, 2 and 3 no slower than FSDP2).
FORETOLD: Mapping[str, Mapping[str, str]] = {
    "30m": {"compute": "0.92", "fsdp2": "1.25", "zero0": "<= 1", "zero1": "<= 1", "zero2": "<= fsdp2", "zero3": "<= fsdp2"},
    "120m": {"compute": "0.82", "fsdp2": "1.8", "zero0": "<= 1", "zero1": "<= 1", "zero2": "<= fsdp2", "zero3": "<= fsdp2"},
}
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One variant in one bout. seconds: of each step, by round. Bytes: the most of any rank, see
    stretto/engine/watch.py; machine_bytes: each rank's most, shared pages by share, of all ranks together."""

    variant: str
    seconds: list[list[float]]
    loss: float
    private_bytes: int
    machine_bytes: int
    high_water_bytes: int

    @property
    def all_seconds(self) -> list[float]:
        return [seconds for turn in self.seconds for seconds in turn]

    def ratios(self, peer: Row) -> list[float]:
        """Median step of mine / of the peer's, round by round."""
        return [median(mine) / median(theirs) for mine, theirs in zip(self.seconds, peer.seconds, strict=True)]


def run_bout(variants: Sequence[str], command: Callable[[str], list[str]], args: argparse.Namespace, deadline: float) -> list[Row]:
    """Let these variants take turns; a row for each, in the same order."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in variants}
    losses: dict[str, list[float]] = {name: [] for name in variants}
    peaks: dict[str, list[Answer]] = {}
    with ExitStack() as stack:
        teams = {}
        for name in variants:
            teams[name] = stack.enter_context(Team(name, command(name), args.ranks, deadline))
            losses[name] += _losses(teams[name].ask(steps=WARMUP, watch=False))
        for number in range(args.rounds):
            for name, team in teams.items():
                answers = team.ask(steps=args.steps, watch=False)
                seconds[name].append(_step_seconds(answers))
                losses[name] += _losses(answers)
            print(f"round {number + 1}: " + ", ".join(f"{name} {median(turns[-1]):.3f} s" for name, turns in seconds.items()), flush=True)
        for name, team in teams.items():
            peaks[name] = team.ask(steps=max(MEMORY_STEPS, LOSS_STEP - len(losses[name])), watch=True)
            losses[name] += _losses(peaks[name])
    return [
        Row(
            name,
            seconds[name],
            losses[name][LOSS_STEP - 1],
            max(answer["private_bytes"] for answer in peaks[name]),
            sum(answer["share_bytes"] for answer in peaks[name]),
            max(answer["high_water_bytes"] for answer in peaks[name]),
        )
        for name in variants
    ]


def _step_seconds(answers: Sequence[Answer]) -> list[float]:
    """A step lasts from when the last rank has ended the one before until the last rank has ended it; one clock serves a machine."""
    ends = [max(moments) for moments in zip(*(answer["clock"] for answer in answers), strict=True)]
    return [after - before for before, after in pairwise(ends)]


def _losses(answers: Sequence[Answer]) -> list[float]:
    return [fmean(losses) for losses in zip(*(answer["losses"] for answer in answers), strict=True)]


def bouts_of(variants: Sequence[str], fits: Callable[[Sequence[str]], bool]) -> list[list[str]]:
    """Who takes turns with whom: all in one bout if memory allows, else each with the peer it answers to, and with DDP."""
    if fits(variants):
        return [list(variants)]
    bouts: list[list[str]] = []
    for peer in PEERS:
        base = [name for name in variants if name in ("ddp", peer)]
        for name in variants:
            if name in PEERS or (STAGES[name] >= 2) != (peer == "fsdp2"):
                continue
            if bouts and bouts[-1][: len(base)] == base and fits([*bouts[-1], name]):
                bouts[-1].append(name)
            else:
                bouts.append([*base, name])
        if peer in variants and not any(peer in bout for bout in bouts):
            bouts.append(base)
    return bouts


def bytes_needed(variants: Sequence[str], job: Job, ranks: int) -> int:
    """A rough guess of what these variants take when all live side by side: model state, one more copy for buckets, and the rest."""
    parameters = Anatomy.of_decoder(DECODERS[job.model.name]).parameters()
    cut = {0: 4.0, 1: 2 + 2 / ranks, 2: 1 + 3 / ranks, 3: 4 / ranks}
    return sum(round(ranks * (4 * parameters * (cut[STAGES[name]] + 1) + 450 * MIB)) for name in variants)


def bytes_available() -> int:
    """Memory that new processes can have without swapping. Linux; 0 where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def table(rows: Sequence[Row], foretold: Mapping[str, str]) -> str:
    """The rows as a markdown table."""
    peaks = ("peak private MiB a rank", "peak PSS MiB of all ranks", "peak RSS MiB a rank")
    titles = ["", "s a step (quartiles)", "of DDP (rounds)", "foretold", "of FSDP2 (rounds)", *peaks, f"loss of step {LOSS_STEP}"]
    lines = [titles, ["---"] * len(titles)]
    by_name = {row.variant: row for row in rows}
    for row in rows:
        low, middle, high = quantiles(row.all_seconds, n=4, method="inclusive")
        ratios = [_ratio(row, by_name[peer]) if peer in by_name else "" for peer in PEERS]
        loss = "" if row.variant == "compute" else f"{row.loss:.5f}"
        memory = [f"{bytes_ / MIB:.0f}" for bytes_ in (row.private_bytes, row.machine_bytes, row.high_water_bytes)]
        timing = f"{middle:.3f} ({low:.3f}-{high:.3f})"
        lines.append([row.variant, timing, ratios[0], foretold.get(row.variant, ""), ratios[1], *memory, loss])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _ratio(row: Row, peer: Row) -> str:
    if row is peer:
        return "1"
    ratios = row.ratios(peer)
    return f"{median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"


def compare(name: str, args: argparse.Namespace, deadline: float) -> tuple[list[list[Row]], str]:
    """One job: its bouts, and what is to be read of them. Prints as it goes."""
    job = Job.load(name, mesh=f"dp={args.ranks}")
    job = job.with_(**{"batch.size": args.rows or job.batch.size}).resolve(args.ranks, "cpu", 0)
    room = 0.9 * (bytes_available() or sys.maxsize)
    foretold = FORETOLD.get(name, {}) if (args.ranks, args.precision) == (2, "fp32") else {}
    program = [sys.executable, str(HERE / "variants.py")]
    text, found = f"## {name}: {job.batch.size} sequences of {job.batch.seq_len} tokens\n", []
    for bout in bouts_of(args.variants, lambda some: bytes_needed(some, job, args.ranks) < room):
        print(f"\n{name}: {', '.join(bout)}", flush=True)
        rows = run_bout(
            bout, lambda variant: [*program, variant, name, args.precision, str(job.batch.size), str(args.clip)], args, deadline
        )
        text += f"\n{table(rows, foretold)}\n"
        found.append(rows)
    if not losses_agree(found):
        text += f"\nThe losses of step {LOSS_STEP} differ.\n"
    print(f"\n{text}", flush=True)
    return found, text


def losses_agree(bouts: Sequence[Sequence[Row]]) -> bool:
    """Whether all printed digits are the same; of `compute` they cannot be."""
    return len({f"{row.loss:.5f}" for rows in bouts for row in rows if row.variant != "compute"}) <= 1


def main() -> int:
    args = _arguments()
    signal.alarm(args.limit + 10)
    deadline = time.monotonic() + args.limit
    shown = ["python", "benchmarks/step.py", *sys.argv[1:]]
    machine = {key: value for key, value in environment_facts(shown, "cpu", 0).items() if key not in ("host", "gpus", "threads")}
    clip = f"clipping at {args.clip:g}" if args.clip else "no clipping"
    about = f"{args.ranks} ranks x 1 thread, {args.precision}, {clip}; {args.rounds} rounds of {args.steps} steps in turn"
    text = f"# A training step: {about}\n\n{_line(machine)}\n"
    print(text, flush=True)
    jobs: dict[str, list[list[Row]]] = {}
    for name in args.jobs:
        jobs[name], part = compare(name, args, deadline)
        text += f"\n{part}"
    found = {name: [list(map(asdict, rows)) for rows in bouts] for name, bouts in jobs.items()}
    result = {"machine": machine, "about": about, "jobs": found}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0 if args.precision != "fp32" or all(losses_agree(bouts) for bouts in jobs.values()) else 1


def _line(machine: Mapping[str, Any]) -> str:
    told = f"python {machine['python']}, torch {machine['versions'].get('torch')}, commit {machine['commit']}; {machine['time']}"
    return f"`{machine['command']}` on {machine['cpu']}, {machine['cores']} cores; {told}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("jobs", nargs="*", default=["30m", "120m"], help="built-in jobs with a built-in decoder (default: 30m 120m)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--rows", type=int, help="sequences a step on all ranks together (default: the job's)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--clip", type=float, default=0.0, help="norm that gradients are clipped to (default: not clipped)")
    parser.add_argument("--variants", nargs="+", choices=list(STAGES), default=DEFAULT, metavar="VARIANT", help=", ".join(STAGES))
    parser.add_argument("--limit", type=int, default=3600, help="seconds after which everything is stopped")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "step.json", help="a table in markdown is written beside it")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (JobError, TeamFailed) as problem:
        sys.exit(f"step.py: {problem}")
