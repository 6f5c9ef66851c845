"""Tables of the datasets library and what a Python function returns, as sources."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from stretto.data.batch import count_targets, prepare_labels
from stretto.data.feed import Feed
from stretto.data.source import open_source
from stretto.errors import JobError


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the user's, for python:own_data:NAME."""
    module = ModuleType("own_data")
    monkeypatch.setitem(sys.modules, "own_data", module)
    return module


def table(**columns: list[Any]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


def test_token_rows_are_cut_or_padded_and_padding_does_not_count(tmp_path: Path) -> None:
    table(input_ids=[[1, 2, 3, 4, 5, 6], [7, 8], [9]]).save_to_disk(str(tmp_path / "d"))
    source = open_source(f"hf:{tmp_path}/d", seq_len=4, vocab=10)
    values = prepare_labels(source.rows([1, 0, 2]))
    assert values["input_ids"].tolist() == [[7, 8, 0, 0], [1, 2, 3, 4], [9, 0, 0, 0]]
    assert values["shift_labels"].tolist() == [[8, -100, -100, -100], [2, 3, 4, -100], [-100] * 4]
    assert count_targets(values) == 4
    assert source.rows([])["labels"].shape == (0, 4)
    assert source.total == 3


def test_a_tables_own_labels_and_mask_are_kept(tmp_path: Path) -> None:
    rows = table(input_ids=[[0, 0, 5, 6, 7]], labels=[[-100, -100, -100, 6, 7]], attention_mask=[[0, 0, 1, 1, 1]])
    rows.save_to_disk(str(tmp_path / "d"))
    values = open_source(f"hf:{tmp_path}/d", seq_len=5).rows([0])
    assert values["input_ids"].tolist() == [[5, 6, 7, 0, 0]]
    assert values["labels"].tolist() == [[-100, 6, 7, -100, -100]]
    assert set(values) == {"input_ids", "labels"}


def test_text_of_a_table_is_one_stream(tmp_path: Path) -> None:
    table(text=["abcde", "", "fghij"], other=[1, 2, 3]).save_to_disk(str(tmp_path / "d"))
    rows = open_source(f"hf:{tmp_path}/d", seq_len=5, vocab=256).rows([0, 1])
    assert bytes(rows["input_ids"].flatten().tolist()) == b"abcde\nfghi"


def test_a_file_of_records_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "d.jsonl").write_text('{"text": "red"}\n{"text": "green"}\n')
    rows = open_source(f"hf:{tmp_path}/d.jsonl", seq_len=9).rows([0])
    assert bytes(rows["input_ids"].flatten().tolist()) == b"red\ngreen"
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(JobError, match="cannot be loaded"):
        open_source(f"hf:{tmp_path}/bad.jsonl", seq_len=9)


def test_splits_are_found_by_name(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {name: table(input_ids=[[n] * 4] * n) for n, name in enumerate(("train", "test", "validation"), 1)}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "d"))
    spec = f"hf:{tmp_path}/d"

    def total(**options: Any) -> int | None:
        return open_source(spec, seq_len=4, **options).total

    assert (total(), total(part="held_out"), total(part="whole")) == (1, 3, 3)
    assert (total(split="test"), total(split="test,train", part="held_out")) == (2, 1)
    with pytest.raises(JobError, match="train, test, validation"):
        total(split="nosuch")


def test_a_share_of_a_table_is_held_out(tmp_path: Path) -> None:
    table(input_ids=[[i] * 3 for i in range(10)]).save_to_disk(str(tmp_path / "d"))
    learn, held = (open_source(f"hf:{tmp_path}/d", seq_len=3, split=0.2, part=part) for part in ("learn", "held_out"))
    assert (learn.total, held.total) == (8, 2)
    assert held.rows([0, 1])["input_ids"][:, 0].tolist() == [8, 9]


@pytest.mark.parametrize(
    ("columns", "options", "says"),
    [
        ({"question": ["a"], "answer": ["b"]}, {}, "which column .*question, answer"),
        ({"text": ["a"]}, {"column": "nosuch"}, "column nosuch .*text"),
        ({"input_ids": [[1, 300]]}, {"vocab": 256}, "token 300 is beyond"),
        ({"text": ["ab"]}, {}, "one sequence takes"),
        ({"input_ids": [[1, 2]], "labels": [0]}, {}, "not one a token"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path: Path, columns: dict[str, list[Any]], options: dict[str, Any], says: str) -> None:
    table(**columns).save_to_disk(str(tmp_path / "d"))
    with pytest.raises(JobError, match=says) as caught:
        open_source(f"hf:{tmp_path}/d", seq_len=4, **options).rows([0])
    assert "\n" not in str(caught.value)


def test_a_map_dataset_of_a_function_is_read_by_number(functions: ModuleType) -> None:
    functions.make = lambda: [{"input_ids": [i, i + 1], "labels": [i, i + 1]} for i in range(10)]  # type: ignore[attr-defined]
    source = open_source("python:own_data:make", seq_len=2, split=0.3, part="held_out")
    assert source.total == 3
    assert source.rows([2, 0])["input_ids"].tolist() == [[9, 10], [7, 8]]
    assert source.rows([])["labels"].shape == (0, 2)


def test_what_a_sample_draws_depends_on_step_and_sample_alone(functions: ModuleType) -> None:
    class Noisy:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"x": torch.rand(2)}

    functions.make = Noisy  # type: ignore[attr-defined]
    whole = Feed(open_source("python:own_data:make", seq_len=2), size=4)
    part = Feed(open_source("python:own_data:make", seq_len=2), size=4)
    for step in (2, 0):
        assert torch.equal(part.rows(step, 2, 1)["x"], whole.rows(step)["x"][2:])
    assert not torch.equal(whole.rows(0)["x"], whole.rows(1)["x"])


@pytest.mark.parametrize("once", [True, False])
def test_a_stream_is_read_on_and_starts_again_at_its_end(functions: ModuleType, once: bool) -> None:
    class Stream:
        def __iter__(self) -> Iterator[dict[str, int]]:
            return iter({"x": i} for i in range(5))

    functions.make = (lambda: iter(Stream())) if once else Stream  # type: ignore[attr-defined]
    feeds = [Feed(open_source("python:own_data:make", seq_len=2), size=4) for _ in range(2)]

    def step(n: int) -> list[int]:
        return [i for index, feed in enumerate(feeds) for i in feed.rows(n, 2, index)["x"].tolist()]

    whole = [[i % 5 for i in range(4 * n, 4 * n + 4)] for n in range(4)]
    assert [step(n) for n in range(4)] == whole
    assert step(1) == whole[1]  # back again, as a resumed run would
    assert step(3) == whole[3]


@pytest.mark.parametrize(
    ("make", "says"),
    [(lambda: 3, "returned a int"), (lambda: [], "without samples"), (lambda: iter(()), "nothing in it"), (lambda: [(1, 2)], "collate_fn")],
)
def test_a_function_that_returns_no_data_is_refused(functions: ModuleType, make: Any, says: str) -> None:
    functions.make = make  # type: ignore[attr-defined]
    with pytest.raises(JobError, match=says):
        open_source("python:own_data:make", seq_len=2).rows([0])


@pytest.mark.parametrize("spec", ["python:nosuch_module:make", "python:own_data:nosuch"])
def test_a_function_that_is_not_there_is_named(functions: ModuleType, spec: str) -> None:
    with pytest.raises(JobError, match="nosuch"):
        open_source(spec, seq_len=2)
