"""Foretold beside measured: every published run of a table, its error, and how the errors of a source sum up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from types import MappingProxyType

from stretto.plan.known import Schedules
from stretto.plan.predict import Predictor
from stretto.plan.published import Run, Skipped, read_runs

#: Runs of one sweep that are closer than this are not told apart by repeating them.
TIE = 0.05
#: Sources whose mean is quoted: dense models whose layout is stated, and not those that measured something else (offloading, other
#: computations, a chip or a software that nobody calibrated here).
QUOTED: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(
        (
            "Narayanan T1", "Narayanan T2", "Korthikanti T5", "Megatron-LM 2020 A100", "Megatron README H100", "BLOOM",
            "vTrain multi-node", "vTrain single-node", "llm-foundry H100-80GB", "llm-foundry A100-80GB", "llm-foundry A100-40GB",
            "torchtitan bf16", "torchtitan fp8", "SimuMax", "nanotron", "InternEvo", "Megatron-Bridge",
        ),
        1,
    )
)  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """One run, foretold: seconds of a step and bytes of its fullest rank, as its source reads them."""

    run: Run
    seconds: float
    memory: float

    @property
    def error(self) -> float | None:
        """Of the seconds, relative and signed; None where none were measured."""
        return None if self.run.seconds is None else self.seconds / self.run.seconds - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.run.memory is None else self.memory / self.run.memory - 1


@dataclass(frozen=True)
class Score:
    """Errors of one source, in percent.

    scaled_mape: after one free factor for the source: what remains is the model's, what went is the software's. left_out: after
    the factor of all other sources. rank_correlation: Spearman's within sweeps (runs that differ in layout alone), weighted by
    their size. ordered: share of a sweep's pairs more than 5% apart that are foretold in the measured order. regret: how much
    slower the layout foretold to be fastest is than the fastest of its sweep.
    """

    n: int
    mape: float
    median: float
    max: float
    bias: float
    scaled_mape: float
    left_out: float
    rank_correlation: float | None
    ordered: float | None
    regret: float | None
    memory_mape: float | None


def validate(paths: Sequence[Path]) -> dict[str, object]:
    """Foretell all runs of these tables. The result is that of `stretto plan --validate --json`. Raises JobError."""
    rows = [(path, row) for path in paths for row in read_runs(path)]
    verdicts = foretell([row for _, row in rows])
    foretold = {id(verdict.run): verdict for verdict in verdicts}
    scores = by_source(verdicts)
    quoted = [score for source, score in scores.items() if source in QUOTED]
    errors = [abs(v.error) for v in verdicts if v.error is not None and v.run.source in QUOTED]
    return {
        "rows": [_row(path, row, foretold.get(id(row))) for path, row in rows],
        "by_source": {source: asdict(score) for source, score in scores.items()},
        "mape": statistics.fmean(score.mape for score in quoted) if quoted else None,
        "scaled_mape": statistics.fmean(score.scaled_mape for score in quoted) if quoted else None,
        "max": 100 * max(errors, default=0.0),
        "foretold": len(verdicts),
        "skipped": len(rows) - len(verdicts),
    }


def _row(path: Path, row: Run | Skipped, verdict: Verdict | None) -> dict[str, object]:
    measured = {} if isinstance(row, Skipped) else {"measured_seconds": row.seconds, "measured_bytes": row.memory, "out_of_memory": row.oom}
    found = {} if verdict is None else {"predicted_seconds": verdict.seconds, "predicted_bytes": verdict.memory}
    errors = {} if verdict is None else {"error": verdict.error, "memory_error": verdict.memory_error}
    skipped = row.why if isinstance(row, Skipped) else None
    return {"file": path.name, "line": row.line, "source": row.source, **measured, **found, **errors, "skipped": skipped}


def foretell(rows: Iterable[Run | Skipped]) -> list[Verdict]:
    """Every run that says enough."""
    schedules = Schedules()
    return [_foretell(row, schedules) for row in rows if isinstance(row, Run)]


def _foretell(run: Run, schedules: Schedules) -> Verdict:
    predictor = Predictor(run.anatomy, run.setting, run.cluster, run.software, schedules)
    memory = [predictor.memory(rank) for rank in range(run.setting.size["pp"])] if run.memory is not None or run.oom else []
    fullest = max((m.peak if run.of_device else m.allocated for m in memory), default=0.0)
    return Verdict(run, predictor.predict().seconds, fullest)


def by_source(verdicts: Sequence[Verdict]) -> dict[str, Score]:
    """A score for each source that timed anything, in the order of the table."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.run.seconds is not None:
            groups.setdefault(verdict.run.source, []).append(verdict)
    remembered = [v for v in verdicts if v.memory_error is not None]
    logs = {source: [math.log(v.seconds / (v.run.seconds or 1)) for v in group] for source, group in groups.items()}
    scores = {}
    for source, group in groups.items():
        errors = [v.error for v in group if v.error is not None]
        own = math.exp(-statistics.median(logs[source]))
        others = [statistics.median(logs[other]) for other in logs if other != source and other in QUOTED]
        correlation, ordered, regret = _order(group)
        memory = [abs(v.memory_error or 0.0) for v in remembered if v.run.source == source]
        scores[source] = Score(
            len(errors),
            100 * statistics.fmean(map(abs, errors)),
            100 * statistics.median(map(abs, errors)),
            100 * max(map(abs, errors)),
            100 * statistics.fmean(errors),
            _scaled(group, own),
            _scaled(group, math.exp(-statistics.fmean(others)) if others else 1.0),
            correlation,
            ordered,
            regret,
            100 * statistics.fmean(memory) if memory else None,
        )
    return scores


