"""Text and token files: what they give, and how each that cannot be used is refused."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.data.source import check_source
from stretto.data.text import TokenStream, bigram_entropy, topics
from stretto.errors import JobError


@given(st.lists(st.lists(st.integers(0, 99), max_size=7), max_size=5), st.integers(0, 30), st.integers(0, 30))
def test_pieces_read_as_one_array(pieces: list[list[int]], start: int, length: int) -> None:
    stream = TokenStream(tuple(np.array(p, np.uint16) for p in pieces))
    whole = [t for p in pieces for t in p]
    assert stream.read(start, start + length).tolist() == whole[start : start + length]
    assert len(stream) == len(whole)
    assert stream.extremes(99) == (0, max(whole, default=0))


def test_topics_is_much_plain_text() -> None:
    text = topics()
    assert len(text) > 300_000
    assert text.decode().count("statement") > 100


def test_bigram_entropy_of_known_texts() -> None:
    assert bigram_entropy(b"ab" * 50) == 0
    assert bigram_entropy(b"aabb" * 5000 + b"a") == pytest.approx(math.log(2), rel=1e-3)  # a or b with equal chance
    assert 2.3 < bigram_entropy(topics()) < 2.6


@pytest.mark.parametrize(
    ("content", "asked", "says"),
    [
        (b"", "text:{}", "is empty"),
        (b"ab\0cd" * 99, "text:{}", "binary"),
        (b"caf\xe9 " * 99, "text:{}", "not UTF-8"),
        ("café".encode()[:-1] * 1, "text:{}", "not UTF-8"),  # ends inside a character
        (b"x" * 16, "text:{}", "batch.seq_len=15"),
        (b"x", "text:{}", "give more"),
        (b"", "tokens:{}@uint16", "is empty"),
        (b"abc", "tokens:{}@uint16", "3 bytes"),
        (b"abcd" * 99, "tokens:{}", "@uint16"),
        (b"abcd" * 99, "tokens:{}@float", "not float"),
        (b"abcd" * 99, "tokens:{}@uint16", "token 25699 is beyond the vocabulary of 200"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, content: bytes, asked: str, says: str) -> None:
    file = tmp_path / "corpus"
    file.write_bytes(content)
    with pytest.raises(JobError, match=says) as caught:
        check_source(asked.format(file), seq_len=16, vocab=200)
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)  # what is wrong; what to write


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("text:nosuch.txt", "no such file: nosuch.txt"),
        ("text:nosuch/*.txt", "no such file"),
        ("text:", "no such kind"),
        ("text:{}", "is a folder"),
        ("topics:x", "no such kind"),
        ("corpus.txt", "text:PATH_OR_GLOB"),
        ("tokens:nosuch.npy", "no such file"),
        ("hf:./nosuch", "no such folder or file"),
        ("python:nofunction", "names no function"),
        ("random", "model.vocab=256"),
    ],
)
def test_a_source_that_is_not_there_is_one_line(tmp_path: Path, asked: str, says: str) -> None:
    with pytest.raises(JobError, match=says) as caught:
        check_source(asked.format(tmp_path), seq_len=16)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("array", [np.ones(99), np.ones((9, 9), np.int64), np.array([3, -1] * 50)])
def test_an_npy_that_holds_no_token_stream_is_refused(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(JobError, match=r"dtype float64|shape|negative"):
        check_source(f"tokens:{tmp_path}/a.npy", seq_len=8)


def test_a_raw_file_of_an_unclear_kind_is_asked_about(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\1\0" * 99)
    check_source(f"tokens:{tmp_path}/a.bin", seq_len=8, vocab=256)
    with pytest.raises(JobError, match="uint16 or uint32"):
        check_source(f"tokens:{tmp_path}/a.bin", seq_len=8, vocab=100_000)


def test_a_character_cut_by_the_reading_chunk_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.data.text.CHUNK", 3)
    (tmp_path / "a.txt").write_text("ééééé" * 9, encoding="utf-8")
    check_source(f"text:{tmp_path}/a.txt", seq_len=8)
