"""Faults to inject: each breaks the step of one tensor in a way that has happened to somebody, so that `check` can show it sees it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from stretto.engine.engine import Engine
from stretto.errors import JobError
from stretto.parallel.sharded import ShardedGroup


class Spot(NamedTuple):
    """Where a fault strikes: parameter `number`, called `name`, of `group`."""

    engine: Engine
    group: ShardedGroup
    number: int
    name: str


def _before_reduction(spot: Spot, change: Callable[[torch.Tensor], object]) -> None:
    """Do something to the tensor's gradient on this rank, just before it is added to those of other ranks."""
    group, reduce = spot.group, spot.group.reduce

    def broken(reason: str) -> None:
        if spot.number in group._touched:
            change(group._grads[spot.number])
        reduce(reason)

    group.reduce = broken  # type: ignore[method-assign]


def missing_reduction(spot: Spot) -> None:
    """Only one rank's gradient counts."""
    if spot.group.group.size == 1:
        raise JobError('missing-reduction needs ranks to reduce over; write mesh="dp=2"')
    if spot.group.group.index != 0:
        _before_reduction(spot, lambda grad: grad.zero_())


def wrong_scale(spot: Spot) -> None:
    """The gradient is half of what it should be, as with a mean over ranks of sums."""
    _before_reduction(spot, lambda grad: grad.mul_(0.5))


def off_by_one(spot: Spot) -> None:
    """One rank's gradient lies one element further on."""
    if spot.group.group.index == 0:
        _before_reduction(spot, lambda grad: grad.view(-1).copy_(grad.reshape(-1).roll(1)))


def stale_gradient(spot: Spot) -> None:
    """What was not cleared after the last step is added to this one's."""
    left: list[torch.Tensor] = []

    def change(grad: torch.Tensor) -> None:
        now = grad.clone()
        for old in left:
            grad.add_(old)
        left[:] = [now]

    _before_reduction(spot, change)


def lost_microbatch(spot: Spot) -> None:
    """The gradient of a step's last microbatch is not added."""
    group, begin = spot.group, spot.group.begin_backward
    before: list[torch.Tensor] = []

    def remember() -> None:
        begin()
        grad = group._grads[spot.number]
        before[:] = [grad.clone() if spot.number in group._touched else torch.zeros_like(grad)]

    group.begin_backward = remember  # type: ignore[method-assign]
    _before_reduction(spot, lambda grad: grad.copy_(before[0]) if _last(spot) else None)


def _last(spot: Spot) -> bool:
    """Whether this is the last backward of the stage in this step."""
    return any(stage.walk._last for stage in spot.engine.parallel.stages if spot.group in stage.walk.groups)


def skipped_update(spot: Spot) -> None:
    """The optimizer passes the tensor over."""
    group, attach = spot.group, spot.group.attach_gradients

    def broken() -> None:
        attach()
        for piece in group.pieces:
            if piece.name == spot.name:
                piece.value.grad = None

    group.attach_gradients = broken  # type: ignore[method-assign]


def stale_gather(spot: Spot) -> None:
    """The last rank goes on with the values from before the update."""
    group = spot.group
    if group.group.index != group.group.size - 1:
        return
    old: list[torch.Tensor] = []
    if group.cuts("param"):
        ready = group.ready

        def stale() -> None:
            gathered = group._gather is not None
            ready()
            if gathered:
                old[:] = old or [group._views[spot.number].clone()]
                group._views[spot.number].copy_(old[0])

        group.ready = stale  # type: ignore[method-assign]
        return
    attach, published = group.attach_gradients, group.wait_published

    def remember() -> None:
        old[:] = [group._views[spot.number].clone()]
        attach()

    def forget() -> None:
        published()
        group._views[spot.number].copy_(old[0])

    group.attach_gradients, group.wait_published = remember, forget  # type: ignore[method-assign]


