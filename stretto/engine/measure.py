"""Times this machine: matrix products, copies, and the collectives of its transports. Called on every rank, at the same places.

Ways that are compared take turns, so that whatever else the machine does meets all of them; of each the median counts, and of all
ranks the slowest.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.comm.messages import Handle, Messages
from stretto.comm.transport import GlooMail, Transport, World
from stretto.errors import Mismatch

Call = Callable[[], object]
#: Rows, inner length and columns of a matrix product.
Shape = tuple[int, int, int]
#: fp16 is left out on CPUs: they convert every number, at a hundredth of the speed (nobody should compute in it there).
DTYPES: Mapping[str, Mapping[str, torch.dtype]] = {
    "cpu": {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64},
    "cuda": {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64},
}
LONGEST = 0.5  # seconds that one product may take
COPIES = (1 << 18, 1 << 22, 1 << 27)
CHANNEL = 2  # of the collectives that are timed; those that keep ranks together have 0


@dataclass(frozen=True)
class Effort:
    """How much is measured.

    sizes: bytes of collectives' buffers. shapes: of matrix products. seconds: spent on each, about; least: batches of calls.
    until: seconds after which no further size of a collective is begun.
    """

    sizes: tuple[int, ...]
    shapes: tuple[Shape, ...]
    seconds: float
    least: int
    until: float


class Found(NamedTuple):
    """One time of a collective; the fields are those of plan/measured.py's LinkTime."""

    transport: str
    ranks: int
    collective: str
    bytes_: int
    private: bool
    seconds: float


class Collective(NamedTuple):
    """One that can be called. result: part of what it gives, which is `expected` all over where the buffer was full of each
    rank's number, counted from 1. turns: how many times one call does it."""

    call: Call
    result: Tensor
    expected: float
    turns: int = 1


class Way(NamedTuple):
    """One way to do a collective: by which carrier, on private memory or not. x: the buffer; the rest is of its Collective."""

    carrier: str
    private: bool
    x: Tensor
    call: Call
    result: Tensor
    expected: float
    turns: int


class Watch:
    """Times calls on all ranks at once."""

    def __init__(self, world: World, effort: Effort) -> None:
        self.world, self.effort = world, effort
        self.everybody = tuple(range(world.size))
        self.settle: Call = torch.cuda.synchronize if world.device.type == "cuda" else lambda: None

    def together(self) -> None:
        """Wait for all ranks."""
        self.world.transport.all_reduce(torch.zeros(1, device=self.world.device), self.everybody, 0).wait()
        self.settle()

    def slowest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, each."""
        x = torch.tensor(values, dtype=torch.float64, device=self.world.device)
        self.world.transport.all_reduce(x, self.everybody, 0, "max").wait()
        return [float(value) for value in x.tolist()]

    def times(self, calls: Sequence[Call]) -> list[float]:
        """Seconds of each call: the median over batches of the slowest rank's, the calls taking turns."""
        if not calls:
            return []
        once = []
        for call in calls:
            call()
            once.append(self._batch(call, 1))
        batch, spent = 8e-3, self.effort.seconds
        counts = [max(1, min(500, math.ceil(batch / max(seconds, 1e-7)))) for seconds in self.slowest(once)]
        longest = max(count * seconds for count, seconds in zip(counts, self.slowest(once), strict=True))
        batches = max(self.effort.least, min(25, int(spent / max(longest, 1e-7))))
        taken = [[self._batch(call, count) for call, count in zip(calls, counts, strict=True)] for _ in range(batches)]
        slowest = self.slowest([seconds for row in taken for seconds in row])
        return [statistics.median(slowest[i :: len(calls)]) for i in range(len(calls))]

    def _batch(self, call: Call, count: int) -> float:
        self.together()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.settle()
        return (time.perf_counter() - start) / count


def device_facts(world: World) -> dict[str, str | int]:
    """What is known of the device without measuring."""
    if world.device.type == "cuda":
        known = torch.cuda.get_device_properties(world.device)
        return {"name": known.name, "kind": "cuda", "cores": known.multi_processor_count, "threads": 1, "memory": known.total_memory}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"name": _cpu_name(), "kind": "cpu", "cores": cores, "threads": torch.get_num_threads(), "memory": memory}


