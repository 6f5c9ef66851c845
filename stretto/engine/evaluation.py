"""Means over real samples, exact on any mesh: sums and counts are added, never means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stretto.data.batch import Batch, prepare_labels

if TYPE_CHECKING:
    from stretto.engine.engine import Engine

#: metrics(output, batch) -> {name: (sum, count)}; a name may be missing on some ranks or batches.
Metrics = Callable[[Any, Batch], Mapping[str, tuple[Tensor | float, Tensor | float]]]


def evaluate(engine: Engine, batches: Iterable[Mapping[str, Any] | Batch], metrics: Metrics | None, local: bool) -> dict[str, float]:
    """See Engine.evaluate. batches: global, each rank taking its rows; with local=True this rank's own, of any number.

    A rank without rows takes part in what the others gather. NaN where nothing was counted.
    """
    sums: dict[str, list[float]] = {}

    def measure(output: Any, microbatch: Batch) -> None:
        found = {"loss": engine.criterion(output, microbatch)} | dict(metrics(output, microbatch) if metrics else {})
        for name, (value, number) in found.items():
            old = sums.setdefault(name, [0.0, 0.0])
            old[0] += float(value)
            old[1] += float(number)

    was_training = engine.train(False)
    try:
        for mine, count in _rounds(engine, batches, local):
            engine.forward_only(mine.microbatches(count) if mine is not None else [None] * count, measure, whole=metrics is not None)
    finally:
        engine.train(was_training)
    total: dict[str, list[float]] = {}
    for part in engine.everybody.objects(sums, reason="evaluation"):
        for name, (value, number) in part.items():
            old = total.setdefault(name, [0.0, 0.0])
            old[0] += value
            old[1] += number
    return {name: value / number if number else float("nan") for name, (value, number) in sorted(total.items())}


def _rounds(engine: Engine, batches: Iterable[Mapping[str, Any] | Batch], local: bool) -> Iterable[tuple[Batch | None, int]]:
    """This rank's rows of each round, and the number of forwards that all ranks make in it.

    A batch that is marked local (as those of engine.loader are) is this rank's own rows, with or without local=True.
    """
    rest = iter(batches)
    while True:
        values = next(rest, None)
        if values is None and not local:
            return
        mine = None if values is None else Batch.of(prepare_labels(values) if engine.counts_targets else values, local=local)
        if mine is not None and not mine.local:
            yield mine.part(engine.rows.size, engine.rows.index), engine.forwards(mine.rows)
            continue
        local = True
        need = torch.tensor(
            [engine.forwards_local(mine.rows) if mine is not None else 0.0], dtype=torch.float64, device=engine.world.device
        )
        engine.rows.all_reduce(need, reason="evaluation", op="max", lane="user").wait()
        if need.item() == 0:
            return
        yield mine, int(need.item())
