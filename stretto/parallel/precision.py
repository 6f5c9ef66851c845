"""Which dtype each thing has: parameters in the computation, what is reduced, and the master copy that the optimizer updates."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """compute: parameters and activations. reduce: gradient buffers and what is sent of them. master: what the optimizer updates.

    Where compute and master agree there is one copy of the parameters, not two.
    """

    compute: torch.dtype
    reduce: torch.dtype
    master: torch.dtype

    @staticmethod
    def of(compute: str, reduce: str, master: str) -> Precision:
        """From the names a Job uses: fp64 fp32 bf16 fp16."""
        return Precision(_DTYPES[compute], _DTYPES[reduce], _DTYPES[master])

    @property
    def scaled(self) -> bool:
        """Whether gradients can underflow, so that the loss is scaled: fp16 has 5 exponent bits."""
        return self.compute == torch.float16
