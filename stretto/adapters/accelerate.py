"""Hugging Face Accelerate: torch's loop with its wrappers, DDP unless told otherwise."""

from __future__ import annotations

import contextlib
from typing import Any

from stretto.adapters.loop import Loop, dtype_of, optimizer_of, prepared
from stretto.adapters.runner import Setting, real


def build(setting: Setting) -> Loop:
    """See Build. Precision, clipping, backward and update go through the Accelerator."""
    from accelerate import Accelerator

    loaded, job = setting.loaded(), setting.job
    accelerator: Any = Accelerator(cpu=setting.device.type == "cpu", mixed_precision="bf16" if job.precision.compute == "bf16" else "no")
    model = prepared(real(loaded, job.seed, setting.device, dtype_of(job)), job)
    wrapped, optimizer = accelerator.prepare(model, optimizer_of(model.parameters(), job))

    def around(last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else accelerator.no_sync(wrapped)

    def clip(most: float) -> float:
        return float(accelerator.clip_grad_norm_(wrapped.parameters(), most))

    return Loop(setting, wrapped, optimizer, loaded, around=around, clip=clip, backward=accelerator.backward, autocast=False)
