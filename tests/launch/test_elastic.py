"""A run on as many ranks as there are: its mesh is its own where that fits, else a planned one; what is computed stays."""

from __future__ import annotations

import pytest

from stretto.errors import JobError
from stretto.job import Job
from stretto.launch.elastic import Workers, job_on
from stretto.layout.mesh import Mesh
from stretto.plan.hardware import Cluster

SMALL = {"batch.size": 8, "batch.seq_len": 16, "model.blocks": 2, "device": "cpu"}
H100 = Cluster.of("1x8 h100")


def on(places: int, workers: str, cluster: Cluster | None = H100, **keys: object) -> Job:
    return job_on(Job.load("tiny", **{**SMALL, **keys}), places, "cpu", Workers.parse(workers), cluster)


@pytest.mark.parametrize(("text", "range_"), [("4", (4, 4)), ("2-8", (2, 8)), (" 1-1 ", (1, 1))])
def test_a_range_is_two_numbers_or_one(text: str, range_: tuple[int, int]) -> None:
    assert Workers.parse(text) == range_


@pytest.mark.parametrize("text", ["0", "8-2", "2-", "a", "-3", "0-4"])
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(JobError, match=f"--num-workers {text} is not possible"):
        Workers.parse(text)


@pytest.mark.parametrize(
    ("places", "workers", "mesh", "found"),
    [
        (4, "1-8", "dp=auto", "dp=4"),
        (4, "1-8", "dp=2 tp=2", "dp=2 tp=2"),
        (4, "1-2", "dp=auto", "dp=2"),
        (8, "1-8", "dp=auto tp=2", "dp=4 tp=2"),
        (3, "1-8", "dp=auto", "dp=2"),  # of 8 rows nobody has a third
        (7, "2-8", "dp=auto tp=2", "dp=2 tp=2"),
    ],
)
def test_its_own_mesh_is_taken_where_it_has_as_many_ranks(places: int, workers: str, mesh: str, found: str) -> None:
    assert on(places, workers, None, mesh=mesh).mesh == found


@pytest.mark.parametrize("places", range(1, 10))
def test_else_the_mesh_is_planned_and_nothing_that_is_computed_changes(places: int) -> None:
    asked = Job.load("tiny", **{**SMALL, "mesh": "dp=4 tp=4", "zero": 2})
    found = on(places, "1-8", mesh="dp=4 tp=4", zero=2)
    assert Mesh.parse(found.mesh).size == max(ranks for ranks in (1, 2, 4, 8) if ranks <= places)
    same = {"mesh": "dp=4 tp=4", "batch.micro_size": None, "pipeline.chunks": None}
    assert Job.load(found, **same) == Job.load(asked, **same)
    found.resolve(None, "cpu", 0)


def test_too_few_places_and_devices_that_nobody_knows_are_told_in_words() -> None:
    with pytest.raises(JobError, match="--num-workers 4-8: there is room for 3 ranks; add nodes, or write fewer"):
        on(3, "4-8")
    with pytest.raises(JobError, match=r'mesh="dp=2 tp=2" is not one of 3 ranks.*write --cluster.*or dp=auto'):
        on(3, "3-3", None, mesh="dp=2 tp=2")
