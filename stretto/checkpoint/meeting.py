"""Meeting: ranks tell each other small things without a collective, so that it may happen in the background and nobody waits for ever."""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable
from typing import Any

from torch.distributed import Store as Board  # type: ignore[attr-defined]

from stretto.errors import JobError, PeerLost

#: Seconds between looks at the board: from the first wait to the longest.
SOONEST, LATEST = 0.001, 0.05


class Meeting:
    """One occasion on which all ranks come together, on the board (torch's key-value store) that they share.

    Each rank must come to the same meetings in the same order. One that comes alone finds that out, and says who was missing; one
    that comes after the others have given up is told so.
    """

    def __init__(self, board: Board, rank: int, size: int, what: str) -> None:
        """what: for messages, as "engine.save"."""
        self.board, self.rank, self.size, self.what = board, rank, size, what
        place = f"checkpoint/{size}"
        self.number = board.add(f"{place}/{rank}", 1)
        self.prefix = f"{place}/{self.number}"
        self.said: list[str] = []

    def call(self, value: Any, patience: float) -> list[Any]:
        """The first word: every rank's value, in rank order. Raises JobError naming who came and who did not within `patience` seconds."""
        if self.size > 1 and self.board.check([f"{self.prefix}/given up"]):
            raise JobError(f"{self.what}: {self.board.get(f'{self.prefix}/given up').decode()}; call it on every rank")
        self.say("call", value)
        absent = self._wait([f"{self.prefix}/call/{rank}" for rank in range(self.size)], patience)
        if absent:
            came = [rank for rank in range(self.size) if rank not in absent]
            words = f"rank{_s(came)} called it, and rank{_s(absent)} did not within {patience:g} s"
            self.board.set(f"{self.prefix}/given up", words)
            raise JobError(f"{self.what}: {words}; all ranks take part in it, so call it on every rank")
        return [self._read("call", rank) for rank in range(self.size)]

    def say(self, topic: str, value: Any) -> None:
        """Tell all ranks a small value."""
        key = f"{self.prefix}/{topic}/{self.rank}"
        self.said.append(key)
        self.board.set(key, zlib.compress(pickle.dumps(value), 1))  # type: ignore[arg-type]  # bytes are what it keeps

    def hear(self, topic: str, rank: int, patience: float, alive: Callable[[], None] = lambda: None) -> Any:
        """What `rank` says on a topic. Raises PeerLost if it has not within `patience` seconds."""
        if self._wait([f"{self.prefix}/{topic}/{rank}"], patience, alive):
            raise PeerLost(f"{self.what}: rank {rank} has not said {topic!r} within {patience:g} s")
        return self._read(topic, rank)

    def leave(self) -> None:
        """Wipe off what this rank said; only when all others must have read it."""
        for key in self.said:
            self.board.delete_key(key)
        self.said.clear()

    def _read(self, topic: str, rank: int) -> Any:
        return pickle.loads(zlib.decompress(self.board.get(f"{self.prefix}/{topic}/{rank}")))

    def _wait(self, keys: list[str], patience: float, alive: Callable[[], None] = lambda: None) -> list[int]:
        """Positions of the keys that are still missing after `patience` seconds."""
        limit, pause = time.monotonic() + patience, SOONEST
        missing = list(range(len(keys)))
        while True:
            if self.board.check([keys[i] for i in missing]):
                return []
            missing = [i for i in missing if not self.board.check([keys[i]])]
            if not missing or time.monotonic() > limit:
                return missing
            alive()
            time.sleep(pause)  # a look, not a wait in the store: that would keep all others of this process out of it
            pause = min(2 * pause, LATEST)


def _s(ranks: list[int]) -> str:
    """' 1', 's 0-3', 's 0, 2'."""
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"s {ranks[0]}-{ranks[-1]}"
    return f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
