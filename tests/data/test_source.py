"""Sources of tokens: how streams are cut into samples, held out, and drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stretto.data.source import open_source
from stretto.data.text import topics
from stretto.errors import JobError


def test_sample_i_is_its_stretch_of_the_text_and_predicts_one_further() -> None:
    source = open_source("topics", seq_len=50, vocab=256)
    text = topics()
    assert source.total == (len(text) - 1) // 50
    rows = source.rows([7, 0])
    assert bytes(rows["input_ids"][0].tolist()) == text[350:400]
    assert bytes(rows["shift_labels"][0].tolist()) == text[351:401]
    assert bytes(rows["input_ids"][1].tolist()) == text[:50]
    assert rows["input_ids"].dtype == torch.int64


def test_no_rows_are_rows_of_the_same_kind() -> None:
    rows = open_source("topics", seq_len=8).rows([])
    assert {name: (x.shape, x.dtype) for name, x in rows.items()} == {
        "input_ids": ((0, 8), torch.int64),
        "shift_labels": ((0, 8), torch.int64),
    }


def test_files_of_a_glob_are_one_stream_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, text in (("b", "klmnopqrst"), ("a", "abcdefghij"), ("c", "")):
        (tmp_path / f"{name}.txt").write_text(text)
    source = open_source(f"text:{tmp_path}/*.txt", seq_len=6)
    assert source.total == 3
    assert bytes(source.rows([1])["input_ids"][0].tolist()) == b"ghijkl"


@pytest.mark.parametrize(("name", "dtype"), [("t.npy", "int32"), ("t.npy", "uint16"), ("t.bin", "<u2"), ("t.u32", "<u4")])
def test_token_files_hold_what_was_saved(tmp_path: Path, name: str, dtype: str) -> None:
    tokens = np.arange(100, 200).astype(dtype)
    if name.endswith(".npy"):
        np.save(tmp_path / name, tokens)
    else:
        tokens.tofile(tmp_path / name)
    source = open_source(f"tokens:{tmp_path}/{name}", seq_len=9, vocab=200)
    assert source.total == 11
    assert source.rows([10])["shift_labels"].tolist() == [list(range(191, 200))]


def test_a_token_behind_what_was_looked_at_is_refused_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stretto.data.source.LOOKED_AT", 10)
    np.save(tmp_path / "t.npy", np.arange(40))
    source = open_source(f"tokens:{tmp_path}/t.npy", seq_len=9, vocab=30)
    source.rows([0, 1])
    with pytest.raises(JobError, match="token 36 is beyond the vocabulary of 30"):
        source.rows([2, 3])


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5])
def test_held_out_samples_are_not_learned_from_and_none_is_lost(tmp_path: Path, share: float) -> None:
    np.save(tmp_path / "t.npy", np.arange(1001))
    spec = f"tokens:{tmp_path}/t.npy"
    parts = [open_source(spec, seq_len=10, split=share, part=part) for part in ("learn", "held_out")]
    found = [source.rows(range(source.total or 0))["input_ids"].flatten().tolist() for source in parts]
    assert found[0] + found[1] == list(range(1000))
    assert len(found[1]) == pytest.approx(1000 * share, abs=5)
    assert open_source(spec, seq_len=10, split=share, part="whole").total == 100


def test_a_split_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("x" * 30)
    spec = f"text:{tmp_path}/t.txt"
    with pytest.raises(JobError, match="nothing is held out"):
        open_source(spec, seq_len=10, part="held_out")
    with pytest.raises(JobError, match='no part named "validation"'):
        open_source(spec, seq_len=10, split="validation")
    with pytest.raises(JobError, match="leaves none of 2 samples"):
        open_source(spec, seq_len=10, split=0.9)


def test_random_samples_do_not_depend_on_their_company() -> None:
    source = open_source("random", seq_len=12, vocab=50, seed=3)
    many = source.rows(range(20))["input_ids"]
    assert torch.equal(source.rows([13, 4])["input_ids"], many[[13, 4]])
    assert (int(many.min()), int(many.max())) == (0, 49)
    assert torch.equal(source.rows([0])["input_ids"][:, 1:], source.rows([0])["shift_labels"][:, :-1])
    assert not torch.equal(open_source("random", seq_len=12, vocab=50, seed=4).rows(range(20))["input_ids"], many)


def test_reading_random_samples_leaves_the_global_stream_alone() -> None:
    before = torch.get_rng_state()
    open_source("random", seq_len=12, vocab=50).rows(range(5))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tokenizer_file_ends_documents(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<eos>": 0, "red": 1, "green": 2, "?": 3}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("red green red")
    (tmp_path / "b.txt").write_text("green blue")
    source = open_source(f"text:{tmp_path}/?.txt", seq_len=6, vocab=4, tokenizer=str(tmp_path / "tokenizer.json"))
    rows = source.rows([0])
    assert rows["input_ids"].tolist() == [[1, 2, 1, 0, 2, 3]]
    assert rows["shift_labels"].tolist() == [[2, 1, 0, 2, 3, 0]]
    with pytest.raises(JobError, match="no such file or folder"):
        open_source(f"text:{tmp_path}/a.txt", seq_len=6, tokenizer="./nosuch.json")
