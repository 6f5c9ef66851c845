"""Training runs that are killed while they save: at a moment that is counted, or from outside at any."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dying import FORKS

from stretto.checkpoint.shelf import Keep
from stretto.checkpoint.store import Disk, LocalStore
from stretto.job import Job

STEPS = 3
SHAPE = {"name": "tiny", "blocks": 1, "hidden": 8, "heads": 2, "kv_heads": 1, "ffn": 12, "vocab": 23}


class Deadly(Disk):
    """A disk that counts each change of it, and kills its process by SIGKILL before change number `at` (None: never).

    Bytes go in two halves and folders file by file, so that death also comes in between.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at, self.changes, self.lock = at, [], threading.Lock()

    def about_to(self, change: str, what: object) -> None:
        with self.lock:
            self.changes.append((change, what))
            if len(self.changes) == self.at:
                os.kill(os.getpid(), signal.SIGKILL)

    def make(self, path):
        self.about_to("make", path)
        super().make(path)

    def create(self, path):
        self.about_to("create", path)
        return super().create(path)

    def write(self, file, view):
        self.about_to("write", os.readlink(f"/proc/self/fd/{file}"))
        return super().write(file, view[: max(len(view) // 2, 1 << 14)])

    def sync(self, file):
        self.about_to("sync", os.readlink(f"/proc/self/fd/{file}"))
        super().sync(file)

    def rename(self, path, to):
        self.about_to("rename", (path, to))
        super().rename(path, to)

    def remove(self, path):
        for file in sorted(path.iterdir()):
            self.about_to("unlink", file)
            file.unlink()
        self.about_to("rmdir", path)
        path.rmdir()


def job(steps: int = STEPS, **keys: Any) -> Job:
    """Two ranks that save after each step and keep one checkpoint."""
    usual = {"model": SHAPE, "data": "random", "batch.size": 4, "batch.seq_len": 6, "steps": steps, "schedule": "constant", "zero": 2}
    saving = {"checkpoint.every": 1, "checkpoint.keep": 1}
    return Job.load({**usual, **saving, "mesh": "dp=2"}, **keys).resolve(None, "cpu", 0)


def run(asked: Job, place: Path, disk: Disk, rank: int | None = None, tell: Any = None) -> list[dict[str, Any]]:
    """Train in `place`, from the newest checkpoint there; what rank 0 tells. rank: this process is that rank; None: it is all of them."""
    from unittest import mock

    import torch
    from torch.distributed import FileStore

    from stretto.comm.threads import run_threads
    from stretto.comm.transport import World, _shared
    from stretto.engine.loop import train

    heard: list[dict[str, Any]] = []

    def of_rank(world: World) -> None:
        emit = tell or (heard.append if world.rank == 0 else lambda event: None)
        train(asked, world, emit, lambda: False, Keep(str(place), "auto"))

    with mock.patch("stretto.engine.keeping.open_store", lambda where: LocalStore(Path(where), disk)):
        if rank is None:
            run_threads(of_rank, 2)
            return heard
        store = FileStore(f"{place}.meet", 2)
        world = World(rank, 2, rank, torch.device("cpu"), _shared(rank, 2, store, 20.0), store, made_transport=True)
        of_rank(world)
    return heard


class Doomed:
    """A run in processes of its own, one for all ranks or one each. at: change of the disk before which it dies; whose: of which rank."""

    def __init__(self, asked: Job, place: Path, at: int | None = None, whose: int | None = None, apart: bool = False) -> None:
        Path(f"{place}.meet").unlink(missing_ok=True)
        self.line, theirs = FORKS.Pipe()
        self.processes = []
        for rank in (0, 1) if apart or whose is not None else (None,):
            dies = at if whose in (None, rank) else None
            process = FORKS.Process(target=_main, args=(asked.model_dump(mode="json"), place, dies, rank, theirs), daemon=True)
            process.start()
            self.processes.append(process)
        theirs.close()

    def wait_for(self, kind: str, timeout: float = 300.0) -> None:
        """Until rank 0 tells an event of this kind."""
        while self.line.poll(timeout):
            if self.line.recv() == kind:
                return
        raise TimeoutError(f"nothing is told of {kind!r}")

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()

    def end(self, first: int | None = None, grace: float = 0.0) -> list[int | None]:
        """Wait until a rank (`first`, or all) has ended by itself, give the others some seconds, and end them; all exit codes."""
        for process in self.processes if first is None else self.processes[first : first + 1]:
            process.join(300)
        for process in self.processes:
            process.join(grace)
            process.kill()
            process.join(10)
        codes = [process.exitcode for process in self.processes]
        self.line.close()
        return codes


def _main(asked: dict[str, Any], place: Path, at: int | None, rank: int | None, line: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a rank that loses its peer has much to say, and nobody listens

    def tell(event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            line.send(event["kind"])

    run(Job.of(asked), place, Deadly(at), rank, tell if rank in (0, None) else lambda event: None)
