"""What a step reports, and what anything that can run a Job offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from stretto.comm.group import Ledger
from stretto.schedule.timeline import Timeline

#: skipped: a gradient was not finite, on all ranks together; empty: no rank had a target that counts.
Status = Literal["committed", "skipped", "empty"]


class Culprit(NamedTuple):
    """A tensor whose gradient was not finite on `rank`, before gradients of ranks were added."""

    rank: int
    tensor: str


@dataclass(frozen=True)
class StepReport:
    """One training step, the same on every rank but for seconds, peak_bytes, ledger and timeline.

    loss: sum over counted targets / their number, in the whole step. tokens: that number. samples: rows. grad_norm: of the
    whole gradient, before clipping. peak_bytes: of this rank, so far.
    """

    step: int
    loss: float
    tokens: int
    samples: int
    grad_norm: float
    lr: float
    status: Status
    why: str
    seconds: float
    peak_bytes: int
    ledger: Ledger
    timeline: Timeline
    nonfinite: tuple[Culprit, ...] = field(default=())

    @property
    def committed(self) -> bool:
        """Whether the parameters were updated."""
        return self.status == "committed"


class Runner(Protocol):
    """Something that runs a Job step by step: the engine here, other frameworks behind adapters."""

    def step(self, batch: Mapping[str, Any]) -> StepReport: ...

    def close(self) -> None: ...
