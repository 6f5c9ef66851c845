"""Shared memory between processes: peers that die are noticed and named, nothing is left behind, and jobs do not meet."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from dying import Doomed


def traces() -> tuple[set[str], set[str]]:
    """What a job could leave behind: names in /dev/shm, and processes of this session that have memory of ours mapped."""
    holders = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if os.getsid(int(process.name)) == os.getsid(0) and "memfd:stretto" in (process / "maps").read_text(
                    encoding="utf-8", errors="replace"
                ):
                    holders.add(process.name)
            except OSError:
                continue
    return set(os.listdir("/dev/shm")), holders


@pytest.mark.parametrize("work", ["private", "own", "send"])
def test_a_killed_peer_is_noticed_within_two_seconds_and_named(tmp_path: Path, work: str) -> None:
    with Doomed(tmp_path, 3, work) as job:
        assert [job.read(rank) for rank in range(3)] == [("met",)] * 3
        time.sleep(0.05)
        killed = job.kill(1)
        for rank in (0, 2):
            word, moment, why = job.read(rank)
            assert word == "lost"
            assert moment - killed < 2
            assert why.startswith("rank 1 is gone: its process")


def kill_at_random(folder: Path, times: int, seed: int) -> int:
    """Start ranks and kill some of them at a random moment, again and again; then look what is left. How often one told of a loss."""
    chance, before, heard = random.Random(seed), traces(), 0
    for number in range(times):
        place = folder / str(number)
        place.mkdir()
        with Doomed(place, 2, "all") as job:
            time.sleep(chance.random() * 0.3)  # perhaps before they have met
            victims = chance.choice([[0], [1], [0, 1]])
            killed = [job.kill(rank) for rank in victims][-1]
            for rank in {0, 1} - set(victims):
                said = job.read(rank, 3.0)  # () if nothing: whoever was killed had not even told where it is
                if said == ("met",):
                    said = job.read(rank, 3.0)
                if said:
                    assert said[0] == "lost"
                    assert said[1] - killed < 2
                    heard += 1
    names, holders = traces()
    assert names <= before[0]
    assert holders <= before[1]
    return heard


def test_nothing_is_left_after_kills_at_random_moments(tmp_path: Path) -> None:
    kill_at_random(tmp_path, 8, seed=time.time_ns())


@pytest.mark.grid
def test_nothing_is_left_after_two_hundred_kills_at_random_moments(tmp_path: Path) -> None:
    assert kill_at_random(tmp_path, 200, seed=1) > 40


def test_two_jobs_at_once_do_not_meet(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with Doomed(folders[0], 2, "all", value=1) as one, Doomed(folders[1], 2, "all", value=10) as two:
        assert [job.read(rank) for job in (one, two) for rank in range(2)] == [("met",)] * 4
        time.sleep(0.2)
        for job in (one, two):
            said = job.end()
            assert [word for word, _ in said] == ["ended", "ended"]  # a wrong sum would have ended them otherwise
            assert said[0][1] > 0
