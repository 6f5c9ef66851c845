"""A batch and its parts: every row is in exactly one, and nothing else is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stretto.data.batch import Batch, collate, count_targets, prepare_labels
from stretto.errors import JobError


def sample_batch(rows: int) -> Batch:
    ids = torch.arange(rows * 3).reshape(rows, 3)
    names = [f"r{i}" for i in range(rows)]
    return Batch.of({"input_ids": ids, "names": names, "weights": torch.ones(99), "scale": 2.0, "deep": {"x": ids[:, 0]}})


@given(st.integers(0, 20), st.integers(1, 6), st.integers(1, 6))
def test_parts_and_their_microbatches_joined_are_the_batch(rows: int, parts: int, count: int) -> None:
    batch = sample_batch(rows)
    pieces = [m for i in range(parts) for m in batch.part(parts, i).microbatches(count)]
    assert len(pieces) == parts * count
    assert torch.equal(torch.cat([p["input_ids"] for p in pieces]), batch["input_ids"])
    assert torch.equal(torch.cat([p["deep"]["x"] for p in pieces]), batch["deep"]["x"])
    assert [name for p in pieces for name in p["names"]] == batch["names"]
    assert [p.rows for p in pieces] == [len(p["input_ids"]) for p in pieces]
    assert all(len(p["weights"]) == 99 and p["scale"] == 2.0 for p in pieces)
    assert all(p.local for p in pieces)
    assert not batch.local


def test_parts_are_views_not_copies() -> None:
    batch = sample_batch(6)
    assert batch.part(2, 1)["input_ids"].data_ptr() == batch["input_ids"][3:].data_ptr()


def test_rows_are_those_of_input_ids_or_of_the_first_tensor() -> None:
    assert Batch.of({"mask": torch.ones(7), "input_ids": torch.ones(2, 7)}).rows == 2
    assert Batch.of({"scale": torch.tensor(1.0), "pixels": torch.ones(5, 3, 8, 8)}).rows == 5
    assert Batch.of(sample_batch(4)).rows == 4


def test_a_batch_goes_where_a_mapping_goes() -> None:
    batch = sample_batch(2)
    assert dict(**batch) == dict(batch.items())
    assert "scale" in batch
    assert batch.get("nosuch", 1) == 1
    assert list(batch) == ["input_ids", "names", "weights", "scale", "deep"]


@pytest.mark.parametrize("values", [(torch.ones(2), torch.ones(2)), {"a": 1}, {}])
def test_what_has_no_rows_is_refused(values: object) -> None:
    with pytest.raises(JobError, match="a batch"):
        Batch.of(values)  # type: ignore[arg-type]


def test_only_floating_point_changes_dtype_on_the_way_to_a_device() -> None:
    ids = torch.ones(2, dtype=torch.int64)
    batch = Batch.of({"x": torch.ones(2, dtype=torch.float64), "i": ids, "d": {"m": torch.ones(2)}, "s": "text"})
    moved = batch.to("cpu", torch.bfloat16)
    assert (moved["x"].dtype, moved["i"].dtype, moved["d"]["m"].dtype, moved["s"]) == (torch.bfloat16, torch.int64, torch.bfloat16, "text")
    assert batch.to("cpu")["x"].dtype == torch.float64
    assert moved.rows == 2


@given(st.integers(0, 5), st.integers(1, 6))
def test_labels_shift_once_and_the_last_position_does_not_count(rows: int, length: int) -> None:
    labels = torch.arange(rows * length).reshape(rows, length)
    values = prepare_labels({"input_ids": labels, "labels": labels})
    assert "labels" not in values
    assert values["shift_labels"].tolist() == [[*row[1:], -100] for row in labels.tolist()]
    assert count_targets(values) == rows * (length - 1)
    again = prepare_labels(values)
    assert torch.equal(again["shift_labels"], values["shift_labels"])


def test_rows_that_are_local_stay_so_when_labels_shift() -> None:
    labels = torch.ones(4, 3, dtype=torch.int64)
    part = Batch.of({"input_ids": labels, "labels": labels}).part(2, 0)
    assert Batch.of(prepare_labels(part)).local
    assert not prepare_labels({"input_ids": labels}).local


def test_shifting_whole_sequences_and_cutting_rows_commute() -> None:
    labels = torch.tensor([[1, 2, -100], [-100, 5, 6], [7, 8, 9]])
    whole = prepare_labels({"input_ids": labels, "labels": labels})
    cut = [prepare_labels(Batch.of({"input_ids": labels, "labels": labels}).part(2, i)) for i in range(2)]
    assert torch.equal(torch.cat([c["shift_labels"] for c in cut]), whole["shift_labels"])
    assert sum(map(count_targets, cut)) == count_targets(whole) == 5


def test_labels_said_twice_or_of_another_kind_are_refused() -> None:
    x = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(JobError, match="both labels and shift_labels"):
        prepare_labels({"input_ids": x, "labels": x, "shift_labels": x})
    with pytest.raises(JobError, match=r"\[B, T\].*shape \[2\]"):
        prepare_labels({"pixels": x, "labels": x[:, 0]})


def test_fingerprints_tell_batches_apart() -> None:
    batch = sample_batch(4)
    assert batch.fingerprint() == sample_batch(4).fingerprint()
    parts = {batch.part(4, i).fingerprint() for i in range(4)}
    assert len(parts | {batch.fingerprint()}) == 5
    ones = torch.ones(2, dtype=torch.bfloat16)
    assert Batch.of({"x": ones}).fingerprint() != Batch.of({"y": ones}).fingerprint()


def test_lists_of_numbers_stack_to_rows_not_columns() -> None:
    stacked = collate([{"input_ids": [1, 2, 3], "label": 0, "text": "a"}, {"input_ids": [4, 5, 6], "label": 1, "text": "b"}])
    assert stacked["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert stacked["label"].tolist() == [0, 1]
    assert stacked["text"] == ["a", "b"]


def test_samples_that_do_not_stack_ask_for_a_collate_fn() -> None:
    with pytest.raises(JobError, match="collate_fn"):
        collate([{"input_ids": [1, 2]}, {"input_ids": [1]}])
    with pytest.raises(JobError, match="collate_fn"):
        collate([(1, 2)])
