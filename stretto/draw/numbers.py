"""Numbers as people read them on an axis, in a progress line or in a table."""

from __future__ import annotations

import math

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(value: float) -> str:
    """12345 -> '12.3k': three digits are enough to compare."""
    for size, prefix in PREFIXES:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g}{prefix}"
    return f"{value:.3g}"


def bytes_(value: float) -> str:
    """310e6 -> '310 MB' (powers of 1000)."""
    for size, prefix in PREFIXES:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.3g} {prefix}B"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """75 -> '1:15'; under ten seconds with one decimal, as '2.4 s'."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"


def measure(value: float) -> str:
    """A loss, a norm, a rate: four digits, without an exponent where it can be read without."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers in [low, high], at most `most` of them, at steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(size * power for size in (1, 2, 5, 10, 20) if size * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(step * index, 12) for index in range(first, last + 1)][:most]
