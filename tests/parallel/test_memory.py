"""Storages are counted from the operator that makes them until the last tensor lets go."""

from __future__ import annotations

import torch

from stretto.parallel.memory import Storages, memory_of


def test_views_lie_in_one_memory_also_where_it_has_no_address() -> None:
    for device in ("cpu", "meta"):
        x = torch.zeros(4, 4, device=device)
        assert memory_of(x) == memory_of(x.t()[1:]) == memory_of(x.view(-1))
        assert memory_of(x) != memory_of(x.clone())


def test_a_storage_counts_once_and_until_its_last_view_is_gone() -> None:
    before = torch.ones(100)
    storages = Storages(torch.device("cpu"))
    with storages:
        x = torch.zeros(100)
        y = x.view(10, 10)
        z = before[1:]  # made before: not counted, as its views are not
        assert storages.live == 400
        del x
        assert storages.live == 400 and storages.peak == 400
        y = y + 1
        assert storages.live == 400 and storages.peak == 800
        del y
    assert storages.live == 0 and z.numel() == 99


def test_what_autograd_keeps_is_held() -> None:
    x = torch.ones(50, requires_grad=True)
    storages = Storages(torch.device("cpu"))
    with storages:
        y = (x * 2).exp().sum()
        assert storages.live == 200 + 4  # the result of exp, for its backward
        y.backward()
        del y
        assert storages.live == 200  # the gradient


def test_bytes_are_told_apart_by_what_they_are_for() -> None:
    storages = Storages(torch.device("cpu"))
    with storages:
        held, kept = torch.zeros(10), torch.zeros(20)
        storages.name({"parameters": [held.view(2, 5)]})
        assert storages.bytes_ == {"activations": 0, "working": 80, "parameters": 40}
        storages.begin()
        left = torch.zeros(30)
        storages.begin()
        passing = torch.zeros(40)
        assert storages.at_peak == {"activations": 120, "working": 240, "parameters": 40}
        assert sum(storages.at_peak.values()) == storages.peak == storages.live == 400
        del passing, left
        assert storages.bytes_ == {"activations": 0, "working": 80, "parameters": 40} and storages.peak == 400
    assert kept.numel()
