"""How much memory this rank has needed."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


class PeakMemory:
    """The most bytes seen at any `look`. On a GPU the allocator's own peak; on a CPU resident memory without mapped files.

    Mapped files (torch's libraries) count as resident too, so VmRSS would overstate: RssAnon + RssShmem is what training holds.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.peak = device, 0

    def look(self) -> int:
        self.peak = max(self.peak, self._now())
        return self.peak

    def _now(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            lines = _STATUS.read_text().splitlines()
        except OSError:  # not Linux
            unit = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))
