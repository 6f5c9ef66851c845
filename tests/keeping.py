"""Ranks in processes of their own that keep their states in each other's memory, and can be killed."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from dying import FORKS

RANKS = 3


def job(mesh: str = f"dp={RANKS}") -> Any:
    from stretto.job import Job

    return Job.load(mesh=mesh, zero=3, precision="fp32", batch=12, schedule="constant")


def engine_of(world: Any, seed: int = 0, mesh: str = f"dp={RANKS}") -> Any:
    from truth import small

    from stretto.engine.engine import Engine

    return Engine(small(seed, tied=True), job(mesh), world, forward=lambda model, b: model(b["input_ids"]))


def batches() -> list[dict[str, Any]]:
    from truth import tokens

    return tokens(6, 12)


class Keeping:
    """Three ranks that train, step by step as they are told, and keep their state after each."""

    def __init__(self, folder: Path) -> None:
        self.lines: list[Connection] = []
        self.processes = []
        for rank in range(RANKS):
            ours, theirs = FORKS.Pipe()
            process = FORKS.Process(target=_rank, args=(rank, str(folder / "meet"), theirs), daemon=True)
            process.start()
            theirs.close()
            self.lines.append(ours)
            self.processes.append(process)

    def all(self, word: Any) -> list[Any]:
        """Say a word to all ranks; what they answer."""
        for line in self.lines:
            line.send(word)
        return [line.recv() if line.poll(60) else None for line in self.lines]

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join(10)

    def __enter__(self) -> Keeping:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)


def _rank(rank: int, meet: str, line: Connection) -> None:
    import torch
    from torch.distributed import FileStore

    from stretto.checkpoint.peers import Peers
    from stretto.comm.transport import World, _shared

    torch.set_num_threads(1)
    store = FileStore(meet, RANKS)
    world = World(rank, RANKS, rank, torch.device("cpu"), _shared(rank, RANKS, store, 20.0, None), store, made_transport=True)
    engine = engine_of(world)
    peers = Peers(world.store, rank, [(0,), (1,), (2,)])
    while (word := line.recv()) != "end":
        if word == "address":
            line.send(peers.vault.address)
        elif word == "state":
            line.send({name: x.numpy() for name, x in engine.full_state() if x is not None})
        elif word == "train":
            loss = engine.step(batches()[engine.steps]).loss
            engine.saver.keep(peers, {"loss": loss}).wait()
            line.send(loss)
