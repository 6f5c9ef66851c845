import io
import os
import signal
import time

import pytest

from stretto.errors import JobError, PeerLost
from stretto.launch.outside import run_here, tell
from stretto.launch.place import Seat


def test_events_of_rank_0_are_heard_and_the_result_comes_back():
    heard = []
    work = lambda here, x: here.emit({"kind": "step", "step": x}) or x
    assert run_here(work, (3,), Seat(0, 2, 0), heard.append) == 3 and heard == [{"kind": "step", "step": 3}]
    run_here(work, (4,), Seat(1, 2, 1), heard.append)
    assert len(heard) == 1


def test_an_error_goes_on_with_a_note_of_where_it_was():
    def fail(here):
        here.emit({"kind": "at", "step": 3, "action": "0B1"})
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom") as caught:
        run_here(fail, (), Seat(1, 2, 1), print)
    stream = io.StringIO()
    assert tell(caught.value, Seat(1, 2, 1), stream) == 1
    assert stream.getvalue().startswith("stretto: rank 1 failed at step 3, action 0B1: ValueError: boom\nTraceback")


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


def test_a_wrong_request_is_told_once_a_machine_in_one_line():
    streams = [io.StringIO() for _ in range(3)]
    seats = [Seat(0, 4, 0), Seat(1, 4, 1), Seat(2, 4, 0)]
    assert [tell(JobError("write\nzero=3"), place, stream) for place, stream in zip(seats, streams)] == [2, 2, 2]
    assert [stream.getvalue() for stream in streams] == ["stretto: write; zero=3\n", "", "stretto: write; zero=3\n"]


def test_the_echo_of_a_failure_waits_so_that_the_cause_speaks_first():
    start = time.monotonic()
    assert tell(PeerLost("rank 1 is gone"), Seat(0, 2, 0), io.StringIO()) == 1
    assert time.monotonic() - start >= 0.5
