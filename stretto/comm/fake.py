"""A transport without peers: it answers for a world of any size at once. Shapes, dtypes and the Ledger are right; values are nobody's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from stretto.comm.transport import Pending, World


class Done:
    """What is over as soon as it begins."""

    def wait(self) -> None: ...

    def result(self) -> None: ...


class Fake:
    """A Transport whose collectives and messages move nothing. Memory comes from `device`; no ranks have any in common."""

    name = "fake"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def all_reduce(self, x: Tensor, ranks: Sequence[int], channel: int, op: str = "sum") -> Pending:
        return Done()

    def reduce_scatter(
        self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int, into: Tensor, accumulate: bool, op: str = "sum"
    ) -> Pending:
        return Done()

    def all_gather(self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int) -> Pending:
        return Done()

    def broadcast(self, x: Tensor, ranks: Sequence[int], source: int, channel: int) -> Pending:
        return Done()

    def send(self, x: Tensor, to: int, channel: int) -> Pending:
        return Done()

    def receive(self, x: Tensor, source: int, channel: int) -> Pending:
        return Done()

    def own(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor:
        return torch.zeros(elements, dtype=dtype, device=self.device)

    def common(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor | None:
        return None

    def close(self) -> None: ...


def world_of(rank: int, size: int, device: torch.device, others: Callable[[Any, str], Any]) -> World:
    """Rank `rank` of `size`, alone here. others(value, reason): what any other rank says where this one says `value`."""

    def answers(ranks: Sequence[int], value: Any, reason: str) -> list[Any]:
        return [value if other == rank else others(value, reason) for other in ranks]

    return World(rank, size, 0, device, Fake(device), HashStore(), answers=answers)
