"""A curve over steps: as a picture for a page (SVG), and as characters for a terminal."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stretto.draw.numbers import count, measure, ticks

Point = tuple[float, float]
MOST_POINTS = 600  # of one curve in a picture: more than it has pixels to show
MARGIN = {"left": 56, "right": 16, "top": 12, "bottom": 34}  # pixels around the plotted area
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Braille's bits, [row of 4][column of 2]


@dataclass(frozen=True)
class Series:
    """One curve; `style` is its class in the page's style sheet."""

    label: str
    points: tuple[Point, ...]
    style: str = "main"

    @classmethod
    def of(cls, label: str, pairs: Iterable[tuple[float | None, float | None]], style: str = "main") -> Series:
        """From (x, y) pairs; those with a part missing or not finite are left out (a skipped step has no loss)."""
        whole = [(float(x), float(y)) for x, y in pairs if x is not None and y is not None]
        return cls(label, tuple(point for point in whole if all(map(math.isfinite, point))), style)

    def smoothed(self, weight: float, label: str, style: str) -> Series:
        """Its running mean, in which a value counts `weight` times the one before it, corrected for the start."""
        total, share, points = 0.0, 0.0, []
        for x, y in self.points:
            total, share = weight * total + (1 - weight) * y, weight * share + (1 - weight)
            points.append((x, total / share))
        return Series(label, tuple(points), style)


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about `most` of the points, in order, with the lowest and the highest of each stretch kept."""
    if len(points) <= most:
        return list(points)
    width = len(points) / (most // 2)
    kept: list[Point] = [points[0]]
    for index in range(most // 2):
        stretch = range(round(index * width), round((index + 1) * width))
        ends = {min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])}
        kept += [points[i] for i in sorted(ends)]
    return [*kept, points[-1]]


def svg_curve(
    series: Sequence[Series],
    *,
    title: str,
    size: tuple[int, int] = (860, 320),
    level: tuple[float, str] | None = None,
    from_zero: bool = False,
) -> str:
    """The curves over steps as one <svg>; `level` is a dashed line at a value, with its name. Colours come from the page."""
    drawn = [one for one in series if one.points]
    if not drawn:
        return f'<p class="none">{html.escape(title)}: nothing was recorded</p>'
    width, height = size
    xs = [x for one in drawn for x, _ in one.points]
    ys = [y for one in drawn for _, y in one.points] + ([level[0]] if level else []) + ([0.0] if from_zero else [])
    frame = _Frame(width, height, _range(xs, 0.0), _range(ys, 0.04, floor=from_zero))
    parts = [*frame.grid()]
    if level:
        y = frame.y(level[0])
        parts.append(f'<line class="level" x1="{frame.left}" x2="{frame.right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="level" x="{frame.right}" y="{y - 5:.1f}" text-anchor="end">{html.escape(level[1])}</text>')
    for one in drawn:
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in thin(one.points))
        parts.append(f'<polyline class="{one.style}" points="{path}"/>' if len(one.points) > 1 else frame.dot(one))
    shown = [[one.label, [[x, y] for x, y in thin(one.points)]] for one in drawn]
    data = html.escape(json.dumps({"frame": frame.numbers(), "series": shown}))
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(title)}" data-chart="{data}">'
        + "".join(parts)
        + "</svg>"
    )


def text_curve(points: Sequence[Point], width: int = 64, height: int = 10, braille: bool = True) -> str:
    """The curve in characters: values at the left, steps below. `braille` has 2 by 4 dots a character, else one '*'."""
    kept = Series.of("", points).points
    if not kept:
        return ""
    columns, rows = (2, 4) if braille else (1, 1)
    frame_x, frame_y = _range([x for x, _ in kept], 0.0), _range([y for _, y in kept], 0.0)
    cells = [[0] * width for _ in range(height)]
    for column, row in _dots(kept, frame_x, frame_y, width * columns, height * rows):
        cells[row // rows][column // columns] |= DOTS[row % rows][column % columns] if braille else 1
    marks = ["".join(" " if not bits else chr(0x2800 + bits) if braille else "*" for bits in line) for line in cells]
    high, low = measure(frame_y[1]), measure(frame_y[0])
    wide = max(len(high), len(low))
    labels = [high.rjust(wide), *[" " * wide] * (height - 2), low.rjust(wide)] if height > 1 else [high.rjust(wide)]
    corner, side, line = ("└", "│", "─") if braille else ("+", "|", "-")
    first, last = count(frame_x[0]), count(frame_x[1])
    body = [f"{label} {side}{mark.rstrip()}" for label, mark in zip(labels, marks, strict=True)]
    foot = [f"{' ' * wide} {corner}{line * width}", f"{' ' * wide}  {first}{last.rjust(width - len(first))}"]
    return "\n".join(body + foot)


def _dots(points: Sequence[Point], xs: Point, ys: Point, columns: int, rows: int) -> set[tuple[int, int]]:
    """(column, row from the top) of every dot on the straight lines between the points."""

    def place(point: Point) -> tuple[float, float]:
        across = (point[0] - xs[0]) / (xs[1] - xs[0]) * (columns - 1)
        return across, (ys[1] - point[1]) / (ys[1] - ys[0]) * (rows - 1)

    found = {(round(x), round(y)) for x, y in map(place, points)}
    for (x, y), (to_x, to_y) in pairwise(map(place, points)):
        pieces = max(1, math.ceil(max(abs(to_x - x), abs(to_y - y))))
        found |= {(round(x + (to_x - x) * i / pieces), round(y + (to_y - y) * i / pieces)) for i in range(pieces)}
    return found


def _range(values: Sequence[float], room: float, floor: bool = False) -> Point:
    """(low, high) of an axis, never of no length, with a share of `room` on both sides (only above where it starts at 0)."""
    low, high = min(values), max(values)
    spread = (high - low) or abs(high) or 1.0
    if high == low:
        low, high = (low, high + spread) if floor else (low - spread / 2, high + spread / 2)
    return (low if floor else low - room * spread, high + room * spread)


@dataclass(frozen=True)
class _Frame:
    """The plotted area and its two axes."""

    width: int
    height: int
    xs: Point
    ys: Point

    @property
    def left(self) -> int:
        return MARGIN["left"]

    @property
    def right(self) -> int:
        return self.width - MARGIN["right"]

    @property
    def bottom(self) -> int:
        return self.height - MARGIN["bottom"]

    def x(self, value: float) -> float:
        return self.left + (value - self.xs[0]) / (self.xs[1] - self.xs[0]) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.ys[0]) / (self.ys[1] - self.ys[0]) * (self.bottom - MARGIN["top"])

    def numbers(self) -> list[float]:
        """What the page needs to find a point again: left, right, top, bottom, and both ranges."""
        return [self.left, self.right, MARGIN["top"], self.bottom, *self.xs, *self.ys]

    def grid(self) -> Iterable[str]:
        for value in ticks(*self.ys):
            yield f'<line class="grid" x1="{self.left}" x2="{self.right}" y1="{self.y(value):.1f}" y2="{self.y(value):.1f}"/>'
            yield f'<text x="{self.left - 8}" y="{self.y(value) + 4:.1f}" text-anchor="end">{_short(value)}</text>'
        for value in ticks(*self.xs, most=9):
            yield f'<text x="{self.x(value):.1f}" y="{self.bottom + 18}" text-anchor="middle">{_short(value)}</text>'
        yield f'<line class="axis" x1="{self.left}" x2="{self.right}" y1="{self.bottom}" y2="{self.bottom}"/>'

    def dot(self, series: Series) -> str:
        x, y = series.points[0]
        return f'<circle class="{series.style}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="3"/>'


def _short(value: float) -> str:
    return count(value) if abs(value) >= 1000 else f"{value:g}"
