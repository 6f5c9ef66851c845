"""Seconds of single operators on one device: products, passes over memory, attention.

An operator takes the longer of its arithmetic and its memory traffic, and a share of the shorter. Products are held back by
what does not fill the device's units, and large ones by power and heat.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from stretto.plan.devices import Device

#: Share of the lesser of arithmetic and memory traffic that an operator does not hide behind the greater.
BARE = 0.4
#: Tiles of a product that one multiprocessor computes, and their rate beside the best.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (64, 128, 0.75), (128, 64, 0.75))
#: Queries that one multiprocessor takes at a time in a flash kernel.
QUERIES = 64
#: Tokens by which a short row's start and diagonal weigh in it, on a device of SLOWEST 16-bit flops a second: faster ones are
#: done sooner with the rest, and not with that.
SHORT, SLOWEST = 384, 312e12
#: Speed of the first flash kernels (2022) beside those of the second generation.
EARLY = 0.66
#: Tensor units want rows of a multiple of so many 16-bit elements; without, ordinary units do the work at such a share.
ALIGNED, UNALIGNED = 8, 0.08
#: Passes over the scores of fused softmax and dropout, in bytes a 16-bit score, forward and backward; and without fusion, as many
#: times that.
SCORE_BYTES, STEPS = (9.0, 11.0), 2.5


@dataclass(frozen=True)
class Kernels:
    """Prices of operators on a device. compute: dtype of products; bytes_: of an element elsewhere; narrow: 8-bit products' rate
    beside the device's own."""

    device: Device
    compute: str
    bytes_: int
    narrow: float = 1.0

    def product(self, m: float, k: float, n: float, count: float = 1.0, traffic: float | None = None) -> float:
        """[m, k] times [k, n], `count` of them in one kernel. traffic: bytes that each moves, if not every operand once."""
        if min(m, k, n) <= 0:
            return 0.0
        speeds = self.device.speeds
        shaped = speeds.best * k / (k + speeds.depth) * filled(m, n, count, self.device.units)
        slow = speeds.narrow * self.narrow if self.compute in ("fp8", "fp4") else 1.0
        arithmetic = 2 * m * k * n * count / (self.device.peak(self.compute) * min(shaped, speeds.sustained) * slow)
        moved = traffic if traffic is not None else self.bytes_ * (m * k + k * n + m * n)
        memory = moved * count / (self.device.bandwidth * speeds.streamed)
        return max(arithmetic, memory) + BARE * min(arithmetic, memory) + self.device.gap

    def stream(self, bytes_: float, kernels: float = 1.0) -> float:
        """A pass over memory."""
        return bytes_ / (self.device.bandwidth * self.device.speeds.streamed) + kernels * self.device.gap

    def flash(self, flops: float, queries: float, row: float, generation: str) -> tuple[float, float]:
        """Attention that keeps no scores, forward and backward. flops: of a forward; queries: rows of all heads together."""
        device = self.device
        half = device.peak("fp16" if "fp16" in device.flops else "fp32")
        shares = device.speeds.attention if generation == "flash" else device.speeds.portable
        slack = (1 + QUERIES * device.units / queries) * (1 + SHORT * (half / SLOWEST) ** 0.5 / row)
        rate = half / slack * (EARLY if generation == "early" else 1.0)
        return flops / (rate * shares[0]) + device.gap, 2.5 * flops / (rate * shares[1]) + 3 * device.gap

    def scores(self, row: int, key_dim: int, value_dim: int, count: float, fused: bool) -> tuple[float, float]:
        """Attention that writes the whole square of scores, `count` squares of it, forward and backward."""
        slow = 1.0 if key_dim % ALIGNED == 0 else 1 / UNALIGNED
        products = slow * (self.product(row, key_dim, row, count) + self.product(row, row, value_dim, count))
        square = count * row * row * self.bytes_ / 2 * (1.0 if fused else STEPS)
        return products + self.stream(square * SCORE_BYTES[0], 2), 2 * products + self.stream(square * SCORE_BYTES[1], 2)


def filled(m: float, n: float, count: float, units: int) -> float:
    """Share of the multiprocessors' work that is wanted: tiles stick out of the matrix, and the last round is not full."""
    best = 0.0
    for rows, columns, worth in TILES:
        tiles = ceil(m / rows) * ceil(n / columns) * count
        best = max(best, m * n * count / (ceil(tiles / units) * units * rows * columns) * worth)
    return best