def _scaled(verdicts: Sequence[Verdict], factor: float) -> float:
    return 100 * statistics.fmean(abs(v.seconds * factor / v.run.seconds - 1) for v in verdicts if v.run.seconds)


def _order(verdicts: Sequence[Verdict]) -> tuple[float | None, float | None, float | None]:
    """Rank correlation, share of ordered pairs and mean regret over the sweeps among the runs."""
    sweeps: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        sweeps.setdefault(verdict.run.sweep, []).append(verdict)
    correlations, right, pairs, regrets = [], 0.0, 0, []
    for sweep in sweeps.values():
        measured = [v.run.seconds or 0.0 for v in sweep]
        foretold = [v.seconds for v in sweep]
        if len(sweep) >= 4 and len(set(measured)) > 1 and len(set(foretold)) > 1:
            correlations.append((statistics.correlation(_ranks(measured), _ranks(foretold)), len(sweep)))
        if len(sweep) >= 2:
            regrets.append(measured[foretold.index(min(foretold))] / min(measured) - 1)
        for i, j in combinations(range(len(sweep)), 2):
            if abs(measured[i] / measured[j] - 1) > TIE:
                pairs += 1
                right += 0.5 if foretold[i] == foretold[j] else (measured[i] < measured[j]) == (foretold[i] < foretold[j])
    weight = sum(n for _, n in correlations)
    return (
        sum(c * n for c, n in correlations) / weight if weight else None,
        100 * right / pairs if pairs else None,
        100 * statistics.fmean(regrets) if regrets else None,
    )


def _ranks(values: Sequence[float]) -> list[float]:
    """Positions in order; equal values share the mean of theirs."""
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


#: Heading, key of a Score, width and digits.
COLUMNS = (
    ("n", "n", 5, 0),
    ("mape", "mape", 7, 1),
    ("median", "median", 8, 1),
    ("max", "max", 7, 1),
    ("bias", "bias", 7, 1),
    ("scaled", "scaled_mape", 8, 1),
    ("left", "left_out", 6, 1),
    ("rank", "rank_correlation", 7, 2),
    ("order", "ordered", 7, 0),
    ("regret", "regret", 8, 1),
    ("memory", "memory_mape", 8, 1),
)


def table(found: Mapping[str, object]) -> str:
    """What `stretto plan --validate` prints: a line a source, the means, and why rows were skipped."""
    scores, rows = found["by_source"], found["rows"]
    assert isinstance(scores, dict) and isinstance(rows, list)
    lines = [f"{'source':<28}" + "".join(f"{name:>{wide}}" for name, _, wide, _ in COLUMNS)]
    for source, score in scores.items():
        name = source if source in QUOTED else f"({source})"
        cells = (" " * wide if score[key] is None else f"{score[key]:>{wide}.{digits}f}" for _, key, wide, digits in COLUMNS)
        lines.append(f"{name:<28}{''.join(cells)}".rstrip())
    quoted = sum(source in QUOTED for source in scores)
    if found["mape"] is not None:
        lines.append(f"mean of {quoted} sources (others in brackets): mape {found['mape']:.1f}, scaled {found['scaled_mape']:.1f}")
    why: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["skipped"]:
            key = (row["source"], row["skipped"])
            why[key] = why.get(key, 0) + 1
    lines.append(f"foretold {found['foretold']} rows, skipped {found['skipped']}:")
    lines += [f"  {times:>3} of {source}: {reason}" for (source, reason), times in why.items()]
    return "\n".join(lines)
