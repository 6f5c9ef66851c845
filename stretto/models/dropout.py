"""Dropout whose masks have names: which elements are dropped follows from (seed, step, sample, name, position) alone.

torch draws masks from one stream, so an element's fate depends on all that was drawn before it: on the mesh. Here each element has
a number of its own, and a hash of it decides (REFERENCE D5): a rank makes the masks of what it has, and in another cut of the
batch, of the tokens or of the features the same elements are dropped. The arithmetic is of 32-bit integers, the same on any device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Elements hashed together: few enough to stay in cache.
CHUNK = 1 << 15
#: Multipliers of a 32-bit mix in which each bit of the input changes about half of the output's (Wellons 2018, "Prospecting for hash
#: functions", lowbias32), as signed numbers.
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)
LOW = (1 << 32) - 1


class Lines(NamedTuple):
    """The numbers of an activation's elements, a line for each index of all dims but the last.

    rows: [n] which sample a line belongs to; starts: [n] number, inside the sample's activation, of the line's first element, int64.
    """

    rows: Tensor
    starts: Tensor


class Draws:
    """What the masks of the forward under way depend on beside names and positions. One a model: forwards follow each other.

    step: of the training; first: number, among the step's rows, of the microbatch's first; tokens: [B, T] of the microbatch. unnamed:
    dropouts that were met and whose elements could not be numbered.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step, self.first, self.tokens = 0, 0, (0, 0)
        self.unnamed: set[str] = set()
        self._times: dict[str, int] = {}

    def begin(self, step: int, first: int, tokens: tuple[int, int]) -> None:
        """A forward begins."""
        self.step, self.first, self.tokens = step, first, tokens
        self._times.clear()

    def remember(self) -> Callable[[], None]:
        """A way back to this moment, for a block that runs again in backward."""
        then, times = (self.step, self.first, self.tokens), dict(self._times)

        def recall() -> None:
            self.step, self.first, self.tokens = then
            self._times = dict(times)

        return recall

    def mask(self, name: str, p: float, shape: torch.Size, lines: Lines, offset: int = 0) -> Tensor:
        """Which elements of an activation of that shape are kept, bool. offset: number, inside its line, of each line's first element."""
        times = self._times[name] = self._times.get(name, -1) + 1
        key = "\x1f".join(map(str, (self.seed, self.step, name, times)))
        words = blake2b(key.encode(), digest_size=8).digest()
        one, two = (_signed(int.from_bytes(words[i : i + 4], "little")) for i in (0, 4))
        rows = (lines.rows + self.first).to(torch.int32)
        high = (lines.starts >> 32).to(torch.int32)
        keys = mix(rows ^ one), mix(rows + high * FIRST ^ two)
        starts = _signed32(lines.starts + offset)
        last = shape[-1]
        inner = torch.arange(last, dtype=torch.int32, device=lines.rows.device)
        threshold = round(p * (1 << 32)) - (1 << 31)
        kept = torch.empty(len(rows), last, dtype=torch.bool, device=lines.rows.device)
        step = max(1, CHUNK // max(last, 1))
        for at in range(0, len(rows), step):
            part = slice(at, at + step)
            x = starts[part, None] + inner
            x ^= keys[0][part, None]
            torch.ge(mix(x, keys[1][part, None]), threshold, out=kept[part])
        return kept.view(shape)


def mix(x: Tensor, key: Tensor | int = 0) -> Tensor:
    """32 bits that look random, of each 32-bit number of x, which is overwritten. key: another mix for each."""
    _shift_in(x, 16)
    x *= FIRST
    x += key
    _shift_in(x, 15)
    x *= SECOND
    _shift_in(x, 16)
    return x


def _shift_in(x: Tensor, bits: int) -> None:
    """x ^= x >> bits, of unsigned numbers."""
    x ^= (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def _signed(number: int) -> int:
    """The int32 of the same 32 bits."""
    return number - (1 << 32) if number >> 31 else number


def _signed32(numbers: Tensor) -> Tensor:
    """The low 32 bits of int64 numbers."""
    low = numbers & LOW
    return torch.where(low > LOW >> 1, low - (1 << 32), low).to(torch.int32)


def lines_of_samples(shape: torch.Size, device: torch.device, stride: int, begins: int = 0) -> Lines:
    """Of an activation [B, ..., width] of B samples. stride: how much the number grows from line to line (the width, of the whole);
    begins: the number of a sample's first line."""
    lines = math.prod(shape[1:-1])
    rows = torch.arange(shape[0], device=device).repeat_interleave(lines)
    return Lines(rows, (torch.arange(lines, device=device) * stride + begins).repeat(shape[0]))


def lines_of_tokens(low: int, high: int, length: int, width: int, device: torch.device) -> Lines:
    """Of tokens [low, high) of samples of `length` tokens each, in one sequence."""
    tokens = torch.arange(low, high, device=device)
    return Lines(tokens // length, tokens % length * width)


def drop(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """x where it is kept, scaled up to the same mean. Keeps the mask for backward, a byte an element."""
    dropped: Tensor = _Drop.apply(x, mask, 1.0 / (1.0 - p) if p < 1 else 0.0)  # type: ignore[no-untyped-call]
    return dropped


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (grad * mask).mul_(ctx.scale), None, None
