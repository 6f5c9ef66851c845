"""Starting ranks and reporting how they ended. The package itself can be called: `stretto.launch(fn, ranks=4)`.

[Note: a package that is a function] A package and a function of one name: whichever is imported last would hide the other,
so the package is the function. What it offers is imported when it is called; importing it costs nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from stretto.job import Job
    from stretto.launch.record import Trained
    from stretto.models.library import Task


def launch(function: Callable[..., Any], ranks: int, args: Sequence[Any] = (), *, timeout: float | None = None) -> list[Any]:
    """Run `function(*args)` on `ranks` processes of this machine, also from a notebook; results in rank order.

    Each process has torchrun's variables (RANK, WORLD_SIZE, ...), and what it prints comes out here behind its rank.
    Raises RankFailed with the first failing rank's own error once all ranks are gone; `timeout` is in seconds.
    """
    from stretto.launch import local

    return local.launch(function, ranks, args, timeout=timeout)


def train(
    job: Job | str | Path | None,
    out: str | Path | None = None,
    *,
    until: int | None = None,
    resume: bool | Literal["auto"] = False,
) -> Trained | None:
    """Train a job: starts its ranks on this machine, or joins them where this process is one (torchrun, srun, stretto.launch).

    out: the run folder (default runs/NAME-TIME). until: stop after that step; the learning rate goes as if it went on.
    resume: go on with the run in `out` from its newest checkpoint, on the mesh of `job`, which may be another ("auto": start if there is
    none). job=None is then the run's own.
    Returns how it went, on rank 0; None on the other ranks. Raises JobError before anything is started or written where it
    can be known, RankFailed for a run that failed.
    """
    from stretto.launch import training

    return training.train_or_go_on(job, out, until, resume)


def check(
    model: nn.Module | Task | None,
    job: Job | str | Path,
    *,
    dtype: Literal["fp64", "job"] = "fp64",
    steps: int = 3,
    blocks: int | None = None,
) -> Mapping[str, Any]:
    """Hold a job on its mesh against one process, on your own model (or Task) or, with None, the job's; returns what was compared.

    dtype: fp64 shows every wrong scale; "job" computes as the job says. blocks: shorten the job's model to that many.
    Raises CheckFailed, naming the worst parameter, if they differ by more than rounding.
    """
    from stretto.launch import checking

    return checking.check(model, job, dtype=dtype, steps=steps, blocks=blocks)


class _Package(ModuleType):
    __call__ = staticmethod(launch)


sys.modules[__name__].__class__ = _Package
