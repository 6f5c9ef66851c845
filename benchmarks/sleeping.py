"""Does a step of a pipeline last as long as its schedule foretells, on more ranks than this machine has cores?

    python benchmarks/sleeping.py                      # every schedule on 8 ranks, 16 microbatches
    python benchmarks/sleeping.py 1f1b zb-v --ranks 4

Each stage's computation is replaced by sleeping, which needs no core. What is left is real: processes, messages of a tiny model,
reductions, the vote. `simulate` is told the same seconds, so a ratio of 1.00 means that schedule and messages cost nothing more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import stretto
from stretto.anatomy import DecoderShape
from stretto.errors import JobError
from stretto.job import Job
from stretto.launch.runfolder import environment_facts
from stretto.schedule.action import Action
from stretto.schedule.pipelines import PIPELINES, chunks_of, microbatches_of
from stretto.schedule.request import requested
from stretto.schedule.step import unit_cost
from stretto.schedule.timeline import simulate

WARMUP = 1  # steps
SHAPE = DecoderShape(hidden=8, blocks=16, heads=2, kv_heads=1, head_dim=4, ffn=8, vocab=16)


class Row(NamedTuple):
    """One schedule. seconds: of each step; foretold, with what it is without messages' own cost; bubble: shares of the step."""

    schedule: str
    microbatches: int
    seconds: list[float]
    foretold: float
    bubble: float

    @property
    def ratio(self) -> float:
        return statistics.median(self.seconds) / self.foretold


def job_of(schedule: str, ranks: int, microbatches: int, transport: str) -> Job:
    """A tiny model in stages; a row a microbatch."""
    count = microbatches_of(schedule, ranks, microbatches)
    keys = {"batch.size": count, "batch.micro_size": 1, "batch.seq_len": 4, "comm.transport": transport, "device": "cpu"}
    return Job.load({**keys, "mesh": f"pp={ranks}", "pipeline": schedule, "zero": 0, "clip": 0.0})


def seconds_of(unit: float, chunks: int) -> Callable[[Action], float]:
    """What each action sleeps: a rank's share of a forward takes `unit`, whatever number of stages it is cut in."""
    return lambda action: unit_cost(action) * unit / chunks


def measure(names: Sequence[str], microbatches: int, unit: float, steps: int, transport: str) -> dict[str, list[float]]:
    """On each rank: the seconds of each step of each schedule."""
    import torch

    from stretto.comm.transport import World
    from stretto.engine.engine import Engine
    from stretto.models import library
    from stretto.models.decoder import Decoder, initial

    torch.set_num_threads(1)
    world = World.from_environment("cpu", transport)
    found: dict[str, list[float]] = {}
    for name in names:
        job = job_of(name, world.size, microbatches, transport)
        model = Decoder(SHAPE, device="meta")
        engine = Engine(library.Loaded(model, initial, "", regular=library.regular_modules(model)), job, world)
        asleep(engine, seconds_of(unit, chunks_of(name, world.size, None)))
        ids = torch.arange(4 * job.batch.size).view(-1, 4) % SHAPE.vocab
        reports = [engine.step({"input_ids": ids, "labels": ids}) for _ in range(WARMUP + steps)]
        found[name] = [report.seconds for report in reports[WARMUP:]]
        if world.rank == 0:
            print(f"{name}: {', '.join(f'{seconds:.3f}' for seconds in found[name])} s", file=sys.stderr, flush=True)
        engine.close()
    return found


def asleep(engine: Any, seconds: Callable[[Action], float]) -> None:
    """Let each stage's computation last as long as `seconds` says, its own few milliseconds included, waiting for messages not."""
    for stage in engine.parallel.stages:
        passage, walk = stage.passage, stage.walk
        passage.run = lasting(passage.run, seconds(Action("F", stage.number, 0)))
        walk.weights = lasting(walk.weights, seconds(Action("W", stage.number, 0)))
        backward(walk, seconds(Action("B", stage.number, 0)), seconds(Action("I", stage.number, 0)))


def lasting(call: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slow(*args: Any, **kwargs: Any) -> Any:
        until = time.perf_counter() + seconds
        result = call(*args, **kwargs)
        sleep_until(until)
        return result

    return slow


def backward(walk: Any, whole: float, half: float) -> None:
    """A backward is what lies between these two calls."""
    begin, end = walk.begin_backward, walk.end_backward
    until = 0.0

    def slow_begin(last: bool, straight: bool | None = None, split: bool = False) -> None:
        nonlocal until
        until = time.perf_counter() + (half if split else whole)
        begin(last, straight, split)

    def slow_end() -> None:
        end()
        sleep_until(until)

    walk.begin_backward, walk.end_backward = slow_begin, slow_end


def sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


def rows_of(args: argparse.Namespace) -> list[Row]:
    answers = stretto.launch(measure, args.ranks, (args.schedules, args.microbatches, args.unit, args.steps, args.transport))
    rows = []
    for name in args.schedules:
        chunks, count = chunks_of(name, args.ranks, None), microbatches_of(name, args.ranks, args.microbatches)
        timeline = simulate(requested(name, args.ranks, count), seconds_of(args.unit, chunks))
        steps = [max(seconds) for seconds in zip(*(answer[name] for answer in answers), strict=True)]
        rows.append(Row(name, count, steps, timeline.seconds, timeline.bubble(0) / timeline.seconds))
    return rows


def table(rows: Sequence[Row]) -> str:
    lines = [("schedule", "microbatches", "s a step (least-most)", "foretold", "measured / foretold", "bubble foretold"), ("---",) * 6]
    for row in rows:
        seconds = f"{statistics.median(row.seconds):.3f} ({min(row.seconds):.3f}-{max(row.seconds):.3f})"
        lines.append((row.schedule, str(row.microbatches), seconds, f"{row.foretold:.3f}", f"{row.ratio:.3f}", f"{row.bubble:.1%}"))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("schedules", nargs="*", default=list(PIPELINES), help=f"default: {' '.join(PIPELINES)}")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--unit", type=float, default=0.1, help="seconds that a rank's share of a forward sleeps; a backward twice that")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--transport", default="auto", choices=["auto", "gloo", "shm"])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "sleeping.json", help="a table stands beside it")
    args = parser.parse_args()
    machine: Mapping[str, Any] = environment_facts(["python", "benchmarks/sleeping.py", *sys.argv[1:]], "cpu", 0)
    told = f"torch {machine['versions'].get('torch')}, commit {machine['commit']}; {machine['time']}"
    text = f"`{machine['command']}` on {machine['cpu']}, {machine['cores']} cores; {told}\n"
    rows = rows_of(args)
    text = f"# A step of a pipeline that only sleeps: {args.ranks} ranks, transport {args.transport}\n\n{text}\n{table(rows)}\n"
    print(text)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in machine.items() if key not in ("host", "gpus", "threads")}
    args.out.write_text(json.dumps({"machine": kept, "rows": [row._asdict() for row in rows]}, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JobError as problem:
        sys.exit(f"sleeping.py: {problem}")
