"""One page that shows a run: how the loss fell, at what speed, on what, and what the model writes now."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.draw.curve import Series, svg_curve
from stretto.draw.numbers import bytes_, count, duration, measure

Row = Mapping[str, Any]  # a line of metrics.jsonl
SMOOTHING = 0.9
SMALL = (420, 190)  # pixels

STYLE = """
:root { --paper:#fbfaf7; --card:#fff; --ink:#22252b; --soft:#6b7078; --line:#e4e1d9;
  --main:#2456a6; --raw:#b9c9e4; --other:#c2571a; --level:#8a6d1f }
@media (prefers-color-scheme: dark) {
  :root { --paper:#15171b; --card:#1d2026; --ink:#e6e6e3; --soft:#9aa0a8; --line:#2d3138;
    --main:#7aa7f0; --raw:#3a4c6e; --other:#f0915a; --level:#d2b55b }
}
* { box-sizing:border-box } body { margin:0; background:var(--paper); color:var(--ink); font:15px/1.5 system-ui,sans-serif }
main { max-width:960px; margin:0 auto; padding:32px 20px 64px } h1 { font-size:26px; margin:0 } h2 { font-size:17px; margin:36px 0 10px }
.sub { color:var(--soft); margin:2px 0 22px } .status { border-radius:9px; padding:1px 9px; border:1px solid var(--line); font-size:13px }
.cards { display:grid; grid-template-columns:repeat(auto-fit,minmax(150px,1fr)); gap:12px }
.card,.panel { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:12px 14px }
.card b { display:block; font-size:21px; font-weight:600; font-variant-numeric:tabular-nums }
.card span { color:var(--soft); font-size:13px }
.panel { padding:14px } .panel h3 { margin:0 0 4px; font-size:14px; font-weight:600 }
.pair { display:grid; grid-template-columns:repeat(auto-fit,minmax(340px,1fr)); gap:12px }
.key { color:var(--soft); font-size:13px } .key i { display:inline-block; width:14px; height:3px; margin:0 6px 3px 14px; border-radius:2px }
.chart { width:100%; height:auto; display:block } .chart text { fill:var(--soft); font-size:11px; font-variant-numeric:tabular-nums }
.chart polyline { fill:none; stroke-width:2; stroke-linejoin:round; stroke:var(--main) }
.chart polyline.raw { stroke:var(--raw); stroke-width:1.2 }
.chart polyline.other { stroke:var(--other) }
.chart circle { fill:var(--main) } .chart circle.other { fill:var(--other) } .chart circle.raw { fill:var(--raw) }
.chart line.grid { stroke:var(--line) } .chart line.axis { stroke:var(--soft); stroke-opacity:.5 }
.chart line.level { stroke:var(--level); stroke-dasharray:5 4 } .chart text.level { fill:var(--level) }
.chart line.hair { stroke:var(--soft); stroke-opacity:.6 }
#tip { position:fixed; display:none; pointer-events:none; background:var(--ink); color:var(--paper);
  padding:5px 9px; border-radius:6px; font-size:12px; white-space:pre; font-variant-numeric:tabular-nums }
pre { margin:0; white-space:pre-wrap; overflow-wrap:anywhere; font:13px/1.45 ui-monospace,monospace }
details { margin-top:12px } summary { cursor:pointer; color:var(--soft) }
details .panel { margin-top:8px; overflow-x:auto } .none { color:var(--soft) }
"""

SCRIPT = """
const tip = document.getElementById('tip');
for (const svg of document.querySelectorAll('svg[data-chart]')) {
  const {frame: [left, right, top, bottom, x0, x1], series} = JSON.parse(svg.dataset.chart);
  const hair = document.createElementNS('http://www.w3.org/2000/svg', 'line');
  hair.setAttribute('class', 'hair'); hair.setAttribute('y1', top); hair.setAttribute('y2', bottom);
  hair.style.display = 'none'; svg.append(hair);
  svg.addEventListener('mousemove', event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    const wanted = x0 + (at - left) / (right - left) * (x1 - x0);
    const near = series.map(([name, points]) => [name, points.reduce((a, b) => Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a)]);
    const x = near[0][1][0], place = left + (x - x0) / (x1 - x0) * (right - left);
    hair.setAttribute('x1', place); hair.setAttribute('x2', place); hair.style.display = '';
    tip.textContent = 'step ' + x + '\\n' + near.map(([name, p]) => name + '  ' + Number(p[1].toPrecision(5))).join('\\n');
    tip.style.display = 'block';
    tip.style.left = Math.min(event.clientX + 14, innerWidth - 170) + 'px'; tip.style.top = (event.clientY + 14) + 'px';
  });
  svg.addEventListener('mouseleave', () => { hair.style.display = tip.style.display = 'none'; });
}
"""


def write_report(folder: Path) -> Path:
    """report.html of a run folder, from its metrics.jsonl, job.toml, environment.json and status.json; returns its path."""
    rows = [json.loads(line) for line in _text(folder / "metrics.jsonl").splitlines() if line.strip()]
    status = json.loads(_text(folder / "status.json") or "{}")
    environment = json.loads(_text(folder / "environment.json") or "{}")
    page = report(folder.name, rows, _text(folder / "job.toml"), status, environment)
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def report(name: str, rows: Sequence[Row], job: str, status: Mapping[str, Any], environment: Mapping[str, Any]) -> str:
    """The page as one text that needs no other file. rows: of metrics.jsonl; job: its TOML; the others as in the run folder."""
    steps = [row for row in rows if "loss" in row]
    summary = f"{status.get('mesh', '')} · {environment.get('time', '')} · {environment.get('command', '')}".strip(" ·")
    body = [
        f"<h1>{_e(name)}</h1>",
        f'<p class="sub"><span class="status">{_e(status.get("status", ""))}</span> {_e(status.get("why", ""))} {_e(summary)}</p>',
        f'<div class="cards">{"".join(_card(*card) for card in _cards(steps, status))}</div>',
        "<h2>Loss</h2>",
        _loss(rows, steps, status.get("entropy")),
        "<h2>Step by step</h2>",
        f'<div class="pair">{"".join(_small(steps, *chart) for chart in CHARTS)}</div>',
        _texts(status.get("texts") or {}),
        "<h2>What ran</h2>",
        _folded("job.toml: this alone repeats the run", job),
        _folded("environment.json", json.dumps(environment, indent=2, ensure_ascii=False)),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_e(name)} - stretto</title><style>{STYLE}</style></head><body><main>{''.join(body)}</main>"
        f'<div id="tip"></div><script>{SCRIPT}</script></body></html>'
    )


CHARTS = (  # title, column of metrics.jsonl, factor, whether the axis starts at 0
    ("tokens a second, whole job", "tokens_per_second", 1.0, True),
    ("seconds a step", "seconds", 1.0, True),
    ("gradient norm, before clipping", "grad_norm", 1.0, True),
    ("learning rate", "lr", 1.0, True),
    ("peak memory of rank 0, MB", "peak_bytes", 1e-6, True),
    ("seconds waiting for data", "data_seconds", 1.0, True),
)


def _cards(steps: Sequence[Row], status: Mapping[str, Any]) -> list[tuple[str, str]]:
    last = steps[-1] if steps else {}
    entropy = status.get("entropy")
    final = last.get("loss") if status.get("final_loss") is None else status["final_loss"]
    peak = status.get("peak_bytes") or [last.get("peak_bytes")]
    peaks = [value for value in peak if value]
    cards = [
        (_or_dash(final, measure), "final loss, nats" + (f" (bigram entropy {measure(entropy)})" if entropy else "")),
        (_or_dash(last.get("step"), lambda step: f"{step:,}"), "steps"),
        (_or_dash(status.get("tokens_per_second") or last.get("tokens_per_second"), count), "tokens a second"),
        (_or_dash(max(peaks, default=None), bytes_), "peak memory, largest rank"),
        (_or_dash(sum(row.get("seconds") or 0.0 for row in steps) or None, duration), "in steps"),
    ]
    return cards


def _loss(rows: Sequence[Row], steps: Sequence[Row], entropy: float | None) -> str:
    raw = Series.of("loss", ((row.get("step"), row.get("loss")) for row in steps), "raw")
    held = Series.of("evaluation", ((row.get("step"), row.get("eval_loss")) for row in rows), "other")
    series = [raw, raw.smoothed(SMOOTHING, "running mean", "main"), held]
    level = (entropy, "bigram entropy of the text") if entropy else None
    keys = [("--raw", "each step"), ("--main", "running mean")] + ([("--other", "evaluation")] if held.points else [])
    key = "".join(f'<i style="background:var({colour})"></i>{name}' for colour, name in keys)
    return f'<div class="panel">{svg_curve(series, title="loss over steps", level=level)}<div class="key">{key}</div></div>'


def _small(steps: Sequence[Row], title: str, column: str, factor: float, from_zero: bool) -> str:
    values = ((row.get("step"), row[column] * factor) for row in steps if isinstance(row.get(column), int | float))
    series = Series.of(title, values)
    if not series.points:
        return ""
    return f'<div class="panel"><h3>{_e(title)}</h3>{svg_curve([series], title=title, from_zero=from_zero, size=SMALL)}</div>'


def _texts(texts: Mapping[str, str]) -> str:
    if not texts:
        return ""
    panels = "".join(f'<div class="panel"><h3>{_e(when)} training</h3><pre>{_e(text)}</pre></div>' for when, text in texts.items())
    return f'<h2>What the model writes</h2><div class="pair">{panels}</div>'


def _folded(title: str, text: str) -> str:
    return f'<details><summary>{_e(title)}</summary><div class="panel"><pre>{_e(text)}</pre></div></details>'


def _card(value: str, label: str) -> str:
    return f'<div class="card"><b>{_e(value)}</b><span>{_e(label)}</span></div>'


def _or_dash(value: Any, show: Any) -> str:
    return "-" if value is None else show(value)


def _e(text: object) -> str:
    return html.escape(str(text))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
