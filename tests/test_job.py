"""A Job says what is asked; a request that cannot be met is one JobError that says what to write instead."""

from __future__ import annotations

import math
import pickle
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import JobError
from stretto.job import Job, merge, nested, parse_override, parse_overrides
from stretto.keys import PEER_KEYS, read_value, show
from stretto.sections import Batch, Precision, Zero

KEYS = Job.keys()
KNOWN = {key.name for key in KEYS} | set(Job.model_fields)
PLAIN = st.text(st.characters(codec="utf-8"), max_size=8)
SMALL = st.integers(1, 64)

#: For each key some of the values it may have; what may not stand together (shapes, lengths) is left out or chosen below.
POSSIBLE: dict[str, st.SearchStrategy[object]] = {
    "name": st.sampled_from(["job", "a.b-c_d", "7"]),
    "mesh": st.sampled_from(["", "dp=2", "dp=auto tp=2", "dp_replicate=2,dp=3"]),
    "clip": st.floats(0, 1e6),
    "recompute": st.sampled_from(["none", "selective", "full"]),
    "device": st.sampled_from(["auto", "cpu", "cuda"]),
    "seed": st.integers(0, 2**63 - 1),
    "model": st.sampled_from(["tiny", "llama3-8b", "hf:a/b", "python:a.b:c"]),
    "data": st.sampled_from(["topics", "random", "tokens:a.npy"]) | PLAIN.filter(bool).map(lambda t: f"text:{t}"),
    "data.split": st.floats(0, 0.99) | st.just("train"),
    "data.column": PLAIN,
    "data.seed": st.integers(0, 9),
    "zero": st.integers(2, 3),
    "zero.gradients": st.sampled_from(["each", "end"]),
    "zero.params": st.sampled_from(["microbatch", "step"]),
    "zero.keep": st.lists(PLAIN, max_size=3),
    "batch.size": SMALL,
    "batch.micro_size": SMALL,
    "batch.seq_len": SMALL,
    "pipeline": st.sampled_from(["gpipe", "zb-v", "file:x"]),
    "precision": st.sampled_from(["bf16", "fp16", "torch.float32", "auto", "16-mixed"]),
    "precision.reduce": st.sampled_from(["bf16", "fp32", "double"]),
    "precision.initial_scale": st.floats(1e-3, 1e9),
    "optimizer": st.sampled_from(["adamw", "sgd"]),
    "optimizer.lr": st.floats(1e-12, 1e3),
    "optimizer.betas": st.lists(st.floats(0, 0.999), min_size=2, max_size=2),
    "schedule": st.sampled_from(["cosine", "linear", "constant"]),
    "schedule.warmup": st.integers(0, 10) | st.floats(0, 1),
    "schedule.min_ratio": st.floats(0, 1),
    "schedule.steps": st.integers(10, 99),
    "compile": st.sampled_from(["none", "block"]),
    "eval.batches": SMALL,
    "profile.steps": st.lists(st.integers(0, 9), max_size=3),
    "comm.step_timeout": st.floats(0.1, 1e4),
}
LENGTH = st.one_of(
    st.tuples(st.just("steps"), st.integers(10, 10**9)),
    st.tuples(st.just("epochs"), st.floats(0.01, 100)),
    st.tuples(st.just("tokens"), st.integers(10**6, 10**12)),
)


@st.composite
def requests(draw: st.DrawFn) -> dict[str, object]:
    """Dotted keys and values that make a Job."""
    keys = draw(st.lists(st.sampled_from(sorted(POSSIBLE)), unique=True))
    chosen = {key: draw(POSSIBLE[key]) for key in keys}
    if "zero.gradients" in chosen:
        chosen.setdefault("zero", 2)
    return chosen | dict([draw(LENGTH)])


def refused(*words: str, source: str | None = "tiny") -> str:
    """The message with which Job.load refuses these words."""
    with pytest.raises(JobError) as caught:
        Job.load(source, **parse_overrides(words))
    return str(caught.value)


def unresolved(*words: str, ranks: int | None = None, device: str = "cpu", visible: int = 0) -> str:
    """The message with which resolve refuses a job that could be asked."""
    job = Job.load("tiny", **parse_overrides(words))
    with pytest.raises(JobError) as caught:
        job.resolve(ranks, device, visible)  # type: ignore[arg-type]
    return str(caught.value)


# --- a job is a value ---


