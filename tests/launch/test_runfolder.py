import json
import math
import time

import pytest

from stretto.errors import JobError
from stretto.launch.runfolder import RunFolder, default_folder, environment_facts, json_text


def made(path):
    return RunFolder.create(path, "steps = 3\n", {"python": "3.11"}, "dp=2")


def test_a_new_folder_holds_what_was_asked_and_where_it_runs(tmp_path):
    made(tmp_path / "a" / "run").close()
    run = tmp_path / "a" / "run"
    assert (run / "job.toml").read_text() == "steps = 3\n" and (run / "logs").is_dir()
    assert json.loads((run / "environment.json").read_text()) == {"python": "3.11"}
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["step"], status["mesh"]) == ("running", 0, "dp=2")


def test_a_row_is_on_disk_at_once_and_is_json_that_every_reader_takes(tmp_path):
    folder = made(tmp_path / "run")
    folder.add_row({"step": 1, "loss": math.nan, "peaks": (1, math.inf)})
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert row == {"step": 1, "loss": None, "peaks": [1, None]}


def test_a_status_is_replaced_as_a_whole(tmp_path):
    folder = made(tmp_path / "run")
    folder.set_status("done", 3, "", final_loss=2.0)
    assert json.loads((tmp_path / "run" / "status.json").read_text())["final_loss"] == 2.0
    assert not list((tmp_path / "run").glob(".*"))


def test_a_folder_with_a_run_is_refused_with_the_state_it_is_in(tmp_path):
    folder = made(tmp_path)
    folder.set_status("done", 250, "")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(JobError, match=r"holds a run already \(done, step 250\); write another --out, --resume to go on with it"):
        made(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_folder_that_cannot_be_written_is_refused_with_nothing_left(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(JobError, match="--out"):
            made(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_a_folder_is_taken_away_again_where_half_of_it_could_not_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(RunFolder, "set_status", lambda *a, **b: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(JobError, match="No space left on device"):
        made(tmp_path / "new" / "run")
    assert not list(tmp_path.iterdir())


def test_discarding_a_run_leaves_what_was_there_before(tmp_path):
    made(tmp_path / "a" / "b").discard()
    assert not (tmp_path / "a").exists()
    (tmp_path / "notes.txt").write_text("mine")
    made(tmp_path).discard()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_two_runs_of_one_second_get_two_folders(tmp_path):
    now = time.strptime("2026-11-30 17:01:02", "%Y-%m-%d %H:%M:%S")
    first = default_folder("tiny", now, tmp_path)
    first.mkdir()
    assert first.name == "tiny-20261130-170102" and default_folder("tiny", now, tmp_path).name == "tiny-20261130-170102-2"


def test_the_environment_says_what_is_needed_to_repeat_a_run():
    facts = json.loads(json_text(environment_facts(["stretto", "train", "tiny"], "cpu", 0)))
    assert facts["command"] == "stretto train tiny" and facts["python"] and facts["versions"]["torch"]
    assert {"commit", "cpu", "cores", "memory_bytes", "device"} <= set(facts)


def rows(folder, *steps):
    for step in steps:
        folder.add_row({"step": step, "loss": 9.0 - step})


def test_a_run_that_goes_on_keeps_its_rows_up_to_where_it_goes_on_from_and_no_row_is_double(tmp_path):
    first = made(tmp_path / "run")
    rows(first, 1, 2, 3)
    first.add_row({"step": 2, "eval_loss": 5.0})
    first.set_status("failed", 3, "boom")
    first.close()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a crash cut the last line short
    folder = RunFolder.reopen(tmp_path / "run", "steps = 9\n", {}, "dp=4")
    assert [row["step"] for row in folder.go_on_from(2)] == [1, 2, 2]
    rows(folder, 3, 4)
    folder.close()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2, 3, 4]
    assert (tmp_path / "run" / "job.toml").read_text() == "steps = 9\n"
    assert (tmp_path / "run" / "job.before-3.toml").read_text() == "steps = 3\n"
    assert json.loads((tmp_path / "run" / "status.json").read_text())["mesh"] == "dp=4"


def test_while_a_process_runs_in_a_folder_no_other_goes_on_in_it_and_nothing_of_it_changes(tmp_path):
    first = made(tmp_path / "run")
    rows(first, 1)
    before = {path.name: path.read_text() for path in (tmp_path / "run").iterdir() if path.is_file()}
    with pytest.raises(JobError, match=r"a process runs in it now \(running, step 0\); wait for its end, or stop it"):
        RunFolder.reopen(tmp_path / "run", "steps = 9\n", {}, "dp=4")
    assert before == {path.name: path.read_text() for path in (tmp_path / "run").iterdir() if path.is_file()}
    first.close()
    RunFolder.reopen(tmp_path / "run", "steps = 9\n", {}, "dp=4").close()


def test_a_run_that_could_not_go_on_is_as_it_was(tmp_path):
    first = made(tmp_path / "run")
    rows(first, 1, 2)
    first.set_status("interrupted", 2, "asked")
    first.close()
    before = {path.name: path.read_text() for path in (tmp_path / "run").iterdir() if path.is_file()}
    RunFolder.reopen(tmp_path / "run", "steps = 3\n", {"other": 1}, "dp=1").discard()
    assert before == {path.name: path.read_text() for path in (tmp_path / "run").iterdir() if path.is_file()}
