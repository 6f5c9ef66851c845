"""Looking into a cut model: whole tensors by name, and the bytes a rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from stretto.parallel.boundary import receive_whole, send_whole
from stretto.parallel.memory import memory_of
from stretto.parallel.parallelize import Parallel
from stretto.parallel.place import Place
from stretto.parallel.sharded import ShardedGroup


def whole_tensors(
    parallel: Parallel, reason: str, part: Callable[[ShardedGroup], Tensor], *, trainable: bool = False
) -> Iterator[tuple[str, Tensor | None]]:
    """The tensors whose parts `part` gives of each group (of trainable ones only, if so asked), joined, one at a time, under every
    name they have: on the CPU of rank 0, None elsewhere. Collective, over all stages."""
    mine = iter(parallel.groups)
    for content in parallel.contents:
        group = next(mine) if parallel.split.rank_of[content.stage] == parallel.pipeline.index else None
        if content.copied or (trainable and not content.trainable):
            continue
        whole = None if group is None else group.whole_of(part(group), reason)
        slots = group.plan.slots if group is not None else [None] * len(content.tensors)
        for (name, _), slot in zip(content.tensors, slots, strict=True):
            tensor = None
            if group is not None and whole is not None and slot is not None:
                tensor = over_tp(parallel, name, group.places[name], whole[slot.start : slot.stop].view(slot.shape), reason)
            found = _to_rank_0(parallel, content.stage, tensor, reason)
            for alias in parallel.aliases[name]:
                yield alias, None if found is None else found.cpu().clone()


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


def whole_buffers(parallel: Parallel) -> Iterator[tuple[str, Tensor | None]]:
    """Persistent buffers, as `whole_tensors` gives parameters: each from the first stage that has it."""
    for number, names in enumerate(parallel.buffers):
        here = parallel.split.rank_of[number] == parallel.pipeline.index
        found = dict(parallel.stage(number).model.named_buffers()) if here else {}
        for name in names:
            buffer = _to_rank_0(parallel, number, found.get(name), "state")
            yield name, None if buffer is None else buffer.detach().cpu().clone()


def _to_rank_0(parallel: Parallel, stage: int, tensor: Tensor | None, reason: str) -> Tensor | None:
    """What a stage's ranks have, on rank 0; None elsewhere. Of the ranks that have it, the one in the pipeline of rank 0 sends."""
    stages, holder = parallel.pipeline, parallel.split.rank_of[stage]
    if 0 not in stages.ranks:
        return None
    if stages.index == holder and holder != 0:
        assert tensor is not None
        send_whole(stages, tensor, 0, f"{reason} of stage {stage}")
    if stages.index != 0:
        return None
    return tensor if holder == 0 else receive_whole(stages, holder)


def held_tensors(parallel: Parallel, optimizer: torch.optim.Optimizer | None) -> dict[str, list[Tensor]]:
    """What this rank holds between steps, by kind. See Engine.bytes_held."""
    groups, rooms = parallel.groups, parallel.rooms
    state = [] if optimizer is None else [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor)]
    masters = [group.master for group in groups if group.separate_master]
    passing = [slot for room in rooms for slot in room.slots] + [t for group in groups for t in group.temporary()]
    buffers = [buffer for stage in parallel.stages for buffer in stage.model.buffers()]
    return {
        "parameters": [group.held for group in groups],
        "gradients": [group.grad for group in groups if group.trainable],
        "optimizer": [*masters, *(t for t in state if t.numel() > 1)],
        "buffers": [*passing, *buffers, *(t for t in state if t.numel() <= 1)],
    }


def bytes_held(parallel: Parallel, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """See Engine.bytes_held."""
    return {kind: live_bytes(tensors) for kind, tensors in held_tensors(parallel, optimizer).items()}


def live_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages behind these tensors, each storage once."""
    return sum({memory_of(t): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())