@settings(deadline=None)
@given(requests())
def test_to_toml_loads_as_the_same_job(asked: dict[str, object]) -> None:
    job = Job.of(asked)
    for comments in (True, False):
        again = Job.of(tomllib.loads(job.to_toml(comments)))
        assert again == job
        assert type(again.schedule.warmup) is type(job.schedule.warmup)  # 1 step and a share of 1.0 are equal numbers


def test_a_run_can_be_repeated_from_its_job_toml(tmp_path: Path) -> None:
    job = Job.load("tiny", zero=3).resolve(2, "cpu", 0)
    file = tmp_path / "job.toml"
    file.write_text(job.to_toml(), encoding="utf-8")
    assert Job.load(file) == job == Job.load(str(file)).resolve(2, "cpu", 0)


@settings(deadline=None)
@given(
    st.recursive(
        st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | PLAIN, lambda inner: st.lists(inner, max_size=3)
    )
)
def test_a_value_is_read_back_as_it_was_shown(value: object) -> None:
    assert read_value(show(value)) == value


@settings(deadline=None)
@given(requests())
def test_dotted_nested_and_keyword_keys_make_the_same_job(asked: dict[str, object]) -> None:
    tables = nested(asked.items())
    assert Job.of(asked) == Job.of(tables) == Job(**tables) == Job.load(None, **asked) == Job.load(tables) == Job.load(Job(), **asked)


def test_a_plain_value_sets_the_main_key_of_its_section_and_leaves_the_rest() -> None:
    job = Job.load({"zero": {"stage": 2, "params": "step"}, "precision": {"reduce": "bf16"}}, zero=3, precision="bf16")
    assert (job.zero.stage, job.zero.params) == (3, "step")
    assert (job.precision.compute, job.precision.reduce) == ("bf16", "bf16")
    assert Job(batch=Batch(size=4, seq_len=7), zero=Zero(stage=0)).batch.seq_len == 7


def test_a_job_does_not_change_and_travels_to_other_processes() -> None:
    job = Job.load("tiny")
    with pytest.raises(ValueError, match="frozen"):
        job.steps = 3
    assert pickle.loads(pickle.dumps(job)) == job
    assert hash(job) == hash(Job.load("tiny"))
    assert job.with_(steps=3).steps == 3 and job.steps == 250
    with pytest.raises(JobError, match="zero"):
        job.with_(zero=9)


def test_text_that_means_a_number_is_that_number() -> None:
    job = Job.load("tiny", **{"batch.size": "8", "optimizer.lr": "1e-3", "schedule.warmup": "0.1", "data.split": "0.25", "steps": 1e3})
    assert (job.batch.size, job.optimizer.lr, job.schedule.warmup, job.data.split, job.steps) == (8, 1e-3, 0.1, 0.25, 1000)
    assert Job(schedule={"warmup": "10"}).schedule.warmup_steps(total=100) == Job(schedule={"warmup": 0.1}).schedule.warmup_steps(total=100)


@pytest.mark.parametrize("name", ["bfloat16", "bf16-mixed", "torch.bfloat16", "BF16", "bf16"])
def test_a_dtype_may_be_spelled_as_peers_do(name: str) -> None:
    assert Job(precision=name).precision.compute == "bf16"


def test_auto_asks_again_for_what_the_program_chooses() -> None:
    job = Job.load("30m", **parse_overrides(["precision=auto", "batch.micro_size=auto", "zero.gradients=auto"]))
    assert (job.precision.compute, job.batch.micro_size, job.zero.gradients) == (None, None, None)


# --- words of the command line ---


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("batch.size=8", ("batch.size", 8)),
        ("precision=bf16", ("precision", "bf16")),
        ('name="8"', ("name", "8")),
        ("mesh=dp=2 tp=2", ("mesh", "dp=2 tp=2")),
        ("optimizer.betas=[0.9, 0.99]", ("optimizer.betas", [0.9, 0.99])),
        ("eval.data=", ("eval.data", "")),
        ("name=1\nseed=2", ("name", "1\nseed=2")),
    ],
)
def test_a_value_is_toml_if_it_parses_else_text(text: str, meant: tuple[str, object]) -> None:
    assert parse_override(text) == meant


@pytest.mark.parametrize("text", ["zero", "=3", ""])
def test_a_word_without_key_or_value_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="KEY=VALUE; write"):
        parse_override(text)


