"""Nearby: shared memory among ranks of one machine, messages between machines. Each group goes the way that all its ranks have.

So it pays to lay the mesh such that axes which talk most stay inside a machine, as `tp`, and `dp` beside `dp_replicate`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.comm.shm import SharedMemory
from stretto.comm.transport import Pending, Transport


class Nearby:
    """A Transport. near: among the ranks of my machine; far: among all ranks.

    Ranks agree on the way of a group without asking: it depends only on which machine each rank is on, which all know.
    """

    name = "shm inside machines, gloo between"

    def __init__(self, near: SharedMemory, far: Transport) -> None:
        self.near, self.far, self.here = near, far, frozenset(near.machine.ranks)

    def all_reduce(self, x: Tensor, ranks: Sequence[int], channel: int, op: str = "sum") -> Pending:
        return self._among(ranks).all_reduce(x, ranks, channel, op)

    def reduce_scatter(
        self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int, into: Tensor, accumulate: bool, op: str = "sum"
    ) -> Pending:
        return self._among(ranks).reduce_scatter(x, bounds, ranks, channel, into, accumulate, op)

    def all_gather(self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int) -> Pending:
        return self._among(ranks).all_gather(x, bounds, ranks, channel)

    def broadcast(self, x: Tensor, ranks: Sequence[int], source: int, channel: int) -> Pending:
        return self._among(ranks).broadcast(x, ranks, source, channel)

    def send(self, x: Tensor, to: int, channel: int) -> Pending:
        return self._among((to,)).send(x, to, channel)

    def receive(self, x: Tensor, source: int, channel: int) -> Pending:
        return self._among((source,)).receive(x, source, channel)

    def own(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor:
        return self._among(ranks).own(elements, dtype, ranks)

    def common(self, elements: int, dtype: torch.dtype, ranks: Sequence[int]) -> Tensor | None:
        return self._among(ranks).common(elements, dtype, ranks)

    def close(self) -> None:
        """Leave the far ranks, then the near ones, who see at once if I am gone."""
        self.far.close()
        self.near.close()

    def _among(self, ranks: Sequence[int]) -> Transport:
        """One machine's ranks may meet in shared memory; all others of the group must know that they do not."""
        return self.near if self.here.issuperset(ranks) else self.far
