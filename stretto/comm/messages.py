"""Collectives out of point-to-point messages, for transports that have nothing better (gloo, threads).

Each rank sends its peers their slices at once and adds what arrives in rank order: the sum has the same bits on every rank
and in every run, whatever the timing. The bytes a rank sends are those of a ring, (n-1)/n of the buffer, in one round.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from stretto.comm.combine import check, combine
from stretto.errors import PeerLost

#: Elements of one message: small enough that what arrived is still in cache when it is added, large enough to amortise a message.
CHUNK = 1 << 18
#: Messages of one peer that may be under way to a buffer of ours.
WINDOW = 3
#: Added to the channel of a message that is no part of a collective.
DIRECT = 1 << 20
#: Up to this many elements, those of all ranks together, an all-reduce sends everything to everybody: one round instead of two.
SMALL = 1 << 10


class Handle(Protocol):
    """A message under way."""

    def wait(self) -> object: ...


class Mail(Protocol):
    """Point-to-point messages between ranks. Messages of one (source, destination, channel) arrive in the order sent."""

    name: str

    def send(self, x: Tensor, destination: int, channel: int) -> Handle: ...

    def receive(self, x: Tensor, source: int, channel: int) -> Handle: ...


class Work:
    """A collective under way; `wait` returns once its result is in place. Raises PeerLost if a peer is gone."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._handles: list[Handle] = []

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise _lost(self._error)
        handles, self._handles = self._handles, []
        try:
            _wait(handles)
        except BaseException as error:
            self._error = error  # whoever waits again must not take it for done
            raise

    def result(self) -> None:
        """The same as `wait`: what has been sent nobody reads where it lay."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise. Messages that are posted are waited for: gloo does not say whether they have come."""
        if not self._over.is_set():
            return False
        with contextlib.suppress(Exception):  # `wait` raises it again
            self.wait()
        return True


