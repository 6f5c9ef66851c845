"""The way of `stretto compare`: runners take turns in fresh processes, and what they did becomes a table, a file and a page."""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stretto.adapters.ability import Ability
from stretto.adapters.catalog import RUNNERS, chosen
from stretto.adapters.summary import APART, Effort, RankTurn, Row, Turn, row
from stretto.adapters.verdict import verdict
from stretto.comm.environment import seat
from stretto.draw.comparison import page
from stretto.draw.numbers import bytes_, count
from stretto.errors import JobError, RunError, StrettoError
from stretto.job import Job
from stretto.launch.failure import RankFailed
from stretto.launch.local import run_local
from stretto.launch.runfolder import default_folder, environment_facts, json_text
from stretto.launch.training import check_data, ready, shortened
from stretto.launch.worker import Rank

DEFAULT_STEPS = 20  # of a job that has more
LATER_STEPS = 12  # of rounds after the first, which only time
DEFAULT = ("stretto", "ddp", "fsdp2")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """One job on several runners."""

    job: str
    mesh: str
    rounds: int
    steps: int
    apart: float
    rows: tuple[Row, ...]
    verdict: tuple[str, ...]
    machine: Mapping[str, Any]
    folder: str

    def plain(self) -> dict[str, Any]:
        """What --json prints."""
        return {
            "job": self.job,
            "mesh": self.mesh,
            "rounds": self.rounds,
            "steps": self.steps,
            "apart": self.apart,
            "rows": [one.plain() for one in self.rows],
            "verdict": list(self.verdict),
            "machine": dict(self.machine),
            "files": [str(Path(self.folder) / name) for name in ("compare.json", "compare.html")],
        }


def options(parser: ArgumentParser) -> None:
    """What `stretto compare` takes besides a job."""
    known = f"of {', '.join(RUNNERS)} (default {','.join(DEFAULT)})"
    parser.add_argument("--runners", metavar="A,B", default=",".join(DEFAULT), help=known)
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="turns of each, in the order A B C A B C (default 2)")
    parser.add_argument(
        "--until", type=int, metavar="STEP", help=f"stop after this step (default: the job's steps, at most {DEFAULT_STEPS}); the "
        "learning rate goes as if it went on",
    )  # fmt: skip
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="that one turn may take (default 600)")
    parser.add_argument("--out", metavar="DIR", help="folder for compare.json, compare.html and logs (default runs/compare-JOB-TIME)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")


def compare(
    job: Job, names: Sequence[str], *, rounds: int, until: int | None, limit: float, out: str | Path | None, tell: Tell
) -> Comparison:
    """Run `job` on each of the runners, `rounds` turns each. tell: hears each line of progress. Raises JobError for what is wrong with the
    job itself; what is wrong with a runner is in its row."""
    runners = chosen(names)
    if seat(os.environ) is not None:
        raise JobError("stretto compare starts its ranks itself, in fresh processes; write it without torchrun or srun")
    if rounds < 1:
        raise JobError(f"--rounds {rounds} is not possible; write --rounds 1 or more")
    prepared = ready(job)
    check_data(prepared.job)
    total = prepared.job.total_steps()
    asked = until if until is not None else min(total or DEFAULT_STEPS, DEFAULT_STEPS)
    cut = shortened(prepared.job, asked) if total is not None else prepared.job.with_(steps=asked)
    steps = cut.total_steps() or asked
    folder = Path(out) if out is not None else default_folder(f"compare-{job.name}", time.localtime())
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    tell(prepared.line())
    rows = {can.name: _base(can, cut) for can in runners}
    turns: dict[str, list[Turn]] = {can.name: [] for can in runners}
    for number in range(rounds):
        effort = Effort.of(steps if number == 0 else min(steps, LATER_STEPS))
        for can in runners:
            if rows[can.name].status == "ok":
                logs = folder / "logs" / f"{can.name}-{number + 1}"
                rows[can.name] = _turn(can, cut, prepared.ranks, effort, logs, limit, rows[can.name], turns[can.name], tell)
    done = _rows(runners, rows, turns, cut)
    facts = environment_facts(["stretto", *sys.argv[1:]], prepared.job.device, prepared.devices.visible)
    tolerance = APART[prepared.job.precision.compute or "fp32"]
    said = verdict(done, prepared.job.mesh, tolerance, len(Effort.of(steps).timed))
    found = Comparison(job.name, prepared.job.mesh, rounds, steps, tolerance, done, tuple(said), facts, str(folder))
    (folder / "compare.json").write_text(json_text(found.plain(), indent=1) + "\n", encoding="utf-8")
    (folder / "compare.html").write_text(page(found.plain()), encoding="utf-8")
    return found


def _base(can: Ability, job: Job) -> Row:
    """The row of a runner before it has run: "ok" if it may."""
    installed = can.version()
    if why := can.refusal(job):  # told first: to install it would not help
        return Row(can.name, installed, "cannot", why)
    if installed is None:
        return Row(can.name, None, "not installed", f"{can.package} is not installed; {can.install}")
    return Row(can.name, installed, "ok", notes=can.notes(job))


