"""One page that shows one job on several frameworks: how fast, how large, and whether they trained the same."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stretto.draw.curve import Series, svg_curve
from stretto.draw.forecast import forecast_html
from stretto.draw.numbers import bytes_, count
from stretto.draw.report import SCRIPT, STYLE

Row = Mapping[str, Any]  # of compare.json
#: Colours of the curves, first one first.
COLOURS = ("#2456a6", "#c2571a", "#2d8a57", "#8a4fa8", "#b3891b", "#3d9aa8", "#a8324f", "#6b7078")
OWN_STYLE = """
table { border-collapse:collapse; width:100%; font-size:14px } th { color:var(--soft); font-size:12px }
td,th { padding:5px 8px; text-align:right; border-bottom:1px solid var(--line); font-variant-numeric:tabular-nums; font-weight:400 }
td:first-child,th:first-child { text-align:left }
.bars { display:grid; grid-template-columns:max-content 1fr max-content; gap:6px 12px; align-items:center; font-size:14px }
.bars div { background:var(--line); border-radius:4px; height:14px; overflow:hidden } .bars i { display:block; height:100% }
.say li { margin:3px 0 } .wide { overflow-x:auto }
"""


def page(found: Mapping[str, Any]) -> str:
    """The page as one text that needs no other file. found: what compare.json holds."""
    rows: Sequence[Row] = found["rows"]
    ran = [row for row in rows if row["status"] == "ok"]
    colours = {row["runner"]: COLOURS[i % len(COLOURS)] for i, row in enumerate(rows)}
    machine = found["machine"]
    body = [
        f"<h1>{_e(found['job'])} on {len(ran)} of {len(rows)} frameworks</h1>" if rows else f"<h1>{_e(found['job'])}, foretold</h1>",
        f'<p class="sub">mesh {_e(found["mesh"])} · {found["steps"]} steps, {found["rounds"]} rounds in turn · {_e(machine.get("cpu"))}, '
        f"{_e(machine.get('cores'))} cores · {_e(machine.get('time'))} · <code>{_e(machine.get('command'))}</code></p>",
        *(_measured(found, rows, ran, colours) if rows else ()),
    ]
    if found.get("cluster"):
        body.append(_foretold(found))
    rules = (f".chart circle.c{i} {{ fill:{colour} }} .chart polyline.c{i} {{ stroke:{colour} }} " for i, colour in enumerate(COLOURS))
    style = STYLE + OWN_STYLE + "".join(rules)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_e(found['job'])} compared - stretto</title><style>{style}</style></head><body><main>{''.join(body)}</main>"
        f'<div id="tip"></div><script>{SCRIPT}</script></body></html>'
    )


def _measured(found: Mapping[str, Any], rows: Sequence[Row], ran: Sequence[Row], colours: Mapping[str, str]) -> list[str]:
    """What the runs of this machine came to."""
    return [
        '<div class="panel"><ul class="say">' + "".join(f"<li>{_e(line)}</li>" for line in found["verdict"]) + "</ul></div>",
        "<h2>Speed</h2>",
        _bars("tokens a second, whole job", ran, colours, "tokens_per_second", count),
        "<h2>Memory</h2>",
        '<div class="pair">'
        + _bars("peak of the largest rank", ran, colours, "peak_bytes", bytes_)
        + _bars("peak of all ranks, shared pages once", ran, colours, "machine_bytes", bytes_)
        + "</div>",
        "<h2>Loss</h2>",
        _losses(ran, colours, found["apart"]),
        "<h2>All figures</h2>",
        f'<div class="panel wide">{_table(rows)}</div>',
        _notes(rows),
    ]


def _foretold(found: Mapping[str, Any]) -> str:
    """What the planner says of each framework on another cluster."""
    rows: Sequence[Row] = found["foretold"]
    colours = {row["runner"]: COLOURS[i % len(COLOURS)] for i, row in enumerate(rows)}
    speed = _bars("tokens a second a device, foretold", rows, colours, "tokens_per_second", count)
    peak = _bars("what the fullest device holds, foretold", rows, colours, "peak_bytes", bytes_)
    return forecast_html(found["cluster"], rows, found["foretold_verdict"], f'<div class="pair">{speed}{peak}</div>')


def _bars(title: str, rows: Sequence[Row], colours: Mapping[str, str], column: str, show: Callable[[float], str]) -> str:
    known = [row for row in rows if row[column]]
    if not known:
        return ""
    longest = max(row[column] for row in known)
    bars = "".join(
        f"<span>{_e(row['runner'])}</span>"
        f'<div><i style="width:{100 * row[column] / longest:.1f}%;background:{colours[row["runner"]]}"></i></div>'
        f"<span>{_e(show(row[column]))}{_spread(row) if column == 'tokens_per_second' else ''}</span>"
        for row in known
    )
    return f'<div class="panel"><h3>{_e(title)}</h3><div class="bars">{bars}</div></div>'


def _spread(row: Row) -> str:
    spread = row.get("spread")
    return f" ({count(spread[0])}-{count(spread[1])})" if spread else ""


def _losses(rows: Sequence[Row], colours: Mapping[str, str], apart: float) -> str:
    order = list(colours)
    series = [Series.of(row["runner"], enumerate(row["losses"], 1), f"c{order.index(row['runner']) % len(COLOURS)}") for row in rows]
    key = "".join(f'<i style="background:{colours[row["runner"]]}"></i>{_e(row["runner"])}' for row in rows)
    parting = [f"{row['runner']} parts at step {row['apart_at']}" for row in rows if row["apart_at"]]
    words = "; ".join(parting) or f"no two differ by more than {apart:g} at any step, so one curve hides the others"
    return f'<div class="panel">{svg_curve(series, title="loss over steps")}<div class="key">{key} · {_e(words)}</div></div>'


COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("version", "version", str),
    ("status", "status", str),
    ("tokens/s", "tokens_per_second", count),
    ("s a step", "step_seconds", lambda x: f"{x:.4g}"),
    ("ratio", "ratio", lambda x: f"{x:.3f}"),
    ("rounds", "ratio_spread", lambda x: f"{x[0]:.3f}-{x[1]:.3f}"),
    ("peak a rank", "peak_bytes", bytes_),
    ("machine", "machine_bytes", bytes_),
    ("sent a step", "sent_bytes", bytes_),
    ("start, s", "startup_seconds", lambda x: f"{x:.1f}"),
    ("last loss", "losses", lambda x: f"{x[-1]:.5f}" if x else "-"),
    ("parts at step", "apart_at", str),
)


def _table(rows: Sequence[Row]) -> str:
    head = "".join(f"<th>{_e(title)}</th>" for title in ("runner", *(title for title, _, _ in COLUMNS)))
    lines = "".join(
        f"<tr><td>{_e(row['runner'])}</td>"
        + "".join(f"<td>{'-' if row[key] is None else _e(show(row[key]))}</td>" for _, key, show in COLUMNS)
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{lines}</table>"


def _notes(rows: Sequence[Row]) -> str:
    said = [(row["runner"], text) for row in rows for text in ((row["why"],) if row["why"] else row["notes"])]
    if not said:
        return ""
    return (
        '<h2>Notes</h2><div class="panel"><ul class="say">'
        + "".join(f"<li>{_e(who)}: {_e(what)}</li>" for who, what in said)
        + "</ul></div>"
    )


def _e(text: object) -> str:
    return html.escape(str(text))
