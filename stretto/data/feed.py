"""Feed: the batches of a run, by step number; the next one is read while the present one is computed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from stretto.data.batch import Batch
from stretto.data.order import rows_of, samples_at
from stretto.data.source import Source
from stretto.errors import JobError
from stretto.layout.layout import split


@dataclass(frozen=True)
class Wanted:
    """One coordinate's rows of one step."""

    step: int
    parts: int
    index: int


class Feed:
    """Turns a step number into rows: `samples` names them, the source reads this coordinate's part of them and no other.

    There is no position to save: `feed.rows(step)` gives the same rows whenever it is asked, on any number of ranks. Training runs
    through shuffled epochs without a gap; `Feed.evaluation` gives every sample once, in order, the last batch smaller.
    """

    def __init__(self, source: Source, *, size: int, seed: int = 0, epochs: float | None = None, shuffle: bool = True):
        """size: samples a step, of the whole job. epochs: where the feed ends (None: never)."""
        if epochs is not None and source.total is None:
            raise JobError(f"epochs={epochs}: {source.describe}, so how long an epoch is cannot be known; write steps=1000")
        self.source, self.size, self.seed = source, size, seed
        self.shuffle = shuffle and source.total is not None
        self.samples = None if epochs is None or source.total is None else round(epochs * source.total)
        self._origin = (0, 0)  # a step, and the position in the endless order of samples at which it begins
        self._thread = ThreadPoolExecutor(1, "stretto-data") if source.background else None
        self._ahead: tuple[Wanted, Future[Batch]] | None = None

    @classmethod
    def evaluation(cls, source: Source, *, size: int, batches: int | None = None) -> Feed:
        """The same samples each time: all of a source, or as many as fill `batches` batches."""
        if source.total is None and batches is None:
            raise JobError(f"evaluation on {source.describe}: it has no known end; write eval.batches=10")
        feed = cls(source, size=size, shuffle=False)
        ends = [n for n in (source.total, None if batches is None else batches * size) if n is not None]
        feed.samples = min(ends)
        return feed

    @property
    def steps(self) -> int | None:
        """Steps until the feed ends, the last one smaller if it must be; None: it never does."""
        return None if self.samples is None else self._steps_to(self.samples)

    @property
    def epoch_steps(self) -> int | None:
        """Steps that it takes to see every sample once, rounded up; None for a stream."""
        return None if self.source.total is None else -(-self.source.total // self.size)

    def steps_of_tokens(self, tokens: int) -> int:
        """Steps that it takes to learn from so many tokens, rounded up."""
        if self.source.tokens_per_sample is None:
            raise JobError(f"tokens={tokens}: {self.source.describe}, with no fixed number of tokens; write steps=1000 or epochs=1")
        return self._steps_to(-(-tokens // self.source.tokens_per_sample))

    def position(self, step: int) -> int:
        """Where step `step` begins: samples of the whole job that went before it."""
        return self._origin[1] + (step - self._origin[0]) * self.size

    def go_on(self, step: int, position: int) -> None:
        """Step `step` is to begin at `position`: so no sample is lost or seen twice where a run goes on with another batch.size."""
        self._origin = (step, position)

    def ids(self, step: int) -> list[int]:
        """The global samples of a step, in row order: what the ranks' parts, joined, hold."""
        return self._ids_at(self._positions(step))

    def rows(self, step: int, parts: int = 1, index: int = 0) -> Batch:
        """Rows of step `step` (from 0): coordinate `index` of `parts`; by default the global batch. Beyond the end: no rows."""
        wanted = Wanted(step, parts, index)
        if self._thread is None:
            return self._read(wanted)
        ahead, self._ahead = self._ahead, None
        batch = (ahead[1] if ahead and ahead[0] == wanted else self._thread.submit(self._read, wanted)).result()
        if self.steps is None or step + 1 < self.steps:
            following = replace(wanted, step=step + 1)
            self._ahead = following, self._thread.submit(self._read, following)
        return batch

    def walk(self, start: int = 0, parts: int = 1, index: int = 0) -> Iterator[Batch]:
        """The rows of step `start`, and of every step after it until the feed ends."""
        step = start
        while self.steps is None or step < self.steps:
            yield self.rows(step, parts, index)
            step += 1

    def close(self) -> None:
        """End the reading thread; what it had read ahead is dropped."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _positions(self, step: int) -> range:
        start, stop = self.position(step), self.position(step + 1)
        return range(start, stop if self.samples is None else max(start, min(stop, self.samples)))

    def _steps_to(self, samples: int) -> int:
        """The step that begins at or beyond a position."""
        step, position = self._origin
        return step + max(0, -(-(samples - position) // self.size))

    def _ids_at(self, positions: range) -> list[int]:
        total = self.source.total
        if total is None:
            return list(positions)
        return samples_at(self.seed, positions, total) if self.shuffle else [p % total for p in positions]

    def _read(self, wanted: Wanted) -> Batch:
        positions = self._positions(wanted.step)
        ids = self._ids_at(rows_of(positions, wanted.parts, wanted.index))
        first = split(len(positions), wanted.parts, wanted.index)[0]
        return Batch(self.source.rows(ids, wanted.step), len(ids), local=wanted.parts > 1, first=first)
