"""A plan as text: the table of the best layouts, where their time goes, what one change would buy, and why the rest do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.draw.numbers import bytes_, count
from stretto.plan.grown import Grown
from stretto.plan.hardware import Cluster
from stretto.plan.planning import Planned, Row
from stretto.plan.wires import Wire

#: Families of meshes that are told of those that are no plan.
REJECTED = 8
#: Heading and width of a column; the first few hold words.
WORDS = 6
COLUMNS = (
    ("mesh", 34), ("zero", 4), ("pipeline", 14), ("micro", 5), ("recompute", 9), ("compile", 7), ("s/step", 8), ("tok/s/dev", 9),
    ("MFU", 6), ("bubble", 6), ("exposed", 7), ("peak", 8),
)  # fmt: skip


def plan_text(planned: Planned) -> str:
    """What `stretto plan JOB` prints."""
    return "\n".join([*_head(planned), "", *_table(planned.rows), "", *_best(planned), *_own(planned), "", *_rejected(planned)]).rstrip()


def _head(planned: Planned) -> Iterator[str]:
    asked, cluster = planned.asked, planned.asked.cluster
    yield (
        f"{asked.job.name}: {count(asked.anatomy.parameters())} parameters, {asked.job.batch.size} rows of {asked.job.batch.seq_len} "
        f"tokens a step, on {cluster.name} ({cluster.devices} devices of {bytes_(cluster.device.memory)})"
    )
    yield f"{planned.searched:,} layouts on {planned.families:,} meshes were looked at; the best of each mesh, best first"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield "  # " + " ".join(f"{name:>{wide}}" if i > 5 else f"{name:<{wide}}" for i, (name, wide) in enumerate(COLUMNS)).rstrip()
    for number, row in enumerate(rows, 1):
        line = " ".join(
            f"{cell:>{wide}}" if i > 5 else f"{cell:<{wide}}" for i, (cell, (_, wide)) in enumerate(zip(cells(row), COLUMNS, strict=True))
        )
        yield f"{number:>3} {line}{'' if row.runs else '  not run yet'}"


def cells(row: Row) -> tuple[str, ...]:
    """A line of the table, below COLUMNS."""
    setting, plan = row.plan.setting, row.plan
    pipeline = "-" if setting.size["pp"] == 1 else f"{setting.schedule}{f' {setting.chunks}' if setting.chunks > 1 else ''}"
    return (
        str(setting.mesh), str(setting.zero), pipeline, str(setting.micro_size), setting.recompute, row.job.compile.mode,
        f"{plan.seconds:.4g}", count(row.tokens_per_second), f"{row.mfu:.1%}", f"{plan.prediction.bubble:.0%}",
        f"{plan.prediction.exposed / plan.seconds:.0%}", bytes_(plan.memory.peak),
    )  # fmt: skip


def _best(planned: Planned) -> Iterator[str]:
    best = planned.best
    if best is None:
        return
    number = planned.rows.index(best) + 1
    memory = best.plan.memory
    kinds = ("parameters", "gradients", "optimizer", "activations", "buffers", "context")
    yield f"The best that runs is number {number}: {best.why}"
    yield f"  a device holds {', '.join(f'{kind} {bytes_(getattr(memory, kind))}' for kind in kinds)}"
    if planned.sent:
        yield f"  a device sends in a step: {', '.join(_sent(wire, planned.asked.cluster) for wire in planned.sent)}"
    yield from (f"  {change}" for change in planned.bought)


def _sent(wire: Wire, cluster: Cluster) -> str:
    """As 'gradients meet 14.1 GB by nvlink4 and 1.76 GB by ndr'."""
    ways = ((wire.inside, cluster.inside.name), (wire.across, cluster.across.name))
    return f"{wire.words} {' and '.join(f'{bytes_(amount)} by {name}' for amount, name in ways if amount)}"


def _own(planned: Planned) -> Iterator[str]:
    if planned.own is None:
        yield f"The job as written cannot be here: {planned.own_why}"
        return
    own, best = planned.own, planned.best
    slower = f", {own.plan.seconds / best.plan.seconds:.2f} times the best" if best else ""
    yield f"The job as written ({own.plan.setting.mesh}, zero {own.plan.setting.zero}): {own.plan.seconds:.4g} s a step{slower}; {own.why}"
    if planned.own_why:
        yield f"  but it does not fit: {planned.own_why}"
    for kind, seconds in planned.actions.items():
        low, high = min(seconds), max(seconds)
        yield f"  {kind:<6} {low:.4g}{f' to {high:.4g}' if high > low * 1.001 else ''} s"


def _rejected(planned: Planned) -> Iterator[str]:
    if planned.rejected:
        yield f"{len(planned.rejected)} meshes are not among them:"
        wide = max(len(one.mesh) for one in planned.rejected[:REJECTED])
        yield from (f"  {one.mesh:<{wide}}  {one.why}" for one in planned.rejected[:REJECTED])
        left = planned.rejected[REJECTED:]
        if left:
            fit = sum(one.fits for one in left)
            yield f"  and {fit} slower ones, {len(left) - fit} that do not fit (--json lists them)"


def grown_text(grown: Sequence[Grown]) -> str:
    """What `--gpus` prints: how time and cost grow with devices."""
    lines = [f"{'devices':>8} {'mesh':<34} {'s/step':>8} {'MFU':>6} {'hours':>9} {'device-hours':>13} {'cost':>10}  "]
    for one in grown:
        if one.row is None:
            lines.append(f"{one.devices:>8} {one.why}")
            continue
        cost = "" if one.cost is None else f"{one.cost:,.0f}"
        cells = f"{one.devices:>8} {one.row.plan.setting.mesh!s:<34} {one.row.plan.seconds:>8.4g} {one.row.mfu:>6.1%}"
        lines.append(f"{cells} {one.hours:>9,.1f} {one.device_hours:>13,.0f} {cost:>10}  {one.why}".rstrip())
    return "\n".join(lines)
