"""torch's DistributedDataParallel: every rank has all of the model, gradients are averaged in buckets while backward runs."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stretto.adapters.loop import Loop, dtype_of, optimizer_of, prepared
from stretto.adapters.runner import Setting, real


def build(setting: Setting) -> Loop:
    """See Build. Gradients are views of the buckets, which torch recommends: it saves a copy."""
    loaded, job = setting.loaded(), setting.job
    model: nn.Module = prepared(real(loaded, job.seed, setting.device, dtype_of(job)), job)
    devices = [setting.device] if setting.device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)

    def around(last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last else wrapped.no_sync()

    return Loop(setting, wrapped, optimizer_of(wrapped.parameters(), job), loaded, around=around)
