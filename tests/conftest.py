"""What all tests share: one thread a rank, and a pool of rank processes that starts once."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
import warm
from hypothesis import settings
from pool import Pool

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # of what a shell runs in the background, and so of all that tests would start
    signal.signal(signal.SIGINT, signal.default_int_handler)
#: How long an example takes says nothing on a machine that others use too.
settings.register_profile("stretto", deadline=None)
settings.load_profile("stretto")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four rank processes that meet over gloo, started at the first use."""
    with Pool(4) as ranks:
        yield ranks


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Ranks share two cores: more threads each would only get in each other's way."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that this test starts are forked from a process that has torch loaded."""
    from stretto.launch import ranks

    monkeypatch.setattr(ranks, "subprocess", warm.STAND_IN)
