"""A timeline as a picture: a row a rank, a box for each computation, foretold and measured alike.

Below each row a strip shows for how many (stage, microbatch) pairs the rank holds activations.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from stretto.draw.numbers import ticks
from stretto.schedule.action import LANE_OF, Schedule
from stretto.schedule.timeline import Span, Timeline

WIDTH, LEFT, RIGHT, TOP = 1080, 62, 126, 30  # pixels: of the picture, and around its rows
ROW, STRIP, GAP = 30, 13, 12  # pixels: a row of boxes, the strip below it, and the room to the next
BESIDE = 8  # pixels: how high a box is that runs beside others
SMALLEST_LABEL = 9.0  # pixels a box must be wide to hold its number
SHADES = 4  # stages of one rank that can be told apart by shade; then shades repeat

#: kind -> what the legend calls it.
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "F": "forward", "B": "backward", "I": "backward: input gradient", "W": "backward: weight gradient", "VOTE": "vote",
        "UPDATE": "update", "REDUCE": "gradients meet",
    }
)  # fmt: skip

STYLE = """
.pipe { font:11px system-ui,sans-serif; font-variant-numeric:tabular-nums } .pipe text { fill:#5d6168 }
.pipe .name { font-size:12px; fill:#22252b } .pipe .number { text-anchor:middle; pointer-events:none }
.pipe .idle { fill:#efece4 } .pipe .tick { stroke:#d9d5ca } .pipe .axis { text-anchor:middle }
.pipe .held { fill:#cfc7b4 } .pipe .box { stroke:#fbfaf7; stroke-width:.8 } .pipe .end { stroke:#22252b; stroke-dasharray:3 3 }
.pipe .F0 { fill:#a9c5ee } .pipe .F1 { fill:#6d9be0 } .pipe .F2 { fill:#3f72c0 } .pipe .F3 { fill:#274f8f }
.pipe .B0 { fill:#f3b98e } .pipe .B1 { fill:#e58d4f } .pipe .B2 { fill:#c4682a } .pipe .B3 { fill:#934a19 }
.pipe .I0 { fill:#9fd6c4 } .pipe .I1 { fill:#5db89c } .pipe .I2 { fill:#318d73 } .pipe .I3 { fill:#1f6552 }
.pipe .W0 { fill:#d5c3ea } .pipe .W1 { fill:#b394d8 } .pipe .W2 { fill:#8b64bd } .pipe .W3 { fill:#644290 }
.pipe .VOTE0,.pipe .UPDATE0 { fill:#8a8f97 } .pipe .REDUCE0 { fill:#d1485f }
.pipe .dark { fill:#16233a } .pipe .light { fill:#fff }
.pipe.chosen .box { opacity:.25 } .pipe.chosen .box.same { opacity:1 }
@media (prefers-color-scheme: dark) {
  .pipe text { fill:#9aa0a8 } .pipe .name { fill:#e6e6e3 } .pipe .idle { fill:#262a31 } .pipe .tick { stroke:#343941 }
  .pipe .held { fill:#4f4a3d } .pipe .box { stroke:#1d2026 } .pipe .end { stroke:#e6e6e3 }
  .pipe .dark { fill:#16233a } .pipe .light { fill:#fff }
}
"""


@dataclass(frozen=True)
class Row:
    """One rank's part of a picture: how it is named, its spans, and the pipeline rank whose stages it holds."""

    label: str
    spans: tuple[Span, ...]
    pipeline_rank: int


def rows_of(
    timeline: Timeline, names: Callable[[int], str] = "rank {}".format, places: Callable[[int], int] = lambda rank: rank
) -> list[Row]:
    """A row for each rank that the timeline knows. places: rank -> pipeline rank."""
    ranks = sorted({span.rank for span in timeline.spans})
    return [Row(names(rank), tuple(span for span in timeline.spans if span.rank == rank), places(rank)) for rank in ranks]


def picture(rows: Sequence[Row], schedule: Schedule, *, title: str, unit: str, show: Callable[[float], str], until: float = 0.0) -> str:
    """The rows as one <svg> that needs no other file. show: a time as text, in `unit`; until: a time that the axis reaches at least,
    so that two pictures can have one scale."""
    origin = min((span.start for row in rows for span in row.spans), default=0.0)
    end = max((span.stop for row in rows for span in row.spans), default=0.0) - origin
    scale = (WIDTH - LEFT - RIGHT) / max(end, until, 1e-12)
    height = TOP + len(rows) * (ROW + STRIP + GAP) + 20
    kinds = [kind for kind in NAMES if any(s.action.kind == kind and s.stop > s.start for row in rows for s in row.spans)]
    most = max((held for row in rows for _, _, held in _held(row.spans)), default=1)
    parts = [*_legend(kinds, schedule), *_axis(max(end, until), scale, height, unit, show)]
    for number, row in enumerate(rows):
        parts += _row(row, schedule, TOP + number * (ROW + STRIP + GAP), origin, end, scale, most, show)
    x = LEFT + end * scale
    parts.append(f'<line class="end" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 5}" y2="{height - 20}"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="pipe" viewBox="0 0 {WIDTH} {height}" role="img"'
    return f"{head}><style>{STYLE}</style><title>{html.escape(title)}</title>{''.join(parts)}</svg>"


def _legend(kinds: Sequence[str], schedule: Schedule) -> Iterator[str]:
    entries = [(f"box {kind}0", 12, NAMES[kind]) for kind in kinds] + [("idle", 12, "idle"), ("held", 6, "activations held")]
    x = float(LEFT)
    for style, size, name in entries:
        yield f'<rect class="{style}" x="{x:.0f}" y="{10 - size / 2:g}" width="14" height="{size}" rx="2"/>'
        yield f'<text x="{x + 19:.0f}" y="14">{name}</text>'
        x += 34 + 5.7 * len(name)
    if schedule.stages > schedule.ranks:
        yield f'<text x="{x:.0f}" y="14">darker: a later stage</text>'


def _axis(end: float, scale: float, height: int, unit: str, show: Callable[[float], str]) -> Iterator[str]:
    marks = ticks(0.0, end, 9)
    for at in marks:
        x = LEFT + at * scale
        yield f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{height - 18}"/>'
        yield f'<text class="axis" x="{x:.1f}" y="{height - 5}">{show(at)}</text>'
    yield f'<text x="{WIDTH - RIGHT + 12}" y="{height - 5}">{html.escape(unit)}</text>'


def _row(
    row: Row, schedule: Schedule, y: int, origin: float, end: float, scale: float, most: int, show: Callable[[float], str]
) -> Iterator[str]:
    chunk = {stage: number for number, stage in enumerate(schedule.stages_of(row.pipeline_rank))}
    yield f'<text class="name" x="{LEFT - 10}" y="{y + ROW / 2 + 4}" text-anchor="end">{html.escape(row.label)}</text>'
    yield f'<rect class="idle" x="{LEFT}" y="{y}" width="{end * scale:.1f}" height="{ROW}" rx="3"/>'
    busy = 0.0
    for span in row.spans:
        kind, stage, m = span.action
        if kind not in NAMES or span.stop <= span.start:
            continue
        beside = LANE_OF[kind] != "compute"  # a low box: it runs while others compute
        busy += 0.0 if beside else span.stop - span.start
        x, width = LEFT + (span.start - origin) * scale, (span.stop - span.start) * scale
        shade = chunk.get(stage, 0) % SHADES if m is not None else 0
        tip = f"{span.action}: {NAMES[kind]}, {show(span.start - origin)} to {show(span.stop - origin)}"
        data = "" if m is None else f' data-m="{m}"'
        low = ROW - BESIDE if beside else 0
        place = f'x="{x:.2f}" y="{y + low}" width="{max(width, 0.6):.2f}" height="{ROW - low}"'
        yield f'<rect class="box {kind}{shade}"{data} {place} rx="{min(3.0, width / 4):.1f}"><title>{tip}</title></rect>'
        if m is not None and width >= SMALLEST_LABEL + 4 * (m > 9):
            yield f'<text class="number {"light" if shade > 1 else "dark"}" x="{x + width / 2:.1f}" y="{y + ROW / 2 + 4}">{m}</text>'
    peak = 0
    for start, stop, held in _held(row.spans):
        peak = max(peak, held)
        size = STRIP * held / most
        place = f'x="{LEFT + (start - origin) * scale:.2f}" width="{(stop - start) * scale:.2f}"'
        yield f'<rect class="held" {place} y="{y + ROW + 2 + STRIP - size:.1f}" height="{size:.1f}"/>'
    yield f'<text class="name" x="{WIDTH - RIGHT + 12}" y="{y + ROW / 2 + 4}">{100 * busy / end if end else 100:.0f}% busy</text>'
    yield f'<text x="{WIDTH - RIGHT + 12}" y="{y + ROW + STRIP}">at most {peak} held</text>'


def _held(spans: Sequence[Span]) -> Iterator[tuple[float, float, int]]:
    """(start, stop, how many (stage, microbatch) pairs are held) wherever some are: from the start of F to the end of B or W."""
    moments = [(span.start, 1) for span in spans if span.action.kind == "F"]
    moments += [(span.stop, -1) for span in spans if span.action.kind in ("B", "W")]
    held, since = 0, 0.0
    for at, change in sorted(moments):
        if held and at > since:
            yield since, at, held
        held, since = held + change, at
