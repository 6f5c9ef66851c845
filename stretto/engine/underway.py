"""What is known of the step that is under way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from stretto.comm.transport import Pending
from stretto.data.batch import Batch
from stretto.engine.runner import Culprit, Status
from stretto.schedule.timeline import Timeline


@dataclass
class Underway:
    """The step's own state, new for each step.

    microbatches: this rank's; None: it has none. loss: of the microbatch between its forward and its backward. expected: targets
    of the whole step, where they can be counted before. before: what losses are multiplied with before backward.
    sums: this rank's share of what is voted on; the fields after it are what the vote came to.
    """

    device: torch.device
    rank: int
    started: float = field(default_factory=time.perf_counter)
    timeline: Timeline = field(init=False)
    microbatches: Sequence[Batch | None] = ()
    loss: Tensor | None = None
    expected: int | None = None
    before: float = 1.0
    roll_work: Pending | None = None
    roll: Tensor = field(init=False)
    sums: Tensor = field(init=False)
    loss_sum: float = 0.0
    count: float = 0.0
    rows: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    status: Status = "committed"
    why: str = ""
    culprits: tuple[Culprit, ...] = ()

    def __post_init__(self) -> None:
        self.timeline = Timeline(self.rank)
        self.roll = torch.zeros(2, dtype=torch.float64, device=self.device)  # targets, ranks that have come to their end
        self.sums = torch.zeros(5, dtype=torch.float64, device=self.device)  # loss, count, rows, squared norm, wish to stop
