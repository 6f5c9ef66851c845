"""Text and token files as one stream of token numbers; nothing here needs torch, so a launcher can refuse bad data at once.

A text without a tokenizer is its bytes: 256 tokens, no download. Files are mapped, not read, so a stream may be larger than memory.
"""

from __future__ import annotations

import codecs
import glob
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.errors import JobError

if TYPE_CHECKING:
    import numpy as np

CHUNK = 1 << 24  # bytes looked at at once
RAW = {".bin": "uint16", ".u16": "uint16", ".uint16": "uint16", ".u32": "uint32", ".uint32": "uint32"}


def refused(asked: str, problem: str, instead: str) -> JobError:
    """The one line about data that cannot be used: what was asked, what is wrong with it, what to write."""
    return JobError(f'data="{asked}": {problem}; {instead}')


@dataclass(frozen=True)
class TokenStream:
    """Token numbers in a row, kept in pieces (one a file) that are read as if they were one array."""

    pieces: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens [start, stop), int64."""
        import numpy as np

        found: list[np.ndarray] = []
        for piece in self.pieces:
            if start < len(piece) and stop > 0:
                found.append(piece[max(start, 0) : stop].astype(np.int64))
            start, stop = start - len(piece), stop - len(piece)
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def extremes(self, first: int) -> tuple[int, int]:
        """The smallest and the largest of the first `first` tokens (all of a stream may be too many to look at)."""
        smallest, largest = 0, 0
        for piece in self.pieces:
            looked = piece[: max(first, 0)]
            if len(looked):
                smallest, largest = min(smallest, int(looked.min())), max(largest, int(looked.max()))
            first -= len(piece)
        return smallest, largest


def topics() -> bytes:
    """The text that ships with every CPython: the language reference as shown by help(), about 0.47 million bytes."""
    try:
        from pydoc_data.topics import topics as pages
    except ImportError as error:
        raise refused("topics", "this Python came without pydoc_data", 'write data="text:FILE" or data="random"') from error
    return "".join(pages[name] for name in sorted(pages)).encode()


def find_files(asked: str, patterns: str) -> tuple[Path, ...]:
    """The files of a path, a glob, or several of them between commas, each pattern's in the order of their names."""
    found: list[Path] = []
    for pattern in filter(None, (p.strip() for p in patterns.split(","))):
        path = Path(pattern).expanduser()
        if path.is_dir():
            raise refused(asked, f"{pattern} is a folder", f"write {asked.partition(':')[0]}:{pattern.rstrip('/')}/* for the files in it")
        matches = [path] if path.exists() else [p for p in map(Path, sorted(glob.glob(str(path), recursive=True))) if p.is_file()]
        if not matches:
            raise refused(asked, f"no such file: {pattern}", "give a file, or a glob such as docs/*.md")
        found += matches
    if not found:
        raise refused(asked, "it names no file", "write text:PATH_OR_GLOB or tokens:FILES")
    return tuple(found)


def check_text(asked: str, path: Path) -> None:
    """Refuse what is not text: NUL bytes, or bytes that are not UTF-8. Reads the file once, in chunks."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                if b"\0" in chunk:
                    raise refused(asked, f"{path} is binary (it holds NUL bytes)", "give a text file, or tokens:FILES for token numbers")
                decoder.decode(chunk)
            decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise refused(asked, f"{path} is not UTF-8 text ({error.reason})", "convert it, or give tokens:FILES for token numbers") from error
    except OSError as error:
        raise refused(asked, f"cannot read {path}: {error.strerror}", "give a file that can be read") from error


def text_files(asked: str, patterns: str) -> tuple[Path, ...]:
    """The files of a text: source, each looked through; all of them together hold something."""
    paths = find_files(asked, patterns)
    for path in paths:
        check_text(asked, path)
    if not sum(path.stat().st_size for path in paths):
        raise refused(asked, "the file is empty", "give a text of at least batch.seq_len + 1 tokens")
    return paths


def text_stream(paths: Sequence[Path]) -> TokenStream:
    """The bytes of text files as tokens, one file behind the other."""
    import numpy as np

    return TokenStream(tuple(np.memmap(path, np.uint8, "r") for path in paths if path.stat().st_size))


def bytes_stream(text: bytes) -> TokenStream:
    """The bytes of a text in memory as tokens."""
    import numpy as np

    return TokenStream((np.frombuffer(text, np.uint8),))


def token_stream(asked: str, patterns: str, vocab: int | None) -> TokenStream:
    """Token files as one stream: .npy (integers, one dim), or raw little-endian uint16 / uint32.

    A raw file's kind is read from its name (.bin .u16 .uint16, .u32 .uint32) or said behind an @: tokens:data/*.bin@uint32.
    """
    patterns, _, dtype = patterns.partition("@")
    if dtype not in ("", "uint16", "uint32"):
        raise refused(asked, f"raw token files are uint16 or uint32, not {dtype}", "write @uint16 or @uint32 at the end, or save a .npy")
    pieces = [token_file(asked, path, dtype, vocab) for path in find_files(asked, patterns)]
    if not sum(map(len, pieces)):
        raise refused(asked, "the file is empty", "give at least batch.seq_len + 1 tokens")
    return TokenStream(tuple(pieces))


def token_file(asked: str, path: Path, dtype: str, vocab: int | None) -> np.ndarray:
    """One token file, mapped: [tokens] of an integer dtype."""
    import numpy as np

    kind = "npy" if path.suffix == ".npy" else dtype or RAW.get(path.suffix, "")
    if not kind:
        raise refused(asked, f"what does {path.name} hold?", f"write tokens:{path}@uint16 (or @uint32) for a raw file, or save a .npy")
    if path.suffix == ".bin" and not dtype and vocab is not None and vocab > 1 << 16:
        raise refused(asked, f"for a vocabulary of {vocab}, it may be uint16 or uint32", f"write tokens:{path}@uint32 (or @uint16)")
    if not path.stat().st_size:
        return np.empty(0, np.uint16)
    if kind == "npy":
        return npy_file(asked, path)
    width = np.dtype(kind).itemsize
    if path.stat().st_size % width:
        raise refused(asked, f"{path} has {path.stat().st_size} bytes, no whole number of {kind} tokens", "write the kind it is")
    return np.memmap(path, np.dtype(kind).newbyteorder("<"), "r")


def npy_file(asked: str, path: Path) -> np.ndarray:
    """A .npy file's tokens, mapped: [tokens] integers."""
    import numpy as np

    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise refused(asked, f"{path} is not a .npy file of numbers", "save it with numpy.save") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise refused(asked, f"{path} has dtype {array.dtype}, shape {list(array.shape)}", "save integers in one dim (array.reshape(-1))")
    return array


def check_ids(asked: str, smallest: int, largest: int, vocab: int | None) -> None:
    """Refuse token numbers that the model has no embedding for."""
    if vocab is not None and largest >= vocab:
        instead = f"give other data, or a model.vocab of {largest + 1} or more"
        raise refused(asked, f"token {largest} is beyond the vocabulary of {vocab}", instead)
    if smallest < 0:
        raise refused(asked, f"token {smallest} is negative", "give tokens of 0 or more")


def bigram_entropy(tokens: Sequence[int] | bytes) -> float:
    """Nats a token that remain when only the token before is known: what counting pairs in this very text can reach.

    A model that ends below has learned more of the text than which byte likes to follow which.
    """
    pairs, firsts = Counter(pairwise(tokens)), Counter(tokens[:-1])
    return -sum(n * math.log(n / firsts[a]) for (a, _), n in pairs.items()) / max(1, len(tokens) - 1)