def test_a_key_set_twice_is_refused_with_both_origins() -> None:
    assert refused("zero=3", "zero.stage=2") == "zero.stage is given twice: zero=3 and zero.stage=2; write one of them"
    assert "zero=3 and zero=2" in refused("zero=3", "zero=2")
    assert "seed=1 and seed=2" in refused("seed=1", "seed=2")


def test_a_length_given_in_words_replaces_the_one_in_the_file() -> None:
    job = Job.load("tiny", epochs=2)
    assert (job.steps, job.epochs, job.tokens) == (None, 2.0, None)
    assert merge({"tokens": 5, "seed": 1}, {"steps": 3}) == {"steps": 3, "seed": 1}


# --- the whole of every possible mistake ---


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([key.name for key in KEYS]),
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | PLAIN
    | st.lists(st.integers() | PLAIN, max_size=3)
    | st.dictionaries(PLAIN, PLAIN, max_size=2),
)
def test_any_value_of_any_key_gives_a_job_or_a_joberror_that_says_what_to_write(key: str, value: object) -> None:
    try:
        job = Job.load("tiny", **{key: value})
    except JobError as error:
        lines = str(error).splitlines()
        assert all("; " in line and len(line) < 600 for line in lines), lines
        assert "pydantic" not in str(error) and "Input should" not in str(error)
    else:
        assert Job.of(tomllib.loads(job.to_toml())) == job


@settings(deadline=None)
@given(st.text(max_size=20))
def test_any_text_as_a_key_is_known_or_refused(text: str) -> None:
    try:
        Job(**{text: 1})
    except JobError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert text in KNOWN


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["zero=7"], "zero.stage=7 is not possible: zero.stage is at most 3 (.*0 = nothing .as DDP.*); write zero.stage=3"),
        (["steps=-1"], r"steps=-1 is not possible: steps is at least 1 \(optimizer steps.*\); write steps=1"),
        (["steps=0"], "steps=0 is not possible"),
        (["precision=fp13"], 'precision.compute="fp13" is not possible: .* one of fp64, fp32, bf16, fp16, auto; write '),
        (["mesh=dp=3x"], "mesh='dp=3x': '3x' is no size for dp; write a whole number"),
        (["mesh=dq=3"], "mesh has no axis 'dq'; the axes are pp dp_replicate dp cp ep tp"),
        (["mesh=dp=0"], "mesh.dp=0 is not possible; write a size of 1 or more"),
        (["mesh=4"], 'mesh=4 names no axis; write mesh="dp=4"'),
        (["mesh=2.5"], "mesh=2.5 names no axis"),
        (["data=5"], "data.source=5 is not a source of data"),
        (["mesh.dp=4"], 'mesh.dp=4 is mesh here; write mesh="dp=4"'),
        (["mesh={dp = 2, tp = 2}"], 'a mesh is one text; write mesh="dp=2 tp=2"'),
        (["mesh=auto"], 'not in this version yet; write mesh="dp=auto"'),
        (["mesh=dp=auto tp=auto"], "only one axis may be auto"),
        (["steps=3", "epochs=2"], "steps=3 and epochs=2 each say how long to train; write one of steps, epochs, tokens"),
        (["batch.size=true"], "batch.size=true is not a whole number .*; write for example batch.size=8"),
        (["clip=false"], "clip=false is not a number"),
        (["clip=nan"], "clip=nan is not a finite number"),
        (["batch.size=8.5"], "batch.size=8.5 is not a whole number"),
        (["batch.size=eight"], 'batch.size="eight" is not a whole number'),
        (["model.tied=maybe"], 'model.tied="maybe" is not true or false'),
        (["data.column=true"], "data.column=true is not text"),
        (["optimizer.betas=0.9"], "optimizer.betas=0.9 is not a list .*; write for example optimizer.betas=.0.9, 0.95."),
        (["optimizer.betas=[0.9]"], "has the wrong length"),
        (["optimizer.betas=[0.9, 0.95, 0.99]"], "has the wrong length"),
        (["optimizer.betas=[0.9, 1.0]"], r"optimizer.betas\[1\]=1.0 is not possible: optimizer.betas is below 1"),
        (["optimizer.lr=0"], "optimizer.lr=0 is not possible: optimizer.lr is above 0"),
        (["optimizer=muon"], 'optimizer.name="muon" is not possible: .* adamw, sgd; write optimizer.name="adamw"'),
        (["optimizer.momentum=0.9"], 'no effect on adamw; write optimizer="sgd"'),
        (["schedule.warmup=300"], "schedule.warmup=300 is longer than the 250 steps of the schedule; write schedule.warmup=250 or less"),
        (["schedule.warmup=20", "steps=10"], "longer than the 10 steps"),
        (["schedule.warmup=1.5"], "a share is a number from 0.0 to 1.0, steps a whole number; write"),
        (["schedule.warmup=-1"], "write 100 or 0.1"),
        (["schedule.min_ratio=2"], "schedule.min_ratio=2 is not possible: schedule.min_ratio is at most 1"),
        (["recompute=true"], 'one of none, selective, full; write recompute="full"'),
        (["compile=false"], 'write compile.mode="none"'),
        (["name=a/b"], 'name="a/b" cannot name a folder; write letters'),
        (["version=2"], "version is only 1 in this version"),
        (["runner=fsdp2"], "runner is only stretto in this version"),
        (["model=llama"], 'is not a model; the built-in models are .*tiny.*; write model="llama3-8b"'),
        (["model=org/name"], 'write model="hf:org/name"'),
        (["model.kv_heads=3"], "model.kv_heads=3 does not divide model.heads=4"),
        (["model=hf:org/name", "model.hidden=64"], "model.hidden=64: the shape of hf:org/name is its own; leave it out"),
        (["model.weights=pretrained"], 'has no weights to load; write model.weights="random"'),
        (["model=gpt2-small", "batch.seq_len=2048"], "longer than the 1024 learned positions of gpt2-small; write batch.seq_len=1024"),
        (["data=corpus.txt"], 'is not a source of data; .*; write data="text:corpus.txt"'),
        (["data=topcs"], 'write data="topics"'),
        (['data=["a", "b"]'], "mixing sources is not in this version yet; write one"),
        (["data.split=2"], "from 0.0 to below 1.0; write data.split=0.05"),
        (["eval.every=5"], "nothing to evaluate on; write data.split=0.05"),
        (["zero.gradients=each"], "stages 0 and 1 keep whole gradients .*; write zero=2"),
        (["precision=fp64", "precision.master=fp32"], 'precision.master="fp32" is narrower than precision.compute="fp64"'),
        (["pipeline=gpip"], 'is not a pipeline schedule; .*; write pipeline="gpipe"'),
        (["checkpoint.best=true"], "checkpoint.best=true needs an evaluation to tell which is the best; write eval.every=50"),
        (["checkpoint.keep_every=5"], "keep_every=5: none is saved at such steps .*every=0.; write checkpoint.every=5"),
        (["checkpoint.every=4", "checkpoint.keep_every=6"], "checkpoint.every=4.; write checkpoint.keep_every=8"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)  # fmt: skip
