"""Collectives as data: who sends which chunk to whom in which round, and the proof that this gives what the name promises.

A Program is one list of Hops. It is proved here, priced in schedule/price.py, run in comm/program.py and drawn in
draw/collective.py: four uses of one list, so that none of them can tell another story. Named algorithms that make Programs
are in schedule/algorithms.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple

from stretto.errors import JobError
from stretto.layout.layout import split

Who = Literal["all", "root", "owner", "sender", "receiver"]


class Hop(NamedTuple):
    """In `round`, `src` sends its copy of `chunk` to `dst`, which adds it to its own (reduce) or keeps it in place of its own.

    All hops of one round start from what was there before the round. Those from one rank to another are one message.
    """

    round: int
    src: int
    dst: int
    chunk: int
    reduce: bool


class Message(NamedTuple):
    """All hops from one rank to another in one round, as one of the two sees them: `peer` is the other. chunks: in order."""

    peer: int
    chunks: tuple[int, ...]
    reduce: bool


class Turn(NamedTuple):
    """What one rank does in one round."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


class Promise(NamedTuple):
    """What a collective does with each part of the data: whose contributions it starts from, and who ends up with their sum.

    parts: what the data is made of: one part, one a rank (part i is rank i's), or one for each pair (part i * n + j goes from
    rank i to rank j).
    """

    parts: Literal["one", "ranks", "pairs"]
    starts: Who
    ends: Who
    summary: str


COLLECTIVES: Mapping[str, Promise] = {
    "broadcast": Promise("one", "root", "all", "one rank has it, everybody gets it"),
    "scatter": Promise("ranks", "root", "owner", "one rank has all parts, rank i gets part i"),
    "gather": Promise("ranks", "owner", "root", "rank i has part i, one rank gets all parts"),
    "reduce": Promise("one", "all", "root", "everybody has one, their sum goes to one rank"),
    "all_gather": Promise("ranks", "owner", "all", "rank i has part i, everybody gets all parts"),
    "reduce_scatter": Promise("ranks", "all", "owner", "everybody has one, rank i gets part i of their sum"),
    "all_reduce": Promise("one", "all", "all", "everybody has one, everybody gets their sum"),
    "all_to_all": Promise("pairs", "sender", "receiver", "rank i has a part for each rank j, which gets it"),
    "barrier": Promise("ranks", "owner", "all", "nobody goes on until everybody has come: an all-gather of nothing"),
}