def _cpu_name() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def call_seconds(watch: Watch) -> float:
    """Of an operation on one number: what asking costs."""
    x = torch.zeros(1, device=watch.world.device)
    return watch.times([lambda: x.add_(1.0)])[0]


def products(watch: Watch) -> Iterator[tuple[str, int, int, int, float]]:
    """(dtype, rows, inner, columns, seconds) of matrix products as a linear layer does them, all ranks at once.

    A dtype that the device only imitates can be a hundred times slower: where it would take too long it is left out.
    """
    kinds = DTYPES[watch.world.device.type]
    rate = dict.fromkeys(kinds, math.inf)  # flops a second, of the last shape
    for rows, inner, columns in watch.effort.shapes:
        flops = 2 * rows * inner * columns
        quick = [name for name in kinds if flops / rate[name] < LONGEST]
        calls = [_product(rows, inner, columns, kinds[name], watch.world.device) for name in quick]
        for name, seconds in zip(quick, watch.times(calls), strict=True):
            rate[name] = flops / seconds
            yield name, rows, inner, columns, seconds


def _product(rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device) -> Call:
    x, weight = (torch.ones(shape, dtype=dtype, device=device) for shape in ((rows, inner), (columns, inner)))
    return lambda: torch.nn.functional.linear(x, weight)


def copies(watch: Watch) -> Iterator[tuple[int, float]]:
    """(bytes, seconds) of copies from memory to memory, all ranks at once."""
    for size in COPIES:
        x, y = (torch.ones(size, dtype=torch.uint8, device=watch.world.device) for _ in range(2))
        yield size, watch.times([lambda x=x, y=y: y.copy_(x)])[0]  # type: ignore[misc]


