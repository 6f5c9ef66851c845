"""The loader of a user's dataset: each rank its rows, every sample once an epoch, resumable anywhere."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stretto.data.batch import Batch
from stretto.data.loader import Loader
from stretto.data.order import Shuffle
from stretto.errors import JobError


class Squares(Dataset[dict[str, Any]]):
    """Sample i is i and its square, and three draws of random numbers."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {"id": i, "square": torch.tensor(float(i * i)), "draws": draws}


class Stream(IterableDataset[dict[str, int]]):
    def __init__(self, length: int):
        self.length = length

    def __iter__(self) -> Iterator[dict[str, int]]:
        return iter({"id": i} for i in range(self.length))


def ids(batches: list[Batch]) -> list[int]:
    return [i for batch in batches for i in batch["id"].tolist()]


def step_ids(loaders: list[Loader]) -> list[list[int]]:
    """What all coordinates of a job see, step by step, in rank order."""
    return [ids(list(step)) for step in zip(*loaders, strict=True)]


def fleet(parts: int, dataset: Any = None, **options: Any) -> list[Loader]:
    return [Loader(dataset or Squares(11), size=4, seed=5, parts=parts, index=i, **options) for i in range(parts)]


def test_it_is_a_torch_dataloader() -> None:
    loader = fleet(1)[0]
    assert isinstance(loader, DataLoader)
    assert len(loader) == 3
    batch = next(iter(loader))
    assert isinstance(batch, Batch)
    assert batch.local
    assert batch["square"].tolist() == [float(i * i) for i in batch["id"].tolist()]


@pytest.mark.parametrize("parts", [2, 3, 4, 5])
def test_ranks_joined_see_what_one_rank_sees(parts: int) -> None:
    alone, together = fleet(1), fleet(parts)
    for epoch in range(2):
        steps = step_ids(alone)
        assert step_ids(together) == steps
        assert [len(s) for s in steps] == [4, 4, 3]
        assert [i for s in steps for i in s] == [Shuffle.of(5, epoch, 11).at(p) for p in range(11)]


def test_a_rank_without_a_row_gets_an_empty_batch_of_the_same_kind() -> None:
    last = list(Loader(Squares(9), size=4, parts=3, index=2))[-1]
    assert last.rows == 0
    assert (last["square"].shape, last["draws"].shape, last["id"].dtype) == ((0,), (0, 3), torch.int64)


def test_workers_change_nothing() -> None:
    kept: list[list[Tensor]] = []
    for workers in (0, 2):
        (loader,) = fleet(1, num_workers=workers)
        kept.append([batch[name] for _ in range(2) for batch in loader for name in ("id", "draws")])
    assert all(map(torch.equal, *kept))


def test_what_a_sample_draws_depends_on_neither_ranks_nor_place_and_is_new_each_epoch() -> None:
    (alone,), pair = fleet(1), fleet(2)
    first = {int(i): d for batch in alone for i, d in zip(batch["id"], batch["draws"], strict=True)}
    for loader in pair:
        for batch in loader:
            assert all(torch.equal(first[int(i)], d) for i, d in zip(batch["id"], batch["draws"], strict=True))
    second = {int(i): d for batch in alone for i, d in zip(batch["id"], batch["draws"], strict=True)}
    assert not any(torch.equal(first[i], second[i]) for i in first)


def test_loading_leaves_the_global_random_streams_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state(), random.getstate()
    list(fleet(1)[0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize("dataset", [Squares(11), Stream(11)])
def test_stopping_anywhere_and_resuming_on_other_ranks_repeats_the_run(dataset: Any) -> None:
    (alone,) = fleet(1, dataset)
    whole = [batch["id"].tolist() for _ in range(3) for batch in alone]
    for stop in range(len(whole)):
        for parts in (1, 2, 3):
            loader = fleet(1, dataset)[0]
            got = 0
            while got < stop:
                for _ in loader:
                    got += 1
                    if got == stop:
                        break
            state = loader.state()
            resumed = fleet(parts, dataset)
            for other in resumed:
                other.load_state(state)
            again: list[list[int]] = []
            for _ in range(4):
                again += step_ids(resumed)
            assert again[: len(whole) - stop] == whole[stop:], (stop, parts)


def test_the_position_counts_what_was_handed_out_not_what_was_fetched() -> None:
    (loader,) = fleet(1, num_workers=2)
    for n, _ in enumerate(loader, 1):
        assert loader.state() == {"position": min(4 * n, 11)}
        if n == 2:
            break
    assert [b.rows for b in loader] == [3]


def test_a_change_of_batch_size_goes_on_at_the_same_sample() -> None:
    loader = fleet(1)[0]
    first = next(iter(loader))
    other = Loader(Squares(11), size=5, seed=5)
    other.load_state(loader.state())
    rest = list(other)
    assert [b.rows for b in rest] == [5, 2]
    assert sorted(ids([first, *rest])) == list(range(11))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_a_stream_is_dealt_out_in_its_own_order(parts: int, workers: int) -> None:
    loaders = fleet(parts, Stream(9), num_workers=workers if parts < 5 else 0)
    assert step_ids(loaders) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert loaders[0].state() == {"position": 0}


def test_unshuffled_is_the_order_of_the_dataset() -> None:
    assert ids(list(Loader(Squares(5), size=2, shuffle=False))) == [0, 1, 2, 3, 4]


def test_a_collate_fn_is_the_users_business() -> None:
    loader = Loader(Squares(5), size=2, shuffle=False, collate_fn=lambda rows: {"x": torch.tensor([r["id"] for r in rows])})
    assert [b["x"].tolist() for b in loader] == [[0, 1], [2, 3], [4]]
    with pytest.raises(JobError, match="a batch is a mapping"):
        next(iter(Loader(Squares(5), size=2, collate_fn=tuple)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dataset", "workers", "says"),
    [(Stream(3), 2, "num_workers=1"), (Squares(0), 0, "no samples"), (3, 0, "no dataset")],
)
def test_what_cannot_be_loaded_is_refused(dataset: Any, workers: int, says: str) -> None:
    with pytest.raises(JobError, match=says):
        Loader(dataset, size=2, num_workers=workers)
