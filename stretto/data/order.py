"""Which samples make step t: a pure function of (seed, step), the same on any number of ranks.

The order is endless: position p of it belongs to epoch p // total, and each epoch is a fresh permutation of all samples. A run
that stops at step t therefore goes on with nothing but the number t, on any mesh. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, TypeVar

from stretto.layout.layout import split

Rows = TypeVar("Rows", list[Any], range)

ROUNDS = 16  # with 8 or 12, some orders of 5 or 6 samples come up more often than others (chi-square, seen)
WORD = (1 << 64) - 1


def stable_number(*names: int | str) -> int:
    """A number in [0, 2^63) that depends on the names alone: the same in every process and Python version."""
    digest = hashlib.blake2b("\0".join(map(str, names)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def mix(value: int, key: int) -> int:
    """64 well-stirred bits of (value, key): the finaliser of SplitMix64 (Steele, Lea and Flood 2014, figure 14)."""
    z = (value * 0x9E3779B97F4A7C15 + key) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


@dataclass(frozen=True)
class Shuffle:
    """One epoch's permutation of `total` samples, asked for one position at a time; no list of that length is ever made.

    A position is written as two digits in the bases `low` and `high`; in turn each digit is moved by a keyed function of the other
    (a Feistel network on numbers: Black and Rogaway 2002, section 5). Each round can be undone, so the whole is a permutation of
    low * high numbers; the few that fall at or above `total` are sent round again, which leaves a permutation of `total`.
    """

    total: int
    low: int
    high: int
    keys: tuple[int, ...]

    @classmethod
    def of(cls, seed: int, epoch: int, total: int) -> Shuffle:
        """The permutation of this epoch; `total` is at least 1."""
        assert total > 0, "an epoch has at least one sample"
        low = math.isqrt(total - 1) + 1
        return cls(total, low, -(-total // low), tuple(stable_number("order", seed, epoch, i) for i in range(ROUNDS)))

    def at(self, position: int) -> int:
        """The sample at a position of this epoch; both in [0, total)."""
        sample = position
        while True:
            b, a = divmod(sample, self.low)
            for i in range(0, ROUNDS, 2):
                a = (a + mix(b, self.keys[i])) % self.low
                b = (b + mix(a, self.keys[i + 1])) % self.high
            sample = b * self.low + a
            if sample < self.total:
                return sample


def samples_at(seed: int, positions: range, total: int) -> list[int]:
    """The samples at some positions of the endless order; a range may run over the end of an epoch."""
    found: list[int] = []
    for epoch in range(positions.start // total, -(-positions.stop // total) if positions else 0):
        shuffle = Shuffle.of(seed, epoch, total)
        start, stop = max(positions.start, epoch * total), min(positions.stop, (epoch + 1) * total)
        found += [shuffle.at(p - epoch * total) for p in range(start, stop)]
    return found


def samples(seed: int, step: int, size: int, total: int) -> list[int]:
    """The global samples of optimizer step `step` (from 0), `size` of them; epochs follow each other without a gap."""
    return samples_at(seed, range(step * size, (step + 1) * size), total)


def rows_of(rows: Rows, parts: int, index: int) -> Rows:
    """Part `index` of a step's samples (or of their positions), dealt out in order to `parts` data-parallel coordinates."""
    start, stop = split(len(rows), parts, index)
    return rows[start:stop]