class TorchsOwn:
    """The collectives of torch.distributed itself among all its ranks: what other frameworks have, to compare with.

    As much of a Transport as is timed here; parts must be equal.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_reduce(self, x: Tensor, ranks: Sequence[int], channel: int) -> Handle:
        return _begun(dist.all_reduce(x, async_op=True))

    def reduce_scatter(
        self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int, into: Tensor, accumulate: bool
    ) -> Handle:
        return _begun(dist.reduce_scatter_single(into, x, async_op=True))

    def all_gather(self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int) -> Handle:
        mine = x[bounds[self.rank] : bounds[self.rank + 1]].clone()  # gloo wants it apart from the result
        return _begun(dist.all_gather_single(x, mine, async_op=True))

    def broadcast(self, x: Tensor, ranks: Sequence[int], source: int, channel: int) -> Handle:
        return _begun(dist.broadcast(x, source, async_op=True))

    def send(self, x: Tensor, to: int, channel: int) -> Handle:
        return _begun(dist.isend(x, to))

    def receive(self, x: Tensor, source: int, channel: int) -> Handle:
        return _begun(dist.irecv(x, source))

    def common(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> None:
        return None

    def own(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor:
        return torch.zeros(elements, dtype=dtype)


Carrier: TypeAlias = Transport | TorchsOwn


def _begun(work: Handle | None) -> Handle:
    assert work is not None, "every rank takes part"
    return work


def carriers(world: World) -> dict[str, Carrier]:
    """What there is between these ranks, by name.

    On CPUs: `gloo`, torch's own collectives over it; `messages`, ours out of gloo's messages, which comm.transport=gloo runs; and
    `shm`, shared memory, if the ranks have it.
    """
    if world.device.type == "cuda":
        return {world.transport.name: world.transport}
    found: dict[str, Carrier] = {"gloo": TorchsOwn(world.rank), "messages": Messages(GlooMail(), world.rank)}
    return found if isinstance(world.transport, Messages) else found | {world.transport.name: world.transport}


def links(watch: Watch, carriers: Mapping[str, Carrier], late: Callable[[list[tuple[str, int]]], object]) -> Iterator[Found]:
    """Times of every collective at every size over every carrier, size after size in the order given.

    late: hears which (collective, bytes) were left out because the time was over, if any were.
    """
    world, start, left_out = watch.world, time.perf_counter(), []
    for size in watch.effort.sizes if world.size > 1 else ():
        elements = size // 4 // world.size * world.size  # equal parts: gloo gathers no others
        for collective in COLLECTIVES:
            if watch.slowest([time.perf_counter() - start])[0] > watch.effort.until:
                left_out.append((collective, 4 * elements))
                continue
            ways = [way for name, carrier in carriers.items() for way in _ways(collective, elements, name, carrier, world)]
            for way in ways:
                _prove(collective, way, world.rank)
            for way, seconds in zip(ways, watch.times([way.call for way in ways]), strict=True):
                yield Found(way.carrier, world.size, collective, 4 * elements, way.private, seconds / way.turns)
    if left_out:
        late(left_out)


def _ways(collective: str, elements: int, name: str, carrier: Carrier, world: World) -> Iterator[Way]:
    """On private memory; and where ranks can share memory, on memory that lies there already."""
    everybody = range(world.size)
    x = torch.zeros(elements, device=world.device)
    x.fill_(0.0)  # its pages are there
    yield Way(name, True, x, *COLLECTIVES[collective](carrier, x, world))
    if collective != "send" and carrier.common(1, torch.float32, everybody) is not None:
        x = carrier.own(elements, torch.float32, everybody).fill_(0.0)
        yield Way(name, False, x, *COLLECTIVES[collective](carrier, x, world))


def _all_reduce(carrier: Carrier, x: Tensor, world: World) -> Collective:
    everybody = range(world.size)
    return Collective(lambda: carrier.all_reduce(x, everybody, CHANNEL).wait(), x, _summed(world))


def _all_gather(carrier: Carrier, x: Tensor, world: World) -> Collective:
    everybody, bounds = range(world.size), _bounds(x, world)
    return Collective(lambda: carrier.all_gather(x, bounds, everybody, CHANNEL).wait(), x[bounds[-2] :], world.size)


def _reduce_scatter(carrier: Carrier, x: Tensor, world: World) -> Collective:
    everybody, bounds = range(world.size), _bounds(x, world)
    into = torch.ones(bounds[world.rank + 1] - bounds[world.rank], device=world.device)
    return Collective(lambda: carrier.reduce_scatter(x, bounds, everybody, CHANNEL, into, False).wait(), into, _summed(world))


def _broadcast(carrier: Carrier, x: Tensor, world: World) -> Collective:
    everybody = range(world.size)
    return Collective(lambda: carrier.broadcast(x, everybody, 0, CHANNEL).wait(), x, 1)


def _send(carrier: Carrier, x: Tensor, world: World) -> Collective:
    """There and back between ranks 2i and 2i + 1, all pairs at once; a last rank without a peer looks on."""
    peer, first = world.rank ^ 1, world.rank % 2 == 0

    def call() -> None:
        for sends in (first, not first) if peer < world.size else ():
            (carrier.send if sends else carrier.receive)(x, peer, CHANNEL).wait()

    return Collective(call, x, world.rank - world.rank % 2 + 1, turns=2)


#: In the order in which they are measured: what is most asked for first.
COLLECTIVES: Mapping[str, Callable[[Carrier, Tensor, World], Collective]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "send": _send,
}


def _prove(collective: str, way: Way, rank: int) -> None:
    """Raises Mismatch if the result is wrong: a rate of wrong results is worth nothing."""
    way.x.fill_(rank + 1)
    way.call()
    if not bool((way.result == way.expected).all()):
        found = f"{way.result.min().item():g} to {way.result.max().item():g}"
        raise Mismatch(f"{collective} of {way.x.numel()} numbers over {way.carrier} gave {found}, not {way.expected}")
    way.x.fill_(0)


def _summed(world: World) -> int:
    return world.size * (world.size + 1) // 2


def _bounds(x: Tensor, world: World) -> list[int]:
    return [x.numel() * i // world.size for i in range(world.size + 1)]
