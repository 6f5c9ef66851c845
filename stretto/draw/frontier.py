"""Frontiers as pictures: speed against memory of the best layouts, and time and cost against the number of devices."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from math import log2
from typing import NamedTuple

from stretto.draw.numbers import bytes_, count, ticks
from stretto.plan.grown import Grown
from stretto.plan.planning import Row

WIDTH, HEIGHT, LEFT, RIGHT, TOP, FOOT = 1080, 330, 70, 40, 26, 46  # pixels: of the picture, and around its points
LINE = 13  # pixels from one name to the next
STYLE = """
.frontier { font:11px system-ui,sans-serif; font-variant-numeric:tabular-nums } .frontier text { fill:#5d6168 }
.frontier .tick { stroke:#e4e1d9 } .frontier .line { fill:none; stroke:#2456a6; stroke-width:2 } .frontier .dot { fill:#2456a6 }
.frontier .here { fill:#c2571a } .frontier .name { fill:#22252b } .frontier .ideal { stroke:#8a8f97; stroke-dasharray:5 4; fill:none }
.frontier .limit { stroke:#b3372c; stroke-dasharray:4 3 }
@media (prefers-color-scheme: dark) {
  .frontier text { fill:#9aa0a8 } .frontier .tick { stroke:#2d3138 } .frontier .line { stroke:#7aa7f0 } .frontier .dot { fill:#7aa7f0 }
  .frontier .here { fill:#f0915a } .frontier .name { fill:#e6e6e3 } .frontier .limit { stroke:#ff8a7a }
}
"""


class Dot(NamedTuple):
    """A point of a picture, with what stands beside it and what pointing at it tells."""

    x: float
    y: float
    name: str
    tip: str
    style: str = "dot"


def frontier_picture(rows: Sequence[Row], device: float, here: Row | None = None) -> str:
    """Tokens a second and device against the bytes of the fullest device. device: bytes that one has; here: a layout to be marked."""
    dots = [_of_row(row) for row in rows]
    marked = [_of_row(here)._replace(style="here", name="this layout")] if here else []
    points = [*dots, *marked]
    xs = (0.0, 1.05 * max([device, *(dot.x for dot in points)]))
    low, high = min((dot.y for dot in points), default=0.0), max((dot.y for dot in points), default=1.0)
    room = 0.12 * (high - low or high)
    frame = _Frame(xs, (max(0.0, low - room), high + room))
    # the fastest within x bytes: level from a layout's own bytes to those of the next faster one
    steps: list[tuple[float, float]] = []
    for slower, faster in zip(reversed(dots), [*reversed(dots[:-1]), None], strict=True):
        steps += [(slower.x, slower.y), (faster.x if faster else device, slower.y)]
    x = frame.x(device)
    parts = [
        *frame.axes("memory of the fullest device", "tokens/s a device"),
        f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - FOOT}"/>',
        frame.line(steps),
        *(frame.dot(dot, dot.x > 0.7 * xs[1], above=dot.style == "dot") for dot in frame.named(points)),
    ]
    return _svg("the fastest layout within each amount of memory", parts)


def growth_picture(grown: Sequence[Grown]) -> str:
    """Tokens a second of the whole job against devices, beside what as many times the first would be; each with hours and cost."""
    found = [(one, one.row) for one in grown if one.row]
    if not found:
        return '<p class="none">nothing fits on any of these numbers of devices</p>'
    dots = [Dot(log2(one.devices), row.tokens_per_second * one.devices, _cost(one), _best_on(one.devices, row)) for one, row in found]
    first = found[0][1].tokens_per_second
    ideal = [(log2(one.devices), first * one.devices) for one, _ in found]
    xs, high = [dot.x for dot in dots], max(y for _, y in [*ideal, *((dot.x, dot.y) for dot in dots)])
    frame = _Frame((min(xs) - 0.3, max(xs) + 0.9), (0.0, 1.15 * high))
    at = [(dot.x, f"{one.devices:,}") for dot, (one, _) in zip(dots, found, strict=True)]
    parts = [
        *frame.axes("devices", "tokens/s of the whole job", at),
        frame.line(ideal, "ideal"),
        frame.line([(dot.x, dot.y) for dot in dots]),
        *(frame.dot(dot, left=False) for dot in dots),
    ]
    return _svg("speed against devices", parts)


def _best_on(devices: int, row: Row) -> str:
    return f"{devices} devices: {row.plan.setting.mesh}, {row.plan.seconds:.4g} s a step"


def _cost(one: Grown) -> str:
    cost = f"{one.device_hours:,.0f} device-hours" if one.cost is None else f"{one.cost:,.0f}"
    return f"{one.hours:,.1f} h, {cost}"


def _of_row(row: Row) -> Dot:
    setting, plan = row.plan.setting, row.plan
    name = f"{setting.mesh}, zero {setting.zero}{'' if setting.recompute == 'none' else f', {setting.recompute}'}"
    told = f"{name}: {plan.seconds:.4g} s a step, {row.mfu:.1%} MFU, {bytes_(plan.memory.peak)}"
    return Dot(plan.memory.peak, row.tokens_per_second, name, told)


class _Frame:
    """The plotted area. xs, ys: ranges."""

    def __init__(self, xs: tuple[float, float], ys: tuple[float, float]) -> None:
        self.xs, self.ys = xs, ys

    def x(self, value: float) -> float:
        return LEFT + (value - self.xs[0]) / (self.xs[1] - self.xs[0]) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - FOOT - (value - self.ys[0]) / (self.ys[1] - self.ys[0]) * (HEIGHT - TOP - FOOT)

    def axes(self, x_name: str, y_name: str, at: Sequence[tuple[float, str]] = ()) -> Iterator[str]:
        """Ticks and what they count. at: of x, instead of round numbers."""
        for value in ticks(*self.ys):
            y = self.y(value)
            yield f'<line class="tick" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{count(value)}</text>'
        for value, text in at or [(value, bytes_(value) if value else "0") for value in ticks(*self.xs, most=9)]:
            yield f'<text x="{self.x(value):.1f}" y="{HEIGHT - FOOT + 17}" text-anchor="middle">{html.escape(text)}</text>'
        yield f'<text class="name" x="{LEFT}" y="14">{html.escape(y_name)}</text>'
        yield f'<text class="name" x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{html.escape(x_name)}</text>'

    def line(self, points: Sequence[tuple[float, float]], style: str = "line") -> str:
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        return f'<polyline class="{style}" points="{path}"/>'

    def named(self, dots: Sequence[Dot]) -> Iterator[Dot]:
        """The dots, without the name where it would lie on that of the one before."""
        last = -2.0 * LINE
        for dot in dots:
            y = self.y(dot.y)
            close = abs(y - last) < LINE and dot.style == "dot"
            last = last if close else y
            yield dot._replace(name="") if close else dot

    def dot(self, dot: Dot, left: bool, above: bool = False) -> str:
        """above: its name goes above it and to the left, where a rising line leaves room, if there is enough."""
        x, y = self.x(dot.x), self.y(dot.y)
        above = above and x - 6.2 * len(dot.name) > LEFT
        place = f'x="{x - 9:.1f}" text-anchor="end"' if left or above else f'x="{x + 9:.1f}"'
        return (
            f'<circle class="{dot.style}" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{html.escape(dot.tip)}</title></circle>'
            f'<text class="name" {place} y="{y + (-5 if above else 15):.1f}">{html.escape(dot.name)}</text>'
        )


def _svg(title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="frontier" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    return f"{head}><style>{STYLE}</style><title>{html.escape(title)}</title>{''.join(parts)}</svg>"
