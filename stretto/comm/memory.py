"""Memory that is there to be written later."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

#: From so many bytes on, pages of their own are worth it.
LARGE = 1 << 20


def zeros(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, [elements]. On a CPU their pages cost memory only once they are written: torch.zeros writes all of them at once, so that a
    model that is being loaded would already have its gradients beside it."""
    bytes_ = elements * dtype.itemsize
    if device.type != "cpu" or bytes_ < LARGE:
        return torch.zeros(elements, dtype=dtype, device=device)
    pages = mmap.mmap(-1, bytes_, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype)  # which keeps the pages
