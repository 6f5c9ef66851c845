"""How much faster do scripts written for torch.distributed train over shared memory, with the backend's name changed and nothing else?

    python benchmarks/backend.py                # DDP, FSDP2 and DTensor TP on job 30m, 2 ranks
    python benchmarks/backend.py --jobs 120m --variants fsdp2 --ranks 4

Each runs once over gloo and once over "stretto" (comm/backend.py), in turns (benchmarks/turns.py). The losses must agree.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median, quantiles

from step import LOSS_STEP, Row, run_bout
from turns import TeamFailed

from stretto.job import Job
from stretto.launch.runfolder import environment_facts

HERE = Path(__file__).parent
VARIANTS = ("ddp", "fsdp2", "tp")
#: gloo's seconds / ours, promised for 2 ranks on job 30m.
PROMISED = {("fsdp2", "30m", 2): 1.2}


def table(rows: list[Row], job: str, ranks: int) -> str:
    """Pairs of rows, gloo's and ours, as a markdown table."""
    lines = [
        [
            "",
            "gloo s a step (quartiles)",
            "stretto s a step (quartiles)",
            "gloo / stretto (rounds)",
            "promised",
            f"losses of step {LOSS_STEP}",
        ]
    ]
    lines.append(["---"] * len(lines[0]))
    for theirs, ours in zip(rows[::2], rows[1::2], strict=True):
        ratios = theirs.ratios(ours)
        timings = []
        for row in (theirs, ours):
            low, middle, high = quantiles(row.all_seconds, n=4, method="inclusive")
            timings.append(f"{middle:.3f} ({low:.3f}-{high:.3f})")
        promised = PROMISED.get((theirs.variant, job, ranks))
        ratio = f"{median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
        lines.append([theirs.variant, *timings, ratio, f">= {promised}" if promised else "", f"{theirs.loss:.5f}, {ours.loss:.5f}"])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def rank_of(job: str, precision: str, rows: int, variant: str) -> list[str]:
    """The command of each rank."""
    return [sys.executable, str(HERE / "variants.py"), variant, job, precision, str(rows), "0"]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", nargs="+", default=["30m"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--rows", type=int, help="sequences a step (default: the job's)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--limit", type=int, default=1800, help="seconds after which everything is stopped")
    parser.add_argument("--out", type=Path, help="a JSON file; a table in markdown is written beside it")
    args = parser.parse_args()
    signal.alarm(args.limit + 10)
    deadline = time.monotonic() + args.limit
    facts = environment_facts(["python", "benchmarks/backend.py", *sys.argv[1:]], "cpu", 0)
    machine = {key: value for key, value in facts.items() if key not in ("host", "gpus", "threads")}
    how = f"{args.ranks} ranks x 1 thread, {args.precision}; {args.rounds} rounds of {args.steps} steps in turn"
    text = f"# The backend's name changed: {how}\n\n"
    text += f"`{machine['command']}` on {machine['cpu']}, {machine['cores']} cores; torch {machine['versions'].get('torch')}, "
    text += f"commit {machine['commit']}; {machine['time']}\n"
    found, agree = {}, True
    for name in args.jobs:
        rows: list[Row] = []
        size = args.rows or Job.load(name).batch.size
        command = partial(rank_of, name, args.precision, size)
        for variant in args.variants:  # a pair at a time: memory for all side by side is not to be had on small machines
            rows += run_bout((variant, f"{variant}@stretto"), command, args, deadline)
        agree &= all(f"{a.loss:.5f}" == f"{b.loss:.5f}" for a, b in zip(rows[::2], rows[1::2], strict=True))
        text += f"\n## {name}\n\n{table(rows, name, args.ranks)}\n"
        found[name] = [asdict(row) for row in rows]
    print(f"\n{text}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"machine": machine, "jobs": found}, indent=1) + "\n", encoding="utf-8")
        args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0 if agree or args.precision != "fp32" else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TeamFailed as problem:
        sys.exit(f"backend.py: {problem}")
