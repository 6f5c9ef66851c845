"""What a job's `data` names, opened: a Source gives the rows of any samples, by number.

`check_source` refuses what can be refused before any rank starts and needs no torch; `open_source` is for the ranks. Both read
the same request and go through the same checks, so that a bad file gives the same line in either place.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from stretto.data.order import stable_number
from stretto.data.text import TokenStream, bytes_stream, check_ids, refused, text_files, text_stream, token_stream, topics
from stretto.data.tokenizer import encode

if TYPE_CHECKING:
    from torch import Tensor

LOOKED_AT = 1 << 26  # tokens looked through when a source is opened; what lies behind is checked as it is read
TABLES = "give a save_to_disk folder, a .parquet, .jsonl, .csv or .txt, or a name on the Hugging Face hub"
RANDOM_SAMPLES = 1 << 20  # an epoch of `random`, which has no end of its own

Part = Literal["learn", "held_out", "whole"]  # without the share of data.split; that share; all, as eval.data is read


class Source(Protocol):
    """Samples that can be asked for by number."""

    @property
    def describe(self) -> str:
        """One line: what it is and how much of it there is."""

    @property
    def total(self) -> int | None:
        """Samples of an epoch; None for a stream, which is read in its own order until it ends and then from the start."""

    @property
    def tokens_per_sample(self) -> int | None:
        """Targets of one sample; None where samples differ or have no tokens."""

    @property
    def background(self) -> bool:
        """Whether a thread may read ahead. Not for code of the user's, which may draw from the process's one random stream."""

    def rows(self, indices: Sequence[int], step: int = 0) -> Mapping[str, Tensor]:
        """The samples of these numbers as rows, on the CPU; [] gives tensors with no rows. `step` seeds what a sample draws."""


@dataclass(frozen=True)
class Request:
    """What is asked of `data`, as one value to hand to the function that opens this kind of source."""

    spec: str  # as written, for messages
    rest: str  # what stands behind "kind:"
    seq_len: int
    vocab: int | None
    split: float | str | None
    column: str | None
    tokenizer: str | None
    seed: int
    part: Part

    def share(self, total: int) -> tuple[int, int]:
        """(first, count) of the samples that are asked for; what is held out are the last ones, so it is text of its own."""
        if isinstance(self.split, str):
            raise refused(self.spec, f'it has no part named "{self.split}"', "write the share to hold out, as data.split=0.1")
        if self.part == "held_out" and not self.split:
            raise refused(self.spec, "nothing is held out for evaluation", "write data.split=0.1, or other data in eval.data")
        if self.part == "whole" or not self.split:
            return 0, total
        held = max(1, round(total * self.split))
        if held >= total:
            raise refused(self.spec, f"data.split={self.split} leaves none of {total} samples to learn from", "write a smaller share")
        return (total - held, held) if self.part == "held_out" else (0, total - held)

    def count(self, stream: TokenStream) -> int:
        """Whole samples in a stream. Refuses one that is too short, or that has tokens the model does not know."""
        tokens = len(stream)
        if tokens < self.seq_len + 1:
            instead = f"give more, or write batch.seq_len={tokens - 1} or less" if tokens > 1 else "give more"
            raise refused(self.spec, f"it has {tokens} tokens, but one sequence takes batch.seq_len + 1 = {self.seq_len + 1}", instead)
        check_ids(self.spec, *stream.extremes(LOOKED_AT), self.vocab)
        return (tokens - 1) // self.seq_len


@dataclass(frozen=True)
class Tokens:
    """A stream of tokens cut into samples: sample i is tokens [i * seq_len, (i + 1) * seq_len], the last one only a target.

    Samples share that one token and nothing else, so every token is a target once an epoch (but the very first, and the tail).
    """

    asked: str
    stream: TokenStream
    seq_len: int
    vocab: int | None
    first: int
    total: int
    background: bool = True

    @classmethod
    def of(cls, request: Request, stream: TokenStream) -> Tokens:
        first, total = request.share(request.count(stream))
        return cls(request.spec, stream, request.seq_len, request.vocab, first, total)

    @property
    def describe(self) -> str:
        return f"{self.asked}: {self.total:,} samples of {self.seq_len} tokens, from {len(self.stream):,} tokens"

    @property
    def tokens_per_sample(self) -> int:
        return self.seq_len

    def rows(self, indices: Sequence[int], step: int = 0) -> Mapping[str, Tensor]:
        """{"input_ids": [n, seq_len], "shift_labels": [n, seq_len]}, int64."""
        import numpy as np
        import torch

        window = np.empty((len(indices), self.seq_len + 1), np.int64)
        for row, index in enumerate(indices):
            start = (self.first + index) * self.seq_len
            window[row] = self.stream.read(start, start + self.seq_len + 1)
        check_ids(self.asked, int(window.min(initial=0)), int(window.max(initial=0)), self.vocab)
        tokens = torch.from_numpy(window)
        return {"input_ids": tokens[:, :-1].contiguous(), "shift_labels": tokens[:, 1:].contiguous()}


@dataclass(frozen=True)
class RandomTokens:
    """Seeded noise, for benchmarks: sample i depends on (seed, i) alone, whoever asks for it and in whatever company."""

    seed: int
    seq_len: int
    vocab: int
    total: int = RANDOM_SAMPLES
    background: bool = True

    @property
    def describe(self) -> str:
        return f"random: seeded tokens below {self.vocab}, {self.seq_len} a sample"

    @property
    def tokens_per_sample(self) -> int:
        return self.seq_len

    def rows(self, indices: Sequence[int], step: int = 0) -> Mapping[str, Tensor]:
        """{"input_ids": [n, seq_len], "shift_labels": [n, seq_len]}, int64."""
        import torch

        tokens = torch.empty((len(indices), self.seq_len + 1), dtype=torch.int64)
        draw = torch.Generator()
        for row, index in enumerate(indices):
            tokens[row].random_(0, self.vocab, generator=draw.manual_seed(stable_number("random", self.seed, index)))
        return {"input_ids": tokens[:, :-1].contiguous(), "shift_labels": tokens[:, 1:].contiguous()}


class Kind(NamedTuple):
    """How one kind of source is opened, and how it is looked at before there are ranks (and torch)."""

    open: Callable[[Request], Source]
    check: Callable[[Request], object]


def open_topics(request: Request) -> Source:
    """The bytes of the text that ships with Python, or its tokens."""
    return Tokens.of(request, bytes_stream(topics()) if request.tokenizer is None else encoded(request, [topics().decode()]))


def open_text(request: Request) -> Source:
    """The bytes of text files, mapped, or their tokens."""
    paths = text_files(request.spec, request.rest)
    if request.tokenizer is None:
        return Tokens.of(request, text_stream(paths))
    return Tokens.of(request, encoded(request, (path.read_text(encoding="utf-8") for path in paths)))


def encoded(request: Request, documents: Iterable[str]) -> TokenStream:
    """Documents as one stream of tokens, by the tokenizer asked for."""
    return encode(documents, request.tokenizer, request.spec)


def open_tokens(request: Request) -> Source:
    """Token files, mapped."""
    return Tokens.of(request, token_stream(request.spec, request.rest, request.vocab))


def open_random(request: Request) -> Source:
    """Seeded noise; the held-out part is noise of another seed."""
    if request.vocab is None:
        raise refused(request.spec, "the model does not say how many tokens it knows", "write model.vocab=256")
    request.share(RANDOM_SAMPLES)
    seed = request.seed if request.part == "learn" else stable_number("held out", request.seed)
    return RandomTokens(seed, request.seq_len, request.vocab)


def open_table(request: Request) -> Source:
    """A table of the datasets library: a folder, a file, or a name on the hub."""
    from stretto.data import dataset

    return dataset.open_table(request)


def open_python(request: Request) -> Source:
    """What a function of the user's returns: a map-style or an iterable dataset."""
    from stretto.data import dataset

    return dataset.open_python(request)


