"""What `stretto measure` found of a machine, as the file that `stretto plan` reads: rates of the device, and times of collectives.

Every time that was measured is kept as it is. A latency and a bandwidth fitted to them are kept beside, with how far off they are.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from stretto.errors import JobError

VERSION = 1

#: What of a buffer crosses the busiest link, by collective and ranks: nccl-tests' factor from algorithm to bus bandwidth
#: (doc/PERFORMANCE.md there). The buffer counts all parts together.
CROSSES: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send": lambda n: 1.0,
}


class Product(NamedTuple):
    """Seconds of one matrix product, [rows, inner] times [inner, columns], by one rank while the others did the same."""

    dtype: str
    rows: int
    inner: int
    columns: int
    seconds: float

    @property
    def flops_per_second(self) -> float:
        return 2 * self.rows * self.inner * self.columns / self.seconds


class Copy(NamedTuple):
    """Seconds to copy so many bytes from one place in memory to another, by one rank while the others did the same."""

    bytes_: int
    seconds: float

    @property
    def bytes_per_second(self) -> float:
        """Of what was copied; memory reads and writes twice as much."""
        return self.bytes_ / self.seconds


@dataclass(frozen=True)
class DeviceFacts:
    """One rank's device. kind: cpu or cuda. cores: of the machine (or multiprocessors of the GPU). threads: of a rank.

    ranks: how many computed at once when it was measured. memory: bytes, of the machine or the GPU. call: seconds of the smallest
    operation, which is what it costs to ask for one.
    """

    name: str
    kind: str
    cores: int
    threads: int
    ranks: int
    memory: int
    call: float
    products: tuple[Product, ...] = ()
    copies: tuple[Copy, ...] = ()


class LinkTime(NamedTuple):
    """Seconds of one collective of a buffer of so many bytes, all parts together. private: False where the buffer lay in shared memory."""

    transport: str
    ranks: int
    collective: str
    bytes_: int
    private: bool
    seconds: float

    @property
    def algbw(self) -> float:
        """Bytes a second of the buffer."""
        return self.bytes_ / self.seconds

    @property
    def busbw(self) -> float:
        """Bytes a second over the busiest link: what can be compared between collectives and numbers of ranks."""
        return self.algbw * CROSSES[self.collective](self.ranks)

    @property
    def way(self) -> Way:
        return Way(self.transport, self.ranks, self.collective, self.private)


class Way(NamedTuple):
    """What one curve over sizes is of."""

    transport: str
    ranks: int
    collective: str
    private: bool


class Fit(NamedTuple):
    """seconds = latency + bytes over the busiest link / bandwidth. off: the largest error of it, as a share of what was measured."""

    way: Way
    latency: float
    bandwidth: float
    off: float


def fit(times: Sequence[LinkTime]) -> Fit:
    """The line through times of one way that makes the squares of its relative errors least."""
    way = times[0].way
    crossing = [time.bytes_ * CROSSES[way.collective](way.ranks) for time in times]
    u, v = [1 / time.seconds for time in times], [x / time.seconds for x, time in zip(crossing, times, strict=True)]
    uu, uv, vv = _dot(u, u), _dot(u, v), _dot(v, v)
    det = uu * vv - uv * uv
    latency, slope = ((sum(u) * vv - sum(v) * uv) / det, (sum(v) * uu - sum(u) * uv) / det) if det > 1e-12 * uu * vv else (0.0, -1.0)
    if slope <= 0:  # one size, or no growth with it: all of the time is latency
        latency, slope = sum(u) / uu, 0.0
    elif latency < 0:
        latency, slope = 0.0, sum(v) / vv
    off = max(abs(a * latency + b * slope - 1) for a, b in zip(u, v, strict=True))
    return Fit(way, latency, 1 / slope if slope else math.inf, off)


@dataclass(frozen=True)
class Measured:
    """A machine as it was measured. about: when, by which command, on which versions."""

    device: DeviceFacts
    links: tuple[LinkTime, ...]
    about: Mapping[str, str] = field(default_factory=dict)

    @property
    def fits(self) -> tuple[Fit, ...]:
        return tuple(fit(times) for times in self.curves.values())

    @cached_property
    def curves(self) -> Mapping[Way, list[LinkTime]]:
        """Times by what they are of, by rising size."""
        found: dict[Way, list[LinkTime]] = {}
        for time in sorted(self.links, key=lambda time: time.bytes_):
            found.setdefault(time.way, []).append(time)
        return {way: found[way] for way in dict.fromkeys(time.way for time in self.links)}

    def seconds(self, way: Way, bytes_: float) -> float:
        """Of a buffer of any size: between two measured sizes along a straight line of logarithms; below the smallest what that
        took, above the largest at its rate. Raises JobError where nothing was measured of this way."""
        curves = self.curves
        if way not in curves:
            there = ", ".join(sorted({f"{w.collective} over {w.transport} on {w.ranks} ranks" for w in curves})) or "nothing"
            raise JobError(
                f"{way.collective} over {way.transport} on {way.ranks} ranks was not measured; there is {there}; "
                f"write stretto measure --ranks {way.ranks}"
            )
        times = curves[way]
        if bytes_ <= times[0].bytes_:
            return times[0].seconds
        if bytes_ >= times[-1].bytes_:
            return times[-1].seconds * bytes_ / times[-1].bytes_
        low, high = next(pair for pair in pairwise(times) if pair[0].bytes_ <= bytes_ <= pair[1].bytes_)
        share = math.log(bytes_ / low.bytes_) / math.log(high.bytes_ / low.bytes_)
        return float(low.seconds * (high.seconds / low.seconds) ** share)

    def plain(self) -> dict[str, Any]:
        """As values of JSON: `device`, `links` and `fits`, with the rates that follow from the times."""
        device = {**vars(self.device)}
        device["products"] = [{**one._asdict(), "flops_per_second": one.flops_per_second} for one in self.device.products]
        device["copies"] = [{**_bytes(one), "bytes_per_second": one.bytes_per_second} for one in self.device.copies]
        links = [{**_bytes(one), "algbw": one.algbw, "busbw": one.busbw} for one in self.links]
        fits = [{**one.way._asdict(), "latency": one.latency, "bandwidth": one.bandwidth, "off": one.off} for one in self.fits]
        return {"device": device, "links": links, "fits": fits, "about": dict(self.about)}

    def text(self) -> str:
        """As TOML; `read` makes the same of it again."""
        facts = {name: value for name, value in vars(self.device).items() if name not in ("products", "copies")}
        fits = ({**one.way._asdict(), **one._asdict()} for one in self.fits)
        return "\n".join(
            [
                "# What `stretto measure` found of this machine; `stretto plan --cluster FILE` reads it. Times in seconds, rates in bytes",
                "# a second. A buffer counts all parts together; private = false: it already lay in memory that the ranks share.",
                f"version = {VERSION}",
                *_lines("about", self.about),
                *_lines("device", facts),
                *_rows("products", (one._asdict() for one in self.device.products)),
                *_rows("copies", (_bytes(one) for one in self.device.copies)),
                *_section("links"),
                *_rows("times", (_bytes(one) for one in self.links)),
                "# seconds = latency + bytes over the busiest link / bandwidth; off: the largest error of this line (0.1: 10%)",
                *_rows("fitted", ({name: value for name, value in one.items() if name != "way"} for one in fits)),
                "",
            ]
        )

    @staticmethod
    def read(path: Path) -> Measured:
        """From the file. Raises JobError where it is not there, or is no such file."""
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise JobError(f"cluster file {path} cannot be read ({error.strerror}); write one with stretto measure --out {path}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise JobError(f"cluster file {path} is no TOML ({error}); write one with stretto measure --out FILE.toml") from None
        if found.get("version") != VERSION:
            version = found.get("version", "none")
            raise JobError(f"cluster file {path} has version {version}, and this stretto reads {VERSION}; write one with stretto measure")
        try:
            facts = dict(found["device"])
            products = tuple(Product(**row) for row in facts.pop("products"))
            copies = tuple(Copy(row["bytes"], row["seconds"]) for row in facts.pop("copies"))
            links = tuple(
                LinkTime(row["transport"], row["ranks"], row["collective"], row["bytes"], row["private"], row["seconds"])
                for row in found["links"]["times"]
            )
            return Measured(DeviceFacts(**facts, products=products, copies=copies), links, found["about"])
        except (KeyError, TypeError) as error:
            raise JobError(f"cluster file {path} is not what stretto measure writes ({error}); write one with stretto measure") from None


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def _bytes(one: Copy | LinkTime) -> dict[str, Any]:
    """Its fields; `bytes` without the underscore that keeps Python's own name free."""
    return {name.rstrip("_"): value for name, value in one._asdict().items()}


def _section(name: str) -> Iterator[str]:
    yield from ("", f"[{name}]")


def _lines(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    yield from _section(name)
    yield from (f"{key} = {_toml(value)}" for key, value in values.items())


def _rows(name: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A list of tables, one a line."""
    yield f"{name} = ["
    yield from ("    { " + ", ".join(f"{key} = {_toml(value)}" for key, value in row.items()) + " }," for row in rows)
    yield "]"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}" if math.isinf(value) or "." in f"{value:.6g}" or "e" in f"{value:.6g}" else f"{value:.6g}.0"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # the one character that JSON takes as it is and TOML does not
