"""Walk: takes a model's groups through forward and backward in one declared order, the same on every rank.

[Note: lanes] Nobody knows before a forward what other ranks will run: a branch may run on one rank only. So gathers stand in
one fixed order (forward: first unit to last; backward: last to first), reductions in another (last to first), and each rank
issues strictly in those orders: what it skips it catches up on, before what comes later or at the end. Gathers and reductions
use channels of their own, so only the order within each matters, and a rank without any data can still take part.

[Note: reverse order] Autograd runs nodes in reverse order of their creation. When the gradient of a unit's output arrives,
everything that ran after the unit in forward has its gradients: later units are then finished, and gradients they did not get
are zero. That holds where this rank went straight through, each module at most once and in order, since its last backward;
after two forwards, or a block that ran twice, what did not come is known to be zero only at the end. A weight that is used
outside the forward of its module escapes this watch: its late gradient is an error (ShardedGroup), never a lost one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stretto.errors import RunError
from stretto.layout.zero import ZeroPolicy
from stretto.parallel.sharded import ShardedGroup
from stretto.parallel.units import Unit


class Stop:
    """One unit on the walk: its groups (trainable, frozen) and what is known of it in this microbatch."""

    def __init__(self, index: int, unit: Unit, groups: Sequence[ShardedGroup]) -> None:
        self.index, self.unit, self.groups = index, unit, tuple(groups)
        self.running = 0
        self.finished = False

    @property
    def resident(self) -> bool:
        return all(group.resident for group in self.groups)

    def rooms(self) -> list[ShardedGroup]:
        """Other groups, perhaps of another walk, that lie in the slots this stop's groups need."""
        users = [group.param_room[0].user[group.param_room[1]] for group in self.groups if group.param_room]
        return [user for user in users if user is not None and user not in self.groups]


