"""World: who I am among the ranks, on which device, and by what my messages travel. The environment is read here alone."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from stretto.comm.environment import Seat, check_interfaces, meeting_point, seat
from stretto.comm.machine import Machine, Unavailable
from stretto.comm.meeting import meet_in_store
from stretto.comm.messages import Handle, Messages
from stretto.comm.nodes import PATIENCE, Nodes, address_towards, interface_of, within
from stretto.errors import JobError, PeerLost

#: (ranks of a group, my value, reason) -> everybody's values, in the order of ranks.
Answers = Callable[[Sequence[int], Any, str], list[Any]]


class Pending(Protocol):
    """A collective or message under way."""

    def wait(self) -> None:
        """Until the result is there and the tensors handed in may be written again."""

    def result(self) -> None:
        """Until the result is there. Peers may still read what was handed in: call `wait` before writing it."""


class Transport(Protocol):
    """Collectives and messages of flat tensors among `ranks` (global numbers, the caller among them).

    `channel` keeps apart what different callers issue in different orders: within one channel all ranks of a group must issue
    the same collectives in the same order, and sender and receiver the same messages. Channels are even numbers; channel + 1
    belongs to the same caller. op: sum, avg, max or min. Sums are taken in the order of `ranks`.
    """

    name: str

    def all_reduce(self, x: Tensor, ranks: Sequence[int], channel: int, op: str = "sum") -> Pending: ...

    def reduce_scatter(
        self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int, into: Tensor, accumulate: bool, op: str = "sum"
    ) -> Pending: ...

    def all_gather(self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int) -> Pending: ...

    def broadcast(self, x: Tensor, ranks: Sequence[int], source: int, channel: int) -> Pending: ...

    def send(self, x: Tensor, to: int, channel: int) -> Pending: ...

    def receive(self, x: Tensor, source: int, channel: int) -> Pending: ...

    def own(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor:
        """Zeros of mine for collectives of these ranks: where they can read each other's memory, nothing is copied on the way.

        Collective, as `common`: all ranks ask for the same, in the same order.
        """
        ...

    def common(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor | None:
        """Zeros that all these ranks share, so that to write a slice is to gather it; None where they cannot.

        Nothing keeps a rank from writing what others still read, but for the collectives that its caller puts between.
        """
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class World:
    """All ranks of the job, seen from one of them.

    store: names and values that all of them see. made_group, made_transport: whether torch's process group and the transport are
    this world's own to end. why: what kept the transport from being a better one. nodes: where all ranks are, of a job on several
    machines. answers: what all members of a group say where nobody is there to be asked (comm/fake.py).
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    transport: Transport
    store: Store
    made_group: bool = False
    made_transport: bool = False
    why: str = ""
    nodes: Nodes | None = None
    answers: Answers | None = None

    @staticmethod
    def alone(device: str = "auto") -> World:
        """One rank, no peers."""
        return World(0, 1, 0, _device(device, 0), Messages(_NoMail(), 0), HashStore())

    @staticmethod
    def from_environment(device: str = "auto", transport: str = "auto", init_timeout: float = 300.0, step_timeout: float = 600.0) -> World:
        """Join the ranks that torchrun's variables (else those of an `srun` step of several tasks) describe; else be one rank.

        Seconds: init_timeout for all ranks to appear, step_timeout for any one message. A process group that the caller has
        made already is used as it is, and stays. Raises PeerLost if the ranks do not meet in time.
        """
        here, given = seat(os.environ), dist.is_initialized()
        if given:
            here = Seat(dist.get_rank(), dist.get_world_size(), here.local_rank if here else dist.get_rank())
        if here is None or (here.ranks == 1 and not given):
            return World.alone(device)
        rank, size, local_rank, node, node_count = here
        where = _device(device, local_rank)
        if transport == "nccl" and where.type != "cuda":
            raise JobError("comm.transport=nccl needs GPUs and device=cuda; write comm.transport=auto for ranks on CPUs")
        if transport == "shm" and where.type != "cpu":
            raise JobError("comm.transport=shm is for ranks on CPUs, and these have GPUs; write comm.transport=nccl, or device=cpu")
        if where.type == "cuda":
            torch.cuda.set_device(where)
        backend = "nccl" if where.type == "cuda" and transport != "gloo" else "gloo"
        # torch hands out the store of a group that somebody else made in no other way
        store = dist.distributed_c10d._get_default_store() if given else _meet(backend, here, init_timeout, step_timeout)
        store = PrefixStore("stretto/world", store)
        nodes = Nodes.meet(rank, size, node, address_towards(meeting_point(os.environ)[0]), store) if node_count > 1 and not given else None
        if backend == "nccl":
            from stretto.comm.native import Native

            return World(rank, size, local_rank, where, Native(rank, where, step_timeout, store), store, not given, True, "", nodes)
        messages = Messages(GlooMail(), rank, where)
        carrier: Transport = messages
        why = ""
        if where.type == "cpu" and transport in ("auto", "shm"):
            try:
                carrier = _shared(rank, size, store, step_timeout, messages if transport == "auto" else None)
            except Unavailable as error:
                if transport == "shm":
                    raise JobError(f"comm.transport=shm: {error}; write comm.transport=gloo") from error
                why = str(error)
        return World(rank, size, local_rank, where, carrier, store, not given, True, why, nodes)

    def first(self, name: str) -> bool:
        """Whether no rank has asked for `name` before: of all callers exactly one gets True. Not collective.

        Raises RuntimeError or TimeoutError if the rank that keeps the store is gone.
        """
        if self.nodes is not None and self.nodes.store_lost:
            raise RuntimeError("the node that keeps the store is gone")  # to ask would wait for ever, and the end of this process with it
        return within(PATIENCE, lambda: bool(self.store.add(name, 1) == 1))

    def lost(self, error: PeerLost) -> PeerLost:
        """The loss of a peer with what can be found out about it: which nodes of the job do not answer. Takes some seconds."""
        gone = self.nodes.gone() if self.nodes is not None else []
        return PeerLost(f"{'; '.join(gone)} ({error})") if gone else error

    def limited(self, size: int) -> World:
        """The first `size` ranks as a world of their own; only they may use it."""
        if self.rank >= size:
            raise ValueError(f"rank {self.rank} is not among the first {size}")
        return replace(self, size=size, made_group=False, made_transport=False)

    def close(self) -> None:
        """Leave the other ranks, and the process group if this world made it."""
        if self.nodes is not None and self.made_group:
            self.nodes.close()
        if self.made_transport:
            self.transport.close()
        if self.made_group and dist.is_initialized():
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


