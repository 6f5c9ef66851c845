"""Which activations of a block are kept for its backward, and which are computed again there.

`none` keeps all; `full` keeps a block's inputs; `selective` also keeps the outputs of weight matrix products and of
attention, so that backward repeats only the cheap rest: norms, rotations, activations, sums. Where a product is one rank's
summand, its sum is kept in its place: to add it up again would be another message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from stretto.anatomy import Recompute
from stretto.comm.crossing import CARRY
from stretto.parallel.memory import memory_of

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
SUMS = ("all_reduce", "reduce_scatter")

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]  # around the forward, around its repetition


#: Called where a block runs; what it returns is called before the block runs again, and brings back what the block reads
#: besides its arguments.
Remember = Callable[[], Callable[[], None]]


def apply(
    blocks: Sequence[nn.Module], mode: Recompute, preserve_rng: bool, *, compiled: bool = False, remember: Sequence[Remember] = ()
) -> None:
    """Let each block keep what `mode` says. The last call decides: "none" takes an earlier mode off again.

    It replaces `block.forward`, not the call, so that the block's hooks stay outside and run once a forward.
    preserve_rng: draw the same dropout again; False where ranks are threads, which share torch's global generator.
    compiled: `block.forward` will be compiled after this call. For `selective` the compiler must see what is kept, and has its own
    way to, for it cannot read `_Keep`; what a block reads besides its arguments is then part of the graph. For `full` it need not
    see anything: the compiled block is run twice.
    """
    for block in blocks:
        current = block.forward
        forward = current.forward if isinstance(current, Recomputed) else current
        if mode == "none" and forward is not current:
            block.forward = forward
        elif mode != "none":
            inside = compiled and mode == "selective"
            block.forward = Recomputed(forward, CALLS[mode, inside], preserve_rng, () if inside else tuple(remember), inside)


class Recomputed:
    """A forward whose activations are dropped and computed again in backward. An object, so that a copy of the module
    copies it too: a closure would go on calling the first module. inside: it is to be compiled as a part of the block."""

    def __init__(
        self,
        forward: Callable[..., Any],
        call: Callable[..., Any],
        preserve_rng: bool,
        remember: tuple[Remember, ...] = (),
        inside: bool = False,
    ) -> None:
        functools.update_wrapper(self, forward, updated=())  # models look at the signature
        self.forward, self.call, self.preserve_rng, self.remember, self.inside = forward, call, preserve_rng, remember, inside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(_again, self.forward, [look() for look in self.remember]) if self.remember else self.forward
        return self.call(forward, *args, preserve_rng_state=self.preserve_rng, **kwargs)


def _again(forward: Callable[..., Any], recalls: Sequence[Callable[[], None]], *args: Any, **kwargs: Any) -> Any:
    for recall in recalls:
        recall()
    return forward(*args, **kwargs)


def kept(func: Any, args: Sequence[Any]) -> bool:
    """Whether selective recompute keeps this operator's output."""
    return func in KEPT or (func is CARRY and args[2] in SUMS)


# --- selective ------------------------------------------------------------------------------------


class _Output(NamedTuple):
    """What one kept operator gave. value: None if it was let go. versions: of the value's tensors when it was kept."""

    func: Any
    value: Any
    versions: tuple[int, ...]


class _Summand(NamedTuple):
    """A product of which only the sum over ranks is kept: in the repetition anything of its shape will do."""

    func: Any
    like: Tensor


#: What one forward of one block keeps, in order.
Outputs = list[_Output | _Summand]


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

    def __init__(self, outputs: Outputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outputs = outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if kept(func, args):
            last = self.outputs[-1] if self.outputs else None
            if func is CARRY and isinstance(last, _Output) and last.func in PRODUCTS and _same_memory(last.value, args[0]):
                empty = last.value.new_empty(()).expand(last.value.shape)
                self.outputs[-1] = _Summand(last.func, empty)
            alias = _alias(output)
            self.outputs.append(_Output(func, alias, _versions(alias)))
        return output

    def __exit__(self, *problem: Any) -> None:
        products = [n for n, output in enumerate(self.outputs) if output.func in PRODUCTS]
        for n in range(products[-1], len(self.outputs)) if products else ():
            self.outputs[n] = _Output(self.outputs[n].func, None, ())
        super().__exit__(*problem)  # type: ignore[no-untyped-call]


class _Replay(TorchDispatchMode):
    """Around the repetition: hand out what was kept, in order; compute what was not.

    A kept output that the block has since changed in place is stale, and is computed again.
    """

    def __init__(self, outputs: Outputs) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outputs = outputs
        self.next = 0

    def __enter__(self) -> Self:
        self.next = 0  # each backward through the block repeats it from the start
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kept(func, args):
            output = self.outputs[self.next] if self.next < len(self.outputs) else None
            self.next += 1
            if isinstance(output, _Summand) and output.func is func:
                return torch.empty_like(output.like, memory_format=torch.contiguous_format)
            if (
                isinstance(output, _Output)
                and output.func is func
                and output.value is not None
                and output.versions == _versions(output.value)
            ):
                return _alias(output.value)
        return func(*args, **(kwargs or {}))


def _same_memory(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and memory_of(a) == memory_of(b)


def _selective() -> Contexts:
    outputs: Outputs = []
    return _Keep(outputs), _Replay(outputs)


def _policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if kept(func, args) else CheckpointPolicy.PREFER_RECOMPUTE


_checkpoint = functools.partial(checkpoint, use_reentrant=False)

# (mode, seen by the compiler) -> how a block's forward is called
CALLS: Mapping[tuple[Recompute, bool], Callable[..., Any]] = MappingProxyType(
    {
        ("full", False): _checkpoint,
        ("selective", False): functools.partial(_checkpoint, context_fn=_selective),
        ("selective", True): functools.partial(_checkpoint, context_fn=functools.partial(create_selective_checkpoint_contexts, _policy)),
    }
)
