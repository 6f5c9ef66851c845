"""The way of `stretto measure`: ranks time this machine, and what they found becomes a table and the file that `plan` reads."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from stretto.comm.environment import seat
from stretto.draw.numbers import bytes_, count
from stretto.errors import JobError
from stretto.launch.devices import devices
from stretto.launch.worker import Event, Rank
from stretto.plan.measured import CROSSES, Copy, DeviceFacts, LinkTime, Measured, Product, Way

KIB, MIB = 1 << 10, 1 << 20
#: Bytes, the most telling first: what there is no time for is left out at the end.
COARSE = (4 * KIB, MIB, 128 * MIB, 16 * MIB, 64 * KIB)
FINE = (*COARSE, 256 * MIB, 256 * KIB, 4 * MIB, 64 * MIB, 16 * KIB)
QUICK = (4 * KIB, MIB, 16 * MIB)
#: Matrix products: of squares, and of decoders of hidden size 512 and 896 on 256 to 1024 tokens.
SHAPES = (
    (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 2048),
    (256, 512, 512), (1024, 512, 512), (1024, 512, 2048), (1024, 2048, 512), (256, 896, 3584), (256, 3584, 896), (512, 512, 8192),
)  # fmt: skip
QUICK_SHAPES = SHAPES[:3] + SHAPES[6:8]
CARRIERS = {
    "gloo": "torch.distributed's own collectives over gloo, what other frameworks have",
    "messages": "stretto's collectives out of gloo's messages: comm.transport=gloo",
    "shm": "shared memory: comm.transport=shm; in place: the buffer lies there already",
    "nccl": "NCCL, through torch.distributed",
}
#: Buffers of the size measured that a rank needs at once: private, in shared memory, a result of each, and one under way.
BUFFERS = 5


class Plan(NamedTuple):
    """How long and at which sizes one number of ranks is measured.

    sizes: bytes. seconds: of each way and size; until: of all of them. shapes: of matrix products, (rows, inner, columns); none
    where the device is known already.
    """

    ranks: int
    sizes: tuple[int, ...]
    seconds: float
    until: float
    shapes: tuple[tuple[int, int, int], ...]


def options(parser: ArgumentParser) -> None:
    """What `stretto measure` takes."""
    parser.add_argument("--out", metavar="FILE", type=Path, default="cluster.toml", help="the file for plan (default cluster.toml)")
    parser.add_argument("--ranks", metavar="N[,N]", default="", help="numbers of ranks that talk (default 2,4; on GPUs 2 and all)")
    parser.add_argument("--quick", action="store_true", help="three sizes, few repeats: half a minute instead of some minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")


def ranks_of(text: str) -> list[int]:
    """'2,4' -> [2, 4]; nothing -> []."""
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isdecimal() for word in words):
        raise JobError(f"--ranks {text} is no number of ranks; write --ranks 2, or --ranks 2,4")
    return [int(word) for word in words]


def measure(ranks: Sequence[int], out: Path, *, quick: bool, tell: Callable[[str], None]) -> Measured | None:
    """Time this machine with each number of ranks in turn (none given: what fits it), and write `out`; tell: hears each line of progress.

    Under torchrun or srun it is the ranks that were started. Returns None on ranks other than 0 there. Raises JobError for what
    cannot be, before anything is measured.
    """
    here = seat(os.environ)
    if here is not None and ranks and list(ranks) != [here.ranks]:
        raise JobError(f"--ranks {','.join(map(str, ranks))}: {here.ranks} ranks were started; leave --ranks out")
    rank = here.rank if here else 0
    if rank == 0:
        check_replaceable(out)
    numbers = [here.ranks] if here else ranks or _numbers()
    found: list[Mapping[str, Any]] = []
    for i, number in enumerate(numbers):
        plan = _plan(number, quick, i == 0, tell if rank == 0 else lambda line: None)
        found.append(_run(plan, tell))
    if rank > 0:
        return None
    measured = _joined(found)
    _write(out, measured.text())
    return measured


def _numbers() -> list[int]:
    """Numbers of ranks that are worth measuring here: two, and more than there are cores; or all GPUs."""
    found = devices()
    return sorted({min(2, found.visible), found.visible}) if found.visible else [2, 4]


def _plan(ranks: int, quick: bool, device: bool, tell: Callable[[str], None]) -> Plan:
    if ranks < 1:
        raise JobError(f"--ranks {ranks} is not possible; write --ranks 2, or --ranks 2,4")
    gpus = devices().visible
    if gpus and ranks > gpus:
        raise JobError(f"--ranks {ranks}: there are {gpus} GPUs; write --ranks {gpus}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sizes = QUICK if quick else FINE if ranks <= max(cores, 2) else COARSE
    free = None if gpus else _free_memory()
    fits = tuple(size for size in sizes if free is None or BUFFERS * size * ranks < free // 2)
    if len(fits) < len(sizes):
        smallest = min(size for size in sizes if size not in fits)
        tell(f"{ranks} ranks: buffers of {_size(smallest)} and more are left out, memory is too small for them")
    shapes = (QUICK_SHAPES if quick else SHAPES) if device else ()
    return Plan(ranks, fits, 0.05 if quick else 0.2, 20.0 if quick else 100.0 if sizes is FINE else 45.0, shapes)


def _run(plan: Plan, tell: Callable[[str], None]) -> Mapping[str, Any]:
    from stretto.launch.local import run_local
    from stretto.launch.outside import run_here

    def hear(event: Event) -> None:
        if event["kind"] == "note":
            tell(event["text"])

    here = seat(os.environ)
    if here is not None:
        return run_here(measure_rank, (plan,), here, hear) or {}
    results = run_local(measure_rank, plan.ranks, (plan,), on_event=hear, on_line=lambda rank, line: tell(f"[{rank}] {line}"))
    return results[0]  # type: ignore[no-any-return]


def measure_rank(here: Rank, plan: Plan) -> Mapping[str, Any] | None:
    """One rank's part; rank 0 returns what was found."""
    here.emit({"kind": "at", "action": "while loading torch"})
    from stretto.comm.transport import World
    from stretto.engine import measure as timed

    here.emit({"kind": "at", "action": "while joining the other ranks"})
    world = World.from_environment()
    here.first = world.first

    def note(text: str) -> None:
        here.emit({"kind": "note", "text": f"{world.size} ranks: {text}"})

    watch = timed.Watch(world, timed.Effort(plan.sizes, plan.shapes, plan.seconds, 3, plan.until))
    found: dict[str, Any] = {"links": [], "device": {**timed.device_facts(world), "ranks": world.size}, "products": [], "copies": []}
    if world.why:
        note(f"no shared memory: {world.why}")
    if plan.shapes:
        here.emit({"kind": "at", "action": "while timing the device"})
        found["device"]["call"] = timed.call_seconds(watch)
        for product in map(Product._make, timed.products(watch)):
            found["products"].append(product)
            note(f"product {_shape(product)} in {product.dtype}: {count(product.flops_per_second)}FLOP/s a rank")
        for copy in map(Copy._make, timed.copies(watch)):
            found["copies"].append(copy)
            note(f"copy of {_size(copy.bytes_)}: {bytes_(copy.bytes_per_second)}/s a rank")
    here.emit({"kind": "at", "action": "while timing collectives"})

    def late(left_out: Sequence[tuple[str, int]]) -> None:
        words = ", ".join(f"{collective} of {_size(size)}" for collective, size in left_out)
        note(f"left out, as {plan.until:g} s were over: {words}")

    for link in map(LinkTime._make, timed.links(watch, timed.carriers(world), late)):
        found["links"].append(link)
        note(f"{link.collective} of {_size(link.bytes_)} over {_over(link.way)}: {_time(link.seconds)}")
    watch.together()
    world.close()
    return found if world.rank == 0 else None