def _turn(can: Ability, job: Job, ranks: int, effort: Effort, logs: Path, limit: float, base: Row, turns: list[Turn], tell: Tell) -> Row:
    """One turn, added to `turns`; returns the runner's row, which says so if it failed."""
    logs.mkdir(parents=True, exist_ok=True)
    asked = time.monotonic()
    run, processes = (drive_rank, 1) if can.driver else (turn_rank, ranks)
    try:
        results = run_local(run, processes, (can.build, job, effort), logs=logs, timeout=limit)
    except KeyboardInterrupt:
        raise
    except StrettoError as error:
        status, why = ("cannot" if isinstance(error, JobError) else "failed"), _why(error)
        tell(f"{can.name}: {status}: {why}")
        return Row(base.runner, base.version, status, why, base.notes, log=str(logs))  # type: ignore[arg-type]
    told = [RankTurn(*one) for one in (results[0] if can.driver else results)]
    turns.append(Turn(asked, effort, tuple(told)))
    seconds = sorted(turns[-1].seconds)
    tell(f"round {len(turns)}: {can.name} {seconds[len(seconds) // 2]:.3f} s a step, after {turns[-1].startup:.1f} s of start")
    return base


def _why(error: StrettoError) -> str:
    """One line: the rank's own error."""
    if isinstance(error, RankFailed):
        return error.failure.headline
    return "; ".join(str(error).splitlines()) if isinstance(error, (JobError, RunError)) else f"{type(error).__name__}: {error}"


def _rows(runners: Sequence[Ability], rows: Mapping[str, Row], turns: Mapping[str, Sequence[Turn]], job: Job) -> tuple[Row, ...]:
    """All rows, in the order asked for; those that ran with their figures, held against the first that did."""
    reference = next((turns[can.name] for can in runners if rows[can.name].status == "ok" and turns[can.name]), ())
    tokens, apart = job.batch.size * job.batch.seq_len, APART[job.precision.compute or "fp32"]

    def finished(can: Ability) -> Row:
        base = rows[can.name]
        return row(base, turns[can.name], reference, tokens, apart) if base.status == "ok" and turns[can.name] else base

    return tuple(finished(can) for can in runners)


def turn_rank(here: Rank, build: str, job: Job, effort: Effort) -> RankTurn:
    """One rank of a turn."""
    here.emit({"kind": "at", "action": "while loading torch"})
    from stretto.adapters.turn import join, take_turn

    here.emit({"kind": "at", "action": "while joining the other ranks"})
    with join(job, own=build.startswith("stretto.adapters.own:"), rank=here.rank, ranks=here.ranks) as setting:
        return take_turn(build, setting, effort, lambda step, action: here.emit({"kind": "at", "step": step, "action": action}))


def drive_rank(here: Rank, build: str, job: Job, effort: Effort) -> Sequence[RankTurn]:
    """The one process that lets a framework start the ranks itself."""
    from importlib import import_module

    here.emit({"kind": "at", "action": "while the framework runs its ranks"})
    module, _, function = build.partition(":")
    told: Sequence[RankTurn] = getattr(import_module(module), function)(job, here.rank, effort)
    return told


# -- for people -------------------------------------------------------------------------------------------------------

TITLES = ("runner", "version", "tokens/s", "spread", "ratio", "peak a rank", "machine", "sent a step", "start", "last loss", "parts at")


def table(found: Comparison) -> str:
    """The comparison for a terminal."""
    about = f"{found.job} on mesh {found.mesh}: {found.steps} steps, {found.rounds} round{'s' * (found.rounds != 1)} in turn"
    lines = [about, ""]
    ran = [one for one in found.rows if one.status == "ok"]
    cells = [TITLES, *(_cells(one) for one in ran)]
    wide = [max(len(line[i]) for line in cells) for i in range(len(TITLES))]
    lines += ["  ".join(cell.ljust(wide[i]) if i < 2 else cell.rjust(wide[i]) for i, cell in enumerate(line)).rstrip() for line in cells]
    lines += ["", *(f"{one.runner}: {one.status}: {one.why}" for one in found.rows if one.status != "ok")]
    lines += [f"{one.runner}: {note}" for one in ran for note in one.notes]
    lines += ["", *_losses(ran), "", *found.verdict]
    lines += ["", f"sent a step: payload bytes of the busiest rank; parts at: first step whose loss differs by more than {found.apart:g}"]
    lines += [f"files: {found.folder}/compare.json, {found.folder}/compare.html"]
    return "\n".join(lines)


def _cells(one: Row) -> tuple[str, ...]:
    def known(value: Any, show: Callable[[Any], str]) -> str:
        return "-" if value is None else show(value)

    return (
        one.runner,
        one.version or "-",
        known(one.tokens_per_second, count),
        known(one.spread, lambda ends: f"{count(ends[0])}-{count(ends[1])}"),
        known(one.ratio, lambda ratio: f"{ratio:.3f}"),
        known(one.peak_bytes, bytes_),
        known(one.machine_bytes, bytes_),
        known(one.sent_bytes, bytes_),
        known(one.startup_seconds, lambda seconds: f"{seconds:.1f} s"),
        f"{one.losses[-1]:.5f}" if one.losses else "-",
        "no" if one.apart_at is None else f"step {one.apart_at}",
    )


def _losses(ran: Sequence[Row]) -> list[str]:
    """Losses of all runners side by side: the first steps, the last, and where they part."""
    if not ran:
        return []
    steps = len(ran[0].losses)
    shown = sorted({1, 2, 3, steps, *(one.apart_at for one in ran if one.apart_at)} & set(range(1, steps + 1)))
    wide = max(9, *(len(one.runner) for one in ran))
    lines = ["loss of step  " + "  ".join(one.runner.rjust(wide) for one in ran)]
    lines += [f"{step:>12}  " + "  ".join(f"{one.losses[step - 1]:.5f}".rjust(wide) for one in ran) for step in shown]
    return lines