def _meet(kind: str, here: Seat, init_timeout: float, step_timeout: float) -> Store:
    """Make the process group; returns the store in which the ranks met."""
    rank, size = here.rank, here.ranks
    host, port = meeting_point(os.environ)
    check_interfaces(os.environ, [name for _, name in socket.if_nameindex()], kind)
    address = address_towards(host) if here.nodes > 1 else None
    if address and (interface := interface_of(address)):
        # gloo looks for its own host name otherwise, which may be an address that only this machine knows
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    started = meet_in_store(os.environ, here, (host, port), init_timeout)
    try:
        dist.init_process_group(kind, store=started, rank=rank, world_size=size, timeout=timedelta(seconds=step_timeout))
        return started
    except (dist.DistError, RuntimeError) as error:
        raise PeerLost(f"{size} ranks met at {host}:{port}, but cannot reach each other: {str(error).splitlines()[0]}") from error


def _shared(rank: int, size: int, store: Store, timeout: float, far: Messages | None = None) -> Transport:
    """Shared memory inside each machine, `far` between them. Raises Unavailable on every rank if it cannot be had on one.

    far None: only for ranks of one machine.
    """
    from stretto.comm.execute import library
    from stretto.comm.nearby import Nearby
    from stretto.comm.shm import SharedMemory

    machine = Machine.meet(rank, size, store, library() is not None)
    if len(machine.machines) == 1:
        return SharedMemory(machine, timeout)
    if far is not None and len(machine.machines) < size:
        return Nearby(SharedMemory(machine, timeout), far)
    machine.close()
    raise Unavailable(f"the ranks are on {len(machine.machines)} machines, and shared memory reaches over one")


def _posted(work: Handle | None) -> Handle:
    assert work is not None, "a message to myself"
    return work


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise JobError("device=cuda, but torch sees no GPU here; write device=cpu")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        count = torch.cuda.device_count()
        if local_rank >= count:
            raise JobError(
                f"local rank {local_rank} has no GPU of its own: {count} are visible; start at most {count} ranks here, or write device=cpu"
            )
        return torch.device("cuda", local_rank)
    return torch.device("cpu")