def test_a_wrong_request_is_one_line(words: list[str], line: str) -> None:
    message = refused(*words)
    assert re.search(line, message), message
    assert "\n" not in message


def test_several_mistakes_are_told_together() -> None:
    lines = refused("zero=7", "batch.size=0", "nosuchkey=1", "seed=-1").splitlines()
    assert len(lines) == 4 and lines[-1] == "and 1 more"


# --- keys nobody knows ---


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("learning_rate=1", "learning_rate=1 is optimizer.lr here; write optimizer.lr=1"),
        ("--learning-rate=0.1", "--learning-rate=0.1 is optimizer.lr here; write optimizer.lr=0.1"),
        ("--tensor-model-parallel-size=2", '--tensor-model-parallel-size=2 is mesh here; write mesh="tp=2"'),
        ("optimizer.learning_rate=1", "optimizer.learning_rate=1 is optimizer.lr here; write optimizer.lr=1"),
        ("zero_optimization={stage = 2}", "zero_optimization.stage=2 is zero here; write zero=2"),
        ("bf16=true", 'bf16=true is precision here; write precision="bf16"'),
        ("fp16=false", "fp16=false is precision here; leave it out"),
        ("dtype=bfloat16", 'dtype="bfloat16" is precision here; write precision="bfloat16"'),
        ("dataset=corpus.txt", 'write data="text:corpus.txt"'),
        ("max_steps=5", "max_steps=5 is steps here; write steps=5"),
        ("--zero=3", "--zero=3 is written zero here; write zero=3"),
        ("batch.micro-size=3", "batch.micro-size=3 is written batch.micro_size here; write batch.micro_size=3"),
        ("lr=1", "there is no key lr; write optimizer.lr=1"),
        ("every=3", "write eval.every=3 or checkpoint.every=3 or log.every=3"),
        ("batch.siz=8", "there is no key batch.siz; the nearest is batch.size; write batch.size=8"),
        ("batchsize=8", "the nearest is batch.size"),
        ("optimzer=sgd", 'the nearest is optimizer; write optimizer="sgd"'),
        ("optimzer.lr=1", "there is no key optimzer.lr; write optimizer.lr=1"),
        ("steps.x=1", "the nearest is steps"),
        ("nosuchkey=1", "there is no key nosuchkey, nor one like it; `stretto keys` lists them all"),
    ],
)
def test_an_unknown_key_is_answered_with_ours(word: str, line: str) -> None:
    assert line in refused(word)


