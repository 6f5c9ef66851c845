"""Memory that is there to be written later, and memory that ranks have in common."""

from __future__ import annotations

import ctypes
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


class Pages:
    """Memory of which tensors are made when they are needed: each has a storage of just its own elements, and keeps the memory.

    Where ranks share memory, what one of them holds of a buffer and the whole of it are then two tensors, of which the second is there
    only while somebody looks at the whole.
    """

    def __init__(self, memory: Tensor) -> None:
        """memory: flat, [elements]."""
        self.elements, self.dtype = memory.numel(), memory.dtype
        self._storage, self._address = memory.untyped_storage(), memory.data_ptr()

    def tensor(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the memory, flat."""
        if (start, stop) == (0, self.elements):
            return torch.empty(0, dtype=self.dtype, device=self._storage.device).set_(self._storage, 0, (stop,), (1,))
        if start == stop:
            return torch.empty(0, dtype=self.dtype, device=self._storage.device)
        some = (ctypes.c_char * ((stop - start) * self.dtype.itemsize)).from_address(self._address + start * self.dtype.itemsize)
        some.memory = self._storage  # type: ignore[attr-defined]  # the tensor keeps what it was made from, and that this
        return torch.frombuffer(some, dtype=self.dtype)
