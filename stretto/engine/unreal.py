"""Operators without values: torch's meta device, counted, and taken for the device that it stands for.

[Note: what is read] Now and then a step reads a number: the vote's sums, a count. Every number reads as 1, what asks whether all of
something is so is told yes, and any other condition no: the step is one that commits, of rows without padding. Nothing else of it is
decided by values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stretto.parallel.memory import Storages, memory_of

META = torch.device("meta")
#: What torch calls the kernel that keeps no scores.
FLASH = torch.nn.attention.SDPBackend.FLASH_ATTENTION.value
#: Shape, strides and dtype of what an operator makes.
Made = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Unreal(Storages):
    """Counts storages, and answers where a value is read. [Note: what is read]

    Many operators of the meta device are Python, and slow. An operator that makes something new makes the same of arguments that
    are shaped alike; so each is asked once. One that changes its argument in place changes nothing here.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        aten = torch.ops.aten
        self.ways: dict[Any, Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]] = {
            aten._local_scalar_dense.default: self._read,
            **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), self._all),
        }
        self.holds: set[int] = set()  # memory of conditions that hold
        self.made: dict[Any, tuple[bool, list[Made | None]]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        way = self.ways.get(func)
        if way is None:
            way = self.ways[func] = self._way(func)
        return way(func, args, kwargs)

    def _way(self, func: Any) -> Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]:
        schema = func._schema
        changes = [argument.alias_info for argument in schema.arguments if argument.alias_info is not None]
        if not changes and not any(made.alias_info for made in schema.returns) and len(schema.returns):
            return self._make
        in_place = torch.Tag.inplace_view not in func.tags and len(changes) == 1 and changes[0].is_write and len(schema.returns) == 1
        return _same if in_place and schema.arguments[0].alias_info is not None and func not in RESIZING else _call

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        (x,) = args
        if not x.is_meta:
            return func(x)
        return memory_of(x) in self.holds if x.dtype == torch.bool else 1.0 if x.dtype.is_floating_point else 1

    def _all(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        out = func(*args, **kwargs)
        self.holds.add(memory_of(out))
        return out

    def _gone(self, key: int, _: object) -> None:
        self.holds.discard(key)
        super()._gone(key, _)

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        key = (func, *map(_like, args), *((name, _like(value)) for name, value in kwargs.items()))
        try:
            known = self.made.get(key)
        except TypeError:  # an argument that has no hash
            return func(*args, **kwargs)
        if known is None:
            out = func(*args, **kwargs)
            several = isinstance(out, (tuple, list))
            parts = out if several else [out]
            given = {memory_of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            if any(isinstance(x, Tensor) and memory_of(x) in given for x in parts):
                self.ways[func] = _call  # a view, whatever its schema says
            elif all(x is None or (type(x) is Tensor and x.is_meta) for x in parts):
                self.made[key] = several, [None if x is None else (x.shape, x.stride(), x.dtype) for x in parts]
            return out
        several, likes = known
        new = [None if like is None else torch.empty_strided(like[0], like[1], dtype=like[2], device=META) for like in likes]
        return tuple(new) if several else new[0]


#: What may change the size of what it is given.
RESIZING = frozenset((torch.ops.aten.resize_.default, torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Tensor))


def _same(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if isinstance(args[0], Tensor) and args[0].is_meta else func(*args, **kwargs)


def _call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return func(*args, **kwargs)


def _like(x: Any) -> Any:
    """What an operator's result can depend on, without values."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device.type
    return tuple(map(_like, x)) if isinstance(x, (list, tuple)) else (type(x), x)


class Kernels:
    """Attention by the kernel that a device would take, which torch chooses before operators are dispatched.

    On a CPU it is asked which; on a GPU it is the one of the dtype.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.usual = torch.nn.functional.scaled_dot_product_attention
        self.kernels: dict[Any, int] = {}

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """In place of torch's own."""
        aten = torch.ops.aten
        if not q.is_meta:
            return self.usual(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if self.device == "cuda":
            if q.dtype in (torch.bfloat16, torch.float16) and attn_mask is None:
                out: Tensor = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
                return out
            if enable_gqa:
                k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
            graph = torch.is_grad_enabled() and q.requires_grad
            out = aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, graph, dropout_p, is_causal, scale=scale)[0]
            return out
        if self._choice(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa) == FLASH:
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
            out = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
            return out
        return self.usual(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    def _choice(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any) -> int:
        shapes = [None if x is None else (x.shape, x.stride(), x.dtype) for x in (q, k, v, mask)]
        key = str((shapes, rest))
        if key not in self.kernels:
            # real tensors of these shapes, whose memory nobody touches
            real: list[Any] = [
                None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu") for x in (q, k, v, mask)
            ]
            dropout, causal, scale, gqa = rest
            self.kernels[key] = torch._fused_sdp_choice(
                real[0], real[1], real[2], real[3], dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=gqa
            )
        return self.kernels[key]


@contextmanager
def unreal(device: str) -> Iterator[None]:
    """Within it torch takes tensors of the meta device for those of `device` where it decides by that, or reads them, before
    operators are dispatched."""
    tolist, cpu = Tensor.tolist, Tensor.cpu

    def numbers(x: Tensor) -> Any:
        return [1.0] * x.numel() if x.is_meta else tolist(x)

    def on_host(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(x.shape, dtype=x.dtype, device="cpu") if x.is_meta else cpu(x, *args, **kwargs)

    adam = sys.modules["torch.optim.adam"]  # torch.optim hides it
    with ExitStack() as patches:
        for where, name, what in (
            (torch.nn.functional, "scaled_dot_product_attention", Kernels(device).attention),
            (Tensor, "tolist", numbers),
            (Tensor, "cpu", on_host),
            (adam, "_device_dtype_check_for_fused", lambda *_, **__: None),  # the fused update knows this device's shapes
        ):
            patches.enter_context(mock.patch.object(where, name, what))
        patches.enter_context(mock.patch("torch.fx.experimental._config.meta_nonzero_assume_all_nonzero", True))
        yield
