"""In a float64 check, what asks for float32 stays float64; what is something else does not change."""

from __future__ import annotations

import copy
import inspect

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from stretto.engine.wide import Wide, widen


def test_float64_stays_float64_however_float32_is_asked_for():
    x = torch.full((2, 3), 1 / 3, dtype=torch.float64)
    with Wide():
        asked = [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), x.type(torch.float32), F.softmax(x, -1, dtype=torch.float32)]
    assert all(y.dtype == torch.float64 for y in asked)
    assert all(torch.equal(y, x) for y in asked)  # the softmax of equal numbers too


def test_other_dtypes_go_where_they_are_told():
    with Wide():
        assert torch.ones(2, dtype=torch.bfloat16).float().dtype == torch.float32
        assert torch.arange(3).to(torch.float32).dtype == torch.float32
        assert torch.ones(2, dtype=torch.float64).to(torch.bfloat16).dtype == torch.bfloat16
    assert torch.ones(2, dtype=torch.float64).float().dtype == torch.float32


class Squares(nn.Module):
    def __init__(self, seen: list) -> None:
        super().__init__()
        self.seen, self.layers = seen, nn.ModuleList([nn.Linear(1, 1)])

    def forward(self, x, scale: float = 1.0):
        self.seen.append(x.float().dtype)
        return scale * x.float() ** 2


def test_what_is_computed_again_in_backward_stays_float64_too():
    model, x = Squares(seen := []), torch.ones(3, dtype=torch.float64, requires_grad=True)
    widen(model)
    checkpoint(model.forward, x, use_reentrant=False).sum().backward()
    assert seen == [torch.float64, torch.float64]
    assert torch.equal(x.grad, torch.full((3,), 2.0, dtype=torch.float64))


def test_a_wide_module_is_what_it_was_and_its_copies_are_their_own():
    model = Squares([])
    widen(model)
    other = copy.deepcopy(model)
    other(torch.ones(1, dtype=torch.float64))
    assert other.seen == [torch.float64] and model.seen == []
    assert isinstance(model, Squares) and type(model).__name__ == "Squares"
    assert list(inspect.signature(model.forward).parameters) == ["x", "scale"]
