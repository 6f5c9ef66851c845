"""Ranks that tests start by the dozen and kill: forked from a server that has torch loaded, so that a start takes no time.

They meet in a file, without a launcher, and use shared memory until they are told to end, or a peer is lost.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch", "torch.distributed", "stretto.comm.shm", "stretto.engine.loop", "torch._dynamo", "pytest"])


class Doomed:
    """`ranks` processes that do `work` again and again, on values of their own job; gone on leaving the context."""

    def __init__(self, folder: Path, ranks: int, work: str, value: int = 1) -> None:
        self.lines: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            ours, theirs = FORKS.Pipe()
            process = FORKS.Process(target=_rank, args=(rank, ranks, str(folder / "meet"), work, value, theirs), daemon=True)
            process.start()
            theirs.close()
            self.lines.append(ours)
            self.processes.append(process)

    def read(self, rank: int, timeout: float = 60.0) -> tuple[Any, ...]:
        """The next thing that a rank tells: ("met",), ("lost", moment, why), ("ended", rounds), or () if it is gone or says nothing."""
        if not self.lines[rank].poll(timeout):
            return ()
        try:
            return self.lines[rank].recv()  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            return ()

    def kill(self, rank: int) -> float:
        """End a rank by SIGKILL; the moment."""
        self.processes[rank].kill()
        return time.monotonic()

    def end(self) -> list[tuple[Any, ...]]:
        """Let all end in good order; what each has to say."""
        for line in self.lines:
            line.send("end")
        return [self.read(rank) for rank in range(len(self.lines))]

    def __enter__(self) -> Doomed:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)
            process.close()
        for line in self.lines:
            line.close()


def _rank(rank: int, ranks: int, meet: str, work: str, value: int, line: Connection) -> None:
    import torch
    from torch.distributed import FileStore

    from stretto.comm.machine import Machine
    from stretto.comm.shm import SharedMemory
    from stretto.errors import PeerLost

    torch.set_num_threads(1)
    everybody, rounds = range(ranks), 0
    over = None
    try:
        over = SharedMemory(Machine.meet(rank, ranks, FileStore(meet, ranks)), 60.0)
        own, x, small = over.own(300_000, torch.float32, everybody), torch.ones(300_000), torch.ones(5)
        asked = torch.zeros(1)
        line.send(("met",))
        while True:
            if work in ("private", "all"):
                over.all_reduce(x.fill_(value), everybody, 0).wait()
                assert bool((x == value * ranks).all())
            if work in ("small", "all"):
                over.all_reduce(small.fill_(value), everybody, 2).wait()
                assert bool((small == value * ranks).all())
            if work in ("own", "all"):
                over.all_reduce(own.fill_(value), everybody, 4).wait()
                assert bool((own == value * ranks).all())
            if work in ("send", "all") and rank < 2:
                (over.send(x, 1, 6) if rank == 0 else over.receive(x, 0, 6)).wait()
            rounds += 1
            asked.fill_(line.poll())
            over.all_reduce(asked, everybody, 8, "min").wait()
            if asked.item():
                line.send(("ended", rounds))
                return
    except PeerLost as lost:
        line.send(("lost", time.monotonic(), str(lost)))
    finally:
        if over is not None:
            over.close()
