"""The feed of a run: rows by step number alone, read ahead, on any number of ranks."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from stretto.data.feed import Feed
from stretto.data.order import samples
from stretto.errors import JobError


@dataclass
class Numbers:
    """Sample i is the number i; notes who asked for what."""

    total: int | None
    tokens_per_sample: int | None = 10
    background: bool = True
    describe: str = "numbers"
    asked: list[list[int]] = field(default_factory=list)
    threads: set[str] = field(default_factory=set)

    def rows(self, indices: Sequence[int], step: int = 0) -> Mapping[str, Tensor]:
        if 666 in indices:
            raise ValueError("spoilt sample")
        self.asked.append(list(indices))
        self.threads.add(threading.current_thread().name)
        return {"x": torch.tensor(indices, dtype=torch.int64)}


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_parts_joined_are_the_step_and_nobody_reads_more(parts: int, background: bool) -> None:
    for step in (0, 1, 4, 3):
        sources = [Numbers(11, background=background) for _ in range(parts)]
        batches = [Feed(s, size=4, seed=9).rows(step, parts, i) for i, s in enumerate(sources)]
        assert [i for b in batches for i in b["x"].tolist()] == samples(9, step, 4, 11)
        assert [b.rows for b in batches] == [len(s.asked[0]) for s in sources]


def test_the_global_batch_is_the_step_in_order() -> None:
    feed = Feed(Numbers(11), size=4, seed=2)
    for step in range(6):
        assert feed.rows(step)["x"].tolist() == feed.ids(step) == samples(2, step, 4, 11)


def test_the_next_batch_is_read_while_this_one_is_computed() -> None:
    source = Numbers(50)
    feed = Feed(source, size=5)
    feed.rows(0)
    feed.close()  # waits for what was begun
    assert source.asked in ([feed.ids(0)], [feed.ids(0), feed.ids(1)])
    feed = Feed(source := Numbers(50), size=5)
    for step in range(4):
        feed.rows(step)
    assert source.asked[:4] == [feed.ids(step) for step in range(4)]  # nothing is read twice
    assert len(source.threads) == 1
    assert threading.current_thread().name not in source.threads


def test_code_of_the_users_runs_in_the_callers_thread() -> None:
    source = Numbers(50, background=False)
    Feed(source, size=5).rows(0)
    assert source.threads == {threading.current_thread().name}
    assert len(source.asked) == 1


def test_a_reading_error_comes_when_its_step_is_asked_for() -> None:
    feed = Feed(Numbers(None), size=333)
    feed.rows(0)
    feed.rows(1)
    with pytest.raises(ValueError, match="spoilt sample"):
        feed.rows(2)
    assert feed.rows(3).rows == 333


def test_epochs_end_with_what_is_left() -> None:
    feed = Feed(Numbers(5), size=4, epochs=2)
    assert (feed.steps, feed.epoch_steps) == (3, 2)
    batches = list(feed.walk())
    assert [b.rows for b in batches] == [4, 4, 2]
    seen = [i for b in batches for i in b["x"].tolist()]
    assert sorted(seen[:5]) == sorted(seen[5:]) == [0, 1, 2, 3, 4]
    assert feed.rows(3).rows == 0
    assert [b["x"].tolist() for b in feed.walk(start=1)] == [b["x"].tolist() for b in batches[1:]]


def test_evaluation_sees_each_sample_once_in_order_on_any_number_of_ranks() -> None:
    for parts in (1, 2, 4, 7):
        feeds = [Feed.evaluation(Numbers(9), size=5) for _ in range(parts)]
        steps = list(zip(*(feed.walk(parts=parts, index=i) for i, feed in enumerate(feeds)), strict=True))
        assert len(steps) == feeds[0].steps == 2
        seen = [i for step in steps for batch in step for i in batch["x"].tolist()]
        assert seen == list(range(9))
        assert sum(seen) / len(seen) == 4.0


def test_evaluation_on_some_batches_takes_the_first_ones() -> None:
    assert [b["x"].tolist() for b in Feed.evaluation(Numbers(9), size=2, batches=2).walk()] == [[0, 1], [2, 3]]
    assert Feed.evaluation(Numbers(9), size=2, batches=99).steps == 5


def test_lengths_in_steps() -> None:
    feed = Feed(Numbers(11), size=4)
    assert feed.steps is None
    assert feed.epoch_steps == 3
    assert feed.steps_of_tokens(400) == 10
    assert feed.steps_of_tokens(401) == 11
    assert Feed(Numbers(11), size=4, epochs=0.5).steps == 2


def test_lengths_that_cannot_be_known_are_asked_about() -> None:
    with pytest.raises(JobError, match="write steps="):
        Feed(Numbers(None), size=4, epochs=1)
    with pytest.raises(JobError, match="write steps="):
        Feed(Numbers(5, tokens_per_sample=None), size=4).steps_of_tokens(100)
    with pytest.raises(JobError, match=r"eval\.batches"):
        Feed.evaluation(Numbers(None), size=4)
