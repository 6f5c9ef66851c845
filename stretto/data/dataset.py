"""Datasets of the user's: tables of the datasets library, and what a Python function returns, map-style or iterable."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from stretto.data.batch import NOT_COUNTED, Batch, collate
from stretto.data.order import stable_number
from stretto.data.source import TABLES, Request, Source, Tokens
from stretto.data.text import check_ids, refused
from stretto.data.tokenizer import encode

FORMATS = MappingProxyType({".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"})
HELD_OUT = ("validation", "valid", "val", "dev", "test", "eval")  # names people give the split to evaluate on, likeliest first


@contextmanager
def numbers_of(number: int) -> Iterator[None]:
    """Inside, Python's, NumPy's and torch's (CPU) global random streams start from `number`; after it they go on as before.

    A dataset that draws (a random crop) then gives a sample the same on any number of ranks and workers, and after a resume.
    """
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(number)
    np.random.seed(number % (1 << 32))
    torch.default_generator.manual_seed(number)  # not torch.manual_seed, which would reseed the GPU as well
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


@dataclass(frozen=True)
class Samples:
    """A map-style dataset read sample by sample, each with random numbers of its own."""

    dataset: Any  # has __getitem__ and __len__
    collate: Callable[[Sequence[Any]], Mapping[str, Any]] = collate

    def batch(self, ids: Sequence[int], seeds: Sequence[int]) -> Batch:
        """These samples as one batch; where there are none, a batch without rows that has the names and dtypes of others."""
        taken = []
        for i, seed in zip(ids or [0], seeds or [0], strict=True):
            with numbers_of(seed):
                taken.append(self.dataset[i])
        batch = Batch.of(self.collate(taken), local=True)
        return batch if ids else batch.cut(0, 0)


def map_style(dataset: Any) -> bool:
    """Whether samples can be asked for by number (an iterable dataset may have a length, too)."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)


@dataclass(frozen=True)
class MapSource:
    """A map-style dataset of the user's."""

    asked: str
    samples: Samples
    seed: int
    first: int
    total: int
    tokens_per_sample: int | None = None
    background: bool = False

    @property
    def describe(self) -> str:
        return f"{self.asked}: {self.total:,} samples"

    def rows(self, indices: Sequence[int], step: int = 0) -> Mapping[str, Any]:
        """The samples, stacked; what each draws depends on (seed, step, sample)."""
        seeds = [stable_number("sample", self.seed, step, i) for i in indices]
        return self.samples.batch([self.first + i for i in indices], seeds).values


@dataclass
class StreamSource:
    """An iterable dataset: one stream, the same for all ranks, from which each takes its rows. At its end it starts again.

    Every rank reads all of it: a stream that gives each rank something else belongs in a loader of your own
    (`engine.step(batch, local=True)`).
    """

    asked: str
    open: Callable[[], Iterable[Any]]  # a new pass over the stream
    total: int | None = None
    tokens_per_sample: int | None = None
    background: bool = False
    at: int = 0  # number of the sample that comes next
    coming: Iterator[Any] | None = None
    shape: Batch | None = field(default=None, repr=False)  # a batch without rows, for ranks with nothing to do

    @property
    def describe(self) -> str:
        return f"{self.asked}: a stream, in its own order"

    def rows(self, indices: Sequence[int], step: int = 0) -> Mapping[str, Any]:
        """The samples of these numbers, which rise; a number below the last one asked for starts the stream from its beginning."""
        if not indices:
            self.shape = self.shape or Batch.of(collate([next(iter(self.open()))])).cut(0, 0)
            return self.shape.values
        if indices[0] < self.at or self.coming is None:
            self.at, self.coming = 0, self.passes()
        taken = []
        for index in indices:
            taken.append(next(islice(self.coming, index - self.at, None)))
            self.at = index + 1
        return collate(taken)

    def passes(self) -> Iterator[Any]:
        """The stream without end, pass after pass."""
        while True:
            empty = True
            for sample in self.open():
                empty = False
                yield sample
            if empty:
                raise refused(self.asked, "it gave a stream with nothing in it", "return one that can be read again and again")


def open_python(request: Request) -> Source:
    """What `python:pkg.mod:function` returns when it is called without arguments."""
    module, _, name = request.rest.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise refused(request.spec, str(error), "write python:package.module:function, its folder on PYTHONPATH") from error
    dataset = function()
    if map_style(dataset):
        if not len(dataset):
            raise refused(request.spec, "it returned a dataset without samples", "return one with at least one")
        first, total = request.share(len(dataset))
        return MapSource(request.spec, Samples(dataset), request.seed, first, total)
    if not isinstance(dataset, Iterable):
        raise refused(request.spec, f"it returned a {type(dataset).__name__}", "return __getitem__ and __len__, or an iterable")
    if request.split:
        raise refused(request.spec, "no share of a stream can be held out", "write other data in eval.data, and no data.split")
    # An iterator can be read once only, so each pass calls the function again; a dataset is asked itself.
    return StreamSource(request.spec, function if isinstance(dataset, Iterator) else lambda: dataset)