@dataclass(frozen=True)
class Program:
    """One collective by one algorithm among ranks 0 .. ranks-1. hops: in the order of their rounds.

    pieces: each part of the data is cut into so many chunks, as evenly as can be: chunk c is piece c % pieces of part c // pieces.
    root: the rank that collectives with a root start from or end at; the others ignore it.
    nodes: into how many equal runs of ranks (machines, or rows of a torus) the algorithm saw them divided; 1 if it did not look.
    """

    collective: str
    algorithm: str
    ranks: int
    pieces: int
    hops: tuple[Hop, ...]
    root: int = 0
    nodes: int = 1

    def __str__(self) -> str:
        return f"{self.algorithm} {self.collective} over {self.ranks} ranks"

    @property
    def promise(self) -> Promise:
        return COLLECTIVES[self.collective]

    @property
    def parts(self) -> int:
        """How many parts the data has."""
        return {"one": 1, "ranks": self.ranks, "pairs": self.ranks**2}[self.promise.parts]

    @property
    def chunks(self) -> int:
        return self.parts * self.pieces

    @cached_property
    def rounds(self) -> int:
        return max((hop.round for hop in self.hops), default=-1) + 1

    @cached_property
    def turns(self) -> tuple[tuple[Turn, ...], ...]:
        """Of each rank, round after round. Messages of a round are in the order of their peers."""
        found: list[list[tuple[list[Message], list[Message]]]] = [[([], []) for _ in range(self.rounds)] for _ in range(self.ranks)]
        for (number, src, dst, reduce), group in groupby(sorted(self.hops, key=_message), key=_message):
            chunks = tuple(hop.chunk for hop in group)
            found[src][number][0].append(Message(dst, chunks, reduce))
            found[dst][number][1].append(Message(src, chunks, reduce))
        return tuple(tuple(Turn(tuple(sends), tuple(receives)) for sends, receives in rounds) for rounds in found)

    def starts(self, chunk: int) -> tuple[int, ...]:
        """Ranks that contribute to the chunk."""
        return self._who(self.promise.starts, chunk)

    def ends(self, chunk: int) -> tuple[int, ...]:
        """Ranks that have to hold all contributions to the chunk at the end."""
        return self._who(self.promise.ends, chunk)

    def _who(self, who: Who, chunk: int) -> tuple[int, ...]:
        part = chunk // self.pieces
        if who == "all":
            return tuple(range(self.ranks))
        return ({"root": self.root, "owner": part, "sender": part // self.ranks, "receiver": part % self.ranks}[who],)

    def sizes(self, parts: Sequence[int]) -> tuple[int, ...]:
        """Elements of each chunk, from those of each part."""
        if len(parts) != self.parts:
            raise ValueError(f"{self} moves {self.parts} parts, and {len(parts)} sizes are given")
        cuts = (split(size, self.pieces, i) for size in parts for i in range(self.pieces))
        return tuple(stop - start for start, stop in cuts)

    def share(self) -> float:
        """The size of a chunk, in parts of S: the buffer that nccl-tests calls its size, all parts together (of all-to-all
        those that one rank sends)."""
        return self.ranks / self.chunks if self.promise.parts == "pairs" else 1 / self.chunks


def _message(hop: Hop) -> tuple[int, int, int, bool]:
    return hop.round, hop.src, hop.dst, hop.reduce


#: What ranks hold of chunks: (rank, chunk) -> how often it contains the contribution of each rank. Absent: the rank has nothing.
Held = Mapping[tuple[int, int], Counter[int]]


def states(program: Program) -> Iterator[tuple[tuple[Hop, ...], Held]]:
    """Each round's hops, with what every rank holds after them; first, without hops, what they start from.

    It is one mapping, changed from round to round: copy what is to be kept.
    Raises JobError if a rank sends what it does not have, or is sent two things for one place in one round.
    """
    held = {(rank, chunk): Counter([rank]) for chunk in range(program.chunks) for rank in program.starts(chunk)}
    yield (), held
    for number, group in groupby(program.hops, key=lambda hop: hop.round):
        hops = tuple(group)
        sent = []
        for hop in hops:
            if (hop.src, hop.chunk) not in held:
                raise JobError(f"{program}: in round {number} rank {hop.src} sends chunk {hop.chunk}, which it does not have")
            sent.append(held[hop.src, hop.chunk])
        filled: set[tuple[int, int]] = set()
        for hop, contributions in zip(hops, sent, strict=True):
            there = (hop.dst, hop.chunk)
            if not hop.reduce and there in filled:
                raise JobError(f"{program}: in round {number} rank {hop.dst} is sent two things for its place of chunk {hop.chunk}")
            filled.add(there)
            held[there] = held.get(there, Counter()) + contributions if hop.reduce else contributions
        yield hops, held


def prove(program: Program) -> None:
    """At the end each chunk is where it has to be, with the contribution of each rank that has one in it exactly once.

    Raises JobError that says which contribution is lost or counted twice, in which chunk, on which rank.
    """
    numbers = [hop.round for hop in program.hops]
    if numbers != sorted(numbers) or set(numbers) != set(range(program.rounds)):
        raise JobError(f"{program}: its rounds are not 0, 1, 2 ... in order")
    for hop in program.hops:
        if hop.src == hop.dst or not (0 <= hop.src < program.ranks and 0 <= hop.dst < program.ranks and 0 <= hop.chunk < program.chunks):
            raise JobError(f"{program}: {hop} is not between two of its ranks, or of none of its {program.chunks} chunks")
    *_, (_, held) = states(program)
    for chunk in range(program.chunks):
        wanted = Counter(program.starts(chunk))
        for rank in program.ends(chunk):
            found = held.get((rank, chunk), Counter())
            wrong = next((source for source in range(program.ranks) if found[source] != wanted[source]), None)
            if wrong is not None:
                what = f"is there {found[wrong]} times, and belongs there {wanted[wrong]} times" if found[wrong] else "is lost"
                raise JobError(f"{program}: in chunk {chunk} on rank {rank} the contribution of rank {wrong} {what}")
