"""Ranks along named axes, and the groups that talk to each other."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass

from stretto.errors import JobError

#: Outermost (slowest) first; the last varies fastest, so tensor-parallel neighbours sit on one node.
AXES = ("pp", "dp_replicate", "dp", "cp", "ep", "tp")

MEANING = {
    "pp": "pipeline stages",
    "dp_replicate": "copies of the sharded model (hybrid sharding)",
    "dp": "data parallel ranks; ZeRO shards over them",
    "cp": "pieces of a sequence",
    "ep": "expert groups",
    "tp": "pieces of each weight matrix",
}


@dataclass(frozen=True)
class Mesh:
    """Sizes of the named axes, outermost first; rank = the coordinates read as digits, the last axis fastest.

    Every axis of AXES is present, most with size 1: a group of one is a group.

    An axis may be seen in two parts, where neighbours on it share something: on tp=4, "tp/2" is its 2 pieces of 2 neighbours
    each, "tp%2" the 2 neighbours within a piece. These names are understood wherever an axis is asked for, but not in `parse`.
    """

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(**sizes: int) -> Mesh:
        """Mesh.of(dp=4, tp=2): the axes not named have size 1. Raises JobError for a name or size that cannot be."""
        for name, size in sizes.items():
            if name not in AXES:
                near = difflib.get_close_matches(name, AXES, n=1)
                hint = f"write {near[0]}={size}" if near else "write one of them"
                raise JobError(f"mesh has no axis {name!r}; the axes are {' '.join(AXES)}; {hint}")
            if size < 1:
                raise JobError(f"mesh.{name}={size} is not possible; write a size of 1 or more")
        return Mesh(tuple((name, sizes.get(name, 1)) for name in AXES))

    @staticmethod
    def parse(text: str, ranks: int | None = None) -> Mesh:
        """'dp=2 tp=2' or 'dp=2,tp=2'; one axis may be `auto` and takes what the other axes leave of `ranks`."""
        sizes: dict[str, int] = {}
        auto: list[str] = []
        for word in re.split(r"[\s,]+", text.strip()):
            if not word:
                continue
            name, equals, value = word.partition("=")
            if not equals or not name or not value:
                raise JobError(f'mesh={text!r}: {word!r} is not axis=size; write for example mesh="dp=2" or mesh="dp=auto tp=2"')
            if name in sizes or name in auto:
                raise JobError(f"mesh={text!r} gives {name} twice; write it once")
            if value == "auto":
                auto.append(name)
                Mesh.of(**{name: 1})  # refuses a name that is no axis
            elif re.fullmatch(r"[0-9]+", value):
                sizes[name] = int(value)
            else:
                raise JobError(f"mesh={text!r}: {value!r} is no size for {name}; write a whole number, as {name}=2, or {name}=auto")
        if len(auto) > 1:
            raise JobError(f"mesh={text!r} leaves {' and '.join(auto)} open; only one axis may be auto")
        fixed = Mesh.of(**sizes)
        if auto:
            if ranks is None:
                raise JobError(f"mesh={text!r}: {auto[0]}=auto needs a known number of ranks; write its size")
            if ranks % fixed.size:
                raise JobError(
                    f"mesh={text!r}: {ranks} ranks cannot be shared evenly by {fixed}; "
                    f"make the other sizes multiply to a divisor of {ranks}"
                )
            return Mesh.of(**sizes, **{auto[0]: ranks // fixed.size})
        return fixed

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def __getitem__(self, axis: str) -> int:
        """Size of one axis."""
        name, part, neighbours = _parts(axis)
        size = dict(self.axes)[name]
        if size % neighbours:
            raise ValueError(f"{axis}: {name}={size} has no pieces of {neighbours} neighbours")
        return {"": size, "/": size // neighbours, "%": neighbours}[part]

    def __str__(self) -> str:
        shown = " ".join(f"{name}={size}" for name, size in self.axes if size > 1)
        return shown or "dp=1"

    def at(self, rank: int) -> dict[str, int]:
        """Coordinates of a rank, by axis name."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is not on the mesh {self} of {self.size} ranks")
        coordinates = {}
        for name, size in reversed(self.axes):
            rank, coordinates[name] = divmod(rank, size)
        return {name: coordinates[name] for name, _ in self.axes}

    def rank(self, **coordinates: int) -> int:
        """The rank at these coordinates; axes not named are at 0."""
        rank = 0
        for name, size in self.axes:
            at = coordinates.pop(name, 0)
            if not 0 <= at < size:
                raise ValueError(f"{name}={at} is not on the mesh {self}")
            rank = rank * size + at
        if coordinates:
            raise ValueError(f"the mesh has no axis {' '.join(coordinates)}")
        return rank

    def along(self, rank: int, axis: str) -> int:
        """Coordinate of a rank on one axis."""
        name, part, neighbours = _parts(axis)
        at = self.at(rank)[name]
        return {"": at, "/": at // neighbours, "%": at % neighbours}[part]

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Ranks that differ from `rank` only along `axes`, in the mesh's own order."""
        ranks = [rank]
        for axis in self._ordered(axes):
            name, part, neighbours = _parts(axis)
            step = self._stride(name) * (neighbours if part == "/" else 1)
            ranks = [start + step * (i - self.along(rank, axis)) for start in ranks for i in range(self[axis])]
        return tuple(ranks)

    def index(self, rank: int, *axes: str) -> int:
        """Position of `rank` within its group along `axes`."""
        index = 0
        for axis in self._ordered(axes):
            index = index * self[axis] + self.along(rank, axis)
        return index

    def extent(self, *axes: str) -> int:
        """Number of ranks in a group along `axes`."""
        return math.prod(self[axis] for axis in axes)

    def view(self, **sizes: int) -> Mesh:
        """The same ranks along other axes (as pp, edp, ep for experts), outermost first as named; sizes must multiply to mine."""
        other = Mesh(tuple(sizes.items()))
        if other.size != self.size:
            raise JobError(f"a view of {self} ({self.size} ranks) cannot have sizes {sizes} ({other.size} ranks)")
        return other

    def _ordered(self, axes: tuple[str, ...]) -> list[str]:
        """Outermost first, as the mesh has them."""
        names = [name for name, _ in self.axes]
        return sorted(axes, key=lambda axis: names.index(_parts(axis)[0]))

    def _stride(self, axis: str) -> int:
        names = [name for name, _ in self.axes]
        return math.prod(size for _, size in self.axes[names.index(axis) + 1 :])


def _parts(axis: str) -> tuple[str, str, int]:
    """'tp/2' -> ('tp', '/', 2), 'tp%2' -> ('tp', '%', 2), 'tp' -> ('tp', '', 1)."""
    for part in "/%":
        name, found, neighbours = axis.partition(part)
        if found:
            return name, part, int(neighbours)
    return axis, "", 1
