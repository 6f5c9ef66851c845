"""A schedule of one's own, from a text file."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto.errors import JobError
from stretto.schedule.pipelines import PIPELINES, microbatches_of, pipeline
from stretto.schedule.step import training_step

TWO = "0F0 0F1 0B0 0B1  # the first rank\n\n1F0 1B0 1F1 1B1\n"


def asked(folder: Path, text: str) -> str:
    (folder / "own.txt").write_text(text)
    return f"file:{folder}/own.txt"


def test_a_line_a_rank_with_comments_makes_a_step(tmp_path: Path) -> None:
    schedule = pipeline(asked(tmp_path, TWO), 2, 2)
    assert str(schedule) == "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"
    assert (schedule.stages, schedule.microbatches, schedule.rank_of) == (2, 2, (0, 1))
    assert training_step(schedule).only("FB") == schedule


@pytest.mark.parametrize("name", PIPELINES)
def test_what_a_known_schedule_prints_reads_back_as_itself(name: str, tmp_path: Path) -> None:
    known = pipeline(name, 3, 6)
    read = pipeline(asked(tmp_path, f"# {name}\n{known}\n"), 3, 6)
    assert (read.order, read.rank_of, read.stages) == (known.order, known.rank_of, known.stages)


def test_a_step_with_fewer_rows_is_filled_up_to_the_microbatches_of_the_file(tmp_path: Path) -> None:
    name = asked(tmp_path, TWO)
    assert [microbatches_of(name, 2, count) for count in (1, 2)] == [2, 2]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty; write a line a pp rank, as 0F0 0B0"),
        ("0F0 0B0 0F1 0B1", 'has 1 lines, so it is for pp=1, and the mesh has pp=2'),
        ("0F0 0B0\n1F0 1B0", r"is for 1 microbatches \(0 to 0\), and a step has 2; write batch.size and batch.micro_size"),
        ("0F0 0F1 0B0 0B1\n2F0 2B0 2F1 2B1", "has a stage 2 and no stage 1; number stages from 0 without gaps"),
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1", "1B1 is missing; write it in the order of rank 1, which holds stage 1"),
        ("0F0 0F1 0B0 0B1 1F1\n1F0 1B0 1B1", "1F1 stands on rank 0|1F0 stands on rank 1"),
        ("0F0 0F1 0B0 0B1 1B1\n1F0 1B0 1F1", "1B1 stands on rank 0, and rank 1 holds stage 1; write it there"),
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1B1 1F1", "never ends: rank 0 waits at 0B1 for 1B1; rank 1 waits at 1B1 for 1F1; the circle: "),
        ("0F0 0F1\n1F0 1F1", "has no backward"),
        ("0F0 0F1 0B0 0B1\n1F0 1b0", "line 2: '1b0' is no action; write stage, kind and microbatch, as 2F0"),
        ("0F0 0F1 0SEND_F0 0B0 0B1\n1F0 1B0 1F1 1B1", "line 1: 0SEND_F0 is not computation; write F, B, I and W"),
    ],
)  # fmt: skip
def test_what_is_no_schedule_of_the_job_is_refused(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=says):
        pipeline(asked(tmp_path, text), 2, 2)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match='nowhere.txt" cannot be read .*; write a text file with a line a pp rank'):
        pipeline(f"file:{tmp_path}/nowhere.txt", 2, 2)