def missing_tp_sum(spot: Spot) -> None:
    """Of a gradient of which each tp rank has its own tokens' or heads' share, only the first rank's counts."""
    place = spot.group.places[spot.name]
    if not place.summed:
        raise JobError(
            f"missing-tp-sum: the gradient of {spot.name} is complete on each tp rank; name one that is summed over tp, such as a norm "
            "with tensor.sequence=true"
        )
    if spot.engine.tensors.group.index == 0:
        return
    group, summed = spot.group, spot.group.summed_gradient

    def broken(axis: str) -> list[torch.Tensor]:
        if axis == place.summed:
            slot = group.plan.slots[spot.number]
            low, high = max(slot.start, group.update_low), min(slot.stop, group.update_high)
            group.update_gradient()[max(low - group.update_low, 0) : max(high - group.update_low, 0)].zero_()
        return summed(axis)

    group.summed_gradient = broken  # type: ignore[method-assign]


def bit_flip(spot: Spot) -> None:
    """One element comes out of the update with its sign changed."""
    group, publish = spot.group, spot.group.publish

    def broken() -> None:
        for piece in group.pieces:
            if piece.name == spot.name and piece.start == 0:
                first = piece.value.data.view(-1)[:1]
                first.copy_(-first - 1e-3)
        publish()

    group.publish = broken  # type: ignore[method-assign]


def wrong_decay(spot: Spot) -> None:
    """The tensor decays though it should not, or does not though it should."""
    decay = spot.engine.job.optimizer.weight_decay
    if not decay:
        raise JobError("wrong-decay changes nothing with optimizer.weight_decay=0; write optimizer.weight_decay=0.1")
    optimizer = spot.engine.optimizer
    assert optimizer is not None
    for piece in spot.group.pieces:
        if piece.name != spot.name:
            continue
        for number, parameters in enumerate(list(optimizer.param_groups)):
            if any(p is piece.value for p in parameters["params"]):
                parameters["params"] = [p for p in parameters["params"] if p is not piece.value]
                other = 0.0 if parameters["weight_decay"] else decay
                optimizer.param_groups.append({**parameters, "params": [piece.value], "weight_decay": other})
                spot.engine.base_lr.append(spot.engine.base_lr[number])


FAULTS: Mapping[str, Callable[[Spot], None]] = MappingProxyType(
    {
        "missing-reduction": missing_reduction,
        "wrong-scale": wrong_scale,
        "off-by-one": off_by_one,
        "stale-gradient": stale_gradient,
        "lost-microbatch": lost_microbatch,
        "skipped-update": skipped_update,
        "stale-gather": stale_gather,
        "missing-tp-sum": missing_tp_sum,
        "bit-flip": bit_flip,
        "wrong-decay": wrong_decay,
    }
)


def inject(engine: Engine, asked: str) -> None:
    """Break `engine` as FAULT@NAME says. Raises JobError for a fault or a parameter that does not exist."""
    fault, at, name = asked.partition("@")
    if fault not in FAULTS or not at:
        raise JobError(f"--inject {asked}: write FAULT@PARAMETER; the faults are {', '.join(FAULTS)}")
    for group in engine.parallel.groups:
        for index, kept in enumerate(group.names):
            if name in engine.parallel.aliases[kept]:
                if not group.trainable:
                    raise JobError(f"--inject {asked}: {name} is frozen, so its step cannot be broken; name a trainable parameter")
                FAULTS[fault](Spot(engine, group, index, kept))
                return
    for content in engine.parallel.contents:
        if any(name in engine.parallel.aliases[kept] for kept, _ in content.tensors):
            return  # another pipeline stage has it, and breaks it
    known = [n for names in engine.parallel.aliases.values() for n in names]
    near = difflib.get_close_matches(name, known, n=1)
    raise JobError(f"--inject {asked}: the model has no parameter {name!r}; write for example {fault}@{near[0] if near else known[0]}")
