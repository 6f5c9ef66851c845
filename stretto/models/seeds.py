"""The same random numbers for a named thing, however it is cut and whoever asks.

torch's own generators count draws, so the value of an element depends on how much was drawn before it, that is on the
mesh. Here a tensor is drawn in blocks of a fixed size, each from a generator of its own, keyed by name and block.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

BLOCK = 65536  # elements drawn together: small enough to waste little at a cut, large enough to draw fast


def generator(seed: int, *names: object) -> torch.Generator:
    """A CPU generator that depends on `seed` and `names` alone: the same in every process, on every machine.

    torch's CPU generator reads 32 bits of a seed, so of very many streams a few pairs are equal; no two are related.
    """
    key = "\x1f".join(str(part) for part in (seed, *names))
    number = int.from_bytes(blake2b(key.encode(), digest_size=4).digest(), "little")
    return torch.Generator().manual_seed(number)


def fill(out: Tensor, name: str, start: int, seed: int, std: float) -> None:
    """Write elements [start, start + out.numel()) of the flattened tensor `name` into `out`, normal(0, std).

    out: contiguous, any shape, dtype and device. Any cut gives bitwise the same values: they are drawn in fp32 on the
    CPU and rounded to out's dtype last.
    """
    flat = out.detach().view(-1)
    stop = start + flat.numel()
    drawn = torch.empty(BLOCK)
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        first = block * BLOCK
        # the whole block even where a part is wanted: torch draws other values for another length
        drawn.normal_(0.0, std, generator=generator(seed, name, block))
        begin, end = max(start, first), min(stop, first + BLOCK)
        flat[begin - start : end - start].copy_(drawn[begin - first : end - first])
