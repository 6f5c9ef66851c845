"""Looking into a cut model: whole tensors by name, and the bytes a rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from stretto.parallel.parallelize import Parallel
from stretto.parallel.place import Place
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
        buffer = group.whole_of(mine, reason)
        for slot in group.plan.slots:
            whole = over_tp(parallel, slot.name, group.places[slot.name], buffer[slot.start : slot.stop].view(slot.shape), reason)
            for name in parallel.aliases[slot.name]:
                yield name, whole.cpu().clone() if rank == 0 else None


def over_tp(parallel: Parallel, name: str, place: Place, mine: Tensor, reason: str) -> Tensor:
    """The whole of a tensor of which this tp rank has the part `mine`. Collective over tp."""
    tp = parallel.tensors.group
    if not place.axis:
        return mine
    shapes = [place.local_shape(tp.mesh, rank) for rank in tp.ranks]
    bounds = list(accumulate(map(math.prod, shapes), initial=0))
    parts = mine.new_empty(bounds[-1])
    parts[bounds[tp.index] : bounds[tp.index + 1]] = mine.reshape(-1)
    tp.all_gather(parts, bounds, reason=f"{reason} {name}", lane="user").wait()
    whole = mine.new_empty(place.shape)
    for rank, shape, (start, stop) in zip(tp.ranks, shapes, pairwise(bounds), strict=True):
        for there, here in place.layout.place(place.shape, tp.mesh, rank):
            whole[there] = parts[start:stop].view(shape)[here]
    return whole


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