class Messages:
    """A Transport over some Mail."""

    def __init__(self, mail: Mail, rank: int, device: torch.device | str = "cpu") -> None:
        self.mail, self.rank, self.name, self.device = mail, rank, mail.name, device
        self._lanes: dict[int, Lane] = {}

    def reduce_scatter(
        self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int, into: Tensor, accumulate: bool, op: str = "sum"
    ) -> Work:
        """Everybody's x combined; my slice [bounds[i], bounds[i+1]) of it is written to, or added to, `into`.

        x: flat. `into` may be that slice of x itself. The other slices of x are left as they were.
        """
        check(x, op)
        work, index = Work(), list(ranks).index(self.rank)
        for peer, rank in enumerate(ranks):
            if peer != index:
                work._handles += [self.mail.send(c, rank, channel) for c in _chunks(x, bounds, peer)]
        own = x[bounds[index] : bounds[index + 1]]
        self._later(channel, work, len(ranks), lambda: self._combine(own, ranks, index, channel, into, accumulate, op))
        return work

    def all_gather(self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int) -> Work:
        """Everybody's slice of x, in place: mine is there already, the others arrive where they belong. x: flat."""
        work = Work()
        self._give(x, bounds, ranks, channel, work)
        self._in_turn(channel, work, lambda: self._take(x, bounds, ranks, channel, work))
        return work

    def all_reduce(self, x: Tensor, ranks: Sequence[int], channel: int, op: str = "sum") -> Work:
        """Everybody's x combined (op: sum, avg, max, min), in place and bit for bit the same on all ranks. x: flat."""
        check(x, op)
        work, n, index = Work(), len(ranks), list(ranks).index(self.rank)
        if x.numel() * n <= SMALL:
            mine = x.clone()  # x is overwritten while slower peers may still be served
            work._handles = [self.mail.send(mine, rank, channel) for rank in ranks if rank != self.rank]
            self._later(channel, work, n, lambda: self._combine_all(x, mine, ranks, channel, op))
            return work
        bounds = [x.numel() * i // n for i in range(n + 1)]
        for peer, rank in enumerate(ranks):
            if peer != index:
                work._handles += [self.mail.send(c, rank, channel) for c in _chunks(x, bounds, peer)]
        own = x[bounds[index] : bounds[index + 1]]

        def both() -> None:
            # A slice of x that I still send cannot be overwritten by its finished sum: its owner sums only what it has received.
            self._combine(own, ranks, index, channel, own, False, op)
            self._give(x, bounds, ranks, channel + 1, work)
            self._take(x, bounds, ranks, channel + 1, work)

        self._later(channel, work, n, both)
        return work

    def broadcast(self, x: Tensor, ranks: Sequence[int], source: int, channel: int) -> Work:
        """x of rank `source`, in place on every rank of the group. x: flat."""
        work = Work()
        if source == self.rank:
            work._handles = [self.mail.send(c, rank, channel) for rank in ranks if rank != source for c in x.split(CHUNK)]
            work.finish()
        else:
            self._in_turn(channel, work, lambda: work._handles.extend(self.mail.receive(c, source, channel) for c in x.split(CHUNK)))
        return work

    def send(self, x: Tensor, to: int, channel: int) -> Work:
        """x to rank `to`, which must `receive` on the same channel; messages of one pair and channel arrive in order. x: flat."""
        work = Work()
        work._handles = [self.mail.send(c, to, channel + DIRECT) for c in _chunks(x, (0, x.numel()), 0)]
        work.finish()
        return work

    def receive(self, x: Tensor, source: int, channel: int) -> Work:
        """The next message of rank `source` on this channel, into x. x: flat."""
        work = Work()
        work._handles = [self.mail.receive(c, source, channel + DIRECT) for c in _chunks(x, (0, x.numel()), 0)]
        work.finish()
        return work

    def own(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor:
        """Zeros; where ranks only send messages, no memory is better than another."""
        return torch.zeros(elements, dtype=dtype, device=self.device)

    def common(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor | None:
        """None: ranks that only send messages have no memory in common."""
        return None

    def close(self) -> None:
        """Nothing is held."""

    def _give(self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int, work: Work) -> None:
        """Send everybody my slice."""
        mine = _chunks(x, bounds, list(ranks).index(self.rank))
        work._handles += [self.mail.send(c, rank, channel) for rank in ranks if rank != self.rank for c in mine]

    def _take(self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int, work: Work) -> None:
        """Post the receives of everybody's slice."""
        for peer, rank in enumerate(ranks):
            if rank != self.rank:
                work._handles += [self.mail.receive(c, rank, channel) for c in _chunks(x, bounds, peer)]

    def _combine(self, own: Tensor, ranks: Sequence[int], index: int, channel: int, into: Tensor, accumulate: bool, op: str) -> None:
        """Combine my slice of everybody's buffer, chunk by chunk and in rank order."""
        peers = [rank for rank in ranks if rank != self.rank]
        mine, out = own.split(CHUNK), into.split(CHUNK)
        scratch = [[torch.empty_like(mine[0]) for _ in peers] for _ in range(min(WINDOW, len(mine)))] if own.numel() else []
        arriving = [self._post(scratch[i], mine[i], peers, channel) for i in range(len(scratch))] if own.numel() else []
        for i, (chunk, target) in enumerate(zip(mine, out, strict=True)):
            if not chunk.numel():
                continue
            _wait(arriving[i])
            buffers = [b[: chunk.numel()] for b in scratch[i % len(scratch)]]
            combine([*buffers[:index], chunk, *buffers[index:]], target, op, accumulate)
            if i + len(scratch) < len(mine):
                arriving.append(self._post(scratch[i % len(scratch)], mine[i + len(scratch)], peers, channel))

    def _post(self, buffers: list[Tensor], chunk: Tensor, peers: list[int], channel: int) -> list[Handle]:
        return [self.mail.receive(b[: chunk.numel()], peer, channel) for b, peer in zip(buffers, peers, strict=True)]

    def _combine_all(self, x: Tensor, mine: Tensor, ranks: Sequence[int], channel: int, op: str) -> None:
        """Combine the whole of everybody's buffer."""
        parts = [mine if rank == self.rank else torch.empty_like(x) for rank in ranks]
        _wait([self.mail.receive(p, rank, channel) for p, rank in zip(parts, ranks, strict=True) if rank != self.rank])
        combine(parts, x, op)

    def _in_turn(self, channel: int, work: Work, post: Callable[[], None]) -> None:
        """Post receives after those of the channel's earlier collectives: now, or in its lane, which posts those of sums."""
        if channel in self._lanes:
            self._lanes[channel].put(post, work)
        else:
            post()
            work.finish()

    def _later(self, channel: int, work: Work, ranks: int, job: Callable[[], None]) -> None:
        """Run `job` beside the caller, after the channel's earlier jobs; in place where there is nobody to wait for."""
        if ranks == 1:
            job()
            work.finish()
            return
        if channel not in self._lanes:
            self._lanes[channel] = Lane()
        self._lanes[channel].put(job, work)


class Lane:
    """A thread that finishes the collectives of one channel, in the order in which they were issued. It ends with its owner."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Work] | None] = queue.SimpleQueue()
        threading.Thread(target=_run_lane, args=(self._jobs,), daemon=True, name="stretto-lane").start()
        weakref.finalize(self, self._jobs.put, None)

    def put(self, job: Callable[[], None], work: Work) -> None:
        self._jobs.put((job, work))


def _run_lane(jobs: queue.SimpleQueue[tuple[Callable[[], None], Work] | None]) -> None:
    torch.set_num_threads(1)
    with torch.inference_mode(False), torch.no_grad():
        while (item := jobs.get()) is not None:
            job, work = item
            try:
                job()
            except BaseException as error:  # handed to whoever waits
                work.finish(error)
            else:
                work.finish()
            del item, job, work


def _chunks(x: Tensor, bounds: Sequence[int], part: int) -> tuple[Tensor, ...]:
    piece = x[bounds[part] : bounds[part + 1]]
    return piece.split(CHUNK) if piece.numel() else ()


def _wait(handles: Sequence[Handle]) -> None:
    for handle in handles:
        try:
            handle.wait()
        except RuntimeError as error:
            raise _lost(error) from error


def _lost(error: BaseException) -> BaseException:
    if isinstance(error, PeerLost) or not isinstance(error, RuntimeError):
        return error
    return PeerLost(f"a peer is gone or does not answer: {str(error).splitlines()[0]}")
