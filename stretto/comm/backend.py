"""SharedMemory as a torch.distributed backend: what is written for gloo runs over it with one word changed.

    import stretto.comm.shm
    torch.distributed.init_process_group("stretto")

[Note: a future is a result] Whoever waits does the work, and who waits for a torch future waits inside torch. So a future is
made when it is asked for, and is complete: DDP, which asks at once, does not reduce behind its backward. With a core a rank
there would be no core to do it on.

Ranks on several machines share memory inside each, and exchange messages over gloo between them (comm/nearby.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Work as TorchWork
from torch.distributed import PrefixStore, ProcessGroupGloo, ReduceOp, Store  # type: ignore[attr-defined]
from torch.futures import Future

from stretto.comm.execute import library
from stretto.comm.machine import Machine, Unavailable
from stretto.comm.messages import Handle, Messages
from stretto.comm.nearby import Nearby
from stretto.comm.shm import SharedMemory

#: torch's operations and ours; compared one by one, since a ReduceOp that carries a factor equals none of them.
OPERATIONS = (
    *((ReduceOp.SUM, "sum"), (ReduceOp.AVG, "avg"), (ReduceOp.MAX, "max"), (ReduceOp.MIN, "min")),
    *((ReduceOp.PRODUCT, "product"), (ReduceOp.BAND, "and"), (ReduceOp.BOR, "or"), (ReduceOp.BXOR, "xor")),
)


class Pending(Protocol):
    """A call under way, of the transport or of torch's kind."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Rooted(Protocol):
    """Options of torch's calls that have a root: its number within the group."""

    rootRank: int


class Reducing(Protocol):
    """Options of torch's calls that reduce."""

    reduceOp: Any


class Work(TorchWork):
    """Calls under way, and what is left to do once they are there. results: what torch's `result` and `get_future` give."""

    def __init__(self, works: Sequence[Pending], results: Any, then: Callable[[], object] | None = None) -> None:
        super().__init__()
        self._works, self._results, self._then = works, results, then

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Until the results are there. The group's timeout counts, not this one."""
        for work in self._works:
            work.wait()
        if self._then is not None:
            self._then()
        self._works, self._then = (), None
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works) and (self._then is None or self.wait())

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> Any:
        self.wait()
        return self._results

    def get_future(self) -> Future[Any]:
        """See [Note: a future is a result]."""
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._results)
        return future


class GlooLine:
    """Mail over a gloo of our own, between ranks of several machines."""

    name = "gloo"

    def __init__(self, gloo: ProcessGroupGloo) -> None:
        self.gloo = gloo

    def send(self, x: Tensor, destination: int, channel: int) -> Handle:
        handle: Handle = self.gloo.send([x], destination, channel)  # type: ignore[attr-defined]
        return handle

    def receive(self, x: Tensor, source: int, channel: int) -> Handle:
        handle: Handle = self.gloo.recv([x], source, channel)  # type: ignore[attr-defined]
        return handle


