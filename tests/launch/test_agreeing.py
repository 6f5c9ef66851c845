"""Ranks that were started with different jobs, files or software are refused on all of them, and the difference is named."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from stretto.checkpoint.shelf import Keep
from stretto.comm.threads import run_threads
from stretto.comm.transport import World
from stretto.errors import JobError, PeerLost
from stretto.job import Job
from stretto.launch.agreeing import Reading, agree

JOB = Job.load("tiny", device="cpu", mesh="dp=3")
SAME = replace(Reading.of(JOB, Keep("runs/a")), host="left")


def answers(readings: Sequence[Reading]) -> list[Reading | str]:
    """What each rank gets, or its error."""

    def rank(world: World) -> Reading | str:
        try:
            return agree(readings[world.rank], world)
        except JobError as error:
            return str(error)

    return run_threads(rank, len(readings))


def test_rank_0_says_where_checkpoints_go() -> None:
    """A folder that is named by the time is another one on a rank that came a second later."""
    others = [replace(SAME, keep=Keep(f"runs/{name}"), host="right") for name in "bc"]
    assert [found.keep.place for found in answers([SAME, *others])] == ["runs/a"] * 3


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Reading.of(Job.load(JOB, **{"optimizer.lr": 0.5}), Keep()), "has optimizer.lr=0.5 and rank 0 (left) has optimizer.lr="),
        (Reading.of(Job.load(JOB, data="random"), Keep()), 'has data.source="random" and rank 0 (left) has data.source="topics"'),
        (replace(SAME, torch="2.12"), "has torch 2.12 and rank 0 (left) has torch"),
        (replace(SAME, code=SAME.code | {"stretto/comm/shm.py": 1}), "comm/shm.py is not the same on rank 2 (right) and rank 0"),
        (replace(SAME, code={**SAME.code, "stretto/comm/shm.py": 1, "own.py": 2}), "shm.py and 1 more files are not the same on rank 2"),
        (replace(SAME, keep=Keep(resume="auto")), "was started with --resume auto and rank 0 (left) with no"),
    ],
)  # fmt: skip
def test_what_differs_on_one_rank_is_the_error_of_all(other: Reading, says: str) -> None:
    told = answers([SAME, SAME, replace(other, host="right")])
    assert len(set(told)) == 1 and isinstance(told[0], str) and says in told[0] and "rank 2 (right)" in told[0]


def test_they_may_meet_again_with_another_job() -> None:
    second = replace(SAME, job=SAME.job | {"steps": 7})
    for found in run_threads(lambda world: [agree(one, world).job["steps"] for one in (SAME, second)], 2):
        assert found == [JOB.steps, 7]


def test_a_rank_that_never_says_what_it_has_is_missed() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    world = replace(World.alone("cpu"), size=2, store=store)
    with pytest.raises(PeerLost, match="not all of 2 ranks said which job they have"):
        agree(SAME, world)


def test_the_users_own_module_is_read_too(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for text in ("a = 1\n", "a = 2\n"):
        (tmp_path / "own_for_agreeing.py").write_text(text)
        found.append(Reading.of(Job.load("tiny", model="python:own_for_agreeing:model"), Keep()))
    assert found[1].differs(3, found[0]).startswith("own_for_agreeing.py is not the same on rank 3")
    assert "own_for_agreeing" not in sys.modules and found[0].torch == torch.__version__
    assert Reading.read(found[0].text()) == found[0]
