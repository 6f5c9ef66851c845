"""stretto: the same training step on any mesh of ranks. Importing it does not import torch; names are loaded when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stretto.comm.transport import World
    from stretto.engine.engine import Engine
    from stretto.engine.runner import StepReport
    from stretto.errors import CheckFailed, JobError, RunError, StrettoError
    from stretto.job import Job
    from stretto.launch import check, launch, train
    from stretto.layout.mesh import Mesh
    from stretto.models.attention import attention
    from stretto.models.library import Task
    from stretto.plan import plan

__version__ = "0.1.0"

_HOME = {
    "CheckFailed": "stretto.errors",
    "Engine": "stretto.engine.engine",
    "Job": "stretto.job",
    "JobError": "stretto.errors",
    "Mesh": "stretto.layout.mesh",
    "RunError": "stretto.errors",
    "StepReport": "stretto.engine.runner",
    "StrettoError": "stretto.errors",
    "Task": "stretto.models.library",
    "World": "stretto.comm.transport",
    "attention": "stretto.models.attention",
    "check": "stretto.launch",
    "launch": "stretto.launch",
    "plan": "stretto.plan",
    "train": "stretto.launch",
}

__all__ = [
    "CheckFailed",
    "Engine",
    "Job",
    "JobError",
    "Mesh",
    "RunError",
    "StepReport",
    "StrettoError",
    "Task",
    "World",
    "attention",
    "check",
    "launch",
    "plan",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stretto' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
