"""Zeros that cost memory once they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stretto.comm.memory import zeros


def resident() -> int:
    """Bytes of this process that are its own, mapped files left out."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what is resident is read from /proc")
def test_pages_cost_memory_only_once_they_are_written_and_are_given_back():
    size = 64 << 20
    before = resident()
    made = zeros(size // 4, torch.float32, torch.device("cpu"))
    assert resident() - before < size / 8
    made.fill_(1.0)
    assert resident() - before > size * 0.9
    del made
    assert resident() - before < size / 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [0, 7, 1 << 20, (1 << 20) + 3])
def test_they_are_zeros_of_their_own_that_can_be_written(elements, dtype):
    a, b = (zeros(elements, dtype, torch.device("cpu")) for _ in range(2))
    assert a.dtype == dtype and a.shape == (elements,) and not a.any()
    assert a.untyped_storage().nbytes() == elements * dtype.itemsize and a.data_ptr() % 64 == 0
    a += 1
    assert (a == 1).all() and not b.any()
