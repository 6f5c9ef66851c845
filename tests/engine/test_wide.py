"""In a float64 check, what asks for float32 stays float64; what is something else does not change."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from stretto.engine.wide import Wide


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
