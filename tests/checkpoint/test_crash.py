"""Killed at any moment of a save, a run goes on from a checkpoint that is whole, and what the crash left is gone. (CASES C29.)"""

from __future__ import annotations

import random
import time

import pytest
import torch
from killing import STEPS, Deadly, Doomed, job, run
from safetensors import safe_open

KILLED = -9


def pieces(count):
    """Every moment is in one of `count` pieces: number n, n + count, ... One of them is always tested."""
    return [piece if piece == count // 2 + 1 else pytest.param(piece, marks=pytest.mark.grid) for piece in range(1, count + 1)]


def tensors(folder):
    """Every tensor of a checkpoint but random streams, read by safetensors itself."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {(path.name, key): file.get_tensor(key) for key in file.keys() if not key.startswith("rng/")}  # noqa: SIM118
    return found


def losses(events):
    return {event["step"]: event["loss"] for event in events if event["kind"] == "step"}


@pytest.fixture(scope="module")
def truth(tmp_path_factory):
    """Of a run that nobody killed: what it saved by step, its losses, how the disk was changed."""
    place, disk = tmp_path_factory.mktemp("truth") / "all", Deadly()
    events = run(job(**{"checkpoint.keep": STEPS}), place, disk)
    counted = Deadly()
    run(job(), place.with_name("one"), counted)
    return {folder.name: tensors(folder) for folder in place.iterdir()}, losses(events), counted.changes


def check(place, truth, least):
    """At least `least` complete checkpoints, each that of the run nobody killed; and the run goes on from the newest to the same end."""
    saved, whole, _ = truth
    complete = [folder for folder in sorted(place.iterdir()) if folder.name.startswith("step-")] if place.exists() else []
    assert len(complete) >= least
    for folder in complete:
        found = tensors(folder)
        assert found.keys() == saved[folder.name].keys() and all(torch.equal(x, saved[folder.name][key]) for key, x in found.items())
    events = run(job(), place, Deadly())
    newest = int(complete[-1].name[5:]) if complete else 0
    assert losses(events) == {step: loss for step, loss in whole.items() if step > newest}
    assert next(event["step"] for event in events if event["kind"] == "resumed") == newest
    assert [folder.name for folder in place.iterdir()] == [f"step-{STEPS:08d}"]  # no orphan, and no older one


@pytest.mark.parametrize("piece", pieces(12))
def test_killed_before_any_change_of_the_disk_a_run_goes_on_from_a_whole_checkpoint(piece, truth, tmp_path):
    """All ranks at once, at the moments of all saves: no folder yet, one older, one on its way out."""
    changes = truth[2]
    first = next(at for at, (change, _) in enumerate(changes, 1) if change == "rename")
    assert {change for change, _ in changes} == {"make", "create", "write", "sync", "rename", "unlink", "rmdir"}
    for at in range(piece, len(changes) + 1, 12):
        place = tmp_path / f"at-{at}"
        assert Doomed(job(), place, at).end() == [KILLED]
        check(place, truth, least=at > first)


@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize("piece", pieces(9))
def test_where_one_rank_is_killed_and_the_others_live_it_is_the_same(whose, piece, truth, tmp_path):
    """Ranks as processes; what the living one does before it is ended, as launchers do, may take nothing away either."""
    by_rank_1 = STEPS + sum("rank-00001" in str(what) and change != "unlink" for change, what in truth[2])  # each makes the folder, too
    its_changes = by_rank_1 if whose == 1 else len(truth[2]) - by_rank_1
    for at in range(piece, its_changes + 1, 9):
        place = tmp_path / f"at-{at}"
        codes = Doomed(job(), place, at, whose).end(first=whose, grace=0.2)
        assert codes[whose] == KILLED
        check(place, truth, least=0)


@pytest.mark.parametrize(("seed", "times"), [(0, 4), *(pytest.param(seed, 20, marks=pytest.mark.grid) for seed in range(1, 11))])
def test_killed_again_and_again_at_random_moments_a_run_gets_on_and_is_the_run_nobody_killed(seed, times, tmp_path):
    """Every second time only one of the ranks."""
    place, draw = tmp_path / "run", random.Random(seed)
    endless, newest = job(10**6), 0
    for number in range(times):
        doomed = Doomed(endless, place, apart=True)
        doomed.wait_for("start")
        time.sleep(draw.uniform(0, 0.3))
        victims = [draw.randrange(2)] if number % 2 else [0, 1]
        for rank in victims:
            doomed.kill(rank)
        doomed.end(first=victims[0], grace=0.2 if number % 2 else 0.0)
        steps = sorted(int(folder.name[5:]) for folder in place.glob("step-*"))
        assert not newest or (steps and steps[-1] >= newest)
        newest = steps[-1] if steps else 0
    events = run(job(newest + 2), place, Deadly())
    assert [folder.name for folder in place.iterdir()] == [f"step-{newest + 2:08d}"]
    whole = losses(run(job(newest + 2, **{"checkpoint.every": 0}), tmp_path / "whole", Deadly()))
    assert losses(events) == {step: whole[step] for step in (newest + 1, newest + 2)}


def test_before_a_folder_gets_its_name_all_in_it_is_on_the_medium_and_after_it_the_name_is(truth):
    """What a power cut would take: bytes, and names in folders, of which no sync came after they were made."""
    changes = truth[2]
    for at, (change, what) in enumerate(changes):
        if change != "rename" or not str(what[1].name).startswith("step-"):
            continue
        folder, before = str(what[0]), changes[:at]
        dirty = set()
        for kind, name in before:
            if kind in ("create", "write") and str(name).startswith(folder):
                dirty |= {str(name)} | ({folder} if kind == "create" else set())
            if kind == "sync":
                dirty.discard(str(name))
        assert any(str(name).startswith(folder + "/") for _, name in before) and not dirty
        after = next(what for kind, what in changes[at + 1 :] if kind in ("sync", "rename", "unlink"))
        assert after == str(what[1].parent)
