import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pool import Pool

from stretto.errors import JobError
from stretto.launch.failure import RankFailed


class Small:
    """A world without messages, so that these tests need no torch."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def limited(self, size):
        return type(self)(self.rank, size)


def small_world():
    return Small(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def process(world):
    return os.getpid()


@pytest.fixture(scope="module")
def three():
    with Pool(3, small_world) as pool:
        yield pool


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_the_first_ranks_run_what_is_sent_and_stay_the_same_processes(three):
    assert three.run(lambda world, x: (world.rank, world.size, x), ranks=2, args=(5,)) == [(0, 2, 5), (1, 2, 5)]
    before = three.run(process)
    assert three.run(process) == before and len(set(before)) == 3 and os.getpid() not in before


def test_a_failing_rank_gives_its_traceback_and_the_next_run_works(three):
    def fail(world):
        if world.rank == 1:
            raise ValueError("the second rank")

    with pytest.raises(RankFailed, match=r'(?s)rank 1 failed.*raise ValueError."the second rank"'):
        three.run(fail)
    assert three.run(lambda world: world.rank) == [0, 1, 2]


def test_a_refusal_on_all_ranks_keeps_the_processes(three):
    def refuse(world):
        raise JobError("write zero=3")

    before = three.run(process)
    with pytest.raises(JobError, match="write zero=3"):
        three.run(refuse)
    assert three.run(process) == before


def test_a_rank_that_dies_is_named_and_the_pool_starts_anew(three):
    before = three.run(process)
    with pytest.raises(RankFailed, match=r"rank 2 failed.*SIGKILL"):
        three.run(lambda world: os.kill(os.getpid(), 9) if world.rank == 2 else time.sleep(60))
    assert not any(map(alive, before))
    assert three.run(lambda world: world.rank) == [0, 1, 2]


def test_a_rank_that_hangs_is_shown_with_its_stack(three):
    def hang(world):
        if world.rank == 0:
            time.sleep(60)

    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"(?s)from ranks \[0\].*in hang"):
        three.run(hang, timeout=1.0)
    assert time.monotonic() - start < 5
    assert three.run(lambda world: world.rank) == [0, 1, 2]


def test_a_world_that_cannot_be_opened_is_an_error_and_not_a_wait():
    with Pool(2, lambda: 1 / 0) as pool, pytest.raises(RankFailed, match="ZeroDivisionError"):
        pool.run(process)


def test_the_ranks_do_not_outlive_the_process_that_made_them(tmp_path):
    script = "import os, sys; sys.path[:0] = sys.argv[1:3]; from test_pool import *; print(Pool(2, small_world).run(process)); os._exit(0)"
    here = Path(__file__).parent
    command = [sys.executable, "-c", script, str(here), str(here.parent)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    ranks = [int(word) for word in found.stdout.strip().strip("[]").split(",")]
    limit = time.monotonic() + 5
    while any(map(alive, ranks)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert len(ranks) == 2 and not any(map(alive, ranks))
