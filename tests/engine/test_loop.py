"""A whole run on thread-ranks, told by its events."""

from __future__ import annotations

import json
import random

import pytest
import torch
import torch.nn.functional as F

from stretto.comm.threads import run_threads
from stretto.engine.loop import train
from stretto.errors import JobError
from stretto.job import Job
from stretto.models import library

SHAPE = {"blocks": 2, "hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 24}
LENGTH, TOKENS = 8, 1300  # 162 samples of 8 tokens, of which an eighth, 20, are held out


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draw = random.Random(0)
    path.write_text("".join(draw.choice("abcdefgh \n") for _ in range(TOKENS)))
    return path


def run(text, ranks=2, stop=lambda rank, events: False, **keys):
    """The events of each rank."""
    usual = {"model": {"name": "tiny", **SHAPE}, "data": f"text:{text}", "batch.size": 12, "batch.seq_len": LENGTH, "precision": "fp64"}
    length = {} if {"epochs", "tokens"} & set(keys) else {"steps": 5}
    job = Job.load({**usual, **length, "mesh": f"dp={ranks}", "schedule": "constant"}, **keys).resolve(None, "cpu", 0)
    heard = [[] for _ in range(ranks)]
    run_threads(lambda world: train(job, world, heard[world.rank].append, lambda: stop(world.rank, heard[world.rank])), ranks)
    return heard


def of(kind, events):
    return [event for event in events if event["kind"] == kind]


def test_a_run_tells_its_start_its_steps_and_its_end(text):
    mine, other = run(text)
    kinds = [event["kind"] for event in mine if event["kind"] != "at"]
    assert kinds == ["start", "entropy", "text", "step", "note", "step", "step", "step", "step", "text", "done"]
    assert mine[0]["steps"] == 5 and any("2 ranks over threads on cpu" in line for line in mine[0]["lines"])
    (done,), steps = of("done", mine), of("step", mine)
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5] and done["steps"] == 5 and len(done["peak_bytes"]) == 2
    assert done["losses"] == [row["loss"] for row in steps] == of("done", other)[0]["losses"]
    assert done["final_loss"] == steps[-1]["loss"] < steps[0]["loss"]
    assert {row["tokens"] for row in steps} == {12 * LENGTH}
    seconds = sum(row["seconds"] + row["data_seconds"] for row in steps)
    assert done["tokens_per_second"] == pytest.approx(5 * 12 * LENGTH / seconds)


def test_what_a_rank_holds_is_told_once_it_holds_it(text):
    events = run(text, ranks=1, zero=0, **{"model.hidden": 128})[0]
    (note,) = of("note", events)
    held = {kind: float(size) for kind, size in (part.split() for part in note["text"].partition(": ")[2].split(", "))}
    assert held["parameters"] > 1 and held["optimizer"] == pytest.approx(2 * held["parameters"], abs=0.11)  # two moments
    assert not any("optimizer" in line for line in events[0]["lines"])


def test_ranks_end_together_when_one_is_asked_to_and_no_time_goes_to_a_last_text(text):
    wanted = lambda rank, events: rank == 1 and len(of("step", events)) == 2
    for events in run(text, stop=wanted):
        assert [row["step"] for row in of("step", events)] == [1, 2, 3]
        assert [said["when"] for said in of("text", events)] == ["before"] and of("done", events)[0]["steps"] == 3


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_evaluation_comes_every_few_steps_and_is_the_mean_over_what_is_held_out(ranks, text):
    keys = {"eval.every": 2, "data.split": 0.125, "optimizer.lr": 1e-30, "seed": 4}  # a model that stays as it was made
    rows = of("eval", run(text, ranks, **keys)[0])
    assert [row["step"] for row in rows] == [2, 4, 5]
    loaded = library.load("tiny", seed=4, overrides=SHAPE)
    model = loaded.model.to_empty(device="cpu").double()
    for name, p in model.named_parameters():
        loaded.initial(loaded.model, name, p.data.view(-1), 0, 4)
    tokens = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long()
    held_out = [tokens[i * LENGTH : (i + 1) * LENGTH + 1] for i in range(162 - 20, 162)]
    losses = [F.cross_entropy(model(row[None, :-1])[0], row[1:]) for row in held_out]
    assert [row["eval_loss"] for row in rows] == pytest.approx([float(sum(losses).detach()) / 20] * 3, rel=1e-10)


@pytest.mark.parametrize(
    ("length", "steps", "samples"),
    [
        ({"epochs": 0.5}, 7, 81),  # half of 162 samples: six steps of 12 and one of 9
        ({"epochs": 1.0, "batch.size": 54}, 3, 162),
        ({"tokens": 12 * LENGTH * 3 + 1}, 4, 48),
    ],
)
def test_a_length_in_epochs_or_tokens_is_a_number_of_steps_with_the_schedule_over_all_of_them(length, steps, samples, text):
    for events in run(text, schedule={"shape": "linear", "min_ratio": 0.0}, **length):
        rows = of("step", events)
        assert of("start", events)[0]["steps"] == steps == len(rows) and sum(row["samples"] for row in rows) == samples
        assert [row["lr"] / rows[0]["lr"] for row in rows] == pytest.approx([1 - i / steps for i in range(steps)])


def test_a_part_of_a_sample_is_nothing_to_learn_from(text):
    with pytest.raises(JobError, match=r"epochs=0.001.*write epochs=1"):
        run(text, epochs=0.001)


def test_the_steps_and_ranks_that_were_asked_for_are_timed(text):
    keys = {"profile.steps": [2, 4], "profile.ranks": [0, 2], "batch.micro_size": 2}
    heard = run(text, 3, **keys)
    trace = json.loads(of("timeline", heard[0])[0]["trace"])
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in events} == {0, 2}
    actions = ["0F0", "0B0", "0F1", "0B1", "0REDUCE", "0VOTE", "0UPDATE"]
    for rank in (0, 2):
        mine = [event for event in events if event["tid"] == rank]
        assert [event["name"] for event in mine] == ["step 2", *actions, "step 4", *actions]
        second, fourth = (event for event in mine if event["cat"] == "step")
        reported = [row["seconds"] * 1e6 for row in of("step", heard[rank]) if row["step"] in (2, 4)]
        assert [second["dur"], fourth["dur"]] == pytest.approx(reported, rel=0.5, abs=5000) and second["ts"] + second["dur"] < fourth["ts"]
    assert of("timeline", run(text)[0]) == []


def test_by_default_one_rank_of_each_pipeline_stage_is_timed(text):
    heard = run(text, 4, mesh="pp=2 dp=2", **{"profile.steps": [2], "batch.micro_size": 2})
    trace = json.loads(of("timeline", heard[0])[0]["trace"])
    assert {event["tid"] for event in trace["traceEvents"]} == {0, 2}


def test_where_a_rank_is_is_told_before_it_gets_there(text):
    events = run(text, ranks=1, steps=2)[0]
    places = [(event.get("step"), event["action"]) for event in of("at", events)]
    assert places[0] == (None, "while the model writes") == places[-1]
    assert places[1:-1] == [(n, a) for n in (1, 2) for a in ("reading data", "0F0", "0B0", "0REDUCE", "0VOTE", "0UPDATE")]
