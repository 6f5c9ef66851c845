"""Ranks as threads of one process: the real collectives in milliseconds, for tests; messages can be delayed on purpose."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from stretto.comm.messages import Messages
from stretto.comm.transport import Transport, World
from stretto.errors import Mismatch, PeerLost

T = TypeVar("T")
#: (source, destination, channel)
Key = tuple[int, int, int]


@dataclass
class Office:
    """Where the threads leave messages for each other. delay: seconds from sending to arrival. Counts payload bytes by sender."""

    delay: float = 0.0
    patience: float = 60.0
    closed: bool = False
    bytes_sent: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    messages: int = 0
    _boxes: dict[tuple[Key, int], tuple[float, Tensor]] = field(default_factory=dict)
    _sent: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    _asked: dict[Key, int] = field(default_factory=lambda: defaultdict(int))
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, key: Key, x: Tensor) -> None:
        with self._changed:
            self._boxes[key, self._sent[key]] = (time.monotonic() + self.delay, x.clone())
            self._sent[key] += 1
            self.bytes_sent[key[0]] += x.numel() * x.element_size()
            self.messages += 1
            self._changed.notify_all()

    def ticket(self, key: Key) -> int:
        """The number of the message that the next receive gets: receives are served in the order in which they are posted."""
        with self._changed:
            self._asked[key] += 1
            return self._asked[key] - 1

    def take(self, key: Key, number: int, into: Tensor) -> None:
        deadline = time.monotonic() + self.patience
        with self._changed:
            while (key, number) not in self._boxes:
                if self.closed or not self._changed.wait(max(deadline - time.monotonic(), 0)):
                    raise PeerLost(f"rank {key[0]} sent nothing to rank {key[1]}")
            arrival, x = self._boxes.pop((key, number))
        time.sleep(max(arrival - time.monotonic(), 0))
        if x.shape != into.shape or x.dtype != into.dtype:
            raise Mismatch(f"rank {key[0]} sent {tuple(x.shape)} {x.dtype}, rank {key[1]} expected {tuple(into.shape)} {into.dtype}")
        into.copy_(x)

    def close(self) -> None:
        with self._changed:
            self.closed = True
            self._changed.notify_all()


class _Sent:
    def wait(self) -> None: ...


class _Arriving:
    def __init__(self, office: Office, key: Key, into: Tensor) -> None:
        self.office, self.key, self.into, self.number = office, key, into, office.ticket(key)

    def wait(self) -> None:
        self.office.take(self.key, self.number, self.into)


class ThreadMail:
    """Mail of one thread-rank."""

    name = "threads"

    def __init__(self, office: Office, rank: int) -> None:
        self.office, self.rank = office, rank

    def send(self, x: Tensor, destination: int, channel: int) -> _Sent:
        self.office.put((self.rank, destination, channel), x)
        return _Sent()

    def receive(self, x: Tensor, source: int, channel: int) -> _Arriving:
        return _Arriving(self.office, (source, self.rank, channel), x)


def run_threads(
    fn: Callable[[World], T],
    ranks: int,
    *,
    delay: float = 0.0,
    office: Office | None = None,
    transport: Callable[[int, int, Store], Transport] | None = None,
) -> list[T]:
    """fn(world) on `ranks` threads at once; their results in rank order. The first failure is raised, after all have ended.

    transport(rank, ranks, store): made in each thread instead of messages through an office.
    """
    office = office or Office(delay=delay)
    results: list[T | None] = [None] * ranks
    errors: list[BaseException] = []
    store = HashStore()

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        over: Transport | None = None
        try:
            over = transport(rank, ranks, store) if transport else Messages(ThreadMail(office, rank), rank)
            results[rank] = fn(World(rank, ranks, rank, torch.device("cpu"), over, store))
        except BaseException as error:
            errors.append(error)
            office.close()
        finally:
            if over is not None:
                over.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, PeerLost)), errors[0])
    return results  # type: ignore[return-value]
