"""ShardedGroup: parameters that are gathered, reduced and updated together, as their row of the ZERO table says.

Parameters are views of one flat buffer, gradients of another: a collective moves the buffer, nobody packs or unpacks.

[Note: who holds what]        stage 0      1            2             3
    parameters (compute)      whole        whole        whole         my part; whole in a slot while needed
    gradients (reduce)        whole        whole        my part       my part; whole in a bucket until reduced
    master (master dtype)     whole        my part      my part       my part       (the parameters themselves if the dtypes agree)
    optimizer moments         whole        my part      my part       my part

[Note: one copy a machine] Where ranks share memory, parameters of stages 1 to 3 are one memory for all ranks of a machine: each
writes its part of the update, and with that it is gathered. In stage 3 a rank holds its part of that memory, and while the whole is
needed it looks at the others' parts where they lie: nothing is copied, and no slot is taken. That nobody writes what others still
look at is the vote's doing: no rank updates before all are through with backward. Gradients lie where peers can read them, and are
added from there. Two waits follow from it: for a result, and (`wait`) until peers have read what I am about to write again.
"""

from __future__ import annotations

import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stretto.comm.group import Group
from stretto.comm.memory import Pages, zeros
from stretto.comm.transport import Pending
from stretto.errors import RunError
from stretto.layout.layout import Layout
from stretto.layout.zero import GroupFacts, ZeroPolicy
from stretto.parallel.flat import FlatPlan, Granularity, Slot
from stretto.parallel.place import FILL_ELEMENTS, Fill, Place
from stretto.parallel.precision import Precision


