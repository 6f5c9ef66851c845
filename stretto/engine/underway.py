"""What is known of the step that is under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stretto.comm.transport import Pending
from stretto.data.batch import Batch
from stretto.engine.runner import Culprit, Status
from stretto.parallel.boundary import Arriving
from stretto.schedule.action import Action
from stretto.schedule.timeline import Timeline

#: (stage, microbatch)
Key = tuple[int, int]
#: What is done with the output of the whole model: the loss of a microbatch, or None where nothing is to be learnt from it.
Finish = Callable[[Any, Batch], Tensor | None]


@dataclass
class Between:
    """What stands between a microbatch's forward through a stage and its backward. output: the loss, in the last stage."""

    input: Tensor | None
    output: Tensor
    straight: bool


@dataclass
class Flow:
    """What is on its way between the actions of a step. By stage and microbatch: inputs of a stage that its neighbour on this rank
    made, or that are awaited; what a forward left; what is to be sent; gradients of a stage's output; halves of backwards."""

    inputs: dict[Key, Tensor] = field(default_factory=dict)
    arriving: dict[Key, Arriving] = field(default_factory=dict)
    between: dict[Key, Between] = field(default_factory=dict)
    outgoing: dict[Key, Tensor] = field(default_factory=dict)
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    returning: dict[Key, Arriving] = field(default_factory=dict)
    leaving: dict[Key, Tensor] = field(default_factory=dict)
    postponed: dict[Key, list[list[Callable[[], None]]]] = field(default_factory=dict)


@dataclass
class Underway:
    """The step's own state, new for each step.

    microbatches: this rank's; None: it has none. finish: what is done with the whole model's output; whole: and somebody
    else than the loss looks at it. lasts: of each stage its last
    backward. expected: targets of the whole step, where they can be counted before. before: what losses are multiplied with
    before backward. settled: whether all reductions are through. seen: rows of forwards of the user's own loop. sums: this rank's
    share of what is voted on; the fields after it are what the vote came to.
    """

    device: torch.device
    rank: int
    started: float = field(default_factory=time.perf_counter)
    timeline: Timeline = field(init=False)
    microbatches: Sequence[Batch | None] = ()
    finish: Finish | None = None
    whole: bool = False
    lasts: Mapping[int, Action] = field(default_factory=dict)
    flow: Flow = field(default_factory=Flow)
    settled: bool = False
    seen: int = 0
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
