"""Ranks that meet without a collective, and find out who is missing."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from stretto.checkpoint.meeting import Meeting
from stretto.errors import JobError, PeerLost


def together(board, ranks, size, work):
    with ThreadPoolExecutor(max(len(ranks), 1)) as threads:
        futures = [threads.submit(work, Meeting(board, rank, size, "engine.save")) for rank in ranks]
    return [future.exception() or future.result() for future in futures]


def test_everybody_hears_everybody_in_rank_order():
    board = HashStore()
    for turn in range(3):
        assert together(board, range(3), 3, lambda m, turn=turn: m.call((turn, m.rank), 5.0)) == [[(turn, 0), (turn, 1), (turn, 2)]] * 3


def test_one_that_comes_alone_is_told_who_is_missing_in_time_and_the_others_that_they_are_late():
    board, start = HashStore(), time.monotonic()
    (error,) = together(board, [0], 4, lambda m: m.call(None, 0.3))
    assert isinstance(error, JobError) and time.monotonic() - start < 5
    assert "rank 0 called it, and ranks 1-3 did not within 0.3 s" in str(error)
    (late,) = together(board, [1], 4, lambda m: m.call(None, 0.3))
    assert isinstance(late, JobError) and "rank 0 called it, and ranks 1-3 did not" in str(late)
    together(board, [2, 3], 4, lambda m: m.call(None, 0.3))
    assert together(board, range(4), 4, lambda m: m.call(m.rank, 5.0)) == [[0, 1, 2, 3]] * 4  # the next meeting is a new one


def test_a_word_that_never_comes_is_a_lost_peer():
    def work(meeting):
        meeting.call(None, 5.0)
        if meeting.rank == 1:
            meeting.say("wrote", [1] * 1000)
        return meeting.hear("wrote", 1, 5.0), meeting.rank and None

    assert [heard for heard, _ in together(HashStore(), range(2), 2, work)] == [[1] * 1000] * 2
    with pytest.raises(PeerLost, match="rank 1 has not said 'wrote'"):
        Meeting(HashStore(), 0, 2, "engine.save").hear("wrote", 1, 0.05)


def test_what_was_said_is_wiped_off():
    board = HashStore()
    before = board.num_keys()
    meeting = Meeting(board, 0, 1, "engine.save")
    meeting.call(1, 1.0)
    meeting.say("wrote", 2)
    meeting.leave()
    assert board.num_keys() == before + 1  # the count of meetings
