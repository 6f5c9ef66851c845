import os

from hypothesis import given
from hypothesis import strategies as st

from stretto.launch.board import Board, Place
from stretto.launch.payload import nameless_file


@given(step=st.none() | st.integers(0, 2**62), action=st.text(alphabet="abcFBW0123 é", max_size=28), rank=st.integers(0, 4))
def test_what_a_rank_writes_is_read_back_and_disturbs_no_other(step, action, rank):
    board = Board.private(5)
    before = [board.read(other) for other in range(5) if other != rank]
    board.write(rank, step, action)
    assert board.read(rank) == Place(step, action)
    assert [board.read(other) for other in range(5) if other != rank] == before


def test_an_action_too_long_for_its_slot_is_cut_and_stays_text():
    board = Board.private(2)
    board.write(0, 7, "é" * 100)
    assert board.read(0).step == 7 and set(board.read(0).action) == {"é"}
    assert board.read(1) == Place(None, "")


def test_two_views_of_one_file_see_each_other():
    file = nameless_file("board")
    parent, rank = Board.over(file, 3), Board.over(file, 3)
    rank.write(2, 3, "0F2")
    parent.ask_to_stop()
    assert str(parent.read(2)) == "at step 3, action 0F2"
    assert rank.asked_to_stop and not rank.called_off
    parent.call_off()
    assert rank.called_off
    os.close(file)