class Group(dist.ProcessGroup):
    """The ranks of a torch process group, over a transport of ours. ranks: their numbers there; number: of the job's groups, from 0,
    the same on all ranks. store: of the whole job, and with it the transport to be closed; of its first group alone."""

    def __init__(
        self, transport: SharedMemory | Nearby, ranks: tuple[int, ...], number: int, name: str, store: Store | None = None
    ) -> None:
        index = ranks.index(transport.rank)
        super().__init__(index, len(ranks))  # type: ignore[call-arg]  # torch's stubs know the form with a store alone
        self.transport, self.ranks, self._index, self._name, self._description = transport, ranks, index, name, ""
        self._channel, self.store = 2 * number, store

    # -- what torch asks of a group ----------------------------------------------------------------------------------

    def rank(self) -> int:
        return self._index

    def size(self) -> int:
        return len(self.ranks)

    getRank, getSize = rank, size

    def getBackendName(self) -> str:
        return "stretto"

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    setGroupName = _set_group_name

    @property
    def group_desc(self) -> str:
        return self._description

    def getGroupDesc(self) -> str:
        return self._description

    def _set_group_desc(self, desc: str) -> None:
        self._description = desc

    setGroupDesc = _set_group_desc

    def shutdown(self) -> None:
        """Leave; the group that made the transport takes it along."""
        if self.store is not None:
            self.transport.close()

    def abort(self) -> None:
        self.shutdown()

    # -- collectives, under the names by which torch calls them ---------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Reducing) -> Work:  # type: ignore[override]
        op = _operation(opts)
        return self._in_place(tensors, lambda x: self.transport.all_reduce(x, self.ranks, self._channel, op))

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Reducing) -> Work:  # type: ignore[override]
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Rooted) -> Work:  # type: ignore[override]
        source = self.ranks[opts.rootRank]
        return self._in_place(tensors, lambda x: self.transport.broadcast(x, self.ranks, source, self._channel))

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:  # type: ignore[override]
        """The result on the root; the others' tensors stay as they are."""
        root, op, works, flats = opts.rootRank, _operation(opts), [], []
        for x in tensors:
            flat = _flat(x)
            bounds = [0] * (root + 1) + [x.numel()] * (self.size() - root)
            into = flat if root == self._index else flat[:0]
            works.append(self.transport.reduce_scatter(flat, bounds, self.ranks, self._channel, into, False, op))
            flats.append(flat)
        return Work(works, tensors, _back(tensors, flats))

    def all_gather_single(self, output: Tensor, input: Tensor, opts: object = None) -> Work:
        whole, mine = _flat(output), input.numel()
        bounds = [mine * i for i in range(self.size() + 1)]
        start = bounds[self._index]
        if whole.data_ptr() + start * whole.dtype.itemsize != input.data_ptr():
            whole[start : start + mine].copy_(input.reshape(-1))
        work = self.transport.all_gather(whole, bounds, self.ranks, self._channel)
        return Work([work], [output], _back([output], [whole]))

    def _allgather_base(self, output: Tensor, input: Tensor, opts: object = None) -> Work:
        return self.all_gather_single(output, input)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None) -> Work:
        return Work([self.all_gather_single(*pair) for pair in zip(outputs, inputs, strict=True)], outputs)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: object = None) -> Work:  # type: ignore[override]
        return Work([self._gather_list(*pair) for pair in zip(outputs, inputs, strict=True)], outputs)

    def _gather_list(self, outputs: list[Tensor], x: Tensor) -> Work:
        bounds = [0, *accumulate(y.numel() for y in outputs)]
        joined = torch.empty(bounds[-1], dtype=x.dtype)
        joined[bounds[self._index] : bounds[self._index + 1]].copy_(x.reshape(-1))
        work = self.transport.all_gather(joined, bounds, self.ranks, self._channel)
        return Work([work], outputs, _back(outputs, joined.split([y.numel() for y in outputs])))

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Reducing) -> Work:  # type: ignore[override]
        into, size = _flat(output), output.numel()
        bounds = [size * i for i in range(self.size() + 1)]
        work = self.transport.reduce_scatter(_flat(input), bounds, self.ranks, self._channel, into, False, _operation(opts))
        return Work([work], [output], _back([output], [into]))

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Reducing) -> Work:  # type: ignore[override]
        return self.reduce_scatter_single(output, input, opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Reducing) -> Work:  # type: ignore[override]
        return Work([self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, inputs, strict=True)], outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Reducing) -> Work:  # type: ignore[override]
        return Work([self._reduce_list(*pair, opts) for pair in zip(outputs, inputs, strict=True)], outputs)

    def _reduce_list(self, output: Tensor, parts: list[Tensor], opts: Reducing) -> Work:
        bounds, into = [0, *accumulate(part.numel() for part in parts)], _flat(output)
        joined = torch.cat([part.detach().reshape(-1) for part in parts])
        work = self.transport.reduce_scatter(joined, bounds, self.ranks, self._channel, into, False, _operation(opts))
        return Work([work], [output], _back([output], [into]))

    def barrier(self, opts: object = None) -> Work:
        return Work([self.transport.barrier(self.ranks, self._channel)], [])

    # -- collectives made of messages -----------------------------------------------------------------------------------

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Rooted) -> Work:  # type: ignore[override]
        root, (output,) = opts.rootRank, outputs
        return self._exchange(dict(enumerate(inputs[0])) if root == self._index else {}, {root: output}, outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Rooted) -> Work:  # type: ignore[override]
        root, (x,) = opts.rootRank, inputs
        return self._exchange({root: x}, dict(enumerate(outputs[0])) if root == self._index else {}, outputs)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: object = None) -> Work:
        return self._exchange(dict(enumerate(inputs)), dict(enumerate(outputs)), outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_sizes: list[int], input_sizes: list[int], opts: object = None
    ) -> Work:
        """Sizes along dim 0, by rank; none: the same for all."""
        size, whole = self.size(), _flat(output)
        out = whole.view(output.shape).split(output_sizes or [len(output) // size] * size)
        parts = input.split(input_sizes or [len(input) // size] * size)
        work = self._exchange(dict(enumerate(parts)), dict(enumerate(out)), [output])
        return Work([work], [output], _back([output], [whole]))

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def _exchange(self, sent: dict[int, Tensor], received: dict[int, Tensor], results: Any) -> Work:
        """By member of the group: what each is sent, and where what it sends is to lie."""
        me, channel, works = self._index, self._channel + 1, []
        if me in sent and me in received:
            received[me].detach().copy_(sent[me].view_as(received[me]))
        for other in range(self.size()):
            if other != me and other in sent:
                works.append(self.transport.send(_flat(sent[other]), self.ranks[other], channel))
        received = {other: x for other, x in received.items() if other != me}
        flats = {other: _flat(x) for other, x in received.items()}
        works += [self.transport.receive(x, self.ranks[other], channel) for other, x in flats.items()]
        return Work(works, results, _back(received.values(), flats.values()))

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Work:
        channel = self._channel + (tag + 1 << 20)
        return Work([self.transport.send(_flat(x), self.ranks[destination], channel) for x in tensors], tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        channel = self._channel + (tag + 1 << 20)
        return self._in_place(tensors, lambda x: self.transport.receive(x, self.ranks[source], channel))

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Work:
        raise NotImplementedError("the stretto backend receives from a rank that is named; say which: recv(x, src=...)")

    def _in_place(self, tensors: list[Tensor], call: Callable[[Tensor], Pending]) -> Work:
        flats = [_flat(x) for x in tensors]
        return Work([call(flat) for flat in flats], tensors, _back(tensors, flats))


def make(store: Store, rank: int, size: int, timeout: timedelta, name: str, ranks: Iterable[int]) -> Group:
    """A group for torch: over the transport of torch's default group if that is one of ours, else over one of its own.

    Raises RuntimeError where the ranks cannot share memory.
    """
    whole, members = dist.group.WORLD if dist.is_initialized() else None, tuple(ranks)
    if isinstance(whole, Group) and whole.store is not None:
        if rank == 0:  # groups of other ranks may be made at the same time: each gets a number that no other has
            store.set("number", str(whole.store.add("groups", 1)))
        return Group(whole.transport, members, int(store.get("number")), name)
    try:
        machine = Machine.meet(rank, size, store, library() is not None)
    except Unavailable as error:
        raise RuntimeError(f'the stretto backend shares memory between ranks: {error}; write init_process_group("gloo")') from error
    near = SharedMemory(machine, timeout.total_seconds())
    transport: SharedMemory | Nearby = near
    if len(machine.machines) > 1:
        gloo = ProcessGroupGloo(PrefixStore("far", store), rank, size, timeout)
        transport = Nearby(near, Messages(GlooLine(gloo), rank))
    return Group(transport, tuple(range(size)), 0, name, store)


def _operation(opts: Reducing) -> str:
    for theirs, ours in OPERATIONS:
        if opts.reduceOp == theirs:
            return ours
    raise ValueError(f"the stretto backend has no {opts.reduceOp}: it sums, averages, multiplies, and takes max, min, and, or, xor")


def _flat(x: Tensor) -> Tensor:
    """x in one dim, the same memory if it is dense there."""
    if x.device.type != "cpu":
        raise ValueError(f"the stretto backend moves tensors on a CPU, and this one is on {x.device}")
    return x.detach().contiguous().view(-1)


def _back(tensors: Iterable[Tensor], flats: Iterable[Tensor]) -> Callable[[], object] | None:
    """What is left to do once the flats, which stand for these tensors, are written; nothing where they are the same memory."""
    copies = [(x, flat) for x, flat in zip(tensors, flats, strict=True) if x.data_ptr() != flat.data_ptr()]
    return (lambda: [x.detach().copy_(flat.view_as(x)) for x, flat in copies]) if copies else None
