"""What a Program costs: messages and bytes of each rank, and seconds over links that differ in speed.

The model (Thakur, Rabenseifner and Gropp 2005, REFERENCE A2): a message of b bytes takes latency + b / bandwidth, adding takes
seconds a byte, and each rank sends one message and receives one at a time. So a round lasts as long as its busiest rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from stretto.schedule.collective import Hop, Program


class Link(NamedTuple):
    """A way between two ranks. latency: seconds a message takes whatever its size. bandwidth: bytes a second in one direction."""

    latency: float
    bandwidth: float

    def seconds(self, bytes_: float) -> float:
        return self.latency + bytes_ / self.bandwidth


@dataclass(frozen=True)
class Links:
    """The ways between ranks 0, 1, 2 ... that sit `per_node` to a machine: one kind inside a machine, another across.

    A rank has a port to each kind (its NVLinks, its network card), which can be busy at the same time.
    add: seconds a byte that a rank adds to its own takes.
    """

    inside: Link
    across: Link
    per_node: int
    add: float = 0.0

    @staticmethod
    def alike(latency: float, bandwidth: float, add: float = 0.0) -> Links:
        """Every rank reaches every other in the same way."""
        link = Link(latency, bandwidth)
        return Links(link, link, 1, add)

    def crosses(self, src: int, dst: int) -> bool:
        return src // self.per_node != dst // self.per_node


class Traffic(NamedTuple):
    """What one rank does in a whole Program. Bytes are floats: chunks are taken to be of equal size."""

    messages: int
    sent: float
    received: float
    added: float


def traffic(program: Program, bytes_: float) -> list[Traffic]:
    """Of each rank, for a buffer of `bytes_` (as nccl-tests counts it, see Program.share)."""
    size = program.share() * bytes_
    found = [Traffic(0, 0.0, 0.0, 0.0)] * program.ranks
    for (_, src, dst), hops in _messages(program):
        mine, theirs = found[src], found[dst]
        found[src] = mine._replace(messages=mine.messages + 1, sent=mine.sent + size * len(hops))
        added = size * sum(hop.reduce for hop in hops)
        found[dst] = theirs._replace(received=theirs.received + size * len(hops), added=theirs.added + added)
    return found


def seconds(program: Program, bytes_: float, links: Links) -> float:
    """How long the Program takes for a buffer of `bytes_`: the sum of its rounds."""
    size = program.share() * bytes_
    total = 0.0
    for _, in_round in groupby(_messages(program), key=lambda message: message[0][0]):
        port: dict[tuple[int, bool, str], float] = defaultdict(float)  # seconds that it is busy, by rank, kind of link and direction
        adding: dict[int, float] = defaultdict(float)
        for (_, src, dst), hops in in_round:
            far = links.crosses(src, dst)
            taken = (links.across if far else links.inside).seconds(size * len(hops))
            port[src, far, "out"] += taken
            port[dst, far, "in"] += taken
            adding[dst] += size * sum(hop.reduce for hop in hops) * links.add
        total += max(busy + adding[rank] for (rank, _, _), busy in port.items())
    return total


def _messages(program: Program) -> list[tuple[tuple[int, int, int], list[Hop]]]:
    """((round, src, dst), its hops), in the order of rounds: what goes from one rank to another in one round goes together."""
    hops = sorted(program.hops)
    return [(key, list(group)) for key, group in groupby(hops, key=lambda hop: (hop.round, hop.src, hop.dst))]
