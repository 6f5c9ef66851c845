"""Runs a Program of hops by point-to-point messages: any collective by any algorithm, over whatever carries messages.

Results have the same bits in every run: a rank adds what arrives to its own in the order of rounds and, within one, of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.comm.combine import OPERATIONS, check
from stretto.comm.messages import CHUNK, WINDOW
from stretto.comm.transport import Pending, Transport
from stretto.schedule.collective import Message, Program, Turn


@dataclass(frozen=True)
class Member:
    """Rank number `index` of a group. ranks: the global numbers of all of them, by which `transport` knows them."""

    transport: Transport
    ranks: Sequence[int]
    index: int
    channel: int


class Span(NamedTuple):
    """Elements [start, stop) of a chunk."""

    chunk: int
    start: int
    stop: int


def run(program: Program, parts: Sequence[int], brings: Tensor, takes: Tensor, member: Member, op: str = "sum") -> None:
    """Do my part of the program; returns when `takes` holds what it promises and `brings` may be written again.

    parts: elements of each part of the data, the same on all ranks. brings, takes: flat, the chunks that start and that end with
    me, one after the other. They may share memory as far as they hold the same chunks; what is in brings alone is left as it is.
    op: sum, avg, max or min. Raises PeerLost if a peer is gone.
    """
    check(takes if takes.numel() else brings, op)
    sizes = program.sizes(parts)
    mine = [chunk for chunk in range(program.chunks) if member.index in program.starts(chunk)]
    wanted = [chunk for chunk in range(program.chunks) if member.index in program.ends(chunk)]
    holder = _Holder(sizes, _cut(brings, mine, sizes), _cut(takes, wanted, sizes), member, OPERATIONS[op])
    for turn in program.turns[member.index]:
        holder.take_turn(turn)
    holder.finish()
    if op == "avg":
        takes.div_(program.ranks)


def pieces(chunks: Iterable[int], sizes: Sequence[int]) -> list[list[Span]]:
    """How a message travels: a small one at once, of a larger one each chunk by itself, CHUNK elements at a time.

    So what is small pays for one message, what is large is never packed, and what arrives is added while it is in cache.
    """
    spans = [Span(chunk, 0, sizes[chunk]) for chunk in chunks if sizes[chunk]]
    if sum(span.stop for span in spans) <= CHUNK:
        return [spans] if spans else []
    return [[Span(c, start, min(start + CHUNK, size))] for c, _, size in spans for start in range(0, size, CHUNK)]


class _Holder:
    """What one rank holds of each chunk while a program runs.

    [Note: where a chunk lies] What I bring is never written. A chunk that changes, or that I only pass on, gets a place: where I
    take it in the end, or memory of its own. A place is written only when nothing is under way from it any more.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        brings: Mapping[int, Tensor],
        takes: Mapping[int, Tensor],
        member: Member,
        combine: Callable[..., Tensor],
    ) -> None:
        self.sizes, self.takes, self.member, self.combine = sizes, takes, member, combine
        self.held = dict(brings)
        self.places = dict(takes)
        self.like = next(iter((*brings.values(), *takes.values())))
        self.under_way: dict[int, list[Pending]] = defaultdict(list)  # from where the chunk lies
        self.copies: list[Pending] = []

    def take_turn(self, turn: Turn) -> None:
        """One round: everything is sent as it was before it."""
        written = {chunk for message in turn.receives for chunk in message.chunks}
        packed = [
            (message.peer, spans, self._pack(spans, written)) for message in turn.sends for spans in pieces(message.chunks, self.sizes)
        ]
        arriving = [(message, self._expect(message)) for message in turn.receives]
        for peer, spans, x in packed:
            handle = self.member.transport.send(x, self.member.ranks[peer], self.member.channel)
            as_it_lies = len(spans) == 1 and spans[0].chunk not in written
            (self.under_way[spans[0].chunk] if as_it_lies else self.copies).append(handle)
        for message, arrive in arriving:
            arrive()
            self.held |= {chunk: self._place(chunk) for chunk in message.chunks}

    def finish(self) -> None:
        for chunk, place in self.takes.items():
            if self.held[chunk].data_ptr() != place.data_ptr():
                self._place(chunk).copy_(self.held[chunk])
        _wait([*self.copies, *(handle for handles in self.under_way.values() for handle in handles)])

    def _pack(self, spans: Sequence[Span], written: set[int]) -> Tensor:
        """What is sent: as it lies, if it is of one chunk that this round leaves as it is; else a copy."""
        parts = [self.held[chunk][start:stop] for chunk, start, stop in spans]
        if len(parts) > 1:
            return torch.cat(parts)
        return parts[0].clone() if spans[0].chunk in written else parts[0]

    def _expect(self, message: Message) -> Callable[[], None]:
        """Post receives of a message; the result waits for all of it and puts it where it belongs."""
        todo = pieces(message.chunks, self.sizes)
        if not message.reduce and all(len(spans) == 1 for spans in todo):
            handles = [self._post(self._place(chunk)[start:stop], message) for [(chunk, start, stop)] in todo]
            return lambda: _wait(handles)
        lengths = [sum(stop - start for _, start, stop in spans) for spans in todo]
        room = [self.like.new_empty(max(lengths)) for _ in todo[:WINDOW]]
        posted = [self._post(buffer[:length], message) for buffer, length in zip(room, lengths, strict=False)]

        def arrive() -> None:
            for i, spans in enumerate(todo):
                buffer, following = room[i % WINDOW], i + WINDOW
                posted[i].wait()
                for part, span in zip(buffer[: lengths[i]].split([stop - start for _, start, stop in spans]), spans, strict=True):
                    self._put(part, span, message.reduce)
                if following < len(todo):
                    posted.append(self._post(buffer[: lengths[following]], message))

        return arrive

    def _put(self, part: Tensor, span: Span, reduce: bool) -> None:
        place = self._place(span.chunk)[span.start : span.stop]
        if reduce and span.chunk in self.held:
            self.combine(self.held[span.chunk][span.start : span.stop], part, out=place)
        else:
            place.copy_(part)

    def _post(self, into: Tensor, message: Message) -> Pending:
        return self.member.transport.receive(into, self.member.ranks[message.peer], self.member.channel)

    def _place(self, chunk: int) -> Tensor:
        """Where the chunk may be written now."""
        _wait(self.under_way.pop(chunk, []))
        if chunk not in self.places:
            self.places[chunk] = self.like.new_empty(self.sizes[chunk])
        return self.places[chunk]


def _wait(under_way: Iterable[Pending]) -> None:
    for pending in under_way:
        pending.wait()


def _cut(x: Tensor, chunks: Sequence[int], sizes: Sequence[int]) -> dict[int, Tensor]:
    return dict(zip(chunks, x.split([sizes[chunk] for chunk in chunks]), strict=True))
