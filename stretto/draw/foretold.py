"""A foretold step of a layout: its timeline, as far as one can read it, and where its seconds go."""

from __future__ import annotations

import html
from typing import NamedTuple

from stretto.draw.memory import shown
from stretto.draw.numbers import bytes_, count
from stretto.draw.timeline import picture, rows_of
from stretto.plan.predict import Predictor
from stretto.plan.view import View
from stretto.schedule.pipelines import FILE, PIPELINES
from stretto.schedule.timeline import simulate

#: Most rows of a timeline, and most boxes of a row, that a person can still read.
MOST_ROWS, MOST_BOXES = 12, 108


class Foretold(NamedTuple):
    """svg: the timeline. note: what of the step it leaves out, "" if nothing."""

    svg: str
    note: str


def foretold_picture(predictor: Predictor) -> Foretold:
    """The step of a layout, by pipeline ranks. Of a long step some microbatches of its steady middle are left out."""
    setting = predictor.setting
    ranks, microbatches = shown(setting.size["pp"], MOST_ROWS), drawn_microbatches(predictor)
    schedule, seconds = predictor.schedule(microbatches), predictor.seconds()
    timeline = simulate(schedule, lambda action: seconds.get((action.kind, action.stage), 0.0))
    unit, factor = ("ms", 1e3) if timeline.seconds < 1.0 else ("s", 1.0)
    rows = [row for row in rows_of(timeline) if row.pipeline_rank in ranks]
    title = f"{setting.schedule} on {setting.mesh}, foretold"
    svg = picture(rows, schedule, title=title, unit=unit, show=lambda at: f"{factor * at:.4g}")
    notes = []
    if microbatches < setting.microbatches:
        notes.append(f"drawn with {microbatches} of {setting.microbatches} microbatches: those in the middle repeat, and make it fuller")
    if len(ranks) < setting.size["pp"]:
        notes.append(f"{len(ranks)} of {setting.size['pp']} pipeline ranks are drawn")
    return Foretold(svg, "; ".join(notes))


def drawn_microbatches(predictor: Predictor) -> int:
    """As many of a step's microbatches as can be drawn; whole rounds of the middle are left out."""
    setting = predictor.setting
    name, ranks, whole = setting.schedule, setting.size["pp"], setting.microbatches
    if name.startswith(FILE):
        return whole
    boxes = setting.chunks * (3 if predictor.splits else 2)  # of a microbatch on a rank
    most = max(MOST_BOXES // boxes, ranks, PIPELINES[name].least(ranks))
    return whole - ranks * max(0, -(-(whole - most) // ranks)) if whole > most else whole


def seconds_bars(view: View) -> str:
    """Where the seconds of a step go, as HTML: a bar a part, the largest first."""
    whole = view.row.plan.seconds
    most = max(part.seconds for part in view.where)
    lines = (
        f'<span>{html.escape(part.words)}</span><div><i style="width:{100 * part.seconds / most:.1f}%"></i></div>'
        f"<b>{part.seconds / whole:.1%}</b><b>{seconds(part.seconds)}</b>"
        for part in view.where
    )
    return f'<div class="where">{"".join(lines)}</div>'


def wires_table(view: View) -> str:
    """What a device sends in a step through which link, as HTML."""
    cluster = view.asked.cluster
    if not view.sent:
        return '<p class="none">nothing: each device works for itself</p>'
    names = (cluster.inside.name, cluster.across.name)
    head = f'<tr><th></th><th class="n">{html.escape(names[0])}, inside a machine</th><th class="n">{html.escape(names[1])}, between</th>'
    lines = (
        f'<tr><td>{html.escape(wire.words)}</td><td class="n">{_amount(wire.inside)}</td><td class="n">{_amount(wire.across)}</td>'
        f'<td class="n">{seconds(wire.seconds(cluster))}</td></tr>'
        for wire in view.sent
    )
    return f'<table class="wires">{head}<th class="n">takes at least</th></tr>{"".join(lines)}</table>'


def _amount(value: float) -> str:
    return bytes_(value) if value else "-"


def seconds(value: float) -> str:
    """0.0123 -> '12.3 ms'."""
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{value:.4g} s"


def cards(view: View) -> list[tuple[str, str, str]]:
    """(name, figure, what it is) of a layout, most important first."""
    row, plan = view.row, view.row.plan
    devices = view.asked.cluster.devices
    return [
        ("step", seconds(plan.seconds), "a step"),
        ("tokens", count(row.tokens_per_second), "tokens a second and device"),
        ("all", count(row.tokens_per_second * devices), f"tokens a second, {devices:,} device{'s' if devices > 1 else ''}"),
        ("mfu", f"{row.mfu:.1%}", "model flops of the device's peak"),
        ("bubble", f"{plan.prediction.bubble:.1%}", "bubble: the busiest rank waits"),
        ("exposed", f"{plan.prediction.exposed / plan.seconds:.1%}", "of the step waits for messages"),
        ("peak", f"{plan.memory.peak / 1e9:.1f} GB", f"fullest rank, of {view.asked.cluster.device.memory / 1e9:.0f} GB"),
    ]