class Walk:
    """See the module. `step` and `rank` are only for messages."""

    def __init__(
        self, model: nn.Module, stops: Sequence[Stop], policy: ZeroPolicy, rank: int, *, watch_inside: bool = True, pipelined: bool = False
    ) -> None:
        """pipelined: other microbatches and stages run between a microbatch's forward and its backward, and nothing stays gathered."""
        self.stops, self.policy, self.rank, self.pipelined = tuple(stops), policy, rank, pipelined
        self.groups = tuple(group for stop in stops for group in stop.groups)
        self.step = 0
        self.phase = "idle"
        self._splitting = False  # this backward leaves the weight gradients for later
        self._discarding = False
        self._next = 0
        self._gathered: set[int] = set()
        self._reduce_at = -1
        self._last = False
        self._at = (-1, -1)  # the unit, and its module, that ran last
        self._straight = True
        self._cut = "param" in policy.cut
        self._stop_of = {group: stop for stop in stops for group in stop.groups}
        for group in self.groups:
            group.on_complete(self._advance)
        model.register_forward_pre_hook(lambda *_: self._enter_root())
        model.register_forward_hook(lambda *_: self._leave_root(), always_call=True)
        self._root_depth = 0
        for stop in stops:
            self._hook(stop, watch_inside)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def _hook(self, stop: Stop, watch_inside: bool) -> None:
        if not stop.unit.regular:
            if self._cut:
                for module in stop.unit.modules:
                    module.register_forward_pre_hook(lambda *_: self._before_forward(stop))
            return
        last = stop.unit.modules[-1]
        cut = {param for _, param in stop.unit.params}  # a module shared with other units has none of these, and may run anywhere
        for position, module in enumerate(stop.unit.modules):
            module.register_forward_pre_hook(lambda *_, position=position: self._start(stop, position))
            module.register_forward_hook(lambda m, _, out: self._end(stop, m is last, out), always_call=True)
            if self._cut and watch_inside:
                for name, inner in module.named_modules():
                    if inner is not module and not cut.isdisjoint(inner.parameters(recurse=False)):
                        inner.register_forward_pre_hook(lambda *_, name=name: self._inside(stop, name))

    def _enter_root(self) -> None:
        if self.phase == "idle":
            self._open()
            self._root_depth = 1
        elif self._root_depth:
            self._root_depth += 1

    def _leave_root(self) -> None:
        if self._root_depth:
            self._root_depth -= 1
            if self._root_depth == 0:
                self.end_forward()

    def _start(self, stop: Stop, position: int) -> None:
        stop.running += 1
        if self.phase != "backward" and torch.is_grad_enabled():
            here = (stop.index, position)
            self._straight = self._straight and self.phase == "forward" and here > self._at
            self._at = here
        self._before_forward(stop)

    def _end(self, stop: Stop, last: bool, out: Any) -> None:
        stop.running -= 1
        if self.phase != "forward":
            return
        if torch.is_grad_enabled():
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda _: self._before_backward(stop))
        if last and self._cut and self.policy.params == "microbatch":
            self._release(stop)

    def _inside(self, stop: Stop, name: str) -> None:
        if not stop.running and not stop.resident:
            raise RunError(
                f"rank {self.rank}, step {self.step}: {stop.unit.name}.{name} ran outside the forward of {stop.unit.name}, "
                f'whose parameters are cut (ZeRO 3); write zero.keep=["{stop.unit.name}"]'
            )

    # -- forward ---------------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The next microbatch's; `straight` is about it alone."""
        self._at, self._straight = (-1, -1), True
        self._open()

    @property
    def straight(self) -> bool:
        """Whether each module has run at most once and in order since begin_forward, or since the last backward."""
        return self._straight

    def _open(self) -> None:
        self.phase = "forward"
        self._next = 0
        for stop in self.stops:
            stop.running = 0

    def end_forward(self) -> None:
        """Catch up on gathers this rank skipped; what is not kept is freed."""
        if self._cut:
            self._gather_up_to(len(self.stops) - 1)
            for stop in self.stops:
                passing = stop.unit.regular or self.pipelined
                if (self.policy.params == "microbatch" and passing) or not torch.is_grad_enabled():
                    self._release(stop)
        self.phase = "idle"

    def _before_forward(self, stop: Stop) -> None:
        if not self._cut:
            return
        if self.phase == "forward":
            if stop.index < self._next and not stop.resident:
                raise RunError(
                    f"rank {self.rank}, step {self.step}: {stop.unit.name} runs a second time, or out of order, in one forward, after its "
                    f'parameters were freed (ZeRO 3); write zero.keep=["{stop.unit.name}"] to keep them gathered'
                )
            self._gather_up_to(stop.index)
            following = stop.index + 1  # a unit ahead of need
            if following < len(self.stops) and following == self._next and not self._busy(self.stops[following]):
                self._gather_up_to(following)
        elif not stop.resident:
            raise RunError(
                f"rank {self.rank}, step {self.step}: {stop.unit.name} runs outside a forward of the engine's model while its parameters "
                "are cut (ZeRO 3); call engine.model(...) as a whole"
            )
        for group in stop.groups:
            group.ready()

    def _gather_up_to(self, index: int) -> None:
        while self._next <= index:
            stop = self.stops[self._next]
            self._next += 1
            if stop.index not in self._gathered:
                self._gather(stop, "before_forward", stop.groups)

    def _gather(self, stop: Stop, reason: str, groups: Sequence[ShardedGroup]) -> None:
        if self._busy(stop):
            other = next(self._stop_of[group].unit.name for group in stop.rooms() if group in self._stop_of)
            raise RunError(
                f"rank {self.rank}, step {self.step}: {stop.unit.name} runs inside {other}, and both need the same buffer (ZeRO 3); "
                f'write zero.keep=["{stop.unit.name}"]'
            )
        for group in stop.rooms():
            if group in self._stop_of:
                self._gathered.discard(self._stop_of[group].index)
        for group in groups:
            group.gather(reason)
        self._gathered.add(stop.index)

    def _busy(self, stop: Stop) -> bool:
        return any(self._stop_of[group].running for group in stop.rooms() if group in self._stop_of)

    def _release(self, stop: Stop) -> None:
        for group in stop.groups:
            group.free()
        self._gathered.discard(stop.index)

    # -- backward --------------------------------------------------------------------------------------------------

    def begin_backward(self, last: bool, straight: bool | None = None, split: bool = False, discard: bool = False) -> None:
        """last: of the step; gradients that are reduced once a step are reduced in it. straight: what `straight` was after the forward
        of this microbatch; None: nothing has run since. split: gradients of parameters wait in each group's `postponed`, for
        `weights` to add them; then nothing is reduced before that. [Note: halves] discard: the loss only runs through this model, and
        its parameters get no gradient."""
        self.phase, self._last, self._splitting, self._discarding = "backward", last, split, discard
        self._straight = self._straight if straight is None else straight
        self._next = len(self.stops) - 1
        self._reduce_at = len(self.groups) - 1
        for group in self.groups:
            group.postponed = [] if split else None
        for stop in self.stops:
            stop.finished = False
            for group in stop.groups:
                group.discarding = discard
                if not discard:
                    group.begin_backward()
        if self._cut:
            for stop in self.stops:
                if not stop.unit.regular and stop.index not in self._gathered:
                    self._gather(stop, "before_backward", stop.groups)
                    for group in stop.groups:
                        group.ready()

    def _before_backward(self, stop: Stop) -> None:
        if self.phase == "forward":  # torch.autograd.grad inside the model's forward
            if stop.resident:
                return
            raise RunError(
                f"rank {self.rank}, step {self.step}: a gradient taken inside the forward goes through {stop.unit.name}, whose parameters "
                f'are freed (ZeRO 3); write zero.keep=["{stop.unit.name}"]'
            )
        if self.phase != "backward":
            raise RunError("a backward outside the engine: call engine.backward(loss_sum, count) instead of loss.backward()")
        if stop.finished and stop.resident:
            return
        if self._straight:
            for later in self.stops[stop.index + 1 :]:
                self._finish(later)
        if self._cut:
            self._gather_down_to(stop.index)
            if not stop.resident:
                raise RunError(
                    f"rank {self.rank}, step {self.step}: one backward goes through {stop.unit.name} twice (two forwards, one backward) "
                    "while ZeRO 3 frees parameters after each use; write zero.params=step zero.gradients=end"
                )
            ahead = self.stops[stop.index - 1] if stop.index > 0 else None
            if ahead is not None and ahead.unit.regular and ahead.index == self._next and not self._busy(ahead):
                self._gather_down_to(ahead.index)
            for group in stop.groups:
                group.ready()

    def _finish(self, stop: Stop) -> None:
        """[Note: reverse order] applies to regular units: nothing more comes for this one."""
        if stop.finished or not stop.unit.regular:
            return
        stop.finished = True
        self._gather_down_to(stop.index)
        for group in stop.groups:
            group.finish_backward()
        self._advance()
        if self._cut and self.policy.params == "microbatch":
            self._release(stop)

    def _gather_down_to(self, index: int) -> None:
        if not self._cut:
            return
        while self._next >= index:
            stop = self.stops[self._next]
            self._next -= 1
            if stop.index not in self._gathered:
                self._gather(stop, "before_backward", tuple(reversed(stop.groups)))

    def _advance(self) -> None:
        """Issue, in order, the reductions whose gradients are complete."""
        if self._splitting or self._discarding or (self.policy.gradients != "each" and not self._last):
            return
        reason = "after_backward" if self.policy.gradients == "each" else "last_backward"
        while self._reduce_at >= 0 and self.groups[self._reduce_at].complete:
            group = self.groups[self._reduce_at]
            self._reduce_at -= 1
            group.reduce(reason)

    def end_backward(self) -> None:
        """Catch up on everything this rank skipped."""
        for stop in reversed(self.stops):
            self._finish(stop)
        self._gather_down_to(0)
        for stop in self.stops:
            for group in stop.groups:
                group.finish_backward()
        self._advance()
        if self._cut and self.policy.params == "microbatch":
            for stop in self.stops:
                self._release(stop)
        for group in self.groups:
            group.listening = group.discarding = False
        self.phase, self._splitting, self._discarding = "idle", False, False
        self._at, self._straight = (-1, -1), True

    def take_postponed(self) -> list[list[Callable[[], None]]]:
        """What a split backward has left to do, group by group: to be handed to `weights`."""
        left = [group.postponed or [] for group in self.groups]
        for group in self.groups:
            group.postponed = None
        return left

    def weights(self, postponed: Sequence[Sequence[Callable[[], None]]], last: bool) -> None:
        """The second half of a split backward: add the gradients of parameters, group after group in the order of reductions.

        [Note: halves] The first half computes gradients of activations, which the stage before waits for, and leaves all those
        of parameters, also the cheap ones: between the halves other microbatches run, and where gradients are reduced each time,
        only two groups at once have room for whole ones. So this is the only half that touches gradient buffers and reduces.
        """
        self._last = last
        self._reduce_at = len(self.groups) - 1
        for group in self.groups:
            group.begin_backward()
        with torch.no_grad():
            for group, left in zip(reversed(self.groups), reversed(postponed), strict=True):
                for add in left:
                    add()
                group.finish_backward()
                self._advance()
                group.listening = False

    def reduce_rest(self) -> None:
        """Reduce what no `last` backward has: the caller's own loop does not say which is the last."""
        if self.policy.gradients == "end" and not self._last:
            for group in reversed(self.groups):
                group.reduce("last_backward")

    def end_step(self) -> None:
        self._last = False
        if self._cut:
            for stop in self.stops:
                self._release(stop)
        for group in self.groups:
            group.clear()