@dataclass(frozen=True)
class TableSource:
    """A table whose rows are token lists already: each cut or padded to seq_len, padding never counted."""

    asked: str
    table: Any  # datasets.Dataset
    column: str
    seq_len: int
    vocab: int | None
    first: int
    total: int
    tokens_per_sample: int | None = None
    background: bool = True

    @property
    def describe(self) -> str:
        return f"{self.asked}: {self.total:,} rows of {self.column}, each cut or padded to {self.seq_len} tokens"

    def rows(self, indices: Sequence[int], step: int = 0) -> Mapping[str, Tensor]:
        """{"input_ids": [n, seq_len], "labels": [n, seq_len]}, int64; `labels` are the row's own where the table has them.

        Padding goes to the right, where a causal model cannot see it from a token that counts; so no attention_mask is needed,
        and positions that the table's own attention_mask hides are dropped.
        """
        shape = (len(indices), self.seq_len)
        ids, labels = np.zeros(shape, np.int64), np.full(shape, NOT_COUNTED, np.int64)
        for row, index in enumerate(indices):
            record = self.table[self.first + index]
            shown = np.flatnonzero(record.get("attention_mask", np.ones(len(record[self.column]))))[: self.seq_len]
            ids[row, : len(shown)] = np.asarray(record[self.column], np.int64)[shown]
            targets = np.asarray(record.get("labels", record[self.column]), np.int64)
            if targets.shape != (len(record[self.column]),):
                raise refused(self.asked, "labels are not one a token", "drop them, or use engine.loader and your own loss")
            labels[row, : len(shown)] = targets[shown]
        check_ids(self.asked, int(ids.min(initial=0)), int(ids.max(initial=0)), self.vocab)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def open_table(request: Request) -> Source:
    """A table's rows of tokens as they are, or its text as one stream of tokens."""
    table, named = load_table(request)
    if not len(table):
        raise refused(request.spec, "the table has no rows", "give one with some")
    column = choose_column(request, table)
    # A named split is whole already; without names, a share of the rows is held out.
    kept = replace(request, split=None, part="whole") if named else request
    if not isinstance(table[0][column], str):
        first, total = kept.share(len(table))
        return TableSource(request.spec, table, column, request.seq_len, request.vocab, first, total)
    return Tokens.of(kept, encode((text for text in table[column] if text), request.tokenizer, request.spec))


def load_table(request: Request) -> tuple[Any, bool]:
    """(the table, whether it is a split with the name asked for)."""
    try:
        import datasets  # type: ignore[import-untyped,import-not-found,unused-ignore]
    except ImportError as error:
        raise refused(request.spec, "the datasets library is not here", 'pip install "stretto[hf]"') from error
    name, _, config = request.rest.partition("@")
    path = Path(name).expanduser()
    try:
        if any((path / mark).is_file() for mark in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(str(path))
        elif path.is_file():
            found = datasets.load_dataset(FORMATS.get(path.suffix, path.suffix.lstrip(".")), data_files=str(path))
        else:
            found = datasets.load_dataset(str(path) if path.is_dir() else name, config or None)
    except Exception as error:  # the library raises many kinds; all mean that this name gives no table
        reason = "".join(str(error).strip().splitlines()[:1]) or type(error).__name__
        raise refused(request.spec, f"it cannot be loaded ({reason})", TABLES) from error
    table, named = choose_split(request, found) if isinstance(found, Mapping) else (found, False)
    return table.with_format(None), named  # plain lists, whatever format it was saved with


def choose_split(request: Request, found: Mapping[str, Any]) -> tuple[Any, bool]:
    """The split of a table with several that this part of the run reads, and whether it was chosen for it by name."""
    if isinstance(request.split, str):
        names = [name.strip() for name in request.split.split(",")]
        wanted = [names[0] if request.part == "learn" else names[-1]]
        if request.part == "held_out" and len(names) == 1:
            wanted = [name for name in HELD_OUT if name not in names]
    elif request.part == "learn" or request.split:
        wanted = ["train", *list(found)[:1]] if "train" in found or len(found) == 1 else []
    else:
        wanted = [*HELD_OUT, *(found if len(found) == 1 and request.part == "whole" else ())]
    chosen = next((name for name in wanted if name in found), None)
    if chosen is None:
        purpose = "to learn from" if request.part == "learn" else "to evaluate on"
        raise refused(request.spec, f"which split {purpose}? (it has {', '.join(found)})", 'write data.split="LEARN,EVALUATE"')
    return found[chosen], not (request.split and not isinstance(request.split, str))


def choose_column(request: Request, table: Any) -> str:
    """The column that holds tokens or text: the one asked for, else input_ids, else text, else the only one there is."""
    columns: list[str] = list(table.column_names)
    names = [request.column] if request.column else ["input_ids", "text", *(columns if len(columns) == 1 else ())]
    for name in names:
        if name in columns and isinstance(table[0][name], (str, list, Tensor, np.ndarray)):
            return name
    problem = f"no text or tokens in column {request.column}" if request.column else "which column holds the text or the tokens?"
    raise refused(request.spec, f"{problem} (it has {', '.join(columns)})", "write data.column=NAME of one with text or lists of numbers")
