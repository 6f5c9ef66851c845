"""How many bytes a rank sends, counted at torch's dispatcher, whichever framework sends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group  # torch gives a group by its name in no other way
from torch.distributed.distributed_c10d import GroupName
from torch.utils._python_dispatch import TorchDispatchMode

#: Operator of torch.distributed, by its name up to a trailing "_" and "_out" -> (which tensors are counted, share of them that a rank
#: sends among n by a bandwidth-optimal algorithm (REFERENCE A2)): "in" what it hands in, "out" what it receives.
SHARES: Mapping[str, tuple[str, Callable[[int], float]]] = {
    "allreduce": ("in", lambda n: 2 * (n - 1) / n),
    "allreduce_coalesced": ("in", lambda n: 2 * (n - 1) / n),
    "all_reduce": ("in", lambda n: 2 * (n - 1) / n),
    "all_reduce_coalesced": ("in", lambda n: 2 * (n - 1) / n),
    "reduce_scatter": ("in", lambda n: (n - 1) / n),
    "_reduce_scatter_base": ("in", lambda n: (n - 1) / n),
    "reduce_scatter_tensor": ("in", lambda n: (n - 1) / n),
    "reduce_scatter_tensor_coalesced": ("in", lambda n: (n - 1) / n),
    "allgather": ("in", lambda n: n - 1.0),
    "_allgather_base": ("in", lambda n: n - 1.0),
    "allgather_into_tensor_coalesced": ("in", lambda n: n - 1.0),
    "all_gather_into_tensor": ("in", lambda n: n - 1.0),
    "all_gather_into_tensor_coalesced": ("in", lambda n: n - 1.0),
    "broadcast": ("in", lambda n: (n - 1) / n),
    "reduce": ("in", lambda n: (n - 1) / n),
    "alltoall": ("in", lambda n: (n - 1) / n),
    "alltoall_base": ("in", lambda n: (n - 1) / n),
    "all_to_all_single": ("in", lambda n: (n - 1) / n),
    "send": ("in", lambda n: 1.0),
}
#: Where an operator writes into its first argument, what it hands in is the second.
SECOND = frozenset(
    ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "allgather", "_allgather_base",
     "allgather_into_tensor_coalesced", "alltoall", "alltoall_base")
)  # fmt: skip


class Traffic(TorchDispatchMode):
    """Within it, `sent` grows by the payload of every collective and message of torch.distributed; `calls` counts them by operator.

    A backend of one's own below torch.distributed is seen as well; what goes past torch.distributed is not.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes_ = 0.0
        self.calls: dict[str, int] = {}

    @property
    def sent(self) -> int:
        return round(self.bytes_)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented  # it turns into plain tensors and messages, which come here in their turn
        namespace, _, name = func._schema.name.partition("::")
        if namespace in ("c10d", "_c10d_functional"):
            self._count(namespace, name.removesuffix("_out").rstrip("_"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, namespace: str, name: str, args: tuple[Any, ...]) -> None:
        if name not in SHARES:
            return
        _, share = SHARES[name]
        handed_in = args[1] if namespace == "c10d" and name in SECOND else args[0]
        size = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(handed_in))
        self.bytes_ += size * share(_members(namespace, args))
        self.calls[name] = self.calls.get(name, 0) + 1


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


def _members(namespace: str, args: tuple[Any, ...]) -> int:
    """Ranks of the group that an operator is called with."""
    for value in args:
        if namespace == "_c10d_functional" and isinstance(value, str) and value not in ("sum", "avg", "max", "min", "product"):
            return int(_resolve_process_group(GroupName(value)).size())
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return int(dist.ProcessGroup.unbox(value).size())
    return dist.get_world_size()
