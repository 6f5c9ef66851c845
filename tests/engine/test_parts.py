"""Parts of a model, timed on one rank: all of a step's seconds, each in its part, and the bytes that autograd keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from stretto.comm.threads import run_threads
from stretto.engine.parts import Timed, time_parts
from stretto.job import Job
from stretto.models import library

#: Part -> seconds of its forward; its backward takes two of them.
SLOW = {"embed": 1.0, "layers.0": 2.0, "layers.1": 6.0, "head": 4.0}


class Clock:
    """Goes on only while a part computes."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


class Takes(torch.autograd.Function):
    """Lets time go by, forward and back."""

    @staticmethod
    def forward(ctx, x: Tensor, seconds: float, clock: Clock) -> Tensor:
        ctx.seconds, ctx.clock = seconds, clock
        ctx.save_for_backward(x)  # so that a recompute has to come this far
        clock.at += seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.at += 2 * ctx.seconds
        return gradient, None, None


class Slow(nn.Module):
    def __init__(self, inner: nn.Module, seconds: float, clock: Clock) -> None:
        super().__init__()
        self.inner, self.seconds, self.clock = inner, seconds, clock

    def forward(self, x: Tensor) -> Tensor:
        return Takes.apply(self.inner(x), self.seconds, self.clock)


class Model(nn.Module):
    """Parts whose time is known, in a model of which nothing else is."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.embed = Slow(nn.Embedding(11, 8), SLOW["embed"], clock)
        self.layers = nn.ModuleList(Slow(nn.Linear(8, 8, bias=bool(i)), SLOW[f"layers.{i}"], clock) for i in range(2))
        self.head = Slow(nn.Linear(8, 11), SLOW["head"], clock)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def timed(model: nn.Module | None, clock: Clock, **keys: object) -> Timed:
    batches = [{"input_ids": torch.arange(12).view(2, 6) % 11, "labels": torch.arange(12).view(2, 6) % 11}]
    usual = {"batch.size": 8, "batch.micro_size": 2, "batch.seq_len": 6, "mesh": "pp=2 dp=2", "pipeline": "zb-v", "device": "cpu"}
    job = Job.load({**usual, **keys}).resolve(4, "cpu", 0)
    task = None if model is None else library.Task(model, batches=batches * 9)
    return run_threads(lambda world: time_parts(job, world, steps=3, model=task, now=clock), 1)[0]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_each_part_has_the_seconds_that_pass_in_it(recompute):
    """With full recompute a block's forward runs twice."""
    clock = Clock()
    found = timed(Model(clock), clock, recompute=recompute).parts
    again = 4 if recompute == "full" else 3
    assert {name: part.seconds for name, part in found.items()} == {
        name: seconds * (again if name.startswith("layers") else 3) for name, seconds in SLOW.items()
    }
    assert all((part.saved is None) == (recompute == "full") for part in found.values())


def test_blocks_of_the_same_work_and_weights_have_the_median_of_their_seconds():
    clock = Clock()
    model = Model(clock)
    model.layers[1].inner = nn.Linear(8, 8, bias=False)
    found = timed(model, clock).parts
    assert [found[f"layers.{i}"].seconds for i in range(2)] == [12.0, 12.0]


def test_the_bytes_that_are_seen_are_those_that_are_counted():
    """Of our decoder, whose anatomy counts what autograd keeps. The first block keeps the table of rotations too."""
    found = timed(None, Clock(), **{"batch.seq_len": 32, "zero": 3, "profile.steps": [1], "profile.ranks": [3]})
    first, *others = (item for item in found.items if item.block)
    assert [found.parts[item.name].saved for item in others] == [item.saved for item in others]
    cos, sin, rows, width = 32, 16, 2, 4  # elements a position, which the rows of a microbatch share; bytes an element
    assert found.parts[first.name].saved - first.saved == (cos + sin) * width / rows
    head = found.items[-1]
    assert 0 <= found.parts[head.name].saved - head.saved <= 32  # targets, and the sum of losses


def test_a_model_cut_short_has_the_parts_that_are_left():
    found = timed_short(2)
    assert found.shortened and [item.name for item in found.items if item.block] == ["layers.0", "layers.1"]


def timed_short(blocks: int) -> Timed:
    job = Job.load("tiny", **{"batch.seq_len": 8, "batch.size": 2, "mesh": "dp=1"}).resolve(1, "cpu", 0)
    return run_threads(lambda world: time_parts(job, world, steps=1, blocks=blocks), 1)[0]
