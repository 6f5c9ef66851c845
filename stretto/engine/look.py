"""Looking into a cut model: whole tensors by name, and the bytes a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from stretto.parallel.parallelize import Parallel
from stretto.parallel.sharded import ShardedGroup


def whole_tensors(
    parallel: Parallel, reason: str, part: Callable[[ShardedGroup], Tensor | None], rank: int
) -> Iterator[tuple[str, Tensor | None]]:
    """The tensors whose parts `part` gives of each group (None: leave the group out), joined, one at a time, under every name
    they have: on the CPU of rank 0, None elsewhere. Collective."""
    for group in parallel.groups:
        mine = part(group)
        if mine is None:
            continue
        whole = group.whole_of(mine, reason)
        for slot in group.plan.slots:
            for name in parallel.aliases[slot.name]:
                yield name, whole[slot.start : slot.stop].view(slot.shape).cpu().clone() if rank == 0 else None


def bytes_held(model: nn.Module, parallel: Parallel, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """See Engine.bytes_held."""
    groups, rooms = parallel.groups, parallel.rooms
    state = [] if optimizer is None else [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
    masters = [group.master for group in groups if group.separate_master]
    passing = [slot for room in rooms for slot in room.slots] + [t for group in groups for t in group.temporary()]
    return {
        "parameters": live_bytes([group.held for group in groups]),
        "gradients": live_bytes([group.grad for group in groups if group.trainable]),
        "optimizer": live_bytes([*masters, *(t for t in state if t.numel() > 1)]),
        "buffers": live_bytes([*passing, *model.buffers(), *(t for t in state if t.numel() <= 1)]),
    }


def live_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages behind these tensors, each storage once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())
