"""Which activations of a block are kept for its backward, and which are computed again there.

`none` keeps all; `full` keeps a block's inputs; `selective` also keeps the outputs of weight matrix products and of
attention, so that backward repeats only the cheap rest: norms, rotations, activations, sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from stretto.anatomy import Recompute

aten = torch.ops.aten

# bmm is not among them: where attention is written out, it makes the T x T scores, which are what not to keep.
PRODUCTS = frozenset((aten.mm.default, aten.addmm.default, aten.convolution.default, aten._grouped_mm.default, aten._scaled_mm.default))
ATTENTION = frozenset(
    (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.higher_order.flex_attention,
    )
)
KEPT = PRODUCTS | ATTENTION

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # around the forward, around its repetition


def apply(blocks: Sequence[nn.Module], mode: Recompute, preserve_rng: bool, *, compiled: bool = False) -> None:
    """Let each block keep what `mode` says. The last call decides: "none" takes an earlier mode off again.

    It replaces `block.forward`, not the call, so that the block's hooks stay outside and run once a forward.
    preserve_rng: draw the same dropout again; False where ranks are threads, which share torch's global generator.
    compiled: `block.forward` will be compiled after this call: the compiler cannot read `_Keep`, it has its own way.
    """
    for block in blocks:
        current = block.forward
        forward = current.forward if isinstance(current, Recomputed) else current
        if mode == "none" and forward is not current:
            block.forward = forward
        elif mode != "none":
            block.forward = Recomputed(forward, CALLS[mode, compiled], preserve_rng)


class Recomputed:
    """A forward whose activations are dropped and computed again in backward. An object, so that a copy of the module
    copies it too: a closure would go on calling the first module."""

    def __init__(self, forward: Callable[..., Any], call: Callable[..., Any], preserve_rng: bool) -> None:
        functools.update_wrapper(self, forward, updated=())  # models look at the signature
        self.forward, self.call, self.preserve_rng = forward, call, preserve_rng

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.forward, *args, preserve_rng_state=self.preserve_rng, **kwargs)


# --- selective ------------------------------------------------------------------------------------


class _Kept:
    """What one forward of one block keeps: per kept operator, in order, its output and the output's version."""

    def __init__(self) -> None:
        self.outputs: list[tuple[Any, Any, tuple[int, ...]] | None] = []


def _versions(output: Any) -> tuple[int, ...]:
    return tuple(x._version for x in (output if isinstance(output, (tuple, list)) else (output,)) if isinstance(x, Tensor))


def _alias(output: Any) -> Any:
    """The same memory under another tensor: autograd is about to hang its graph on the one that was returned.

    The key that makes views share their version is off in here, below autograd; without it a change in place of one
    would not show at the other.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tree_map_only(Tensor, lambda x: x.detach(), output)


class _Keep(TorchDispatchMode):
    """Around the forward: write down what is kept.

    torch's own selective checkpoint asks for each operator alone. Here the end is known too: the output of the last
    product of a block only feeds the residual sum, which needs no inputs in backward, so it is let go.
    """

    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in KEPT:
            alias = _alias(output)
            self.kept.outputs.append((func, alias, _versions(alias)))
        return output

    def __exit__(self, *problem: Any) -> None:
        products = [n for n, entry in enumerate(self.kept.outputs) if entry is not None and entry[0] in PRODUCTS]
        if products:
            self.kept.outputs[products[-1]] = None
        super().__exit__(*problem)  # type: ignore[no-untyped-call]


class _Replay(TorchDispatchMode):
    """Around the repetition: hand out what was kept, in order; compute what was not.

    A kept output that the block has since changed in place is stale, and is computed again.
    """

    def __init__(self, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept = kept
        self.next = 0

    def __enter__(self) -> Self:
        self.next = 0  # each backward through the block repeats it from the start
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in KEPT:
            entry = self.kept.outputs[self.next] if self.next < len(self.kept.outputs) else None
            self.next += 1
            if entry is not None and entry[0] is func and entry[2] == _versions(entry[1]):
                return _alias(entry[1])
        return func(*args, **(kwargs or {}))


def _selective() -> Contexts:
    kept = _Kept()
    return _Keep(kept), _Replay(kept)


def _policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if func in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


_checkpoint = functools.partial(checkpoint, use_reentrant=False)

# (mode, compiled) -> how a block's forward is called
CALLS: Mapping[tuple[Recompute, bool], Callable[..., Any]] = MappingProxyType(
    {
        ("full", False): _checkpoint,
        ("full", True): _checkpoint,
        ("selective", False): functools.partial(_checkpoint, context_fn=_selective),
        ("selective", True): functools.partial(_checkpoint, context_fn=functools.partial(create_selective_checkpoint_contexts, _policy)),
    }
)
