"""What every framework is given, and what it gives back: a Runner of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn

from stretto.data.batch import Batch
from stretto.engine.values import whole
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.models import library


class Told(NamedTuple):
    """What a rank says of one step.

    loss: this rank's share; the shares of all ranks add up to the sum of losses / the number of targets of the step. A share, so that
    no framework sends a message more than it would. grad_norm: of the whole gradient before clipping, None where nobody computed it.
    sent: payload bytes that the rank counted itself, None where it does not count.
    """

    loss: float
    grad_norm: float | None = None
    sent: int | None = None


class Runner(Protocol):
    """A Job on one rank, in the terms of some framework. All ranks of the job make one and call it alike.

    counts_bytes: whether it says itself what it sent (else it is counted at torch's dispatcher, see traffic.py).
    """

    counts_bytes: bool

    def step(self, batch: Batch) -> Told:
        """One optimizer step. batch: of the whole job, the same on every rank."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Setting:
    """What a Runner is made of: a resolved job, and this process's place among its ranks, which have met."""

    job: Job
    rank: int
    ranks: int
    device: torch.device

    @property
    def mesh(self) -> Mesh:
        return Mesh.parse(self.job.mesh)

    @property
    def shards(self) -> int:
        """Ranks among which the rows are shared: frameworks average gradients over so many."""
        return self.job.shards

    def rows(self, batch: Batch) -> Batch:
        """This rank's rows of a step's batch, on its device."""
        return batch.part(self.shards, self.mesh.index(self.rank, "dp_replicate", "dp")).to(self.device)

    def loaded(self) -> library.Loaded:
        """The job's model, as the engine loads it."""
        keys = self.job.model
        return library.load(keys.name, weights=keys.weights, seed=self.job.seed, overrides=keys.sizes())

    @property
    def counts_loss(self) -> bool:
        """Whether the loss of a step is this rank's to tell: of ranks that compute the same rows, the first does."""
        at = self.mesh.at(self.rank)
        return at["tp"] == 0


#: Makes a Runner. Collective: all ranks of the job call it.
Build = Callable[[Setting], Runner]


def real(loaded: library.Loaded, seed: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The whole model on a device with the first values that the engine gives it, in training mode."""
    return whole(loaded, seed).to(device, dtype).train()
