"""What a Program costs: messages and bytes of each rank, and seconds over links that differ in speed.

The model (Thakur, Rabenseifner and Gropp 2005, REFERENCE A2): a message of b bytes takes latency + b / bandwidth, adding takes
seconds a byte, and each rank sends one message and receives one at a time. So a round lasts as long as its busiest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stretto.schedule.collective import Message, Program


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
    return [
        Traffic(
            messages=sum(len(turn.sends) for turn in turns),
            sent=size * sum(len(message.chunks) for turn in turns for message in turn.sends),
            received=size * sum(len(message.chunks) for turn in turns for message in turn.receives),
            added=size * sum(len(message.chunks) for turn in turns for message in turn.receives if message.reduce),
        )
        for turns in program.turns
    ]


def seconds(program: Program, bytes_: float, links: Links) -> float:
    """How long the Program takes for a buffer of `bytes_`: the sum of its rounds."""
    size = program.share() * bytes_
    busiest = [0.0] * program.rounds
    for rank, turns in enumerate(program.turns):
        for number, turn in enumerate(turns):
            out, into = (_port(rank, messages, size, links) for messages in (turn.sends, turn.receives))
            adding = links.add * size * sum(len(message.chunks) for message in turn.receives if message.reduce)
            busiest[number] = max(busiest[number], out, into + adding)
    return sum(busiest)


def _port(rank: int, messages: Sequence[Message], size: float, links: Links) -> float:
    """Seconds until one after the other has gone, to or from a rank; its two ports work at the same time."""
    busy = [0.0, 0.0]
    for message in messages:
        far = links.crosses(rank, message.peer)
        busy[far] += (links.across if far else links.inside).seconds(size * len(message.chunks))
    return max(busy)