def check_text(request: Request) -> None:
    """Everything about bytes; with a tokenizer, only that there is text (how many tokens it makes, the ranks find out)."""
    if request.tokenizer is None:
        open_text(request)
    else:
        text_files(request.spec, request.rest)


def check_table(request: Request) -> None:
    """Whether the library is here, and the folder or file if it must be one. Loading the table is left to the ranks."""
    if importlib.util.find_spec("datasets") is None:
        raise refused(request.spec, "the datasets library is not here", 'pip install "stretto[hf]"')
    if request.rest.startswith((".", "/", "~")) and not Path(request.rest).expanduser().exists():
        raise refused(request.spec, "no such folder or file", TABLES)


def check_python(request: Request) -> None:
    """That it names a function. It is not imported here: a launcher has no use for the torch it would bring."""
    module, _, function = request.rest.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), function]):
        raise refused(request.spec, "it names no function", "write python:package.module:function")


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "topics": Kind(open_topics, lambda request: open_topics(request) if request.tokenizer is None else None),
        "random": Kind(open_random, open_random),
        "text": Kind(open_text, check_text),
        "tokens": Kind(open_tokens, open_tokens),
        "hf": Kind(open_table, check_table),
        "python": Kind(open_python, check_python),
    }
)


def kind_of(spec: str) -> tuple[Kind, str]:
    """The kind of source that a spec names, and what stands behind it."""
    name, _, rest = spec.partition(":")
    if name not in KINDS or (name in ("topics", "random")) != (not rest):
        kinds = "topics, random, text:PATH_OR_GLOB, tokens:FILES, hf:NAME_OR_FOLDER, python:pkg.mod:function"
        raise refused(spec, "no such kind of data", f"write one of {kinds}")
    return KINDS[name], rest


def open_source(
    spec: str,
    *,
    seq_len: int,
    vocab: int | None = None,
    split: float | str | None = None,
    column: str | None = None,
    tokenizer: str | None = None,
    seed: int = 0,
    part: Part = "learn",
) -> Source:
    """The source a spec names, for a rank. JobError where it is missing, empty, not what it says, or too short for one sample.

    vocab: tokens the model knows (None: not checked). split: the share held out, or for hf: the name of a split ("train", or
    "train,validation": what to learn from, what to evaluate on).
    """
    kind, rest = kind_of(spec)
    return kind.open(Request(spec, rest, seq_len, vocab, split, column, tokenizer, seed, part))


def check_source(
    spec: str,
    *,
    seq_len: int,
    vocab: int | None = None,
    split: float | str | None = None,
    column: str | None = None,
    tokenizer: str | None = None,
    seed: int = 0,
    part: Part = "learn",
) -> None:
    """The same refusals as far as they can be known without torch; for a launcher, before it starts ranks."""
    kind, rest = kind_of(spec)
    kind.check(Request(spec, rest, seq_len, vocab, split, column, tokenizer, seed, part))
