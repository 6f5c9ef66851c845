"""Weight gradients without a detour: linear and embedding layers add them to the flat buffer themselves.

Left alone, autograd allocates each weight gradient, and the group's hook copies it to its place and lets it go: fresh pages
and one more pass through memory, for as many bytes as the model has. Here the layer's backward has the matrix product write
to the place itself, and tells autograd of no gradient. Autograd still comes by the parameter once all its uses are through, so
the group learns as always when a gradient is complete.

A layer keeps its class, its parameters and its hooks; only its `forward` is replaced, and only where that changes nothing: see
`_kind` for which layers, `_aside` for which calls. A gradient that is taken inside a forward (torch.autograd.grad) is an
ordinary one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.parallel.sharded import ShardedGroup
from stretto.parallel.walk import Walk


class Sink(NamedTuple):
    """Where the gradient of a layer's weight goes: parameter number `parameter` of `group`, which `walk` takes through its steps."""

    walk: Walk
    group: ShardedGroup
    parameter: int

    def take(self, add: Callable[[ShardedGroup, int], None]) -> None:
        """Add a gradient now, or once the walk comes to its weight gradients (the W of schedules that split the backward)."""
        if self.group.postponed is None:
            add(self.group, self.parameter)
        else:
            self.group.postponed.append(lambda: add(self.group, self.parameter))


def write_directly(model: nn.Module, walk: Walk) -> None:
    """Let every linear and embedding layer of `model` whose weight belongs to a group of `walk` write its gradient there."""
    sinks = {id(p): Sink(walk, group, i) for group in walk.groups if group.trainable for i, p in enumerate(group.params)}
    for module in model.modules():
        kind, weight = _kind(module), module._parameters.get("weight")
        if kind is not None and weight is not None and id(weight) in sinks:
            module.forward = Direct(module, kind, sinks[id(weight)])


class Direct:
    """The forward of one layer. An object and not a closure, so that it can be seen in a debugger what stands there."""

    def __init__(self, module: nn.Module, apply: Callable[..., Any], sink: Sink) -> None:
        self.module, self.apply, self.sink = module, apply, sink
        self.usual = type(module).forward

    def __call__(self, x: Tensor) -> Any:
        weight = self.module.weight
        if not torch.is_grad_enabled() or _aside(weight, x):
            return self.usual(self.module, x)
        return self.apply(self.module, x, self.sink)


def _kind(module: nn.Module) -> Callable[..., Any] | None:
    """How a layer's forward is done here; None: it is left as it is. Exactly torch's own forward: a subclass may compute anything."""
    if "forward" in vars(module):
        return None  # somebody has replaced it before, and knows why
    if type(module).forward is nn.Linear.forward:
        return lambda layer, x, sink: _Linear.apply(x, layer.weight, layer.bias, sink)  # type: ignore[no-untyped-call]
    if type(module).forward is nn.Embedding.forward and not (module.sparse or module.scale_grad_by_freq or module.max_norm is not None):
        return lambda layer, ids, sink: _Embedding.apply(ids, layer.weight, layer.padding_idx, sink)
    return None


def _aside(weight: Any, x: Tensor) -> bool:
    """Whether this call goes the usual way: somebody listens to the weight's gradient, or torch changes what an operator means."""
    return bool(
        not isinstance(weight, nn.Parameter)
        or weight._backward_hooks
        or (torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type))
        or (x.is_floating_point() and x.dtype != weight.dtype)
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


class _Linear(torch.autograd.Function):
    """x: [..., in], weight: [out, in], bias: [out] or None -> [..., out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, sink: Sink) -> Tensor:
        ctx.sink = sink
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        of_x = grad.matmul(weight) if needs_x else None
        of_bias = rows.sum(0) if needs_bias else None
        of_weight = None
        if needs_weight and ctx.sink.walk.phase == "backward":
            ctx.sink.take(lambda group, i: group.add_product(i, rows.t(), inputs))
        elif needs_weight:
            of_weight = rows.t().matmul(inputs)
        return of_x, of_weight, of_bias, None


class _Embedding(torch.autograd.Function):
    """ids: [...] of integers, weight: [entries, width] -> [..., width]."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding: int | None, sink: Sink) -> Tensor:
        ctx.sink, ctx.padding, ctx.entries = sink, padding, weight.shape[0]
        ctx.save_for_backward(ids)
        return F.embedding(ids, weight, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        (ids,) = ctx.saved_tensors
        if ctx.sink.walk.phase == "backward" and not grad.is_cuda:  # there, adding rows in any order would not repeat bit for bit
            flat, rows = ids.reshape(-1), grad.reshape(-1, grad.shape[-1])
            if ctx.padding is not None:
                flat, rows = flat[flat != ctx.padding], rows[flat != ctx.padding]
            ctx.sink.take(lambda group, i: group.add_rows(i, flat, rows))
            return None, None, None, None
        padding = -1 if ctx.padding is None else ctx.padding
        return None, torch.ops.aten.embedding_dense_backward(grad, ids, ctx.entries, padding, False), None, None