@pytest.mark.parametrize("peer", sorted(PEER_KEYS))
def test_each_key_of_a_peer_in_any_spelling_is_refused_with_a_key_of_ours(peer: str) -> None:
    written = PEER_KEYS[peer].write
    ours = written.partition("=")[0]
    assert peer not in KNOWN
    assert ours in KNOWN or written.startswith("--")
    for spelled in (peer, peer.upper(), "--" + peer.replace("_", "-")):
        message = refused(f"{spelled}=1")
        assert f"is {ours} here" in message and "; write " in message


@settings(deadline=None)
@given(st.sampled_from([key.name for key in KEYS if len(key.name) > 9]), st.data())
def test_a_key_with_one_letter_missing_is_answered_with_a_known_one(name: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(name) - 1))
    message = refused(f"{name[:at]}{name[at + 1 :]}=1")
    assert any(key in message.partition("; ")[2] for key in KNOWN), message


# --- files ---


def test_a_job_that_is_not_there_is_answered_with_those_that_are() -> None:
    message = refused(source="nosuch.toml")
    assert message.startswith("there is no job file nosuch.toml; the built-in jobs are 120m, 30m") and "\n" not in message
    assert "; write tiny, or the path" in refused(source="tny")
    assert "there is no job" in refused(source="x" * 5000)
    assert "there is no job" in refused(source="a\0b")


def test_a_file_that_is_no_job_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('name = "a"\nzero = = 3\n')
    assert re.search(r"my\.toml line 2, column 8 is not TOML: .*; write lines as key = value", refused(source=str(file)))
    file.write_text("[batch\n")
    assert re.search(r"my\.toml line 1", refused(source=str(file)))
    file.write_bytes(b"\xff\xfe\0")
    assert "not a text file in utf-8" in refused(source=str(file))
    assert "there is no job" in refused(source=str(tmp_path))
    (tmp_path / "job.toml").write_text("")
    assert f"write {tmp_path / 'job.toml'}" in refused(source=str(tmp_path))
    assert "my.toml" in refused(source=str(tmp_path / "my"))


def test_a_job_without_a_name_is_called_as_its_file(tmp_path: Path) -> None:
    file = tmp_path / "my run.toml"
    file.write_text("zero = 3\n")
    assert Job.load(file).name == "my-run"
    assert Job.load(file, name="other").name == "other"


def test_built_in_jobs_load_and_fit_the_machines_they_are_for() -> None:
    for name, summary, text in Job.builtins():
        job = Job.load(name)
        assert job.name == name and summary.endswith(".") and job == Job.of(tomllib.loads(text))
        job.resolve(None, "cuda", 8)
    for name in ("tiny", "30m", "120m"):
        job = Job.load(name).resolve(None, "cpu", 0)
        assert (job.mesh, job.schedule.shape, job.device, job.precision.compute) == ("dp=2", "constant", "cpu", "fp32")
    tiny, small, large = (Job.load(name) for name in ("tiny", "30m", "120m"))
    assert (tiny.batch.size, tiny.data.source) == (12, "topics")
    assert (small.batch.size, large.batch.size) == (4, 2)
    for job in (small, large):
        assert (job.batch.seq_len, job.clip, job.optimizer.lr, job.optimizer.betas, job.data.source) == (
            256,
            0,
            3e-4,
            (0.9, 0.95),
            "random",
        )


def test_every_key_is_explained_and_its_default_may_be_written() -> None:
    assert len({key.name for key in KEYS}) == len(KEYS)
    for name, default, description in KEYS:
        assert description and "\n" not in description
        if name not in ("epochs", "tokens"):
            assert Job.of({name: read_value(default)}) == Job(), name


