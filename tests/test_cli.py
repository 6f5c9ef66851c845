import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from stretto import cli
from stretto.cli import VERBS, main
from stretto.job import Job
from stretto.launch import checking, training
from stretto.verbs.words import load

FOUND = {
    "kind": "check",
    "ok": True,
    "mesh": "dp=2",
    "loss_error": 1e-16,
    "gradient_error": 2e-15,
    "parameter_error": 3e-15,
    "grad_norm_error": 0.0,
    "worst_parameter": "layers.0.attn.q.weight",
    "tolerance": 1e-10,
    "steps": 3,
    "compared": 76,
    "bytes": [{"parameters": 6300000, "gradients": 6300000, "optimizer": 6300000}] * 2,
}


@pytest.fixture
def call(capsys):
    def run(*words):
        code = main(words)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def stretto(*words, **more):
    return subprocess.run([sys.executable, "-m", "stretto", *words], capture_output=True, text=True, timeout=120, **more)


def test_help_loads_neither_torch_nor_pydantic():
    heavy = "{'torch', 'pydantic', 'numpy', 'rich', 'cloudpickle'}"
    code = f"import sys; from stretto.cli import main; main(['--help']); sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_help_lists_every_verb_and_marks_those_to_come(call):
    code, out, _ = call("--help")
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    verbs = ["train", "check", "plan", "rehearse", "compare", "measure", "convert", "inspect", "export", "draw", "jobs", "keys"]
    assert code == 0 and list(VERBS) == verbs and set(verbs) <= set(lines)
    assert [verb for verb in verbs if "not in this version yet" in lines[verb]] == []


@pytest.mark.parametrize("verb", list(VERBS))
def test_the_help_of_each_verb_shows_an_example_of_that_verb(verb, capsys):
    try:
        code = main([verb, "--help"])
    except SystemExit as left:
        code = left.code
    out = capsys.readouterr().out
    assert not code and f"stretto {verb}" in out.partition("example:")[2]


@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if not (verb.run or verb.kinds)])
def test_a_verb_to_come_is_refused_whatever_stands_behind_it(verb, call):
    code, out, err = call(verb, "tiny", "--cluster", "nosuchcluster")
    assert code == 2 and out == "" and err == f"stretto: stretto {verb} is not in this version yet; `stretto --help` lists what is\n"


REQUESTS = {
    "train nosuch.toml": "nosuch.toml",
    "train tiny mesh=dp=3x": "3x",
    "train tiny zero=7": "zero",
    "train tiny mesh=dp=4 batch.size=5": "batch.size=4 or 8",
    "train tiny learning_rate=1": "optimizer.lr=1",
    "train tiny --learning-rate 1": "optimizer.lr=1",
    "train tiny --tensor-model-parallel-size 2 steps=3": "tp=2",
    "train tiny mesh=tp=3": "tp",
    "check tiny mesh=pp=99": "pp",
    "train tiny precision=fp13": "fp13",
    "train tiny steps=-1": "steps",
    "train tiny nosuchkey=1": "nosuchkey",
    "train tiny steps": "KEY=VALUE",
    "train tiny data=text:no-such-file": "no-such-file",
    "train tiny --until 0": "--until 1",
    "train tiny --until x": "--until",
    "train tiny --outt x": "write --out",
    "train tiny --resume": "write --out DIR",
    "train tiny --resume --out nowhere": "holds no run to go on with",
    "train tiny --resume=maybe --out nowhere": "write --resume, or --resume=auto",
    "train tiny --out /proc/nothing/here": "--out",
    "check tiny --steps 0": "--steps 1",
    "check tiny --dtype fp13": "fp64",
    "trian tiny": "stretto train",
    "keys nosuchkey": "nosuchkey",
    "jobs tinny": "tiny",
    "draw colective": "stretto draw collective",
    "draw collective --algorithm rng": "ring",
    "draw collective --collective allreduce": "all_reduce",
    "draw collective --ranks 40": "--ranks 16",
    "draw collective --ranks two": "--ranks",
    "draw collective --out ring.pdf": "ring.svg",
    "draw collective --out /proc/nothing/ring.svg": "--out",
}


@pytest.mark.parametrize(("words", "named"), REQUESTS.items())
def test_a_wrong_request_is_one_line_and_exit_2(words, named, call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*words.split())
    assert code == 2 and out == "" and not list(tmp_path.iterdir())
    assert err.count("\n") == 1 and err.startswith("stretto: ") and named in err, err


