"""Which runner fits this job on this machine, and why, in plain words drawn from the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stretto.adapters.summary import Row
from stretto.draw.numbers import bytes_, count

#: Medians of rounds on a shared machine, and peaks of memory, differ by so much without a cause.
NOISE = 0.04
#: Timed steps a round from which a median means something.
ENOUGH = 5


def verdict(rows: Sequence[Row], mesh: str, apart: float, timed: int) -> Iterator[str]:
    """Sentences: the fastest, the smallest, whether all trained the same, who could not, and what to take. timed: steps a round."""
    ran = [row for row in rows if row.status == "ok"]
    if not ran:
        yield "None of the runners trained this job; the reasons stand above."
        return
    same = [row for row in ran if row.apart_at is None]
    fastest = sorted(same, key=lambda row: -(row.tokens_per_second or 0.0))
    if fastest:
        yield _speed(fastest)
    smallest = min((row for row in same if row.machine_bytes), key=lambda row: row.machine_bytes or 0, default=None)
    if smallest is not None and len(same) > 1:
        yield _memory(smallest, fastest)
    yield from _numbers(ran, apart)
    unable = [row.runner for row in rows if row.status in ("cannot", "failed")]
    if unable:
        yield f"Not on this job: {', '.join(unable)}; why stands above."
    absent = [row.runner for row in rows if row.status == "not installed"]
    if absent:
        yield f"Not installed, so not judged: {', '.join(absent)}."
    if fastest and len(ran) > 1:
        yield _choice(fastest, smallest)
    if timed < ENOUGH:
        steps = "1 step a round was timed" if timed == 1 else f"{timed} steps a round were timed"
        yield f"Only {steps}, so speeds are rough; write --until 20, or a job of more steps."
    yield f"All this is of mesh {mesh} on this machine; another machine or network may order them otherwise."


def close(row: Row, best: Row) -> bool:
    """Whether a row is as fast as the best within noise, or the rounds overlap."""
    assert row.tokens_per_second and best.tokens_per_second and row.spread and best.spread
    return row.tokens_per_second > best.tokens_per_second * (1 - NOISE) or row.spread[1] >= best.spread[0]


def as_small(row: Row, least: Row) -> bool:
    """Whether a row needs no more memory on the machine than the least, within noise."""
    return bool(row.machine_bytes and least.machine_bytes) and (row.machine_bytes or 0) <= (least.machine_bytes or 0) * (1 + NOISE)


def _speed(fastest: Sequence[Row]) -> str:
    best, others = fastest[0], fastest[1:]
    assert best.tokens_per_second
    told = f"Fastest: {best.runner}, {count(best.tokens_per_second)} tokens/s"
    parts = [f"{best.tokens_per_second / (row.tokens_per_second or 1.0):.2f} times {row.runner}" for row in others]
    even = [row.runner for row in others if close(row, best)]
    return told + (f" ({', '.join(parts)})" if parts else "") + "." + (f" Within noise of it: {', '.join(even)}." if even else "")


def _memory(smallest: Row, fastest: Sequence[Row]) -> str:
    others = [row for row in fastest if row is not smallest and row.machine_bytes]
    assert smallest.machine_bytes
    if all(as_small(row, smallest) for row in others):
        return f"Memory decides nothing: all need about {bytes_(smallest.machine_bytes)} on the machine."
    parts = [f"{row.runner} {bytes_(row.machine_bytes or 0)}" for row in others]
    return f"Least memory on the machine: {smallest.runner}, {bytes_(smallest.machine_bytes)} (against {', '.join(parts)})."


def _numbers(ran: Sequence[Row], apart: float) -> Iterator[str]:
    parting = [row for row in ran if row.apart_at is not None]
    if len(ran) > 1 and not parting:
        most = max(row.apart_by or 0.0 for row in ran)
        by = f"differ by {most:.1e} at most, and {apart:g} would be rounding" if most else "are equal to the last bit"
        yield f"All of them train the same: their losses {by}."
    for row in parting:
        off = f"parts from {ran[0].runner}'s at step {row.apart_at} (by {row.apart_by:.1e} at most)"
        yield f"{row.runner} trains something else: its loss {off}."
    for row in ran:
        if row.repeats is False:
            yield f"{row.runner} does not repeat itself: its rounds gave different losses."


def _choice(fastest: Sequence[Row], smallest: Row | None) -> str:
    best = fastest[0]
    if smallest is None or as_small(best, smallest):
        return f"For this job here: {best.runner}, the fastest" + ("." if smallest is None else ", and none needs less memory.")
    if close(smallest, best):
        return f"For this job here: {smallest.runner}, as fast as any within noise, in the least memory."
    return f"For this job here: {best.runner} where speed counts; {smallest.runner} where memory is short."
