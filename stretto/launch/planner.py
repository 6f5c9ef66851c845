"""`stretto plan --serve`: a page on this machine whose questions the planner answers, one layout at a time, as its sliders move.

Only this machine can ask: it listens on 127.0.0.1, and answers nobody who calls it by another name (a page of elsewhere that had its
own name lead here could read along otherwise).
"""

from __future__ import annotations

import errno
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qsl, urlsplit

from stretto.draw.planner import PAGE, best_answer, frontier_answer, growth_answer, job_text, layout_answer
from stretto.errors import JobError, StrettoError
from stretto.plan.asking import Asked
from stretto.plan.choices import Start, choose
from stretto.plan.known import Known, Schedules
from stretto.plan.search import OURS

HOST, PORT = "127.0.0.1", 8765
#: Models and clusters whose prices are kept for the next slider.
KEPT = 6
#: Models and clusters after which schedules, which all of them share, are made anew.
RENEWED = 32
#: What a page may load: itself, and answers from here.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'"
)
HTML, JSON, TEXT = "text/html; charset=utf-8", "application/json", "text/plain; charset=utf-8"


class Answer(NamedTuple):
    """What goes back: a status of HTTP, a kind of content, and the content."""

    status: HTTPStatus
    kind: str
    body: str
    file: str = ""


class Planner:
    """Answers by path and question. A question is the fragment of the page's address, and what the path takes besides."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self._known: OrderedDict[tuple[str, ...], dict[bool, Known]] = OrderedDict()
        self._schedules, self._made = Schedules(), 0
        self._asking, self._searching = threading.Lock(), threading.Lock()
        self.paths: Mapping[str, Callable[[dict[str, str]], Answer]] = {
            "/": lambda wanted: Answer(HTTPStatus.OK, HTML, PAGE.read_text(encoding="utf-8")),
            "/layout": self._layout,
            "/best": self._best,
            "/frontier": self._frontier,
            "/growth": self._growth,
            "/job.toml": self._job,
        }

    def answer(self, address: str) -> Answer:
        """To what a browser asks for. That a choice cannot be is an answer to the page like any other: `error` says why."""
        asked = urlsplit(address)
        if asked.path not in self.paths:
            known = ", ".join(self.paths)
            return Answer(HTTPStatus.NOT_FOUND, TEXT, f"there is nothing at {asked.path}; there is {known}\n")
        try:
            return self.paths[asked.path](dict(parse_qsl(asked.query, keep_blank_values=False)))
        except StrettoError as error:
            return _json({"error": str(error)})

    def _layout(self, wanted: dict[str, str]) -> Answer:
        moved = wanted.pop("moved", "")
        with self._asking:
            chosen = choose(self.start, wanted, moved)
            found = layout_answer(chosen, self._of(chosen.asked) if chosen.asked else None)
        return _json(found)

    def _of(self, asked: Asked) -> dict[bool, Known]:
        """What layouts of one model on one cluster have made so far."""
        cluster = asked.cluster
        key = (asked.job.model.model_dump_json(), cluster.name, cluster.inside.name, cluster.across.name)
        if key not in self._known:
            self._made += 1
            self._schedules = Schedules() if self._made % RENEWED == 0 else self._schedules
            self._known[key] = {compiled: Known(asked.anatomy, cluster, stack, self._schedules) for compiled, stack in OURS.items()}
        self._known.move_to_end(key)
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return self._known[key]

    def _asked(self, wanted: dict[str, str]) -> Asked:
        chosen = choose(self.start, wanted)
        if chosen.asked is None:
            raise JobError(chosen.error)
        return chosen.asked

    def _best(self, wanted: dict[str, str]) -> Answer:
        keep = _keep(wanted)
        with self._searching:
            return _json(best_answer(self._asked(wanted), keep))

    def _frontier(self, wanted: dict[str, str]) -> Answer:
        keep = _keep(wanted)
        with self._searching:
            return _json(frontier_answer(self._asked(wanted), keep))

    def _growth(self, wanted: dict[str, str]) -> Answer:
        keep, price = _keep(wanted), _price(wanted.pop("price", ""))
        with self._searching:
            return _json(growth_answer(self._asked(wanted), keep, price))

    def _job(self, wanted: dict[str, str]) -> Answer:
        asked = self._asked(wanted)
        return Answer(HTTPStatus.OK, TEXT, job_text(asked), f"{asked.job.name}.toml")


def _json(value: object) -> Answer:
    return Answer(HTTPStatus.OK, JSON, json.dumps(value))


def _keep(wanted: dict[str, str]) -> frozenset[str]:
    return frozenset(filter(None, wanted.pop("keep", "").split(",")))


def _price(text: str) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        raise JobError(f"a price of {text!r} is no number; write that of a device-hour, as 2.5") from None


def server(start: Start, port: int | None) -> ThreadingHTTPServer:
    """A server that listens already. port: 0 for any that is free; None for the usual one, or any where that is taken.

    Raises JobError where it is taken.
    """
    planner = Planner(start)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name = self.headers.get("Host", "").rpartition(":")[0]
            here = name in (HOST, "localhost")
            answer = planner.answer(self.path) if here else Answer(HTTPStatus.FORBIDDEN, TEXT, f"call this page {HOST} or localhost\n")
            body = answer.body.encode()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", POLICY)
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if answer.file:
                self.send_header("Content-Disposition", f'attachment; filename="{answer.file}"')
            self.end_headers()
            with suppress(BrokenPipeError, ConnectionResetError):  # the page asked anew, and does not wait for this
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing: a slider asks many times a second."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True

    try:
        return Server((HOST, PORT if port is None else port), Handler)
    except (OSError, OverflowError) as error:
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        if port is None and taken:
            return server(start, 0)
        why = "is taken" if taken else "cannot be had"
        raise JobError(f"--port {port} {why}; write another one, or --port 0 for any that is free") from None


def serve(start: Start, port: int | None, tell: Callable[[str], None]) -> None:
    """Answers until Ctrl-C. tell: is given the page's address. Raises JobError."""
    with server(start, port) as listening:
        tell(f"http://{HOST}:{listening.server_port}/")
        with suppress(KeyboardInterrupt):
            listening.serve_forever(poll_interval=0.2)