# --- on a machine ---

EXAMPLE = 'batch.size=5 cannot be shared evenly by dp=4; write batch.size=4 or 8, or mesh="dp=1" or "dp=5"'


@pytest.mark.parametrize(
    ("words", "ranks", "device", "visible", "mesh", "chosen", "compute"),
    [
        (["mesh="], None, "cpu", 0, "dp=1", "cpu", "fp32"),
        (["mesh="], 3, "cpu", 0, "dp=3", "cpu", "fp32"),
        (["mesh="], None, "cuda", 4, "dp=4", "cuda", "bf16"),
        ([], None, "cpu", 0, "dp=2", "cpu", "fp32"),
        ([], None, "cuda", 1, "dp=2", "cpu", "fp32"),  # two ranks cannot share one GPU, so auto is the CPU
        ([], None, "cuda", 2, "dp=2", "cuda", "bf16"),
        (["mesh=", "device=cpu"], None, "cuda", 4, "dp=1", "cpu", "fp32"),
        (["mesh=dp=auto dp_replicate=2"], 6, "cpu", 0, "dp_replicate=2 dp=3", "cpu", "fp32"),
        (["mesh=dp=auto"], None, "cpu", 0, "dp=1", "cpu", "fp32"),
        (["mesh=", "precision=fp64"], 2, "cpu", 0, "dp=2", "cpu", "fp64"),
    ],
)  # fmt: skip
def test_resolve_fills_in_what_the_machine_says(
    words: list[str], ranks: int | None, device: str, visible: int, mesh: str, chosen: str, compute: str
) -> None:
    job = Job.load("tiny", **parse_overrides(words)).resolve(ranks, device, visible)  # type: ignore[arg-type]
    assert (job.mesh, job.device, job.precision.compute) == (mesh, chosen, compute)
    wide = "fp64" if compute == "fp64" else "fp32"
    assert (job.precision.master, job.precision.reduce) == (wide, wide)
    assert job.comm.transport == ("nccl" if chosen == "cuda" else "auto")


@pytest.mark.parametrize(("stage", "when"), [(0, "end"), (1, "end"), (2, "each"), (3, "each")])
def test_stages_that_cut_gradients_reduce_each_microbatch(stage: int, when: str) -> None:
    job = Job.load("tiny", zero=stage).resolve(2, "cpu", 0)
    assert job.zero.gradients == when
    assert job.resolve(2, "cpu", 0) == job


def test_what_was_asked_of_precision_is_kept() -> None:
    asked = Precision(compute="bf16", master="bf16", reduce="bf16")
    assert Job(precision=asked).resolve(1, "cpu", 0).precision == asked


SIX_HEADS = ("model.heads=6", "model.kv_heads=3", "model.hidden=96")


