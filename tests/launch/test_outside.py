import io
import os
import signal
import time

import pytest

from stretto.comm.environment import Seat
from stretto.errors import JobError, PeerLost
from stretto.launch import outside
from stretto.launch.outside import run_here, tell

PLACES = (Seat(0, 4, 0), Seat(1, 4, 1), Seat(2, 4, 0))  # of two machines


def test_events_of_rank_0_are_heard_and_the_result_comes_back():
    heard = []
    work = lambda here, x: here.emit({"kind": "step", "step": x}) or x
    assert run_here(work, (3,), Seat(0, 2, 0), heard.append) == 3 and heard == [{"kind": "step", "step": 3}]
    run_here(work, (4,), Seat(1, 2, 1), heard.append)
    assert len(heard) == 1


def failing(error, first=None):
    """What a rank at work does that fails; first: what the store knows, once the ranks have met."""

    def work(here):
        here.first = first
        here.emit({"kind": "at", "step": 3, "action": "0B1"})
        raise error

    return work


def told(seat, work):
    """(exit code, what is printed) of a rank whose work fails."""
    stream = io.StringIO()
    try:
        run_here(work, (), seat, print)
    except Exception as error:
        return tell(error, seat, stream), stream.getvalue()
    raise AssertionError("it did not fail")


def test_an_error_goes_on_as_it_is_and_says_where_it_was():
    with pytest.raises(ValueError, match="boom") as caught:
        run_here(failing(ValueError("boom")), (), Seat(1, 2, 1), print)
    assert caught.value.__notes__ == ["rank 1 failed at step 3, action 0B1"]
    code, said = told(Seat(1, 2, 1), failing(ValueError("boom")))
    assert code == 1 and said.startswith("stretto: rank 1 failed at step 3, action 0B1: ValueError: boom\nTraceback")
    assert said.count("rank 1") == 1


def test_of_ranks_that_have_met_only_the_first_to_fail_is_told():
    asked = []
    first = lambda name: asked.append(name) or len(asked) == 1
    said = [told(seat, failing(ValueError(f"of {seat.rank}"), first)) for seat in PLACES]
    assert [code for code, _ in said] == [1, 1, 1] and len(set(asked)) == 1
    assert "of 0" in said[0][1] and said[1][1] == said[2][1] == ""


def test_a_store_that_is_gone_took_the_cause_with_it():
    def first(name):
        raise RuntimeError("connection reset")

    assert told(PLACES[1], failing(ValueError("boom"), first))[1].count("boom") > 0
    assert told(PLACES[1], failing(PeerLost("rank 0 is gone"), first)) == (1, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_asks_for_a_stop_and_its_handler_is_put_back(number):
    def work(here):
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        return here.stop()

    before = signal.getsignal(number)
    assert run_here(work, (), Seat(0, 1, 0), print) is True
    assert signal.getsignal(number) is before


def test_ctrl_c_twice_at_once_counts_as_one_and_a_second_later_ends_it():
    def work(here, pause):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        return "went on"

    assert run_here(work, (0.0,), Seat(0, 1, 0), print) == "went on"
    with pytest.raises(KeyboardInterrupt):
        run_here(work, (1.1,), Seat(0, 1, 0), print)


def test_a_wrong_request_is_told_once_a_machine_in_one_line(monkeypatch):
    stayed = []
    monkeypatch.setattr(outside.time, "sleep", stayed.append)
    streams = [io.StringIO() for _ in PLACES]
    assert [tell(JobError("write\nzero=3"), place, stream) for place, stream in zip(PLACES, streams)] == [2, 2, 2]
    assert [stream.getvalue() for stream in streams] == ["stretto: write; zero=3\n", "", "stretto: write; zero=3\n"]
    found_at_work = [told(place, failing(JobError("write\nzero=3"))) for place in PLACES]
    assert found_at_work == [(2, "stretto: write; zero=3\n"), (2, ""), (2, "stretto: write; zero=3\n")]
    assert stayed == [outside.TELL_WAIT] * 2  # the silent one, both times: its exit would end the one who tells


def test_the_echo_of_a_failure_waits_so_that_the_cause_speaks_first():
    start = time.monotonic()
    assert told(Seat(0, 2, 0), failing(PeerLost("rank 1 is gone")))[0] == 1
    assert time.monotonic() - start >= 0.5
