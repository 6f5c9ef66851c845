"""Which checkpoints of a run count, and which are kept."""

from __future__ import annotations

import pytest

from stretto.checkpoint.shelf import Shelf, name_of
from stretto.checkpoint.store import LocalStore, open_store


@pytest.fixture(params=["folder", "memory"])
def shelf(request, tmp_path):
    if request.param == "folder":
        yield Shelf(LocalStore(tmp_path))
        return
    shelf = Shelf(open_store(f"memory://{tmp_path.name}"))
    yield shelf
    shelf.store.files.rm(shelf.store.root, recursive=True) if shelf.store.files.exists(shelf.store.root) else None


def put(shelf, *steps):
    for step in steps:
        temporary = shelf.store.temporary(name_of(step), "t")
        shelf.store.write(f"{temporary}/data", [memoryview(b"x")])
        shelf.store.commit(temporary, name_of(step), b"{}")


def test_complete_checkpoints_are_listed_newest_first(shelf):
    assert shelf.steps() == []
    put(shelf, 5, 100, 123456789, 20)
    assert shelf.steps() == [123456789, 100, 20, 5] and name_of(50) == "step-00000050"


@pytest.mark.parametrize(
    ("keep", "every", "best", "left"),
    [(2, 0, None, [6, 5]), (1, 2, None, [6, 4, 2]), (1, 0, 3, [6, 3]), (9, 0, None, [6, 5, 4, 3, 2, 1]), (1, 3, 1, [6, 3, 1])],
)
def test_what_is_kept_is_the_newest_every_nth_and_the_best(shelf, keep, every, best, left):
    put(shelf, *range(1, 7))
    gone = shelf.retire(keep, every, best)
    assert shelf.steps() == left and sorted([*gone, *left]) == [1, 2, 3, 4, 5, 6]


def test_what_crashes_left_is_swept_away_and_nothing_else(shelf):
    put(shelf, 3)
    shelf.store.write(f"{shelf.store.temporary(name_of(4), 'b7')}/data", [memoryview(b"half")])
    shelf.store.write("notes/data", [memoryview(b"mine")])
    assert len(shelf.sweep()) == 1
    assert shelf.steps() == [3] and shelf.store.folders() == ["notes", "step-00000003"] and shelf.sweep() == []


def test_a_damaged_one_makes_room_for_its_step_and_stays_to_be_looked_at(shelf):
    for _ in range(2):
        put(shelf, 4)
        assert "damaged-step-00000004" in shelf.set_aside(4)
    assert shelf.steps() == [] and shelf.store.folders() == ["damaged-step-00000004", "damaged-step-00000004-2"]