@pytest.mark.parametrize(
    ("words", "where", "line"),
    [
        (["mesh=dp=4", "batch.size=5"], {}, EXAMPLE),
        (["mesh=dp_replicate=2 dp=2", "batch.size=6"], {}, 'by dp_replicate=2 dp=2; write batch.size=4 or 8, or mesh="dp=3" or "dp=6"'),
        (["mesh=dp=4", "batch.size=2"], {}, 'write batch.size=4, or mesh="dp=2"'),
        (["steps=9", "profile.steps=[0]"], {}, "profile.steps=[0]: steps are numbered from 1 to 9; write profile.steps=[9]"),
        (["steps=9", "profile.steps=[9, 10]"], {}, "profile.steps=[9, 10]: steps are numbered from 1 to 9; write profile.steps=[9]"),
        (["epochs=2", "profile.steps=[0]"], {}, "profile.steps=[0]: steps are numbered from 1; write profile.steps=[1]"),
        (["profile.steps=[3]", "profile.ranks=[0, 2]"], {}, 'mesh="dp=2" has ranks 0 to 1; write profile.ranks=[1]'),
        (["mesh=tp=3"], {}, "mesh.tp=3 does not divide heads=4 of tiny; use tp in {1, 2, 4}"),
        (["mesh=tp=4", *SIX_HEADS], {}, "mesh.tp=4 does not divide heads=6 of tiny; use tp in {1, 3, 6}"),
        (["mesh=tp=2", *SIX_HEADS], {}, "mesh.tp=2 does not divide kv_heads=3 of tiny, nor they it; use tp in {1, 3, 6}"),
        (["mesh=cp=2 ep=2"], {}, "cp and ep are not in this version yet"),
        (["mesh=dp=2 tp=2"], {"ranks": 2}, 'mesh="dp=2 tp=2" makes 4 ranks, and 2 started; write mesh="dp=2", or start 4'),
        ([], {"ranks": 3}, 'mesh="dp=2" makes 2 ranks, and 3 started; write mesh="dp=3", or start 2'),
        (["mesh=dp=auto dp_replicate=2"], {"ranks": 5}, "5 ranks cannot be shared evenly by dp_replicate=2"),
        (["batch.micro_size=7"], {}, "more than the 6 rows of a rank (batch.size=12 over 2 dp ranks); write batch.micro_size=6 or less"),
        (["device=cuda"], {}, 'device="cuda": no GPU is visible here; write device="cpu"'),
        (["device=cuda"], {"device": "cuda", "visible": 1}, 'needs 2 GPUs, and 1 are visible; write mesh="dp=1", or device="cpu"'),
        (["comm.transport=nccl"], {}, 'comm.transport="nccl" needs GPUs'),
        (["comm.transport=shm"], {"device": "cuda", "visible": 2}, 'comm.transport="shm" is for CPUs, and the job runs on GPUs; write'),
        (["precision.master=bf16"], {}, 'precision.master="bf16" is narrower than precision.compute="fp32"'),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_machine_is_one_line(words: list[str], where: dict[str, object], line: str) -> None:
    message = unresolved(*words, **where)  # type: ignore[arg-type]
    assert line in message and "\n" not in message and "; " in message


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 40))
def test_sizes_named_in_a_refusal_do_fit(size: int, ranks: int) -> None:
    if size % ranks == 0:
        assert Job(mesh=f"dp={ranks}", batch=size).resolve(None, "cpu", 0).rows_per_rank == size // ranks
        return
    message = unresolved(f"mesh=dp={ranks}", f"batch.size={size}")
    sizes, _, meshes = message.partition("; write ")[2].partition(", or ")
    for n in map(int, re.findall(r"\d+", sizes)):
        assert n % ranks == 0 and abs(n - size) < ranks
    for n in map(int, re.findall(r"\d+", meshes)):
        assert size % n == 0


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 8))
def test_microbatches_cover_the_rows_and_only_the_last_is_smaller(rows: int, micro: int, ranks: int) -> None:
    asked = Job(mesh=f"dp={ranks}", batch={"size": rows * ranks, "micro_size": min(micro, rows)})
    job = asked.resolve(ranks, "cpu", 0)
    assert (job.rows_per_rank, job.shards) == (rows, ranks)
    assert (job.microbatches - 1) * min(micro, rows) < rows <= job.microbatches * min(micro, rows)
    assert {name: value for name, value, _ in job.derived()}["microbatches"] == job.microbatches
    assert asked.with_(batch={"micro_size": None}).resolve(ranks, "cpu", 0).microbatches == 1


def test_length_in_steps_follows_from_epochs_and_tokens() -> None:
    batch = {"size": 10, "seq_len": 100}
    assert Job(steps=7, batch=batch).total_steps() == 7
    assert Job(tokens=1001, batch=batch).total_steps() == 2
    assert Job(epochs=2, batch=batch).total_steps() is None
    assert Job(epochs=2, batch=batch).total_steps(samples=26) == math.ceil(52 / 10)
    assert Job(epochs=0.1, batch=batch).total_steps(samples=300) == 3  # 0.1 * 300 is not 30 in floating point
    assert Job().total_steps() == 100


def test_asking_for_a_job_loads_no_torch() -> None:
    code = "import sys, stretto.job; print([m for m in ('torch', 'tomlkit', 'numpy', 'rich') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_heads_of_a_folder_are_read_before_any_rank_starts(tmp_path):
    (tmp_path / "config.json").write_text('{"num_attention_heads": 6, "num_key_value_heads": 2}')
    job = Job.load("tiny", model=f"hf:{tmp_path}", mesh="tp=4")
    with pytest.raises(JobError, match=r"mesh.tp=4 does not divide heads=6 of hf:.*; use tp in \{1, 2, 6\}"):
        job.resolve(None, "cpu", 0)
    (tmp_path / "config.json").write_text('{"text_config": {"num_attention_heads": 12}}')
    assert "tp=4" in job.resolve(None, "cpu", 0).mesh
