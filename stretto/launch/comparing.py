"""The way of `stretto compare`: runners take turns in fresh processes, and what they did becomes a table, a file and a page."""

from __future__ import annotations

import os
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from stretto.adapters.ability import Ability
from stretto.adapters.catalog import RUNNERS, chosen
from stretto.adapters.foretold import Forecast, foretell
from stretto.adapters.summary import APART, Effort, RankTurn, Row, Turn, row, steps_left
from stretto.adapters.verdict import verdict
from stretto.comm.environment import seat
from stretto.draw.comparison import page
from stretto.draw.forecast import forecast_text
from stretto.draw.numbers import bytes_, count
from stretto.errors import JobError, RunError, StrettoError
from stretto.job import Job
from stretto.launch.failure import RankFailed
from stretto.launch.local import run_local
from stretto.launch.runfolder import default_folder, environment_facts, json_text
from stretto.launch.training import check_data, ready, shortened
from stretto.launch.worker import Rank
from stretto.layout.mesh import Mesh
from stretto.plan.hardware import Cluster

DEFAULT_STEPS = 20  # of a job that has more
DEFAULT_MINUTES = 14.0
DEFAULT = ("stretto", "ddp", "fsdp2")
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Comparison:
    """One job on several runners. forecast: what is foretold of them on another cluster, where that was asked for. stopped: by Ctrl-C."""

    job: str
    mesh: str
    rounds: int
    steps: int
    apart: float
    rows: tuple[Row, ...]
    verdict: tuple[str, ...]
    machine: Mapping[str, Any]
    folder: str
    forecast: Forecast | None = None
    stopped: bool = False

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
            "cluster": self.forecast.cluster if self.forecast else None,
            "foretold": [one.plain() for one in self.forecast.rows] if self.forecast else [],
            "foretold_verdict": list(self.forecast.said) if self.forecast else [],
            "files": [str(Path(self.folder) / name) for name in ("compare.json", "compare.html")],
        }


def options(parser: ArgumentParser) -> None:
    """What `stretto compare` takes besides a job."""
    known = f"of {', '.join(RUNNERS)} (default {','.join(DEFAULT)})"
    parser.add_argument("--runners", metavar="A,B", default=",".join(DEFAULT), help=known)
    parser.add_argument(
        "--rounds",
        type=int,
        default=2,
        metavar="N",
        help="turns of each, in the order A B C A B C (default 2); 0 with --cluster runs nothing",
    )
    parser.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help='also foretell each framework there: "64x8 h100", a device\'s name, or a file of stretto measure',
    )
    parser.add_argument(
        "--until", type=int, metavar="STEP", help=f"stop after this step (default: the job's steps, at most {DEFAULT_STEPS}); the "
        "learning rate goes as if it went on",
    )  # fmt: skip
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="that one turn may take (default 600)")
    parser.add_argument(
        "--minutes", type=float, default=DEFAULT_MINUTES, metavar="M",
        help=f"that all may take (default {DEFAULT_MINUTES:g}): rounds after the first are shortened, then left out",
    )  # fmt: skip
    parser.add_argument("--out", metavar="DIR", help="folder for compare.json, compare.html and logs (default runs/compare-JOB-TIME)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")


def compare(
    job: Job,
    names: Sequence[str],
    *,
    rounds: int,
    until: int | None,
    limit: float,
    out: str | Path | None,
    tell: Tell,
    minutes: float = DEFAULT_MINUTES,
    cluster: Cluster | None = None,
    keep: Collection[str] = (),
) -> Comparison:
    """Run `job` on each of the runners, `rounds` turns each, fewer where `minutes` would not do.

    tell: hears each line of progress. limit: seconds of one turn. cluster: where each framework is foretold beside that, with the keys of
    `keep` as the job has them. Raises JobError for what is wrong with the job itself; what is wrong with a runner is in its row.
    """
    began, runners = time.monotonic(), chosen(names)
    if seat(os.environ) is not None:
        raise JobError("stretto compare starts its ranks itself, in fresh processes; write it without torchrun or srun")
    if rounds < (0 if cluster else 1):
        raise JobError(f"--rounds {rounds} is not possible; write --rounds 1 or more, or --rounds 0 with --cluster")
    forecast = None if cluster is None else foretell(job, cluster, [can.name for can in runners], _kept(job, cluster, keep))
    measured = _measure(job, runners, Bounds(rounds, until, limit, began + 60 * minutes), out, tell) if rounds else _nothing(job, out)
    found = replace(measured, forecast=forecast)
    (Path(found.folder) / "compare.json").write_text(json_text(found.plain(), indent=1) + "\n", encoding="utf-8")
    (Path(found.folder) / "compare.html").write_text(page(found.plain()), encoding="utf-8")
    return found


