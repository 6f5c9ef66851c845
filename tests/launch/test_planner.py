"""The server behind the page of `stretto plan --serve`: its answers are plan's own, to nobody but this machine."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlencode

import pytest

from stretto.cli import main
from stretto.errors import JobError
from stretto.job import Job
from stretto.launch.planner import PORT, Planner, server
from stretto.plan.asking import ask
from stretto.plan.choices import Start
from stretto.plan.frontier import frontier
from stretto.plan.grown import grow
from stretto.plan.hardware import Cluster
from stretto.plan.planning import plan_job
from stretto.plan.view import view

JOB, CLUSTER = Job.load("llama3-8b"), Cluster.of("1x8 h100")
START = Start(JOB, CLUSTER)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with server(START, 0) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True).start()
        yield listening.server_port
        listening.shutdown()


def get(port: int, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers=headers)
    reply = connection.getresponse()
    found = reply.status, reply.read().decode(), dict(reply.headers)
    connection.close()
    return found


def asked(port: int, path: str, **question: str) -> dict[str, Any]:
    status, body, headers = get(port, f"{path}?{urlencode(question)}")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    return dict(json.loads(body))


def plain(value: object) -> Any:
    return json.loads(json.dumps(value))


def test_the_page_needs_nothing_from_elsewhere(port: int) -> None:
    status, body, headers = get(port, "/")
    assert status == 200 and body.startswith("<!doctype html>") and "://" not in body and " src=" not in body
    assert "default-src 'none'" in headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("question", "mesh", "keys"),
    [
        ({}, "dp=8", {}),
        ({"tp": "2", "pp": "2"}, "pp=2 dp=2 tp=2", {}),
        ({"cp": "2", "zero": "1", "recompute": "none"}, "dp=4 cp=2", {"zero": 1, "recompute": "none"}),
        ({"pp": "4", "schedule": "interleaved", "chunks": "4", "micro": "2", "compile": "block"}, "pp=4 dp=2",
         {"pipeline": {"schedule": "interleaved", "chunks": 4}, "batch.micro_size": 2, "compile": "block"}),
    ],
)  # fmt: skip
def test_a_layouts_answer_is_plans_own(port: int, question: dict[str, str], mesh: str, keys: dict[str, Any]) -> None:
    found = asked(port, "/layout", **question)
    wanted = view(ask(JOB.with_(mesh=mesh, **keys), CLUSTER, {"mesh"}))
    assert found["layout"] == plain(wanted.plain())
    assert asked(port, "/layout", **question) == found  # with what the first has made
    status, text, headers = get(port, f"/job.toml?{urlencode(question)}")
    assert status == 200 and text == wanted.row.job.to_toml() and "attachment" in headers["Content-Disposition"]


def test_the_best_the_frontier_and_the_growth_are_plans_own(port: int) -> None:
    keys = {"model": "gpt2-small", "batch": "16", "zero": "3", "keep": "zero.stage"}
    job = Job.load("gpt2-small", zero=3, precision="bf16", **{"batch.size": 16})
    found = asked(port, "/best", **keys)
    planned = plan_job(job, CLUSTER, {"zero.stage"}, 8)
    assert [one["plan"] for one in found["rows"]] == plain([row.plain() for row in planned.rows])
    assert {one["choices"]["zero"] for one in found["rows"]} == {"3"} and found["searched"] == planned.searched
    points = asked(port, "/frontier", **keys)
    assert points["points"] == plain([row.plain() for row in frontier(job, CLUSTER, {"zero.stage"})])
    assert points["svg"].count("<circle") == len(points["points"]) + 1  # and this layout
    more = asked(port, "/growth", **keys, price="2.5")
    cells = [one["cells"] for one in more["rows"]]
    grown = grow(job, CLUSTER, [8, 16, 32], 2.5, None, {"zero.stage"})
    assert [(line[0], line[1], line[6]) for line in cells] == [
        (str(one.devices), str(one.row.plan.setting.mesh) if one.row else "-", "" if one.cost is None else f"{one.cost:,.0f}")
        for one in grown
    ]


@pytest.mark.parametrize(
    ("path", "question", "said"),
    [
        ("/layout", {"device": "h900"}, "there is no device 'h900'"),
        ("/layout", {"zero": "7"}, "zero=7 is not possible here"),
        ("/layout", {"model": "python:a.b:c"}, "there is no model"),
        ("/layout", {"model": "llama3-405b", "words": "model.heads=3"}, "model.heads=3"),
        ("/best", {"model": "llama3-70b"}, "nothing fits: llama3-70b"),
        ("/growth", {"price": "cheap"}, "a price of 'cheap' is no number"),
        ("/job.toml", {"nodes": "0"}, "has no devices"),
    ],
)
def test_what_cannot_be_is_an_answer_in_words(port: int, path: str, question: dict[str, str], said: str) -> None:
    assert said in asked(port, path, **question)["error"]


def test_a_wrong_choice_still_tells_what_else_there_is(port: int) -> None:
    found = asked(port, "/layout", pp="4", schedule="zb-h1", compile="block")
    assert "splits the backward" in found["error"] and "layout" not in found
    assert found["options"]["compile"] == ["none", "block"]


def test_who_calls_it_by_another_name_is_not_answered(port: int) -> None:
    assert get(port, "/layout", Host="elsewhere.example:80")[0] == 403
    assert get(port, "/layout", Host=f"localhost:{port}")[0] == 200
    assert get(port, "/secrets")[0] == 404


def test_it_listens_on_this_machine_alone() -> None:
    with server(START, 0) as listening:
        assert listening.server_address[0] == "127.0.0.1"


def test_what_was_made_for_a_model_is_kept_for_the_next_question_and_not_for_ever() -> None:
    planner = Planner(START)
    for nodes in ("1", "2", "1", "4", "8", "16", "32", "64", "128"):
        assert planner.answer(f"/layout?nodes={nodes}").status == 200
    assert [key[1] for key in planner._known] == [f"{n}x8 h100" for n in (4, 8, 16, 32, 64, 128)]


def test_a_port_that_is_taken_is_said_and_the_usual_one_gives_way_to_another(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        assert main(["plan", "--serve", "--port", str(taken)]) == 2
        out, err = capsys.readouterr()
        assert f"--port {taken} is taken; write another one, or --port 0" in err and len(err.splitlines()) == 1 and not out
    with server(START, None) as first, server(START, None) as second:
        assert first.server_port != second.server_port and second.server_port != PORT
    with pytest.raises(JobError, match="--port 99999 cannot be had"):
        server(START, 99999)


def test_the_command_tells_its_address_and_ends_at_ctrl_c_with_zero() -> None:
    words = [sys.executable, "-m", "stretto", "plan", "tiny", "--cluster", "1x2 h100", "--serve", "--port", "0", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stderr
            address = json.loads(process.stdout.readline())["url"]
            port = int(address.rstrip("/").rpartition(":")[2])
            assert json.loads(get(port, "/layout")[1])["choices"]["model"] == "tiny"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
        assert process.stdout.read() == "" and process.stderr.read() == ""
