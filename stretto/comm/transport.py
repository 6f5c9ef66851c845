"""World: who I am among the ranks, on which device, and by what my messages travel. The environment is read here alone."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from stretto.comm.messages import Handle, Messages
from stretto.errors import JobError, PeerLost


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None: ...


class Transport(Protocol):
    """Collectives on flat tensors among `ranks` (global numbers, the caller among them).

    `channel` keeps collectives apart that different callers issue in different orders: within one channel all ranks of a
    group must issue the same collectives in the same order. Channels are even numbers; channel + 1 belongs to the same caller.
    """

    name: str

    def all_reduce(self, x: Tensor, ranks: Sequence[int], channel: int, op: str = "sum") -> Pending: ...

    def reduce_scatter(
        self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int, into: Tensor, accumulate: bool
    ) -> Pending: ...

    def all_gather(self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int) -> Pending: ...

    def broadcast(self, x: Tensor, ranks: Sequence[int], source: int, channel: int) -> Pending: ...


@dataclass(frozen=True)
class World:
    """All ranks of the job, seen from one of them."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    transport: Transport

    @staticmethod
    def alone(device: str = "auto") -> World:
        """One rank, no peers."""
        return World(0, 1, 0, _device(device, 0), Messages(_NoMail(), 0))

    @staticmethod
    def from_environment(
        device: str = "auto", transport: str = "auto", init_timeout: float = 300.0, step_timeout: float = 600.0
    ) -> World:
        """Join the ranks that torchrun's variables (else those of an `srun` step of several tasks) describe; else be one rank.

        Seconds: init_timeout for all ranks to appear, step_timeout for any one message. A process group that the caller has
        made already is used as it is. Raises PeerLost if the ranks do not meet in time.
        """
        place = environment_rank(os.environ)
        if place is None and not dist.is_initialized():
            return World.alone(device)
        if dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
            local_rank = place[2] if place else rank
        else:
            assert place is not None
            rank, size, local_rank = place
        if size == 1 and not dist.is_initialized():
            return World.alone(device)
        where = _device(device, local_rank)
        kind = transport if transport != "auto" else ("nccl" if where.type == "cuda" else "gloo")
        if kind == "nccl" and where.type != "cuda":
            raise JobError("comm.transport=nccl needs GPUs and device=cuda; write comm.transport=gloo for ranks on CPUs")
        if where.type == "cuda":
            torch.cuda.set_device(where)
        if not dist.is_initialized():
            _meet(kind, rank, size, init_timeout, step_timeout)
        if kind == "nccl":
            from stretto.comm.native import Native

            return World(rank, size, local_rank, where, Native(rank, step_timeout))
        return World(rank, size, local_rank, where, Messages(GlooMail(), rank))

    def limited(self, size: int) -> World:
        """The first `size` ranks as a world of their own; only they may use it."""
        if self.rank >= size:
            raise ValueError(f"rank {self.rank} is not among the first {size}")
        return replace(self, size=size)

    def close(self) -> None:
        """Leave the process group, if this world made one."""
        if dist.is_initialized():
            dist.destroy_process_group()


class GlooMail:
    """Messages over torch.distributed's gloo: TCP, on loopback inside a machine. One process group serves every channel, as a tag."""

    name = "gloo"

    def send(self, x: Tensor, destination: int, channel: int) -> Handle:
        return _posted(dist.isend(x, destination, tag=channel))

    def receive(self, x: Tensor, source: int, channel: int) -> Handle:
        return _posted(dist.irecv(x, source, tag=channel))


class _NoMail:
    name = "none"

    def send(self, x: Tensor, destination: int, channel: int) -> Handle:
        raise PeerLost(f"there is no rank {destination}: this world has one rank")

    def receive(self, x: Tensor, source: int, channel: int) -> Handle:
        raise PeerLost(f"there is no rank {source}: this world has one rank")


def environment_rank(environment: Mapping[str, str]) -> tuple[int, int, int] | None:
    """(rank, size, local rank) from torchrun's variables, else from an srun step of several tasks, else None."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment.get("LOCAL_RANK", environment["RANK"]))
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        return (
            int(environment["SLURM_PROCID"]),
            int(environment["SLURM_NTASKS"]),
            int(environment.get("SLURM_LOCALID", environment["SLURM_PROCID"])),
        )
    return None


def _meet(kind: str, rank: int, size: int, init_timeout: float, step_timeout: float) -> None:
    host, port = _rendezvous(os.environ)
    listen = os.environ.get("STRETTO_LISTEN_FD") if rank == 0 else None
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            host,
            port,
            size,
            is_master=rank == 0 and not agent_store,
            timeout=timedelta(seconds=init_timeout),
            master_listen_fd=int(listen) if listen else None,
        )
        prefix = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            kind,
            store=PrefixStore(f"stretto/{prefix}", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=step_timeout),
        )
    except (dist.DistError, RuntimeError) as error:
        raise PeerLost(f"{size} ranks did not meet at {host}:{port} within {init_timeout:g} s: {str(error).splitlines()[0]}") from error


def _rendezvous(environment: Mapping[str, str]) -> tuple[str, int]:
    """Address and port of rank 0: MASTER_ADDR and MASTER_PORT, else the first node of the Slurm job and a port made from its number."""
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"], int(environment.get("MASTER_PORT", "29500"))
    if "SLURM_JOB_ID" in environment:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "127.0.0.1")
        return first_node(nodes), 20000 + int(environment["SLURM_JOB_ID"]) % 20000
    raise JobError("RANK and WORLD_SIZE are set, but MASTER_ADDR is not; set it to rank 0's address, or start with torchrun")


def first_node(nodes: str) -> str:
    """The first host of a Slurm node list: 'gpu[003-006,9],cpu1' -> 'gpu003', 'rack[0-1]node[3-4]' -> 'rack0node3'."""
    first = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes)  # of each range its first number
    return first.split(",")[0]


def _posted(work: Handle | None) -> Handle:
    assert work is not None, "a message to myself"
    return work


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise JobError("device=cuda, but torch sees no GPU here; write device=cpu")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise JobError(f"local rank {local_rank} has no GPU of its own: {count} are visible; start at most {count} ranks here, or write device=cpu")
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
