"""Named dropout in a cut model: which elements of the whole activation a rank has before it, at each nn.Dropout.

An nn.Dropout stays what it is; only its `forward` is replaced. Attention of transformers models, which drops by a function, comes to
the same place by models/dropping_attention.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from stretto.errors import JobError, RunError
from stretto.layout.layout import split
from stretto.models.dropout import Draws, Lines, drop, lines_of_samples, lines_of_tokens
from stretto.models.dropping_attention import attention_share, hand_in
from stretto.parallel.stream import Stream


class Named:
    """The dropout of one place of the model, called `name` there. An object, so that it can be seen in a debugger what stands there."""

    def __init__(self, name: str, draws: Draws, stream: Stream) -> None:
        self.name, self.draws, self.stream = name, draws, stream
        self._widths: dict[int, tuple[int, ...]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Named:
        """A copy of the model drops as the model does."""
        return self

    def __call__(self, x: Tensor, p: float) -> Tensor:
        """x with a share p of its elements dropped. Where they cannot be numbered, by torch's own stream; refused where ranks that hold the
        same would then drop differently."""
        if p == 0 or not x.numel() or not x.is_floating_point():  # ids come by where a pipeline stage lacks their embedding
            return x
        numbered = self._lines(x)
        if numbered is None:
            rows, length = self.draws.tokens
            if self.stream.bridge.size > 1:
                raise RunError(
                    f"dropout {self.name} is given {list(x.shape)}, and there are {rows} rows of {length} tokens: which elements these are "
                    "is not known, so tp ranks would drop differently; set its p to 0, or write a mesh without tp"
                )
            self.draws.unnamed.add(self.name)
            return F.dropout(x, p, True)
        lines, offset = numbered
        return drop(x, self.draws.mask(self.name, p, x.shape, lines, offset), p)

    def _lines(self, x: Tensor) -> tuple[Lines, int] | None:
        """The numbers of x's elements, and how far into its lines this rank's part begins; None where they are not known."""
        (rows, length), bridge = self.draws.tokens, self.stream.bridge
        if x.ndim < 2:
            return None
        width, device = x.shape[-1], x.device
        if self.stream.region == "tokens":
            whole_rows, whole_length = self.stream.tokens
            low, high = split(whole_rows * whole_length, bridge.size, bridge.index)
            if (whole_rows, whole_length) != (rows, length) or x.shape[:-1] != (1, high - low):
                return None
            return lines_of_tokens(low, high, length, width, device), 0
        if self.stream.region == "part" and bridge.size > 1:
            if x.shape[0] != rows:
                return None
            if x.ndim == 4 and x.shape[2] == length:  # [B, heads, T, T]: heads are cut
                first = sum(self._of_all_ranks(x.shape[1])[: bridge.index])
                return lines_of_samples(x.shape, device, width, first * length * width), 0
            if x.ndim == 3 and x.shape[1] == length:  # [B, T, features]: these are
                widths = self._of_all_ranks(width)
                return lines_of_samples(x.shape, device, sum(widths)), sum(widths[: bridge.index])
            return None
        if x.shape[0] == rows:
            return lines_of_samples(x.shape, device, width), 0
        if x.ndim == 2 and x.shape[0] == rows * length:
            return lines_of_tokens(0, rows * length, length, width, device), 0
        return None

    def _of_all_ranks(self, mine: int) -> tuple[int, ...]:
        """How many heads or features each tp rank has where this one has so many; asked once."""
        if mine not in self._widths:
            self._widths[mine] = tuple(self.stream.bridge.door.group.objects(mine, reason=f"dropout {self.name}"))
        return self._widths[mine]


class NamedForward:
    """The forward of one nn.Dropout."""

    def __init__(self, module: nn.Module, named: Named) -> None:
        self.module, self.named = module, named

    def __call__(self, x: Tensor) -> Tensor:
        return self.named(x, float(self.module.p)) if self.module.training else x  # type: ignore[arg-type]


def name_dropout(model: nn.Module, draws: Draws, stream: Stream, *, compiled: bool = False) -> None:
    """Let every nn.Dropout of `model`, and attention of a transformers model, drop by name. Raises JobError for other kinds of dropout
    where tp ranks would not agree on them. compiled: masks stay torch's, as the compiler makes them."""
    if compiled:
        if stream.bridge.size > 1 and drops(model):
            raise JobError("dropout under compile would differ on tp ranks; write compile=none, a dropout of 0, or a mesh without tp")
        return
    if attention_share(model):
        hand_in(model, lambda name: Named(f"{name}.attention", draws, stream))
    for name, module in model.named_modules():
        if type(module).forward is nn.Dropout.forward and "forward" not in vars(module):
            module.forward = NamedForward(module, Named(name, draws, stream))
    for name, module in _others(model):
        if stream.bridge.size > 1:
            raise JobError(
                f"{name} is a {type(module).__name__}, whose masks tp ranks would draw differently; use nn.Dropout, or a mesh without tp"
            )
        draws.unnamed.add(name)


def drops(model: nn.Module) -> bool:
    """Whether anything in `model` is known to drop while it trains."""
    return attention_share(model) > 0 or any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules())


def _others(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and type(module).forward is not nn.Dropout.forward and module.p > 0:
            yield name, module
