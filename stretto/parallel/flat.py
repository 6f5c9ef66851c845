"""Many tensors in one flat buffer: where each starts, and where the buffer is cut."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from stretto.layout.layout import Flat, Shape

Granularity = Literal["element", "row", "matrix"]
#: Tensors start at multiples of this many bytes, so that kernels load whole cache lines.
ALIGN_BYTES = 64


class Slot(NamedTuple):
    """One tensor's place: elements [start, start + elements) of the flat buffer."""

    name: str
    shape: Shape
    start: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.elements


@dataclass(frozen=True)
class FlatPlan:
    """Places of tensors in a flat buffer of `total` elements, cut at `bounds` (one more than there are ranks)."""

    slots: tuple[Slot, ...]
    total: int
    bounds: tuple[int, ...]

    @staticmethod
    def of(
        tensors: Sequence[tuple[str, Shape]],
        parts: int,
        granularity: Granularity = "element",
        itemsize: int = 4,
        room: Sequence[int] | None = None,
    ) -> FlatPlan:
        """Lay tensors one after another, aligned; cut into `parts`. room: elements to leave for each, where not just its own.

        element: equal parts, wherever that cuts (the buffer is padded so that it divides).
        row: only between rows of a tensor. matrix: only between tensors, so that one rank has all of each
        (optimizers such as Muon need that); parts are then as equal as the tensors allow.
        """
        align = max(1, ALIGN_BYTES // itemsize)
        slots, at = [], 0
        for (name, shape), elements in zip(tensors, room or [math.prod(shape) for _, shape in tensors], strict=True):
            slots.append(Slot(name, shape, at))
            at = _up(at + elements, align)
        if granularity == "element":
            total = _up(at, align * parts)
            return FlatPlan(tuple(slots), total, tuple(total * i // parts for i in range(parts + 1)))
        allowed = {0, at}
        for slot in slots:
            allowed.add(slot.start)
            if granularity == "row" and len(slot.shape) > 1:
                row = math.prod(slot.shape[1:])
                allowed.update(range(slot.start, slot.stop, max(row, 1)))
        points = sorted(allowed)
        return FlatPlan(tuple(slots), at, tuple(_nearest(points, at * part / parts) for part in range(parts + 1)))

    @property
    def elements(self) -> int:
        """Elements of the tensors themselves, without padding."""
        return sum(slot.elements for slot in self.slots)

    def gaps(self) -> list[tuple[int, int]]:
        """The ranges that belong to no tensor. They must hold zeros wherever they are summed."""
        stops = [0, *(slot.stop for slot in self.slots)]
        starts = [*(slot.start for slot in self.slots), self.total]
        return [(a, b) for a, b in zip(stops, starts, strict=True) if a < b]

    def pieces(self, low: int, high: int) -> list[tuple[Slot, int, int]]:
        """Which elements [start, stop) of which tensor lie in [low, high) of the buffer."""
        found = []
        for slot in self.slots:
            start, stop = max(low, slot.start), min(high, slot.stop)
            if start < stop:
                found.append((slot, start - slot.start, stop - slot.start))
        return found

    def flat(self, slot: Slot, axes: tuple[str, ...]) -> Flat:
        """A tensor's place in this buffer when it is cut along `axes`."""
        return Flat(axes, slot.start, self.total, self.bounds)


def _nearest(points: Sequence[int], ideal: float) -> int:
    """The point nearest to `ideal`; of two, the lower. points: sorted, reaching from below `ideal` to above."""
    above = bisect.bisect_left(points, ideal)
    return min(points[max(above - 1, 0) : above + 1], key=lambda point: abs(point - ideal))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
