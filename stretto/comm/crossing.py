"""A transition as a step of autograd: how an activation comes to lie as it is wanted, and its gradient as it is wanted there.

Which collective runs forward and which backward is read from TRANSITIONS. The collective itself is an operator of torch
(stretto::carry), so that the compiler and selective recompute see one node and not what a transport does inside.

[Note: cut tokens] Between a row-parallel and the next column-parallel layer each token is treated alone, so the cut goes
through the tokens of all rows in one sequence: [B, T, H] lies as [1, n, H], n = the rank's part of B * T. Any B and T can be cut
so, and a part is one range of memory: nothing is packed for a collective. (Korthikanti et al. 2022 cut T.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

from stretto.comm.group import Group
from stretto.errors import RunError
from stretto.layout.layout import Shape, split
from stretto.layout.transition import TRANSITIONS, Collective, Have, Want

#: What a cut goes through: all dims but the last as one sequence, see [Note: cut tokens]; or the last dim.
Dim = Literal["tokens", "features"]


class Door(OpaqueBase):
    """A group as the compiler may hold it: a black box that only the operator opens."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def carry(self, x: Tensor, collective: str, result: Sequence[int], dim: str, reason: str) -> Tensor:
        """The collective on x, out of place, with a result of that shape."""
        if collective == "all_reduce":
            out = x.contiguous().clone()
            self.group.all_reduce(out.view(-1), reason=reason, lane="tensor").wait()
            return out
        whole = tuple(result) if collective == "all_gather" else tuple(x.shape)
        outer, inner = (math.prod(whole[:-1]), whole[-1]) if dim == "tokens" else (whole[-1], math.prod(whole[:-1]))
        size, index = self.group.size, self.group.index
        cuts = [split(outer, size, i)[0] for i in range(size)] + [outer]
        low, high = cuts[index], cuts[index + 1]
        if collective == "slice":
            return x.reshape(outer, inner)[low:high].clone().view(*result) if dim == "tokens" else x[..., low:high].clone()
        bounds = [cut * inner for cut in cuts]
        if collective == "all_gather":
            flat = x.new_empty(outer * inner)
            flat[bounds[index] : bounds[index + 1]].view(x.shape).copy_(x)
            self.group.all_gather(flat, bounds, reason=reason, lane="tensor").wait()
            if dim == "tokens":
                return flat.view(*result)
            return torch.cat([flat[a * inner : b * inner].view(*whole[:-1], b - a) for a, b in pairwise(cuts)], dim=-1)
        assert collective == "reduce_scatter" and dim == "tokens"
        mine = x.new_empty((high - low) * inner)
        self.group.reduce_scatter(x.contiguous().view(-1), bounds, reason=reason, into=mine, lane="tensor").wait()
        return mine.view(*result)


register_opaque_type(Door, typ="reference")
_LIBRARY = torch.library.Library("stretto", "DEF")  # torch forgets an operator whose library is let go
_LIBRARY.define(f"carry(Tensor x, {Door.__module__}.Door door, str collective, SymInt[] result, str dim, str reason) -> Tensor")
_LIBRARY.impl("carry", lambda x, door, *rest: door.carry(x, *rest), "CompositeExplicitAutograd")
torch.library.register_fake("stretto::carry", lambda x, door, collective, result, dim, reason: x.new_empty(result), lib=_LIBRARY)
#: carry(x, door, collective, result, dim, reason), as the dispatcher knows it.
CARRY = torch.ops.stretto.carry.default


@dataclass(frozen=True)
class Bridge:
    """The ranks that activations cross between, `size` of them, seen from number `index`."""

    size: int
    index: int
    door: Door

    @staticmethod
    def of(group: Group) -> Bridge:
        """The ranks of a group."""
        return Bridge(group.size, group.index, Door(group))

    def part(self, whole: Sequence[int], dim: Dim) -> Shape:
        """The shape of this rank's part of an activation of shape `whole`."""
        if dim == "features":
            start, stop = split(whole[-1], self.size, self.index)
            return (*whole[:-1], stop - start)
        start, stop = split(math.prod(whole[:-1]), self.size, self.index)
        return (*(1,) * (len(whole) - 2), stop - start, whole[-1])

    def carry(self, x: Tensor, collective: Collective, result: Sequence[int], dim: Dim, reason: str) -> Tensor:
        """One collective on x, with a result of that shape, outside of autograd."""
        out: Tensor = CARRY(x, self.door, collective, result, dim, reason)
        return out


def cross(x: Tensor, bridge: Bridge, have: Have, want: Want, whole: Sequence[int], *, reason: str, dim: Dim = "tokens") -> Tensor:
    """x, which lies on the ranks of `bridge` as `have`, as it is wanted. whole: its shape where it is not cut.

    Raises RunError where x has not the shape it should have: something between two crossings has mixed tokens. Collective.
    """
    expected = bridge.part(whole, dim) if have == "cut" else tuple(whole)
    if tuple(x.shape) != expected:
        raise RunError(
            f"{reason}: {list(x.shape)} came where this rank's part of {list(whole)} is {list(expected)}; what runs between the cut "
            "layers must treat each token alone (write tensor.sequence=false where it does not)"
        )
    result = bridge.part(whole, dim) if want == "cut" else tuple(whole)
    crossed: Tensor = _Cross.apply(x, bridge, *TRANSITIONS[have, want], result, dim, reason)  # type: ignore[no-untyped-call]
    return crossed


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bridge: Bridge, forward: Collective, backward: Collective, result: Shape, dim: Dim, reason: str
    ) -> Tensor:
        ctx.bridge, ctx.backward_collective, ctx.home, ctx.dim, ctx.reason = bridge, backward, tuple(x.shape), dim, reason
        return x.view_as(x) if forward == "none" else bridge.carry(x, forward, result, dim, reason)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        if ctx.backward_collective != "none":
            grad = ctx.bridge.carry(grad, ctx.backward_collective, ctx.home, ctx.dim, f"{ctx.reason}, backward")
        return grad, None, None, None, None, None, None
