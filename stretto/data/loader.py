"""Loader: a torch DataLoader over a user's dataset that gives one data-parallel coordinate's rows, and can be resumed anywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from stretto.data.batch import Batch, collate
from stretto.data.dataset import Samples, map_style
from stretto.data.order import rows_of, samples_at, stable_number
from stretto.errors import JobError


class Rows(NamedTuple):
    """What a worker is to fetch: samples, and the number each one's random draws start from."""

    ids: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass
class Walk(Sampler[Rows]):
    """The rest of an epoch, batch after batch: this coordinate's rows of each. `position` counts samples of the whole job.

    Batches do not run over the end of an epoch: the last one is smaller, and still dealt out to all coordinates (to some of them
    perhaps no row), so that every rank sees the same number of batches and no sample is dropped or seen twice.
    """

    total: int | None  # None: a stream, where position starts anew with each pass
    size: int
    seed: int
    parts: int
    index: int
    shuffle: bool
    position: int = 0

    def spans(self) -> Iterator[range]:
        """Positions of each batch from here to the end of the epoch."""
        assert self.total is not None
        end = (self.position // self.total + 1) * self.total
        for start in range(self.position, end, self.size):
            yield range(start, min(start + self.size, end))

    def __iter__(self) -> Iterator[Rows]:
        for span in self.spans():
            assert self.total is not None
            mine = rows_of(span, self.parts, self.index)
            ids = samples_at(self.seed, mine, self.total) if self.shuffle else [p % self.total for p in mine]
            yield Rows(tuple(ids), tuple(stable_number("draw", self.seed, p) for p in mine))


@dataclass(frozen=True)
class Table(Dataset[Batch]):
    """A map-style dataset asked for whole batches."""

    samples: Samples

    def __getitem__(self, rows: Rows) -> Batch:
        return self.samples.batch(rows.ids, rows.seeds)


@dataclass(frozen=True)
class Stream(IterableDataset[Batch]):
    """An iterable dataset, read whole by every coordinate, each keeping its own rows of every `size` samples."""

    dataset: Iterable[Any]
    collate: Callable[[Sequence[Any]], Mapping[str, Any]]
    walk: Walk

    def __iter__(self) -> Iterator[Batch]:
        coming = iter(self.dataset)
        next(islice(coming, self.walk.position, self.walk.position), None)  # samples handed out before
        while block := list(islice(coming, self.walk.size)):
            mine = rows_of(block, self.walk.parts, self.walk.index)
            batch = Batch.of(self.collate(mine or block[:1]), local=True)
            yield batch if mine else batch.cut(0, 0)


class Loader(DataLoader[Batch]):
    """Batches of this coordinate's rows, for `engine.step(batch, local=True)`; one `for` over it is (the rest of) one epoch.

    The order of a map-style dataset is a function of (seed, position) alone, so `state()` is one number, and it may be given to a
    loader on another number of ranks, with other workers or another batch size. It counts what was handed out, not what workers
    have fetched ahead. Leaving the loop early and coming back goes on with the next batch; `load_state` goes anywhere.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        size: int,
        seed: int = 0,
        parts: int = 1,
        index: int = 0,
        shuffle: bool = True,
        collate_fn: Callable[[Sequence[Any]], Mapping[str, Any]] | None = None,
        num_workers: int = 0,
    ):
        """size: samples a step, of the whole job. parts, index: data-parallel coordinates, and which one this is."""
        total = len(dataset) if map_style(dataset) else None
        if total == 0:
            raise JobError("the dataset has no samples; give one with at least one")
        if total is None and not isinstance(dataset, Iterable):
            raise JobError(f"a {type(dataset).__name__} is no dataset; give one with __getitem__ and __len__, or an iterable")
        if total is None and num_workers > 1:
            raise JobError(f"num_workers={num_workers}: an iterable dataset is one stream, read by one worker; write num_workers=1 or 0")
        walk = Walk(total, size, seed, parts, index, shuffle)
        stack = collate_fn or collate
        super().__init__(
            Stream(dataset, stack, walk) if total is None else Table(Samples(dataset, stack)),
            batch_size=None,
            sampler=None if total is None else walk,
            collate_fn=as_it_is,
            num_workers=num_workers,
            generator=torch.Generator(),  # workers' seeds are drawn from it: the process's own stream is left alone
        )
        self.walk = walk

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        if self.walk.total is None:
            raise TypeError("an iterable dataset has no length")
        return -(-self.walk.total // self.walk.size)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        walk = self.walk
        if walk.total is not None:
            for span, batch in zip(walk.spans(), super().__iter__(), strict=True):
                walk.position = span.stop
                yield batch
            return
        for batch in super().__iter__():
            walk.position += walk.size
            yield batch
        walk.position = 0

    def state(self) -> dict[str, int]:
        """Where the loader stands: samples handed out, of the whole job (of a stream: in this pass)."""
        return {"position": self.walk.position}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on from where a loader of any other shape stood."""
        self.walk.position = state["position"]


def as_it_is(batch: Any) -> Any:
    """The DataLoader's own collation is not wanted: samples were stacked where they were fetched."""
    return batch
