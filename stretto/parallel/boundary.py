"""What goes from one pipeline stage to the next, and back: one tensor a microbatch, each way.

[Note: sizes] A message is received into memory of its size, so both ends must know it. Both have the microbatch's tensors, and
what a stage makes of equal shapes has one shape. So a shape travels ahead only the first time that tensors of such shapes come.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from stretto.comm.group import Group
from stretto.comm.transport import Pending
from stretto.data.batch import Batch
from stretto.errors import RunError

#: int64 numbers of a message that says how the next is shaped: dtype, number of dims, dims.
HEADER = 16
_CODES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)


class Like(NamedTuple):
    """How a message is shaped."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> Like:
        return Like(tuple(x.shape), x.dtype)


@dataclass(frozen=True)
class Arriving:
    """A message that is awaited."""

    x: Tensor
    pending: Pending

    def wait(self) -> Tensor:
        self.pending.wait()
        return self.x


class Boundary:
    """The messages of one rank's stages. `stages`: the group over pp; members are its numbers."""

    def __init__(self, stages: Group) -> None:
        self.stages = stages
        self._known: dict[Hashable, Like] = {}
        self._sent: list[tuple[Tensor, Pending]] = []  # memory that may still be read
        #: (stage, its batch) -> how its input is shaped, where nobody is there to send it (a rehearsal).
        self.told: Callable[[int, Batch], Like] | None = None

    def send_forward(self, x: Tensor, to: int, stage: int, batch: Batch) -> None:
        """What stage `stage` made of `batch`, to the rank of the next. Does not wait."""
        key, like = ("sent", stage, shapes_of(batch)), Like.of(x)
        known = self._known.setdefault(key, like)
        if known != like:
            raise RunError(
                f"stage {stage} made {list(like.shape)} {like.dtype} of a microbatch, and {list(known.shape)} {known.dtype} of an earlier "
                "one of the same shapes: what comes next cannot know its size; a stage's output must follow from the shapes of its input"
            )
        if like is known:
            self._send(_header(like).to(x.device), to, f"shape {stage}")
        self._send(x, to, f"forward {stage}")

    def receive_forward(self, source: int, stage: int, batch: Batch) -> Arriving:
        """The input of stage `stage` for `batch`. Does not wait, but for a shape that is new. [Note: sizes]"""
        key = ("received", stage, shapes_of(batch))
        if key not in self._known and self.told is not None:
            self._known[key] = self.told(stage, batch)
        elif key not in self._known:
            header = torch.zeros(HEADER, dtype=torch.int64, device=self.stages.world.device)
            self.stages.receive(header, source).wait()
            self._known[key] = _read(header)
        return self._receive(self._known[key], source)

    def send_backward(self, x: Tensor, to: int, stage: int) -> None:
        """The gradient of stage `stage`'s input, to the rank of the stage before. Does not wait."""
        self._send(x, to, f"backward {stage}")

    def receive_backward(self, source: int, like: Tensor) -> Arriving:
        """The gradient of a stage's output, which is shaped as the output. Does not wait."""
        return self._receive(Like.of(like), source)

    def settle(self) -> None:
        """All that was sent is gone, and its memory can be used again."""
        sent, self._sent = self._sent, []
        for _, pending in sent:
            pending.wait()

    def _send(self, x: Tensor, to: int, reason: str) -> None:
        flat = x.detach().contiguous().view(-1)
        self._sent.append((flat, self.stages.send(flat, to, reason=reason)))

    def _receive(self, like: Like, source: int) -> Arriving:
        x = torch.empty(like.shape, dtype=like.dtype, device=self.stages.world.device)
        return Arriving(x, self.stages.receive(x.view(-1), source))


def shapes_of(batch: Batch) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Names and shapes of a batch's tensors."""
    return tuple((name, tuple(value.shape)) for name, value in batch.items() if isinstance(value, Tensor))


def send_whole(stages: Group, x: Tensor, to: int, reason: str) -> None:
    """A tensor of any shape, to a member that knows nothing of it; waits."""
    flat = x.detach().contiguous().view(-1)
    for part in (_header(Like.of(x)).to(x.device), flat):
        if part.numel():
            stages.send(part, to, reason=reason, lane="user").wait()


def receive_whole(stages: Group, source: int) -> Tensor:
    """What `send_whole` of member number `source` sends."""
    header = torch.zeros(HEADER, dtype=torch.int64, device=stages.world.device)
    stages.receive(header, source, lane="user").wait()
    like = _read(header)
    x = torch.empty(like.shape, dtype=like.dtype, device=stages.world.device)
    if x.numel():
        stages.receive(x.view(-1), source, lane="user").wait()
    return x


def _header(like: Like) -> Tensor:
    dims = len(like.shape)
    if dims > HEADER - 2 or like.dtype not in _CODES:
        raise RunError(f"a stage made {like.dtype} with {dims} dims; between stages go floating-point tensors of at most {HEADER - 2}")
    return torch.tensor([_CODES.index(like.dtype), dims, *like.shape, *[0] * (HEADER - 2 - dims)], dtype=torch.int64)


def _read(header: Tensor) -> Like:
    code, dims, *shape = header.tolist()
    return Like(tuple(shape[:dims]), _CODES[code])