def _joined(found: Sequence[Mapping[str, Any]]) -> Measured:
    first = found[0]
    about = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "command": shlex.join(["stretto", *sys.argv[1:]]),
        "torch": version("torch"),
        "stretto": version("stretto"),
    }
    device = DeviceFacts(**first["device"], products=tuple(first["products"]), copies=tuple(first["copies"]))
    order = {collective: i for i, collective in enumerate(CROSSES)}
    links = (link for one in found for link in sorted(one["links"], key=lambda link: (order[link.collective], link.bytes_)))
    return Measured(device, tuple(links), about)


def check_replaceable(out: Path) -> None:
    """JobError, before minutes are spent, if `out` cannot be written, or holds something else than an earlier measurement."""
    folder = out.parent
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise JobError(f"--out {out} cannot be written; write --out FILE.toml in a folder that is there and that you may write")
    if out.exists():
        try:
            Measured.read(out)
        except JobError:
            raise JobError(f"--out {out} holds something else than an earlier measurement; write another --out FILE.toml") from None


def _write(out: Path, text: str) -> None:
    """There whole or not at all."""
    new = out.with_name(f".{out.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, out)


def _free_memory() -> int | None:
    """Bytes that programs can still have; None where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def table(measured: Measured) -> str:
    """What was found, for people."""
    device = measured.device
    lines = [
        f"{device.name}: {device.cores} {'cores' if device.kind == 'cpu' else 'multiprocessors'}, {bytes_(device.memory)}; "
        f"{device.ranks} ranks at once, {device.threads} thread{'s' * (device.threads != 1)} each",
        f"an operation on one number takes {_time(device.call)}; copies "
        + ", ".join(f"{_size(one.bytes_)} {bytes_(one.bytes_per_second)}/s" for one in device.copies),
        "",
        *_products(device.products),
        "",
        "collectives: time, then the buffer's bytes and those over the busiest link a second (algbw, busbw of nccl-tests)",
    ]
    for (ranks, collective), group in groupby(measured.links, key=lambda one: (one.ranks, one.collective)):
        lines += ["", *_collective(f"{collective}, {ranks} ranks", list(group))]
    there = dict.fromkeys(one.transport for one in measured.links)
    lines += ["", *(f"{name}: {CARRIERS[name]}" for name in there if name in CARRIERS)]
    lines += ["", "fitted: seconds = latency + bytes over the busiest link / bandwidth; off by at most"]
    for one in measured.fits:
        name = f"{one.way.collective}, {one.way.ranks} ranks, {_over(one.way)}"
        rate = f"{bytes_(one.bandwidth)}/s" if one.bandwidth < math.inf else "any rate"  # one size: nothing can be told
        lines.append(f"  {name:<44}{_time(one.latency):>10}{rate:>12}{one.off:>8.0%}")
    return "\n".join(lines)


def _products(products: Sequence[Product]) -> list[str]:
    kinds = list(dict.fromkeys(one.dtype for one in products))
    lines = [f"{'matrix product, FLOP/s a rank':<30}" + "".join(f"{kind:>9}" for kind in kinds)]
    for shape, group in groupby(products, key=_shape):
        rates = {one.dtype: count(one.flops_per_second) for one in group}
        lines.append(f"  {shape:<28}" + "".join(f"{rates.get(kind, '-'):>9}" for kind in kinds))
    return lines


def _shape(product: Product) -> str:
    return f"{product.rows} x {product.inner} x {product.columns}"


def _collective(title: str, times: Sequence[LinkTime]) -> list[str]:
    """A line a size, three columns a way: time, algorithm bandwidth, bus bandwidth."""
    ways = list(dict.fromkeys(one.way for one in times))
    names = " " * 14 + "".join(f"{_over(way):>26}" for way in ways)
    lines = [title + names[len(title) :]]
    for size, group in groupby(times, key=lambda one: one.bytes_):
        by_way = {one.way: one for one in group}
        cells = [_cell(by_way[way]) if way in by_way else f"{'':>26}" for way in ways]
        lines.append((f"  {_size(size):<12}" + "".join(cells)).rstrip())
    return lines


def _cell(one: LinkTime) -> str:
    return f"{_time(one.seconds):>8}{bytes_(one.algbw):>9}{bytes_(one.busbw):>9}"


def _over(way: Way) -> str:
    return way.transport if way.private else f"{way.transport}, in place"


def _size(size: int) -> str:
    """4096 -> '4 KiB': buffers are powers of two, or nearly."""
    for scale, unit in ((MIB, "MiB"), (KIB, "KiB")):
        if size > 0.99 * scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} B"


def _time(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
