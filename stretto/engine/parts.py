"""How long each part of a model takes on this device: the engine's own step on one rank, watched at the parts' edges."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from stretto.comm.transport import World
from stretto.engine import check
from stretto.engine.engine import Engine
from stretto.job import Job
from stretto.layout.balance import Item, PartTime
from stretto.models import library
from stretto.models.stages import stage_items

WARMUP = 2  # steps


class Timed(NamedTuple):
    """items: the parts with their counted work; parts: what was measured of each, by its name; blocks: whether the model was cut short."""

    items: tuple[Item, ...]
    parts: dict[str, PartTime]
    shortened: bool


def time_parts(
    job: Job,
    world: World,
    *,
    steps: int = 5,
    blocks: int | None = None,
    model: nn.Module | library.Task | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> Timed:
    """Forward and backward of one microbatch of a resolved job, part by part, on a world of one rank.

    blocks: shorten the model to that many, where one device cannot hold it. model: a module (or Task) of one's own in place of the
    job's. now: reads the clock. Raises JobError for a model that has no parts.
    """
    rows = job.batch.micro_size or job.rows_per_rank
    alone = job.with_(
        mesh="dp=1",
        zero={"stage": 0, "gradients": "end", "keep": []},
        pipeline={"schedule": "1f1b", "chunks": None, "split": []},
        batch={"size": rows, "micro_size": rows},
        profile={"steps": []},
    )
    loaded = check.load(alone, model, blocks)
    compute = str(alone.precision.compute)
    width = {"fp64": 8, "fp32": 4}.get(compute, 2)
    items = stage_items(loaded.model, alone.batch.seq_len, alone.recompute, loaded.stages, width)
    batches = check.batches_of(alone, loaded, WARMUP + steps)
    with Engine(loaded, alone, world) as engine:
        watch = Watch(engine, [item.name for item in items], now)
        for i in range(WARMUP + steps):
            watch.begin()
            engine.step(batches[i % len(batches)])
        seconds = watch.seconds(WARMUP)
        saved = None
        if alone.recompute == "none" and alone.compile.mode == "none":  # else what is kept does not pass the door that is watched
            with saved_tensors_hooks(watch.keep, lambda x: x):
                watch.begin()
                engine.step(batches[0])
            first = batches[0].get("input_ids")
            saved = watch.saved(tokens=first.numel() if isinstance(first, Tensor) else rows * alone.batch.seq_len)
    return Timed(items, _alike_are_equal(items, seconds, saved), blocks is not None)


def _alike_are_equal(items: Sequence[Item], seconds: Mapping[str, float], saved: Mapping[str, float] | None) -> dict[str, PartTime]:
    """Blocks of the same work and weights take the median of what they took: what else they differ by is the machine's doing."""
    like: dict[tuple[object, ...], list[float]] = {}
    keys = {item.name: (item.work, item.elements) if item.block else (item.name,) for item in items}
    for name, key in keys.items():
        like.setdefault(key, []).append(seconds[name])
    return {name: PartTime(statistics.median(like[key]), None if saved is None else saved[name]) for name, key in keys.items()}


class Watch:
    """Marks when a step comes to each part: in forward as the part is called, in backward as the gradient of what it was given is there.

    What lies between two marks is counted to the part that was entered: so the loss belongs to the last part, and whatever the model
    does between blocks to the block before. Parts that are given no gradient (an embedding) share what is left at the end.
    """

    def __init__(self, engine: Engine, names: Sequence[str], now: Callable[[], float]) -> None:
        self.engine, self.names, self._clock = engine, list(names), now
        self.steps: list[tuple[dict[str, float], dict[str, float]]] = []
        self._end: list[float] = []
        self._here = self.names[0]
        self._storages: set[int] = set()
        self._bytes: dict[str, int] = {}
        modules = dict(engine.model.named_modules())
        for name in names:
            if name in modules:  # else a parameter, which runs nothing
                modules[name].register_forward_pre_hook(self._enters(name), with_kwargs=True)
        backward = engine.do["B"]

        def watched(action: Any) -> None:
            backward(action)
            self._end.append(self._now())

        engine.do["B"] = watched

    def begin(self) -> None:
        """A step of one microbatch follows."""
        self.steps.append(({}, {}))
        self._storages = {group.values().untyped_storage().data_ptr() for group in self.engine.parallel.groups}
        self._bytes = dict.fromkeys(self.names, 0)

    def _enters(self, name: str) -> Callable[..., None]:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            forward, backward = self.steps[-1]
            if name in forward:
                return  # computed again in backward
            forward[name], self._here = self._now(), name
            given = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad), None)
            if given is not None:
                given.register_hook(lambda _: backward.__setitem__(name, self._now()))

        return enter

    def _now(self) -> float:
        if self.engine.world.device.type == "cuda":
            torch.cuda.synchronize()
        return self._clock()

    def seconds(self, skip: int) -> dict[str, float]:
        """Of each part, the median over all steps but the first `skip`."""
        found: dict[str, list[float]] = {name: [] for name in self.names}
        for (forward, backward), end in zip(self.steps[skip:], self._end[skip:], strict=True):
            ran = [name for name in self.names if name in forward]
            spent = dict.fromkeys(self.names, 0.0)
            for name, following in pairwise(ran):
                spent[name] += forward[following] - forward[name]
            since = forward[ran[-1]]  # the last part's forward, the loss and all that goes back before its own gradient
            for name in reversed(ran):
                if name in backward:
                    spent[name] += backward[name] - since
                    since = backward[name]
            first = [name for name in ran if name not in backward] or ran[:1]
            for name in first:
                spent[name] += (end - since) / len(first)
            for name in self.names:
                found[name].append(spent[name])
        return {name: statistics.median(times) for name, times in found.items()}

    def keep(self, x: Tensor) -> Tensor:
        """A tensor that autograd keeps: its memory counts once, for the part that runs; weights do not count."""
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._storages:
            self._storages.add(storage.data_ptr())
            self._bytes[self._here] += storage.nbytes()
        return x

    def saved(self, tokens: int) -> dict[str, float]:
        """Bytes a token that each part's forward kept, of the step before."""
        return {name: bytes_ / tokens for name, bytes_ in self._bytes.items()}
