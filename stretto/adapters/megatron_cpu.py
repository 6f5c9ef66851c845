"""Lets megatron-core run where there is no GPU: all of its calls of CUDA are turned away in this one place.

It asks for the current GPU, makes tensors on "cuda", waits for streams and keeps random states of a GPU, on whatever device it is.
Here all that means the CPU. What it computes and sends is its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: Functions of torch that are handed a device.
FACTORIES = ("tensor", "zeros", "empty", "ones", "full", "arange", "rand", "randn", "as_tensor", "eye", "linspace")


def pretend() -> None:
    """From here on this process takes the CPU for its GPU. Only for a process that megatron has for itself."""
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    for name in ("synchronize", "empty_cache", "set_device", "_lazy_init"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda._lazy_call = lambda function, **__: function()
    cuda.Stream, cuda.Event = _Stream, _Stream
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Stream()
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    tensor: Any = Tensor
    tensor.cuda = lambda self, *_, **__: self
    tensor.type = _type(Tensor.type)
    module: Any = torch.nn.Module
    module.cuda = lambda self, *_, **__: self


def after_import() -> None:
    """What megatron-core took from torch.cuda by value when it was imported, replaced in its own module."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


class _Stream:
    """A stream, or an event, of a device that does one thing after the other."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    def wait_event(self, *_: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    def record_event(self, *_: Any) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass

    def wait(self, *_: Any) -> None:
        pass


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, with a device that is a GPU taken for the CPU."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def _type(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.type, which megatron asks to tell masters from 16-bit parameters: it knows the names of a GPU's only."""

    @functools.wraps(kind)
    def named(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = kind(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) and not found.startswith("torch.cuda.") else found

    return named
