import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.errors import CheckFailed, JobError, Mismatch, PeerLost, RunError
from stretto.launch.board import Place
from stretto.launch.failure import Failure, RankFailed, first

HERE = Place(3, "0F2")


def failure_of(exception, rank=1, place=HERE):
    try:
        raise exception
    except type(exception) as caught:
        return Failure.of(caught, rank, place)


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 100), st.booleans()), min_size=1, max_size=8))
def test_the_earliest_that_is_no_echo_is_reported_in_whatever_order_they_come(accounts):
    failures = [Failure(rank, 0, "", "E", "e", "", time, echo) for rank, time, echo in accounts]
    chosen = first(failures)
    causes = [failure for failure in failures if not failure.consequence] or failures
    assert chosen in causes and chosen.time == min(failure.time for failure in causes)
    assert first(reversed(failures)) == chosen


def test_a_lost_peer_is_an_echo_even_where_another_error_was_raised_from_it():
    assert failure_of(PeerLost("rank 0 is gone")).consequence
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = PeerLost("rank 0 is gone")
    assert failure_of(wrapped).consequence
    assert not failure_of(ValueError("mine")).consequence


def test_the_headline_says_rank_step_action_and_error_in_one_line():
    headline = failure_of(ValueError("boom\nand more")).headline
    assert headline == "rank 1 failed at step 3, action 0F2: ValueError: boom ..."


@pytest.mark.parametrize("error", [JobError("write zero=3"), CheckFailed("h.weight is off")])
def test_a_wrong_request_and_a_failed_check_are_raised_as_what_they_are(error):
    with pytest.raises(type(error)) as caught:
        failure_of(error).throw()
    assert str(caught.value) == str(error)


def test_any_other_error_of_a_rank_keeps_its_traceback_and_names_its_log():
    for error in (ValueError("boom"), Mismatch("other sizes")):
        with pytest.raises(RankFailed) as caught:
            failure_of(error).throw("logs/rank-00001.log")
        assert isinstance(caught.value, RunError) and caught.value.exit_code == 1
        assert "logs/rank-00001.log" in str(caught.value) and "in failure_of" in str(caught.value)


def test_an_account_survives_the_way_to_the_parent():
    told = failure_of(ValueError("boom"))
    assert Failure.from_event(told.to_event()) == told


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [
        (-9, "signal 9 (SIGKILL), perhaps out of memory"),
        (-11, "signal 11 (SIGSEGV)"),
        (-63, "signal 63"),
        (3, "exit code 3"),
        (0, "exit code 0"),
    ],
)
def test_a_death_without_words_is_described(exit_code, words):
    assert words in Failure.of_death(exit_code, 0, Place(None, ""), "").headline


def test_a_death_by_signal_seen_just_after_an_error_of_another_rank_is_the_cause():
    echo = failure_of(RuntimeError("connection closed by peer"), rank=0)
    assert first([echo, Failure.of_death(-9, 1, Place(3, ""), "")]).rank == 1