def _kept(job: Job, cluster: Cluster, keep: Collection[str]) -> frozenset[str]:
    """A mesh is the runs' here, and holds there only if it is of the cluster's size."""
    there = bool(job.mesh) and "auto" not in job.mesh and Mesh.parse(job.mesh).size == cluster.devices
    return frozenset(key for key in keep if key != "mesh" or there)


def _folder(job: Job, out: str | Path | None) -> Path:
    folder = Path(out) if out is not None else default_folder(f"compare-{job.name}", time.localtime())
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    return folder


def _nothing(job: Job, out: str | Path | None) -> Comparison:
    """Of a job that is only foretold."""
    facts = environment_facts(["stretto", *sys.argv[1:]], "cpu", 0)
    return Comparison(job.name, job.mesh, 0, 0, APART["fp32"], (), (), facts, str(_folder(job, out)))


class Bounds(NamedTuple):
    """How much is run. until: the last step. limit: seconds of one turn. end: when all shall be done, on the machine's monotonic clock."""

    rounds: int
    until: int | None
    limit: float
    end: float


def _measure(job: Job, runners: Sequence[Ability], bounds: Bounds, out: str | Path | None, tell: Tell) -> Comparison:
    """The runs, in turn."""
    prepared = ready(job)
    check_data(prepared.job)
    total = prepared.job.total_steps()
    asked = bounds.until if bounds.until is not None else min(total or DEFAULT_STEPS, DEFAULT_STEPS)
    cut = shortened(prepared.job, asked) if total is not None else prepared.job.with_(steps=asked)
    steps = cut.total_steps() or asked
    folder = _folder(job, out)
    tell(prepared.line())
    rows = {can.name: _base(can, cut) for can in runners}
    turns: dict[str, list[Turn]] = {can.name: [] for can in runners}
    stopped = False
    try:
        for number, now in _rounds(turns, rows, steps, bounds):
            for can in runners:
                if rows[can.name].status == "ok":
                    logs = folder / "logs" / f"{can.name}-{number}"
                    rows[can.name] = _turn(
                        can, cut, prepared.ranks, Effort.of(now), logs, bounds.limit, rows[can.name], turns[can.name], tell
                    )
    except KeyboardInterrupt:
        if not any(turns.values()):
            raise
        stopped = True  # what has been measured is minutes of work
    finished = _rows(runners, rows, turns, cut)
    facts = environment_facts(["stretto", *sys.argv[1:]], prepared.job.device, prepared.devices.visible)
    tolerance = APART[prepared.job.precision.compute or "fp32"]
    said = list(verdict(finished, prepared.job.mesh, tolerance, len(Effort.of(steps).timed)))
    done = max((len(some) for some in turns.values()), default=0)
    if stopped:
        said.append("It was stopped: what stands here is of the turns before.")
    elif 0 < done < bounds.rounds:
        said.append(f"Only {done} of {bounds.rounds} rounds: another would have taken longer than --minutes allows.")
    return Comparison(job.name, prepared.job.mesh, done, steps, tolerance, finished, tuple(said), facts, str(folder), stopped=stopped)


def _rounds(turns: Mapping[str, Sequence[Turn]], rows: Mapping[str, Row], steps: int, bounds: Bounds) -> Iterator[tuple[int, int]]:
    """(number, steps) of each round: the first whole, later ones as long as there is time for."""
    for number in range(1, bounds.rounds + 1):
        latest = [some[-1] for name, some in turns.items() if rows[name].status == "ok" and some]
        now = steps_left(latest, steps, bounds.end - time.monotonic()) if latest else steps * (number == 1)
        if not now:
            return
        yield number, now


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
        if base.status == "ok" and not turns[can.name]:
            return replace(base, status="not run", why="stopped before its first turn was over")
        return row(base, turns[can.name], reference, tokens, apart) if base.status == "ok" else base

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
    parts = [_measured(found)] if found.rows else []
    if found.forecast is not None:
        parts.append(forecast_text(found.forecast.cluster, [one.plain() for one in found.forecast.rows], found.forecast.said))
    return "\n\n".join([*parts, f"files: {found.folder}/compare.json, {found.folder}/compare.html"])


def _measured(found: Comparison) -> str:
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
