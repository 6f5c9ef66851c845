"""A collective as a picture: ranks side by side, time from top to bottom, and chunks that fill with colour as contributions arrive.

The picture is made of the Program that runs (schedule/collective.py): what it shows is what is sent.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from stretto.errors import JobError
from stretto.schedule.algorithms import ALGORITHMS
from stretto.schedule.collective import Message, Program, states
from stretto.schedule.price import traffic

#: A colour for each rank: what it contributes has it wherever it goes.
COLOURS = (
    "#2f6fc4", "#e0792b", "#3a9a5c", "#8e5bb5", "#d1485f", "#1f9bab", "#b28a12", "#6b7480",
    "#7fb2ee", "#f0b37e", "#8fcf9f", "#c9a8e2", "#efa0ac", "#86d3dc", "#ddc26a", "#b4bac2",
)  # fmt: skip
MOST_RANKS, MOST_ROUNDS, MOST_CHUNKS = len(COLOURS), 40, 256
GUTTER, TOP, EDGE = 118, 134, 34  # pixels left of the ranks, above them, and beside them for arrows that leave
BETWEEN, NODE_GAP = 30, 30  # pixels between two ranks, and more of them between two nodes
FLIGHT = 58  # pixels that an arrow falls

STYLE = """
.paper{fill:#fbfaf7}.ink{fill:#22252b}.soft{fill:#6b7078}
text{font-family:system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;font-size:12px;fill:#22252b}
.title{font-size:19px;font-weight:600}.sub{font-size:13px;fill:#6b7078}.rank{font-size:13px;font-weight:600}
.round{font-size:13px;font-weight:600}.small{font-size:11px;fill:#6b7078}.tiny{font-size:9px;fill:#6b7078}
.tray{fill:#fff;stroke:#dcd8cd}.node{fill:#f1eee6}.empty{fill:#fff;stroke:#d5d1c6;stroke-dasharray:2 2}
.cell{fill:#fff;stroke:#8d929a;stroke-width:.8}.done{fill:none;stroke:#22252b;stroke-width:2}
.flight{fill:none;stroke-width:1.8}.plus{fill:#22252b}.sign{fill:#fff;font-size:11px;font-weight:700}
"""


@dataclass(frozen=True)
class Snapshot:
    """What there is after a round: (rank, chunk) -> the ranks whose contributions are in it. number: of the round, -1 before all."""

    number: int
    held: dict[tuple[int, int], tuple[int, ...]]
    reduces: bool


def snapshots(program: Program) -> Iterator[Snapshot]:
    """Before the first round, and after each."""
    for number, (hops, held) in enumerate(states(program), -1):
        yield Snapshot(number, {place: tuple(sorted(found)) for place, found in held.items()}, any(hop.reduce for hop in hops))


def check_drawable(program: Program) -> None:
    """JobError if nobody could read the picture."""
    check_countable(program.ranks, 1)
    if program.rounds > MOST_ROUNDS or program.chunks > MOST_CHUNKS:
        raise JobError(
            f"{program} has {program.rounds} rounds and {program.chunks} chunks, and a picture shows {MOST_ROUNDS} and {MOST_CHUNKS}; "
            f"write fewer --ranks or --pieces"
        )


def check_countable(ranks: int, pieces: int) -> None:
    """The same of numbers alone, before a program of them is made: of many ranks that takes minutes, and all memory."""
    if ranks > MOST_RANKS:
        raise JobError(f"a picture of {ranks} ranks cannot be read; write --ranks {MOST_RANKS} or less")
    if pieces > MOST_CHUNKS:
        raise JobError(f"a picture of {pieces} pieces cannot be read; write --pieces {MOST_CHUNKS} or less")


def svg(program: Program) -> str:
    """The picture, as one <svg> that needs nothing else. Raises JobError if it would be too large to read."""
    check_drawable(program)
    return _Sheet(program).draw()


def headline(program: Program) -> tuple[str, str]:
    """The title of the picture, and a line of what is shown."""
    way = ALGORITHMS.get(program.algorithm)
    told = f"{program.promise.summary[0].upper()}{program.promise.summary[1:]}."
    if way:
        told += f" By {program.algorithm}: {way.summary}."
    return f"{program.collective} on {program.ranks} ranks, {program.algorithm}", told


class _Sheet:
    """Where everything is on the sheet."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.columns = program.ranks * program.pieces if program.promise.parts == "pairs" else program.chunks
        self.rows = program.chunks // self.columns
        stripes = 2.4 * len(program.starts(0)) if program.ranks <= 8 else 0.0  # wide enough to tell their colours
        self.cell = min(30, max(7, 150 // self.columns, int(stripes) + 2)) if self.rows == 1 else max(9, min(18, 130 // self.columns))
        self.tall = 26 if self.rows == 1 else self.cell
        self.wide = self.columns * self.cell + 10
        self.high = self.rows * self.tall + 10
        per_node = program.ranks // program.nodes
        self.left = [
            GUTTER + EDGE + rank * (self.wide + BETWEEN) + rank // per_node * (NODE_GAP * (program.nodes > 1))
            for rank in range(program.ranks)
        ]
        self.width = max(self.left[-1] + self.wide + EDGE + 20, 640)
        self.band = self.high + FLIGHT

    def draw(self) -> str:
        shots = list(snapshots(self.program))
        bottom = TOP + self.band * (len(shots) - 1) + self.high
        height = bottom + 118
        parts = [*self._nodes(bottom), *self._head()]
        for before, after in pairwise(shots):
            parts += self._flights(before, after)
        for shot in shots:
            parts += self._band(shot, last=shot is shots[-1])
        parts += self._foot(bottom)
        said = html.escape(headline(self.program)[0])
        markers = "".join(
            f'<marker id="to{rank}" viewBox="0 0 8 8" refX="6.5" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0,0.8 L7,4 L0,7.2 Z" fill="{colour}"/></marker>'
            for rank, colour in enumerate(COLOURS[: self.program.ranks])
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {height}" width="{self.width}" height="{height}" '
            f'role="img" aria-label="{said}"><title>{said}</title><style>{STYLE}</style><defs>{markers}</defs>'
            f'<rect class="paper" width="{self.width}" height="{height}"/>{"".join(parts)}</svg>\n'
        )

    def _head(self) -> Iterator[str]:
        title, sub = headline(self.program)
        yield f'<text class="title" x="20" y="34">{html.escape(title)}</text>'
        for i, line in enumerate(textwrap.wrap(sub, int((self.width - 40) / 7.3))):
            yield f'<text class="sub" x="20" y="{55 + 17 * i}">{html.escape(line)}</text>'
        for rank, x in enumerate(self.left):
            root = " (root)" if "root" in self.program.promise[1:] and rank == self.program.root else ""
            yield f'<circle cx="{x + 5}" cy="{TOP - 24}" r="5" fill="{COLOURS[rank]}"/>'
            yield f'<text class="rank" x="{x + 15}" y="{TOP - 20}">rank {rank}{root}</text>'
            if self.rows == 1 and self.cell >= 12:
                for chunk in range(self.program.chunks):
                    middle = self._corner(rank, chunk, -1)[0] + self.cell / 2 - 1
                    yield f'<text class="tiny" x="{middle}" y="{TOP - 4}" text-anchor="middle">{chunk}</text>'

    def _nodes(self, bottom: int) -> Iterator[str]:
        if self.program.nodes == 1:
            return
        per_node = self.program.ranks // self.program.nodes
        for node in range(self.program.nodes):
            x, stop = self.left[node * per_node] - 12, self.left[(node + 1) * per_node - 1] + self.wide + 12
            yield f'<rect class="node" x="{x}" y="{TOP - 56}" width="{stop - x}" height="{bottom - TOP + 70}" rx="10"/>'
            yield f'<text class="small" x="{x + 10}" y="{TOP - 40}">{"row" if self.program.algorithm == "torus" else "node"} {node}</text>'

    def _y(self, number: int) -> int:
        return TOP + self.band * (number + 1)

    def _band(self, shot: Snapshot, last: bool) -> Iterator[str]:
        """What every rank has at one moment."""
        y = self._y(shot.number)
        if shot.number < 0:
            yield f'<text class="round" x="20" y="{y + self.high / 2 + 4}">at the start</text>'
        else:
            middle = y - FLIGHT / 2
            yield f'<text class="round" x="20" y="{middle}">round {shot.number + 1}</text>'
            yield f'<text class="small" x="20" y="{middle + 15}">{"sent and added" if shot.reduces else "sent"}</text>'
        if last and shot.number >= 0:
            yield f'<text class="round" x="20" y="{y + self.high / 2 + 4}">at the end</text>'
        for rank, x in enumerate(self.left):
            yield f'<rect class="tray" x="{x}" y="{y}" width="{self.wide}" height="{self.high}" rx="5"/>'
            for chunk in range(self.program.chunks):
                yield from self._cell(shot, rank, chunk)

    def _cell(self, shot: Snapshot, rank: int, chunk: int) -> Iterator[str]:
        """One chunk of one rank: a stripe for each contribution that is in it."""
        x, y = self._corner(rank, chunk, shot.number)
        w, h = self.cell - 2, self.tall - 2
        found, starts = shot.held.get((rank, chunk)), self.program.starts(chunk)
        if found is None:
            yield f'<rect class="empty" x="{x}" y="{y}" width="{w}" height="{h}" rx="1.5"/>'
            return
        yield f'<rect class="cell" x="{x}" y="{y}" width="{w}" height="{h}" rx="1.5"/>'
        stripe = w / len(starts)
        for place, source in enumerate(starts):
            if source in found:
                yield f'<rect x="{x + place * stripe:.2f}" y="{y}" width="{stripe:.2f}" height="{h}" fill="{COLOURS[source]}"/>'
        if found == starts and rank in self.program.ends(chunk):
            yield f'<rect class="done" x="{x}" y="{y}" width="{w}" height="{h}" rx="1.5"/>'

    def _corner(self, rank: int, chunk: int, number: int) -> tuple[int, int]:
        row, column = divmod(chunk, self.columns)
        return self.left[rank] + 6 + column * self.cell, self._y(number) + 6 + row * self.tall

    def _flights(self, before: Snapshot, after: Snapshot) -> Iterator[str]:
        """The arrows of a round: from where chunks lie to where they come to lie."""
        sends = [(src, message) for src, turns in enumerate(self.program.turns) for message in turns[after.number].sends]
        shifts = {(message.peer - src) % self.program.ranks for src, message in sends}
        around = next(iter(shifts)) if len(shifts) == 1 and len(sends) == self.program.ranks > 2 else 0
        turn = {1: 1, self.program.ranks - 1: -1}.get(around, 0)  # a ring: what leaves at one side comes in at the other
        for src, message in sends:
            for run in _runs(message.chunks) if self.rows == 1 else [message.chunks]:
                yield from self._flight(src, message, run, after.number, turn)

    def _flight(self, src: int, message: Message, run: Sequence[int], number: int, turn: int) -> Iterator[str]:
        x0, x1 = (sum(self._corner(rank, c, 0)[0] for c in run) / len(run) + self.cell / 2 - 1 for rank in (src, message.peer))
        y0, y1 = self._y(number - 1) + self.high + 1, self._y(number) - 2
        colour = COLOURS[src]
        middle = (y0 + y1) / 2
        if turn and (message.peer - src) * turn < 0:
            out, back = (self.left[-1] + self.wide + EDGE, GUTTER) if turn > 0 else (GUTTER, self.left[-1] + self.wide + EDGE)
            paths = [f"M{x0:.1f},{y0:.1f} C{x0:.1f},{middle} {x0 + turn * 20:.1f},{middle} {out},{middle}"]
            paths.append(f"M{back},{middle} C{x1 - turn * 20:.1f},{middle} {x1:.1f},{middle} {x1:.1f},{y1:.1f}")
        else:
            paths = [f"M{x0:.1f},{y0:.1f} C{x0:.1f},{middle + 12} {x1:.1f},{middle - 12} {x1:.1f},{y1:.1f}"]
        for i, path in enumerate(paths):
            end = f' marker-end="url(#to{src})"' if i == len(paths) - 1 else ""
            yield f'<path class="flight" d="{path}" stroke="{colour}"{end}/>'
        if message.reduce:
            radius = 6 if self.cell > 18 else 5
            yield f'<circle class="plus" cx="{x1:.1f}" cy="{y1 - 13:.1f}" r="{radius}"/>'
            yield f'<text class="sign" x="{x1:.1f}" y="{y1 - 9:.1f}" text-anchor="middle">+</text>'

    def _foot(self, bottom: int) -> Iterator[str]:
        """How much each rank sent, and what the signs mean."""
        yield f'<text class="small" x="20" y="{bottom + 24}">sent in all</text>'
        for rank, x in zip(traffic(self.program, 1.0), self.left, strict=True):
            yield f'<text class="small" x="{x}" y="{bottom + 24}">{rank.sent:.3g} S</text>'
            yield f'<text class="small" x="{x}" y="{bottom + 39}">{rank.messages} message{"s" * (rank.messages != 1)}</text>'
        several = len(self.program.starts(0)) > 1
        stripe = (
            f'<rect x="0" width="6" height="20" fill="{COLOURS[0]}"/>' if several else f'<rect width="24" height="20" fill="{COLOURS[0]}"/>'
        )
        full = (
            "".join(f'<rect x="{6 * i}" width="6" height="20" fill="{colour}"/>' for i, colour in enumerate(COLOURS[:4]))
            if several
            else stripe
        )
        part = "a chunk, with the contribution of rank 0" if several else "a chunk of rank 0"
        plus = '<circle class="plus" cx="10" cy="10" r="6"/><text class="sign" x="10" y="14" text-anchor="middle">+</text>'
        signs = {
            part: f'<rect class="cell" width="24" height="20" rx="1.5"/>{stripe}',
            "complete, and where it belongs": f'{full}<rect class="done" width="24" height="20" rx="1.5"/>',
            "added to what is there": plus if any(hop.reduce for hop in self.program.hops) else "",
        }
        x, y = 20, bottom + 58
        for said, sign in ((said, sign) for said, sign in signs.items() if sign):
            yield f'<g transform="translate({x},{y})">{sign}</g><text class="small" x="{x + 32}" y="{y + 14}">{said}</text>'
            x += 58 + int(6.3 * len(said))
        unit = f"S is {'what a rank sends and keeps' if self.rows > 1 else 'the whole buffer'}: {round(1 / self.program.share())} chunks."
        lines = "" if self.rows == 1 else "Line i, column j: what goes from rank i to rank j. "
        yield f'<text class="small" x="20" y="{y + 40}">{lines}{unit}</text>'


def _runs(chunks: Sequence[int]) -> Iterator[list[int]]:
    """The chunks that lie side by side together."""
    for _, run in groupby(enumerate(chunks), key=lambda at: at[1] - at[0]):
        yield [chunk for _, chunk in run]
