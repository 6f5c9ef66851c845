"""A run that saves, is stopped, and goes on: the events it tells are those of the run that was never stopped."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path

import pytest
from running import TOKENS, losses, of, run

from stretto.checkpoint.convert import convert
from stretto.checkpoint.kinds import inspect
from stretto.checkpoint.shelf import Keep, Shelf
from stretto.checkpoint.store import Disk, LocalStore, open_store
from stretto.engine import keeping
from stretto.errors import JobError, RunError
from stretto.job import Job


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draw = random.Random(0)
    path.write_text("".join(draw.choice("abcdefgh \n") for _ in range(TOKENS)))
    return path


@pytest.fixture
def place(tmp_path):
    return str(tmp_path / "checkpoints")


@pytest.fixture(scope="module")
def whole(text):
    return losses(run(text, Keep()))


@pytest.fixture(scope="module")
def twenty(text):
    """Losses and samples by step of 20 steps that nobody stopped."""
    events = run(text, Keep(), steps=20, zero=2)
    return losses(events), {event["step"]: event["samples"] for event in of("step", events)}


def test_a_run_saves_every_few_steps_and_at_its_end_and_keeps_what_it_was_told_to(text, place, whole):
    events = run(text, Keep(place), **{"checkpoint.every": 3, "checkpoint.keep": 2, "steps": 8})
    assert [event["step"] for event in of("saved", events)] == [3, 6, 8] and losses(events) == whole
    assert sorted(os.listdir(place)) == ["step-00000006", "step-00000008"]
    assert all(event["bytes"] > 0 and event["path"].startswith(place) for event in of("saved", events))


def test_nothing_is_saved_that_nobody_asked_for(text, place):
    run(text, Keep(place))
    assert not os.path.exists(place)


@pytest.mark.parametrize("at", range(1, 8))
def test_stopped_at_any_step_and_resumed_the_losses_are_bitwise_those_of_the_whole_run(at, text, place, whole):
    """Step 6 begins in one epoch and ends in the next."""
    before = run(text, Keep(place), stop_after=at)
    assert [event["step"] for event in of("saved", before)] == [at] == [max(losses(before))]
    after = run(text, Keep(place, "yes"))
    assert of("resumed", after)[0]["step"] == at and of("text", after)[0]["when"] == "after"
    assert {**losses(before), **losses(after)} == whole and min(losses(after)) == at + 1
    assert of("done", after)[0]["steps"] == 8 and len(of("done", after)[0]["losses"]) == 8 - at


@pytest.mark.grid
@pytest.mark.parametrize("at", range(1, 20))
def test_a_run_of_twenty_steps_may_be_stopped_at_every_one_and_resumed_on_the_same_mesh_and_on_another(at, text, tmp_path, twenty):
    """Nearly four epochs; ends of epochs fall into steps and between them."""
    for ranks in (2, 3):
        place = str(tmp_path / f"ranks-{ranks}")
        before = run(text, Keep(place), stop_after=at, steps=20, zero=2)
        after = run(text, Keep(place, "yes"), ranks=ranks, steps=20, zero=2 if ranks == 2 else 3)
        seen = {**losses(before), **losses(after)}
        assert seen == twenty[0] if ranks == 2 else seen == pytest.approx(twenty[0], rel=1e-12)
        assert {event["step"]: event["samples"] for event in of("step", before) + of("step", after)} == twenty[1]


@pytest.mark.parametrize("ranks", [1, 3])
def test_resumed_on_another_mesh_it_is_the_same_run(ranks, text, place, whole):
    before = run(text, Keep(place), stop_after=4, zero=3)
    after = run(text, Keep(place, "yes"), ranks=ranks, zero=2)
    assert {**losses(before), **losses(after)} == pytest.approx(whole, rel=1e-12)


def test_a_run_may_be_stopped_and_resumed_again_and_again(text, place, whole):
    seen = {}
    for at in (2, 3, 6, None):
        events = run(text, Keep(place, "auto"), stop_after=at)
        seen |= losses(events)
    assert seen == whole


def test_a_run_that_is_done_has_no_step_left_and_can_be_made_longer(text, place):
    run(text, Keep(place), **{"checkpoint.every": 5, "schedule": "constant"})
    events = run(text, Keep(place, "yes"), schedule="constant")
    assert of("step", events) == [] and of("done", events)[0]["steps"] == 8
    more = run(text, Keep(place, "yes"), steps=10, schedule="constant")
    longer = losses(run(text, Keep(), steps=10, schedule="constant"))
    assert losses(more) == {9: longer[9], 10: longer[10]}


def test_with_another_batch_size_no_sample_is_lost_or_seen_twice(text, place):
    run(text, Keep(place), stop_after=3, epochs=2.0)  # 36 of 124 samples
    events = run(text, Keep(place, "yes"), epochs=2.0, **{"batch.size": 8})
    rows = of("step", events)
    assert [row["step"] for row in rows] == list(range(4, 15)) and sum(row["samples"] for row in rows) == 124 - 36
    assert of("start", events)[0]["steps"] == 14


def test_with_until_the_last_step_is_saved_whatever_every_says(text, place):
    events = run(text, Keep(place, last=True), steps=3, **{"schedule.steps": 8})
    assert [event["step"] for event in of("saved", events)] == [3]


def test_the_best_is_saved_where_it_is_found_and_kept(text, place, monkeypatch):
    found = iter([3.0, 2.0, 2.5, 2.4])
    monkeypatch.setattr("stretto.engine.engine.evaluate", lambda *_: {"loss": next(found)})
    keys = {"eval.every": 2, "data.split": 0.1, "checkpoint.best": True, "checkpoint.every": 8, "checkpoint.keep": 1}
    events = run(text, Keep(place), ranks=1, **keys)
    assert [event["step"] for event in of("saved", events)] == [2, 4, 8]
    assert sorted(os.listdir(place)) == ["step-00000004", "step-00000008"]
    again = iter([2.3])
    monkeypatch.setattr("stretto.engine.engine.evaluate", lambda *_: {"loss": next(again)})
    assert [event["step"] for event in of("saved", run(text, Keep(place, "yes"), ranks=1, **keys, steps=10))] == [10]
    assert sorted(os.listdir(place)) == ["step-00000004", "step-00000010"]  # what was best is remembered


def test_auto_starts_where_there_is_nothing_and_says_so(text, place, whole):
    events = run(text, Keep(place, "auto"))
    assert any("no checkpoint" in event["text"] and "starting at step 1" in event["text"] for event in of("note", events))
    assert of("resumed", events)[0]["step"] == 0 and losses(events) == whole
    with pytest.raises(JobError, match="has no checkpoint to go on from; write --resume=auto"):
        run(text, Keep(place, "yes"))


def test_a_damaged_newest_is_told_in_a_line_and_the_one_before_it_taken(text, place, whole):
    run(text, Keep(place), stop_after=6, **{"checkpoint.every": 2})
    file = f"{place}/step-00000006/rank-00001.safetensors"
    os.truncate(file, os.path.getsize(file) - 1)
    events = run(text, Keep(place, "yes"), **{"checkpoint.every": 2})
    (note,) = [event["text"] for event in of("note", events) if "cannot be used" in event["text"]]
    assert note.startswith("the checkpoint of step 6 cannot be used") and "rank-00001.safetensors" in note and "\n" not in note
    assert of("resumed", events)[0]["step"] == 4 and losses(events) == {step: loss for step, loss in whole.items() if step > 4}
    assert {"damaged-step-00000006", "step-00000006", "step-00000008"} <= set(os.listdir(place))  # step 6 could be saved again


def test_what_a_crash_left_is_gone_at_the_next_start(text, place):
    run(text, Keep(place), stop_after=2)
    os.makedirs(f"{place}/.step-00000003.abc.tmp/x")
    run(text, Keep(place, "yes"), stop_after=3)
    assert sorted(os.listdir(place)) == ["step-00000002", "step-00000003"]


class Full(Disk):
    """A disk that is full while `full` is set."""

    def __init__(self):
        self.full, self.gate, self.error = False, None, OSError(28, "No space left on device")

    def write(self, file, view):
        if self.gate is not None:
            self.gate.wait(20)
        if self.full:
            raise self.error
        return super().write(file, view)


@pytest.fixture
def disk(monkeypatch):
    made = Full()
    monkeypatch.setattr(keeping, "open_store", lambda place: LocalStore(Path(place), made))
    return made


def test_a_failed_write_is_reported_and_training_goes_on_until_the_limit(text, place, disk, monkeypatch):
    saved = keeping.Keeper.after

    def after(self, step, *args, **kwargs):
        disk.full = step in (2, 4)
        saved(self, step, *args, **kwargs)
        if self.writing is not None:
            self.writing.join()

    monkeypatch.setattr(keeping.Keeper, "after", after)
    events = run(text, Keep(place), ranks=1, **{"checkpoint.every": 2, "checkpoint.max_failures": 2})
    told = [event["text"] for event in of("note", events) if "was not saved" in event["text"]]
    assert len(told) == 2 and "step 2 was not saved: rank 0: no space left for" in told[0] and "failure 2" in told[1]
    assert [event["step"] for event in of("saved", events)] == [6, 8] and sorted(os.listdir(place)) == ["step-00000006", "step-00000008"]
    with pytest.raises(RunError, match="step 4 was not saved.*no space left"):
        run(text, Keep(place + "2"), ranks=1, **{"checkpoint.every": 2, "checkpoint.max_failures": 1})
    assert os.listdir(place + "2") == []


def test_a_stop_that_cannot_be_saved_is_a_failure(text, place, disk):
    disk.full = True
    with pytest.raises(RunError, match="step 3 was not saved.*no space left"):
        run(text, Keep(place), stop_after=3)


def test_a_folder_that_may_not_be_written_is_told_with_what_to_do(text, place, disk):
    disk.full, disk.error = True, OSError(13, "Permission denied")
    with pytest.raises(
        RunError, match=r"step 3 was not saved: .*cannot be written \(Permission denied\); give a folder that may be written"
    ):
        run(text, Keep(place), stop_after=3)
    assert os.listdir(place) == []


def test_where_there_is_no_room_nothing_is_begun_and_the_older_checkpoint_stays(text, place, monkeypatch, whole):
    run(text, Keep(place), stop_after=2)
    monkeypatch.setattr(LocalStore, "free", lambda self: 1000)
    with pytest.raises(
        RunError, match=r"no space left for .*step-00000004: 0\.\d MB are to be written, and 0\.0 MB are free; make room, or keep"
    ):
        run(text, Keep(place, "yes"), stop_after=4, **{"checkpoint.keep": 1})
    assert os.listdir(place) == ["step-00000002"]
    monkeypatch.undo()
    assert losses(run(text, Keep(place, "yes"))) == {step: loss for step, loss in whole.items() if step > 2}


def test_checkpoints_may_lie_behind_a_url_and_the_run_goes_on_from_there(text, tmp_path, whole):
    place = f"memory://{tmp_path.name}/run"
    keys = {"checkpoint.every": 2, "checkpoint.keep": 1}
    before = run(text, Keep(place), stop_after=5, **keys)
    shelf = Shelf(open_store(place))
    assert [event["path"] for event in of("saved", before)] == [f"{place}/step-0000000{n}" for n in (2, 4, 5)] and shelf.steps() == [5]
    shelf.store.write("step-00000006/rank-00000.safetensors", [memoryview(b"of a crash")])
    after = run(text, Keep(place, "yes"), ranks=3, zero=3, **keys)
    assert {**losses(before), **losses(after)} == pytest.approx(whole, rel=1e-12)
    assert shelf.steps() == [8] and shelf.store.folders() == ["step-00000008"]
    told = inspect(place, verify=True)
    assert told.about["path"] == f"{place}/step-00000008" and told.about["mesh"] == "dp=3"
    made = convert(place, f"memory://{tmp_path.name}/hf")
    assert made.kind == "huggingface" and made.bytes_ == told.about["kinds"]["model"]
    assert convert(place, f"memory://{tmp_path.name}/dcp", "dcp").about["step"] == 8
    shelf.store.files.rm(f"/{tmp_path.name}", recursive=True)


@pytest.mark.parametrize(("busy", "steps"), [("skip", [1, 8]), ("wait", [1, 2, 3, 4, 5, 6, 7, 8])])
def test_one_that_is_due_while_the_last_is_being_written_waits_or_is_skipped(busy, steps, text, place, disk, monkeypatch):
    disk.gate = threading.Event()
    if busy == "wait":
        disk.gate.set()
    saved = keeping.Keeper.after

    def after(self, step, *args, last, **kwargs):
        if last:
            disk.gate.set()
        saved(self, step, *args, last=last, **kwargs)

    monkeypatch.setattr(keeping.Keeper, "after", after)
    events = run(text, Keep(place), **{"checkpoint.every": 1, "checkpoint.busy": busy, "checkpoint.keep": 9})
    assert [event["step"] for event in of("saved", events)] == steps
    skipped = [event["text"] for event in of("note", events) if "still being written" in event["text"]]
    assert len(skipped) == 8 - len(steps)


@pytest.mark.parametrize("busy", ["skip", "wait"])
def test_asked_to_stop_while_one_is_being_written_both_are_saved(busy, text, place, disk, monkeypatch):
    disk.gate = threading.Event()
    saved = keeping.Keeper.after

    def after(self, step, *args, **kwargs):
        if step == 3:  # asked to stop in it, and step 2 is still on its way
            assert not self.writing.done
            threading.Timer(0.2, disk.gate.set).start()
        saved(self, step, *args, **kwargs)

    monkeypatch.setattr(keeping.Keeper, "after", after)
    events = run(text, Keep(place), ranks=1, stop_after=3, **{"checkpoint.every": 2, "checkpoint.busy": busy})
    assert [event["step"] for event in of("saved", events)] == [2, 3] == sorted(losses(events))[1:]


def test_a_checkpoint_tells_the_job_and_the_mesh_it_came_from(text, place):
    run(text, Keep(place), stop_after=1)
    manifest = json.loads(Path(place, "step-00000001", "manifest.json").read_text())
    assert manifest["mesh"] == "dp=2" and manifest["ranks"] == 2 and Job.of(manifest["job"]).batch.size == 12
