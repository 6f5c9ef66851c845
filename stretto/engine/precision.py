"""Dynamic loss scaling for fp16: gradients too small for its 5 exponent bits are scaled up before backward."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScale:
    """The scale, a power of two so that undoing it is exact. `update` is called by all ranks with the same verdict.

    Halved (down to 1) at each overflow; doubled after `window` good steps in a row (torch's GradScaler, REFERENCE H2).
    """

    scale: float = 65536.0
    window: int = 2000
    good: int = 0

    def update(self, finite: bool) -> None:
        if not finite:
            self.scale, self.good = max(self.scale / 2, 1.0), 0
            return
        self.good += 1
        if self.good == self.window:
            self.scale, self.good = self.scale * 2, 0
