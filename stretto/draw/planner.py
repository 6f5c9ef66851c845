"""What the page of `stretto plan --serve` shows: the planner's own answers, with their pictures and words. The page is planner.html."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.draw.foretold import cards, foretold_picture, seconds_bars, wires_table
from stretto.draw.frontier import frontier_picture, growth_picture
from stretto.draw.memory import MOST_BARS, memory_picture
from stretto.draw.numbers import bytes_, count
from stretto.draw.plans import COLUMNS, REJECTED, cells
from stretto.errors import JobError
from stretto.job import Job
from stretto.plan.asking import Asked
from stretto.plan.choices import Chosen, choices_of
from stretto.plan.frontier import frontier
from stretto.plan.grown import Grown, grow
from stretto.plan.known import Known
from stretto.plan.planning import plan_job
from stretto.plan.view import View, view

#: Meshes that the table of the best has, and those whose reasons are told.
BEST, WHY_NOT = 8, 3 * REJECTED
PAGE = Path(__file__).with_name("planner.html")


def layout_answer(chosen: Chosen, known: Mapping[bool, Known] | None = None) -> dict[str, Any]:
    """One layout, or why it cannot be, with what else can be chosen."""
    found: dict[str, Any] = {"choices": chosen.choices, "options": chosen.options, "notes": chosen.notes, "error": chosen.error}
    if chosen.asked is None:
        return found
    try:
        seen = view(chosen.asked, known)
    except JobError as error:
        return {**found, "error": str(error)}
    step = foretold_picture(seen.predictor)
    ranks = len(seen.memory)
    return {
        **found,
        "dp": str(seen.row.plan.setting.size["dp"]),
        "layout": seen.plain(),
        "head": head(seen),
        "verdict": verdict(seen),
        "why": why(seen),
        "cards": cards(seen),
        "memory": memory_picture(seen),
        "memory_note": f"some of {ranks} pipeline ranks" if ranks > MOST_BARS else "a bar a pipeline rank" if ranks > 1 else "",
        "timeline": step.svg,
        "timeline_note": step.note,
        "where": seconds_bars(seen),
        "wires": wires_table(seen),
    }


def head(seen: View) -> str:
    """What is planned where, in a line."""
    job, cluster = seen.asked.job, seen.asked.cluster
    return (
        f"{job.model.name}: {count(seen.asked.anatomy.parameters())} parameters, {job.batch.size:,} rows of {job.batch.seq_len:,} tokens "
        f"a step, on {cluster.name} ({cluster.devices:,} device{'s' if cluster.devices > 1 else ''} of {bytes_(cluster.device.memory)})"
    )


def verdict(seen: View) -> str:
    """Whether it fits, and what is wrong if it does not."""
    peak = f"{bytes_(seen.row.plan.memory.peak)} of {bytes_(seen.room)} that a device can use"
    mesh = seen.row.plan.setting.mesh
    if seen.over:
        return f"{mesh} does not fit: {seen.over}"
    return f"{mesh} fits: the fullest device holds {peak}{'' if seen.row.runs else '; the engine does not run this mesh yet'}"


def why(seen: View) -> list[str]:
    """The reasons, a sentence each."""
    shares, *forced = seen.row.why.split("; ")
    memory, plan = seen.row.plan.memory, seen.row.plan
    fullest = max(("parameters", "gradients", "optimizer", "activations", "buffers"), key=lambda kind: float(getattr(memory, kind)))
    lines = [f"of a step's time: {shares}", *forced]
    if len(seen.memory) > 1:
        lines.append(f"pipeline rank {plan.fullest} is the fullest: most of it {fullest}, {bytes_(getattr(memory, fullest))}")
    else:
        lines.append(f"most of what a device holds is {fullest}: {bytes_(getattr(memory, fullest))}")
    if seen.over:
        lines.append(f"it does not fit: {seen.over}")
    return [*lines, *(f"one change: {bought}" for bought in seen.bought)]


def best_answer(asked: Asked, keep: Collection[str]) -> dict[str, Any]:
    """The best layouts as rows, each with the choices that make it; and why other meshes are not among them."""
    planned = plan_job(asked.job, asked.cluster, keep, BEST)
    return {
        "heads": [name for name, _ in COLUMNS],
        "rows": [
            {"cells": cells(row), "choices": choices_of(row.plan), "runs": row.runs, "why": row.why, "plan": row.plain()}
            for row in planned.rows
        ],
        "rejected": [{"mesh": one.mesh, "why": one.why} for one in planned.rejected[:WHY_NOT]],
        "left": len(planned.rejected),
        "bought": list(planned.bought),
        "told": f"{planned.searched:,} layouts on {planned.families:,} meshes were looked at in {planned.seconds:.1f} s",
        "searched": planned.searched,
    }


def frontier_answer(asked: Asked, keep: Collection[str]) -> dict[str, Any]:
    """The frontier as a picture, with the layout that is chosen in it."""
    rows = frontier(asked.job, asked.cluster, keep)
    svg = frontier_picture(rows, asked.cluster.device.memory, view(asked).row)
    return {"svg": svg, "points": [row.plain() for row in rows]}


def growth_answer(asked: Asked, keep: Collection[str], price: float | None) -> dict[str, Any]:
    """How time and cost grow with devices, around as many as there are."""
    sizes = sizes_around(asked.cluster.devices, asked.cluster.per_node)
    grown = grow(asked.job, asked.cluster, sizes, price, None, frozenset(keep) - {"mesh"})
    heads = ["devices", "mesh", "s/step", "MFU", "hours", "device-hours", "cost"]
    return {"svg": growth_picture(grown), "heads": heads, "rows": [{"cells": growth_cells(one), "why": one.why} for one in grown]}


def sizes_around(devices: int, per_node: int) -> list[int]:
    """A quarter to four times as many, in whole machines."""
    return sorted({max(1, round(devices * share / per_node)) * per_node for share in (0.25, 0.5, 1, 2, 4)})


def growth_cells(one: Grown) -> Sequence[str]:
    """A line of the table of what more devices bring."""
    if one.row is None:
        return (f"{one.devices:,}", "-", "", "", "", "", "")
    cost = "" if one.cost is None else f"{one.cost:,.0f}"
    plan = one.row.plan
    return (
        f"{one.devices:,}", str(plan.setting.mesh), f"{plan.seconds:.4g}", f"{one.row.mfu:.1%}", f"{one.hours:,.1f}",
        f"{one.device_hours:,.0f}", cost,
    )  # fmt: skip


def job_text(asked: Asked) -> str:
    """The job of the layout, as --write writes it."""
    job: Job = view(asked).row.job
    return job.to_toml()