class Piece(NamedTuple):
    """What this rank updates of one named parameter: `value.grad` is its gradient. shape: before ZeRO, so of the part that tp leaves;
    start, stop: elements of that, taken flat."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    value: nn.Parameter


class Room:
    """Memory for whole buffers that live only for a while: `count` of them, used in turn, allocated once.

    [Note: a slot's address] Autograd keeps views of a gathered weight, so a group must find its bytes at the same address in
    backward as in forward: a group always uses the same slot. Users of one slot follow each other by `count` groups.
    """

    def __init__(self, elements: int, count: int, dtype: torch.dtype, group: Group) -> None:
        self.slots = [group.own(elements, dtype) for _ in range(count)]
        self.user: list[ShardedGroup | None] = [None] * count

    @property
    def bytes_(self) -> int:
        return sum(slot.untyped_storage().nbytes() for slot in self.slots)


class ShardedGroup:
    """See the module. `at` moments come from parallel/walk.py, which knows the order of groups.

    params: named; the same names, shapes and order on every rank of `group`, along whose axes parts lie. places: where those lie
    over tp that are not whole and complete there; they follow each other as `regions` needs it.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[tuple[str, nn.Parameter]],
        group: Group,
        replicas: Group,
        policy: ZeroPolicy,
        precision: Precision,
        *,
        granularity: Granularity = "element",
        kept: bool = False,
        places: Mapping[str, Place] | None = None,
    ) -> None:
        self.name, self.group, self.replicas, self.policy, self.precision = name, group, replicas, policy, precision
        self.params = tuple(p for _, p in params)
        self.names = tuple(n for n, _ in params)
        self.trainable = self.params[0].requires_grad
        self.kept = kept
        itemsize = precision.compute.itemsize
        self.places = {n: (places or {}).get(n) or Place.whole(tuple(p.shape)) for n, p in params}
        room = [place.room(group.mesh) for place in self.places.values()]
        self.plan = FlatPlan.of([(n, tuple(p.shape)) for n, p in params], group.size, granularity, itemsize, room)
        self.low, self.high = self.plan.bounds[group.index], self.plan.bounds[group.index + 1]
        self.device = group.world.device
        self._views: list[Tensor] = []
        self._absent = [torch.full((), math.nan, dtype=precision.compute, device=self.device).expand(p.shape) for p in self.params]
        self._gather: Pending | None = None
        self._shown: list[Pending] = []  # gathers of which peers may still read my part
        self._reduces: list[Pending] = []
        self._summed: list[Pending] = []  # reductions for which peers may still read my gradients
        self._reduced = 0
        self._pending: set[int] = set()
        self._given_up: set[int] = set()  # no more gradients were expected of these, and not all uses had brought theirs
        self._missed: set[int] = set()  # and then the reduction went without them
        self._touched: set[int] = set()
        self._local_sums: list[tuple[int, Tensor]] = []
        #: Whether a backward of the engine is under way, and whether its gradients are for others: a loss that only runs through here.
        self.listening = self.discarding = False
        #: Where gradients of parameters wait in a backward that is split in halves; None: they are added at once.
        self.postponed: list[Callable[[], None]] | None = None
        #: Whether another stage counts and saves these parameters (a tied weight's copy).
        self.copied = False
        self.resident = not self.cuts("param")
        self.common: Pages | None = None
        self.whole: Tensor | None = None
        self.bucket: Tensor | None = None
        self.param_room: tuple[Room, int] | None = None
        self.bucket_room: tuple[Room, int] | None = None

    # -- memory ----------------------------------------------------------------------------------------------------

    def cuts(self, kind: str) -> bool:
        return kind in self.policy.cut

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced into my part after every microbatch, so that whole gradients live only in a bucket."""
        return self.policy.gradients == "each" and self.cuts("grad")

    @property
    def facts(self) -> GroupFacts:
        return GroupFacts(self.name, self.plan.total, self.trainable, self.kept)

    def meet(self) -> bool:
        """Make the memory that all ranks have in common, before anything else; whether it can be had. Collective."""
        if self.cuts("optim"):
            self.common = self.group.common(self.plan.total, self.precision.compute)
        return self.common is not None

    def allocate(self, fill: Fill) -> None:
        """Make the buffers and fill them: `fill` is asked only for what this rank holds. Then the parameters are views."""
        total, mine, dtypes = self.plan.total, self.high - self.low, self.precision

        def new(n: int, dtype: torch.dtype) -> Tensor:
            return zeros(n, dtype, self.device)

        base, top = (self.low, self.high) if self.cuts("param") else (0, total)
        held = self.common.tensor(base, top) if self.common else new(top - base, dtypes.compute)  # between steps
        self.held = held
        self.update_low, self.update_high = (self.low, self.high) if self.cuts("optim") else (0, total)
        size = self.update_high - self.update_low
        self.separate_master = self.trainable and dtypes.master != dtypes.compute
        if self.separate_master:
            self.master = new(size, dtypes.master)
        else:
            self.master = held[self.update_low - base : self.update_high - base] if self.trainable else held.new_empty(0)
        fills = (self.low, self.high) if self.common else (base, top)
        if held.is_meta:
            fills = base, base  # without memory there are no values
        for slot, first, last in self.plan.pieces(*fills):
            for start in range(first, last, FILL_ELEMENTS):
                stop = min(start + FILL_ELEMENTS, last)
                values = torch.empty(stop - start, dtype=dtypes.master, device=self.device)
                fill(slot.name, start, values)
                held[slot.start + start - base : slot.start + stop - base] = values
                low, high = max(slot.start + start, self.update_low), min(slot.start + stop, self.update_high)
                if self.separate_master and low < high:
                    part = values[low - slot.start - start : high - slot.start - start]
                    self.master[low - self.update_low : high - self.update_low] = part
        if self.common and not self.cuts("param"):
            self.group.all_gather(held, self.plan.bounds, reason=f"first values {self.name}").wait()
        if self.trainable and not self.reduces_each:
            self.grad = self.group.own(total, dtypes.reduce)
        else:
            self.grad = new(mine if self.trainable else 0, dtypes.reduce)
        if not self.cuts("param"):
            self.whole = held
        elif self.common:
            self.whole = None
        elif self.param_room is None:
            self.whole = self.group.own(total, dtypes.compute)
        else:
            room, index = self.param_room
            self.whole = room.slots[index][:total]
        if self.trainable:
            if not self.reduces_each:
                self.bucket = self.grad
            elif self.bucket_room is None:
                self.bucket = self.group.own(total, dtypes.reduce)
            else:
                room, index = self.bucket_room
                self.bucket = room.slots[index][:total]
        self._look()
        self._grads = [self.bucket[s.start : s.stop].view(s.shape) for s in self.plan.slots] if self.bucket is not None else []
        self._show(self.resident)
        self.pieces = tuple(self._pieces()) if self.trainable else ()
        if self.trainable:
            for i, param in enumerate(self.params):
                param.register_post_accumulate_grad_hook(functools.partial(_arrived, weakref.ref(self), i))

    def _pieces(self) -> Iterator[Piece]:
        """Views of the master copy, one a tensor; shaped as the tensor where all of it, or whole rows of it, are mine."""
        for slot, start, stop in self.plan.pieces(self.update_low, self.update_high):
            at = slot.start + start - self.update_low
            value = nn.Parameter(_shaped(self.master[at : at + stop - start], slot, start))
            yield Piece(slot.name, slot.shape, start, stop, value)

    def layouts(self) -> dict[str, Layout]:
        """Where each parameter's master copy and moments lie, of the whole tensor (whose shape is `places[name].shape`)."""
        axes = self.group.axes if self.cuts("optim") else ()
        places = self.places
        return {s.name: places[s.name].flat(self.plan.flat(s, axes)) if axes else places[s.name].layout for s in self.plan.slots}

    def regions(self) -> Iterator[tuple[Place, int, int]]:
        """Ranges [start, stop) of the buffer, each with the place of all that lies in it: how it is cut and summed over tp."""
        for _, slots in itertools.groupby(self.plan.slots, key=lambda s: (self.places[s.name].axis, self.places[s.name].summed)):
            found = list(slots)
            yield self.places[found[0].name], found[0].start, found[-1].stop

    def temporary(self) -> list[Tensor]:
        """Whole buffers of this group alone, beside what is held between steps."""
        cut = self.cuts("param") and self.param_room is None and not self.common
        own = [self.whole] if cut and self.whole is not None else []
        return own + ([self.bucket] if self.bucket is not None and self.reduces_each and self.bucket_room is None else [])

    # -- parameters ------------------------------------------------------------------------------------------------

    def gather(self, reason: str) -> None:
        """Start bringing the whole parameters into my slot. Raises RunError if the slot's user is still at work."""
        if self.param_room is not None:
            room, index = self.param_room
            user = room.user[index]
            if user is not None and user is not self:
                user.free()
                user._unshow()
            room.user[index] = self
        self._unshow()
        if self.common:
            self.whole = self.common.tensor(0, self.common.elements)
            self._look()
        assert self.whole is not None
        if not self.common:
            self.whole[self.low : self.high].copy_(self.held)
        self._gather = self.group.all_gather(self.whole, self.plan.bounds, reason=f"{reason} {self.name}")
        self.resident = True

    def ready(self) -> None:
        """Wait until the gathered parameters are there, and show them to the model."""
        if self._gather is not None:
            self._arrive()
            self._show(True)

    def _arrive(self) -> None:
        if self._gather is not None:
            self._gather.result()
            self._shown.append(self._gather)
            self._gather = None

    def _unshow(self) -> None:
        """Until nobody reads what I have gathered: it may be overwritten."""
        self._arrive()
        shown, self._shown = self._shown, []
        for work in shown:
            work.wait()

    def free(self) -> None:
        """The whole parameters are not needed: whoever looks at one now sees NaN, not another group's weights."""
        self._arrive()
        if self.resident:
            self._show(False)
            self.resident = False
            if self.common:
                self.whole, self._views = None, []

    def _look(self) -> None:
        """Find the parameters in the whole."""
        self._views = [] if self.whole is None else [self.whole[s.start : s.stop].view(s.shape) for s in self.plan.slots]

    def _show(self, there: bool) -> None:
        for param, found in zip(self.params, self._views if there else self._absent, strict=True):
            param.data = found

    # -- gradients -------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Every trainable parameter may now get a gradient; `complete` tells when all have."""
        self.listening = True
        self._pending = set(range(len(self.params))) if self.trainable else set()
        self._given_up, self._missed = set(), set()

    def on_complete(self, call: Callable[[], None]) -> None:
        self._completed = call

    @property
    def complete(self) -> bool:
        return not self._pending

    def _accumulate(self, i: int) -> None:
        """Autograd is through with parameter i in this backward: add what it brings, if its layers have not written it themselves."""
        grad, self.params[i].grad = self.params[i].grad, None
        if self._unheard(i):
            return
        if grad is not None and self.postponed is not None:
            self.postponed.append(lambda: self._add(i, grad))
        elif grad is not None:
            self._add(i, grad)
        if i in self._pending:
            self._pending.discard(i)
            if not self._pending:
                self._completed()

    def _unheard(self, i: int) -> bool:
        """Whether a gradient of parameter i is to be dropped. Raises RunError if nobody has said that one might come."""
        if not self.listening and not self.discarding:
            raise RunError(
                f"a gradient came for {self.names[i]} outside engine.backward of its engine. Instead of loss.backward() write "
                "engine.backward(loss_sum, count); where a loss runs through the models of several engines, write "
                "engine.backward(loss_sum, count, also=[other]), or through=[other] if other's parameters shall not learn from it"
            )
        return self.discarding

    def _add(self, i: int, grad: Tensor) -> None:
        first = self._begin(i)
        self._note(i, grad)
        if first:
            self._grads[i].copy_(grad)
        else:
            self._grads[i].add_(grad)

    def add_product(self, i: int, a: Tensor, b: Tensor) -> None:
        """The gradient of parameter i grows by a @ b, which is written where it belongs."""
        if self._unheard(i):
            return
        if a.dtype != self._grads[i].dtype:
            self._add(i, a @ b)
            return
        if self._begin(i):
            torch.mm(a, b, out=self._grads[i])
        else:
            self._grads[i].addmm_(a, b)
        self._note(i, self._grads[i])

    def add_rows(self, i: int, ids: Tensor, rows: Tensor) -> None:
        """The gradient of parameter i grows by rows[n] in its row ids[n], for each n."""
        if self._unheard(i):
            return
        if self._begin(i):
            self._grads[i].zero_()
        self._grads[i].index_add_(0, ids, rows.to(self._grads[i].dtype))
        self._note(i, rows)

    def _begin(self, i: int) -> bool:
        """Whether this is the first gradient of parameter i since the last reduction: what lies in its place is then old.

        Raises RunError if the reduction of this backward has passed it over.
        """
        if i in self._missed:
            raise RunError(
                f"the gradient of {self.names[i]} comes after those of {self.name} were reduced: something outside the forward of its "
                f'module uses it; write zero.keep=["{self.names[i]}"]'
            )
        self._take_bucket()
        first = i not in self._touched
        self._touched.add(i)
        return first

    def _note(self, i: int, grad: Tensor) -> None:
        """Here and not before the reduction: the gradient is still in cache, and of this rank alone, so that it can be blamed by name."""
        self._local_sums.append((i, grad.sum(dtype=self.precision.reduce)))  # not finite if one of them is not; half the price of a norm

    def _take_bucket(self) -> None:
        """Before the first gradient since a reduction is written: whoever still reads from there is waited for."""
        if self._touched:
            return
        if not self.reduces_each:
            self.release()
            return
        if self.bucket_room is not None:
            room, index = self.bucket_room
            user = room.user[index]
            if user is not None and user is not self:
                if user._touched:
                    also = " zero.params=step" if self.cuts("param") else ""
                    raise RunError(
                        f"gradients of {user.name} are not finished while those of {self.name} begin (two forwards, one backward, or blocks"
                        f" that run several times), and ZeRO {self.policy.stage} keeps whole gradients of two units only; write "
                        f"zero.gradients=end{also}"
                    )
                user.release()
            room.user[index] = self
        self.release()  # my own last microbatch
        assert self.bucket is not None
        for start, stop in self.plan.gaps():
            self.bucket[start:stop].zero_()

    def finish_backward(self) -> None:
        """No more gradients come in this backward: those that did not come are zero."""
        self._given_up |= self._pending
        self._pending.clear()

    def reduce(self, reason: str) -> None:
        """Start adding everybody's gradients; parameters that got none count as zero."""
        if not self.trainable:
            return
        self._missed = self._given_up
        self._take_bucket()
        for i in range(len(self.params)):
            if i not in self._touched:
                self._grads[i].zero_()
        assert self.bucket is not None
        if self.policy.reduction == "all_reduce":
            work = self.group.all_reduce(self.bucket, reason=f"{reason} {self.name}")
        else:
            into = self.grad if self.reduces_each else self.grad[self.low : self.high]
            again = self.reduces_each and self._reduced > 0
            work = self.group.reduce_scatter(self.bucket, self.plan.bounds, reason=f"{reason} {self.name}", into=into, accumulate=again)
        self._reduces.append(work)
        self._reduced += 1
        self._touched.clear()

    def wait_reduced(self) -> None:
        """Until the sums are there."""
        works, self._reduces = self._reduces, []
        for work in works:
            work.result()
        self._summed += works

    def release(self) -> None:
        """Until the sums are there and nobody reads my gradients any more: they may be overwritten."""
        self.wait_reduced()
        works, self._summed = self._summed, []
        for work in works:
            work.wait()

    def reduce_replicas(self) -> None:
        """Add the parts of all copies (hybrid sharding); stage 0 has done so already."""
        if self.trainable and self.replicas.size > 1 and self.policy.reduction == "reduce_scatter":
            self._reduces.append(self.replicas.all_reduce(self.my_gradient(), reason=f"replicas {self.name}", lane="replicas"))

    def my_gradient(self) -> Tensor:
        """My part of the reduced gradients, whatever the stage: the parts of all ranks are the whole, once."""
        return self.grad if self.reduces_each else self.grad[self.low : self.high]

    def counted_gradient(self) -> list[Tensor]:
        """Of my part, what this rank counts in a norm: where other ranks hold the same, the first of them counts it."""
        if self.replicas.index and not set(self.replicas.axes) <= set(self.group.axes):
            return []
        mine, rank = self.my_gradient(), self.group.world.rank
        ranges = [(a, b) for place, a, b in self.regions() if place.counts(self.group.mesh, rank)]
        return [
            mine[max(a, self.low) - self.low : max(min(b, self.high) - self.low, 0)] for a, b in ranges if a < self.high and b > self.low
        ]

    def summed_gradient(self, axis: str) -> list[Tensor]:
        """Of what I update, the gradients that are still to be added over `axis`: the same ranges on all its ranks."""
        gradient, low, high = self.update_gradient(), self.update_low, self.update_high
        ranges = [(max(a, low), min(b, high)) for place, a, b in self.regions() if place.summed == axis]
        return [gradient[a - low : b - low] for a, b in ranges if a < b]

    def update_gradient(self) -> Tensor:
        """The reduced gradients of what I update."""
        return self.grad if self.reduces_each else self.grad[self.update_low : self.update_high]

    def attach_gradients(self) -> None:
        """Hand the reduced gradients to the pieces that the optimizer updates."""
        source = self.update_gradient().to(self.precision.master)
        for piece, (slot, start, stop) in zip(self.pieces, self.plan.pieces(self.update_low, self.update_high), strict=True):
            at = slot.start + start - self.update_low
            piece.value.grad = _shaped(source[at : at + stop - start], slot, start)

    def nonfinite(self) -> list[str]:
        """Names of parameters whose gradient, on this rank and before any reduction, was not finite in this step."""
        found = [self.names[i] for i, total in self._local_sums if not math.isfinite(float(total))]
        return list(dict.fromkeys(found))

    def clear(self) -> None:
        """The step is over: forget its gradients."""
        self.wait_reduced()
        self._reduced = 0
        self._touched.clear()
        self._pending.clear()
        self._local_sums.clear()
        for piece in self.pieces:
            piece.value.grad = None

    # -- after the update ------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """The master copy has changed: bring the parameters after it, and start sending my part where others hold it too."""
        base = self.low if self.cuts("param") else 0
        if self.separate_master:
            self.held[self.update_low - base : self.update_high - base].copy_(self.master)
        if self.policy.does("after_step", ("all_gather", "param")):
            self._gather = self.group.all_gather(self.held, self.plan.bounds, reason=f"after_step {self.name}")

    def wait_published(self) -> None:
        if self._gather is not None and not self.cuts("param"):
            self._gather.wait()
            self._gather = None

    def whole_of(self, part: Tensor, reason: str) -> Tensor:
        """All ranks' parts of a buffer like the master copy, joined. part: [update_high - update_low]."""
        if not self.cuts("optim"):
            return part
        joined = torch.zeros(self.plan.total, dtype=part.dtype, device=part.device)
        joined[self.low : self.high] = part
        self.group.all_gather(joined, self.plan.bounds, reason=f"{reason} {self.name}", lane="user").wait()
        return joined

    def values(self) -> Tensor:
        """What this rank is responsible for, at full precision: of frozen parameters, what it holds."""
        if self.trainable:
            return self.master
        return self.held if self.cuts("param") or not self.cuts("optim") else self.held[self.low : self.high]


def _arrived(group: weakref.ref[ShardedGroup], i: int, param: Tensor) -> None:
    """A hook on parameter i. It does not hold the group: Python's garbage collector cannot see through a tensor's hooks."""
    if (found := group()) is not None:
        found._accumulate(i)


def _shaped(flat: Tensor, slot: Slot, start: int) -> Tensor:
    row = math.prod(slot.shape[1:]) if len(slot.shape) > 1 else 1
    if flat.numel() == slot.elements:
        return flat.view(slot.shape)
    if len(slot.shape) > 1 and start % row == 0 and flat.numel() % row == 0:
        return flat.view(-1, *slot.shape[1:])
    return flat