TEXTS = {
    "empty": (b"", "the file is empty"),
    "binary": (b"a line\n\x00\x01\x02" * 100, "binary (it holds NUL bytes)"),
    "latin-1": (b"d\xe9j\xe0 vu " * 100, "not UTF-8"),
    "short": (b"too short", "it has 9 tokens, but one sequence takes batch.seq_len + 1"),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_that_cannot_be_learned_from_is_one_line_and_leaves_nothing(kind, call, monkeypatch, tmp_path):
    content, named = TEXTS[kind]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(content)
    code, out, err = call("train", "tiny", "data=text:text.txt")
    assert code == 2 and out == "" and os.listdir(tmp_path) == ["text.txt"]
    assert err.count("\n") == 1 and err.startswith('stretto: data="text:text.txt": ') and named in err, err


@pytest.mark.parametrize("out", [["--out", "taken"], ["--out", "taken/run"], []])
def test_a_run_folder_that_cannot_be_written_is_one_line_and_leaves_nothing(out, call, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    names = ["runs", "taken"]  # files, where folders would have to be
    for name in names:
        (tmp_path / name).touch()
    code, printed, err = call("train", "tiny", *out)
    assert code == 2 and printed == "" and sorted(os.listdir(tmp_path)) == names
    assert err.count("\n") == 1 and err.startswith("stretto: --out ") and "write --out DIR" in err, err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_one_line_and_leaves_nothing(call, tmp_path):
    tmp_path.chmod(0o500)
    code, _, err = call("train", "tiny", "--out", str(tmp_path / "run"))
    assert code == 2 and err.count("\n") == 1 and "Permission denied" in err and not list(tmp_path.iterdir())


def test_several_faults_of_one_request_are_still_one_line(call):
    code, _, err = call("train", "tiny", "zero=7", "steps=-1")
    assert code == 2 and err.count("\n") == 1 and "zero" in err and "steps" in err


def test_a_wrong_mesh_for_the_ranks_that_were_started_is_told_once(call, monkeypatch):
    said = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        code, _, err = call("train", "tiny", "mesh=dp=3")
        assert code == 2
        said.append(err)
    assert said[0].count("\n") == 1 and "3 ranks" in said[0] and said[1] == ""


def test_jobs_lists_and_prints_toml_that_loads_as_that_job(call, tmp_path):
    assert {"tiny", "30m", "120m"} <= {line.split()[0] for line in call("jobs")[1].splitlines()}
    code, out, _ = call("jobs", "tiny")
    (tmp_path / "tiny.toml").write_text(out)
    assert code == 0 and out.startswith("# ") and Job.load(tmp_path / "tiny.toml") == Job.load("tiny")
    assert {job["name"] for job in json.loads(call("jobs", "--json")[1])["jobs"]} >= {"tiny", "30m", "120m"}


def test_keys_lists_each_key_with_default_and_meaning(call):
    everything = call("keys")[1]
    assert len(everything.splitlines()) == len(Job.keys())
    code, out, _ = call("keys", "zero")
    assert code == 0 and out.splitlines()[0].split()[:2] == ["zero.stage", "1"]
    found = json.loads(call("keys", "batch.*size", "--json")[1])["keys"]
    assert {key["name"] for key in found} == {"batch.size", "batch.micro_size"} and all(key["description"] for key in found)


def test_options_and_keys_may_stand_in_any_order():
    for words in ("tiny --json steps=40 zero=3", "--json tiny steps=40 zero=3", "tiny steps=40 --json zero=3"):
        parser = cli._Parser(prog="stretto train")
        VERBS["train"].options(parser)
        asked = parser.parse_intermixed_args(words.split())
        job = load(asked.words)
        assert asked.json and (job.name, job.steps, job.zero.stage) == ("tiny", 40, 3)


def test_without_a_job_it_is_tiny_that_is_meant():
    assert load([]) == Job.load("tiny")
    assert load(["steps=3", "model.blocks=2"]) == Job.load("tiny", steps=3, **{"model.blocks": 2})


def test_a_job_may_be_given_by_its_keys_alone_and_by_a_file(tmp_path):
    alone = load(["model=30m", "steps=3"])
    assert alone == Job.load(model="30m", steps=3) and alone.name != "tiny"
    (tmp_path / "a=b.toml").write_text("steps = 7\n")
    assert load([str(tmp_path / "a=b.toml"), "zero=2"]).steps == 7


def emits_a_check(finding):
    def work(here, job, model, dtype, steps, inject, blocks):
        print("a line of a library")
        here.emit({**finding, "asked": [job.mesh, dtype, steps, inject, blocks]})

    return work


def test_check_prints_one_object_on_stdout_and_the_rest_on_stderr(call, monkeypatch):
    monkeypatch.setattr(checking, "check_rank", emits_a_check(FOUND))
    code, out, err = call("check", "tiny", "--json", "--steps", "2", "--blocks", "1", "--inject", "scale@norm.weight")
    found = json.loads(out)
    assert code == 0 and out.count("\n") == 1 and "kind" not in found and "a line of a library" in err
    assert found["asked"] == ["dp=2", "fp64", 2, "scale@norm.weight", 1] and found["compared"] == 76


def test_check_says_for_people_what_agrees(call, monkeypatch):
    monkeypatch.setattr(checking, "check_rank", emits_a_check(FOUND))
    code, out, _ = call("check", "tiny")
    assert code == 0 and "2.0e-15" in out and "rank 1 holds parameters 6.3 MB" in out and out.rstrip().endswith("agree")


def test_a_check_that_does_not_hold_exits_3_and_names_the_tensor(call, monkeypatch):
    monkeypatch.setattr(checking, "check_rank", emits_a_check({**FOUND, "ok": False, "gradient_error": 0.5, "loss_error": float("nan")}))
    code, out, err = call("check", "tiny", "--json")
    assert code == 3 and json.loads(out)["ok"] is False and json.loads(out)["loss_error"] is None
    line = err.splitlines()[-1]
    assert line.startswith("stretto: check failed on mesh dp=2: layers.0.attn.q.weight is off by") and "Traceback" not in err
    code, out, _ = call("check", "tiny")
    assert code == 3 and "TOO LARGE" in out


def emits_a_training(here, job, keep):
    print("a line of a library")
    for step in (1, 2):
        here.emit({"kind": "step", "step": step, "loss": 3.0 - step, "tokens": 8, "seconds": 0.1})
    here.emit({"kind": "done", "steps": 2, "final_loss": 1.0, "losses": [2.0, 1.0], "tokens_per_second": 80.0, "peak_bytes": [5, 6]})


def test_train_prints_one_object_on_stdout_and_progress_on_stderr(call, monkeypatch, tmp_path):
    monkeypatch.setattr(training, "train_rank", emits_a_training)
    code, out, err = call("train", "tiny", "steps=2", "--json", "--out", str(tmp_path / "run"))
    told = json.loads(out)
    assert code == 0 and out.count("\n") == 1 and "step 2/2" in err
    assert {name: told[name] for name in ("steps", "final_loss", "losses", "tokens_per_second", "peak_bytes", "mesh", "out")} == {
        "steps": 2,
        "final_loss": 1.0,
        "losses": [2.0, 1.0],
        "tokens_per_second": 80.0,
        "peak_bytes": [5, 6],
        "mesh": "dp=2",
        "out": str(tmp_path / "run"),
    }


def test_train_shows_people_a_curve_and_the_way_to_the_report(call, monkeypatch, tmp_path):
    monkeypatch.setattr(training, "train_rank", emits_a_training)
    code, out, _ = call("train", "tiny", "steps=2", "--out", str(tmp_path / "run"))
    assert code == 0 and "└" in out and out.rstrip().endswith(str(tmp_path / "run" / "report.html"))


def dies(here, job, keep):
    here.emit({"kind": "at", "step": 3, "action": "0F0"})
    os._exit(7)


def test_a_run_that_fails_exits_1_with_one_report(call, monkeypatch, tmp_path):
    monkeypatch.setattr(training, "train_rank", dies)
    code, out, err = call("train", "tiny", "--json", "--out", str(tmp_path / "run"))
    assert code == 1 and out == "" and err.count("failed at step 3, action 0F0") == 1 and "its log:" in err


def test_a_reader_that_has_enough_is_no_error():
    command = f"{sys.executable} -m stretto keys | head -1; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0 and found.stderr == "" and found.stdout.startswith("version")


def test_a_module_beside_the_user_is_found_by_the_console_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    main(["jobs"])
    assert sys.path[-1] == str(tmp_path)


def test_python_m_stretto_is_the_same_command():
    found = stretto("jobs", "tiny")
    assert found.returncode == 0 and tomllib.loads(found.stdout)["name"] == "tiny"
    assert Path(cli.__file__).with_name("__main__.py").exists()


# --- draw -----------------------------------------------------------------------------------------


def test_draw_schedule_writes_a_page_and_names_it(call, tmp_path):
    job = ("tiny", "pipeline=zb-v", "mesh=pp=2", "batch.micro_size=1")
    code, out, _ = call("draw", "schedule", *job, "--out", f"{tmp_path}/a.html", "--json")
    assert code == 0 and json.loads(out) == {"file": f"{tmp_path}/a.html"}
    assert "zb-v: 2 pipeline ranks, 12 microbatches" in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), r"draw what\?; there is mesh, schedule, timeline"),
        (("shedule",), "'shedule' is nothing that draw knows; .* write stretto draw schedule tiny"),
        (("timeline",), "draw timeline takes one run folder, and 0 were given; write stretto draw timeline runs/first"),
        (("timeline", "nowhere"), "nowhere is no run folder"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call, words, says):
    code, _, err = call("draw", *words)
    assert code == 2 and re.search(says, err)
