"""Stream: what runs between the layers that tp cuts, see [Note: the stream] in rules.py; and how a layer is entered and left."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from stretto.comm.crossing import Bridge, cross
from stretto.errors import RunError
from stretto.layout.layout import Shape
from stretto.layout.transition import Have
from stretto.parallel.memory import memory_of

#: alike: all of it, the same on every rank. tokens: its part of the tokens. part: its part of the heads or features.
Region = Literal["alike", "tokens", "part"]


class Stream:
    """The stream of the forward under way. One a model: forwards follow each other.

    cut: whether each rank has only its part of the tokens. tokens: [B, T] of the whole stream, told by whatever it begins with
    (a pipeline stage without a beginning is told by its engine). region: what a rank has before it where the forward is.
    cuts_logits: whether the loss takes logits of this rank's part of the vocabulary, as the engine's own does; anybody else gets
    them joined.
    """

    def __init__(self, bridge: Bridge, cut: bool, *, gathers_again: bool) -> None:
        self.bridge, self.cut, self.gathers_again = bridge, cut, gathers_again
        self.tokens: Shape = ()
        self.region: Region = "alike"
        self.cuts_logits = False
        self._entered: tuple[Callable[[], Tensor | None], Tensor] | None = None
        self.gathered: Gathered | None = None

    @property
    def form(self) -> Have:
        return "cut" if self.cut else "same"

    @property
    def between(self) -> Region:
        """What a rank has before it on the stream."""
        return "tokens" if self.cut else "alike"

    def forget(self) -> None:
        """The forward is over."""
        self._entered = self.gathered = None
        self.region = "alike"

    def remember(self) -> Callable[[], None]:
        """A way back to this moment's tokens, for a block that runs again in backward when other forwards may have been."""
        tokens, region = self.tokens, self.region

        def recall() -> None:
            self.tokens, self.region = tokens, region

        return recall

    def begin(self, x: Tensor, reason: str) -> Tensor:
        """x: [B, T, H], the same on every rank."""
        self.tokens, self.region = tuple(x.shape[:-1]), self.between
        return cross(x, self.bridge, "same", "cut", x.shape, reason=reason) if self.cut else x

    def end(self, x: Tensor, reason: str) -> Tensor:
        """The stream's tokens, all on every rank, which go on to do the same with them."""
        self.region = "alike"
        return cross(x, self.bridge, "cut", "alike", self._whole(x, reason), reason=reason) if self.cut else x

    def enter(self, x: Tensor, have: Have, reason: str) -> Tensor:
        """All tokens of x, for each rank to use for its own part. Layers that read the same x one after another cross once."""
        self.region = "part"
        if self._entered is not None and self._entered[0]() is x:
            return self._entered[1]
        whole = self._whole(x, reason) if have == "cut" else tuple(x.shape)
        crossed = cross(x, self.bridge, have, "same", whole, reason=reason)
        self._entered = weakref.ref(x), crossed
        self.gathered = Gathered(x, crossed, self.bridge, reason) if have == "cut" and self.gathers_again else None
        return crossed

    def leave(self, x: Tensor, reason: str, begins: bool = False) -> Tensor:
        """x: [B, T, H], a summand on each rank. Result: the sum, on the stream."""
        if begins:
            self.tokens = tuple(x.shape[:-1])
        self.region = self.between
        if torch.compiler.is_compiling():  # a block is one graph, of which nothing may stay behind
            self._entered = self.gathered = None
        return cross(x, self.bridge, "sum", "cut" if self.cut else "same", x.shape, reason=reason)

    def ids(self, ids: Tensor, reason: str) -> Tensor:
        """Of ids [T] or [B, T], those of this rank's tokens."""
        if not self.cut:
            return ids
        if not self.tokens:
            raise RunError(f"{reason}: the stream has not begun, so which tokens are this rank's is not known")
        whole = ids.expand(self.tokens).unsqueeze(-1)
        return self.bridge.carry(whole, "slice", self.bridge.part(whole.shape, "tokens"), "tokens", reason).squeeze(-1)

    def _whole(self, x: Tensor, reason: str) -> Shape:
        if not self.tokens:
            raise RunError(f"{reason}: the stream has not begun, so the shape of its whole is not known")
        return (*self.tokens, x.shape[-1])


class Piece(NamedTuple):
    """A view of what was gathered, without its bytes."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Gathered:
    """Tokens that were gathered for column-parallel layers, which need them again for the gradients of their weights.

    They are kept as this rank's part, and gathered again in backward, once for all layers that read them: n more elements on
    the way, and (tp - 1) / tp of the layer's input less in memory (REFERENCE D2).
    """

    def __init__(self, part: Tensor, whole: Tensor, bridge: Bridge, reason: str) -> None:
        self.part, self.bridge, self.reason = part.detach(), bridge, f"{reason}, again"
        self.shape, self.address = tuple(whole.shape), memory_of(whole)
        self.wanted = 0
        self.again: Tensor | None = None

    def pack(self, x: Tensor) -> Tensor | Piece:
        """What autograd keeps in place of x."""
        if memory_of(x) != self.address:
            return x
        self.wanted += 1
        return Piece(x.shape, x.stride(), int(x.storage_offset()))

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if self.again is None:
            self.again = self.bridge.carry(self.part, "all_gather", self.shape, "tokens", self.reason)
        whole = self.again
        self.wanted -= 1
        if self.wanted <= 0:
            self.again = None
        return whole.view(-1).as_strided(*kept)
