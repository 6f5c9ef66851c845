"""The processes of a run on this machine: started, listened to, and gone at the end, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import site
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.launch.board import Board, Place
from stretto.launch.failure import Failure
from stretto.launch.payload import nameless_file, read_whole, write_whole
from stretto.launch.worker import SHOW

TICK = 0.1  # seconds between looks at which processes are still there
LOG_TAIL = 12  # lines of a rank's log in the report when it died without words
STACK_WAIT = 2.0  # seconds that a rank has to say where in its code it is
OUR_START = ("<frozen runpy>", "stretto/launch/worker.py")  # calls of a stack that say nothing about it
ROOT = Path(__file__).parents[2]  # the folder that holds the package


def environment_of(rank: int, ranks: int, port: int, base: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables for one rank of a run on this machine; threads are shared out unless `base` says how many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    loopback = "lo" if sys.platform == "linux" else "lo0"
    chosen = {"OMP_NUM_THREADS": str(max(1, cores // ranks)), "GLOO_SOCKET_IFNAME": loopback}
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONUNBUFFERED": "1"}
    if str(ROOT) not in (*site.getsitepackages(), site.getusersitepackages()):  # those come after Python's own, and must
        own["PYTHONPATH"] = os.pathsep.join(part for part in (str(ROOT), base.get("PYTHONPATH", "")) if part)
    return {**chosen, **base, **{name: str(value) for name, value in places.items()}, **own}


def listening_socket() -> socket.socket:
    """A socket that already listens on a free port of the loopback, for rank 0 to inherit: no one can take it between."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listener.set_inheritable(True)
    return listener


@dataclass
class Child:
    """One rank as its parent sees it."""

    rank: int
    process: subprocess.Popen[bytes]
    events: int  # read end of its event pipe
    result: int  # file that it writes its result into
    log: Path | None  # where its output goes; None: `output` is a pipe to us
    output: int | None
    pending: bytearray = field(default_factory=bytearray)
    printed: bytearray = field(default_factory=bytearray)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_TAIL))
    finished: bool = False
    failure: Failure | None = None
    exit_code: int | None = None

    def last_lines(self) -> str:
        """The end of what the rank printed."""
        if self.log is None:
            return "\n".join(self.tail)
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL:])
        return ""


class Ranks:
    """All ranks of one run. Used as a context: on leaving it every process is gone and every descriptor closed."""

    def __init__(self, payload: bytes, ranks: int, *, logs: Path | None, stoppable: bool, on_line: Callable[[int, str], None]) -> None:
        self.payload = nameless_file("payload")
        write_whole(self.payload, payload)
        self.page = nameless_file("board")
        self.board = Board.over(self.page, ranks)
        self.selector = selectors.DefaultSelector()
        self.on_line = on_line
        self.children: list[Child] = []
        try:
            with listening_socket() as listener:
                for rank in range(ranks):
                    self.children.append(self._start(rank, ranks, listener, logs, stoppable))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self, rank: int, ranks: int, listener: socket.socket, logs: Path | None, stoppable: bool) -> Child:
        events, told = os.pipe()
        result = nameless_file("result")
        log = logs / f"rank-{rank:05d}.log" if logs else None
        output, said = (None, os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)) if log else os.pipe()
        environment = environment_of(rank, ranks, listener.getsockname()[1], os.environ)
        inherited = {"payload": self.payload, "board": self.page, "events": told, "result": result}
        numbers = {"rank": rank, "ranks": ranks, "parent": os.getpid(), **inherited}
        first = [listener.fileno()] if rank == 0 else []
        if first:
            environment["STRETTO_LISTEN_FD"] = str(first[0])
        command = [sys.executable, "-P", "-m", "stretto.launch.worker"]
        command += [part for name, value in numbers.items() for part in (f"--{name}", str(value))]
        command += ["--stoppable"] * stoppable + ["--logged"] * bool(log)
        try:
            # a session of its own: Ctrl-C reaches the parent alone, and what the rank starts dies with it
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                pass_fds=[*inherited.values(), *first],
                start_new_session=True,
            )
        finally:
            os.close(told)
            os.close(said)
        child = Child(rank, process, events, result, log, output)
        for descriptor, kind in ((events, "events"), (output, "output")):
            if descriptor is not None:
                os.set_blocking(descriptor, False)
                self.selector.register(descriptor, selectors.EVENT_READ, (child, kind))
        return child

    def listen(self) -> list[tuple[Child, dict[str, Any]]]:
        """Wait at most TICK for news: the events that came, and in `children` who has ended since."""
        news: list[tuple[Child, dict[str, Any]]] = []
        for key, _ in self.selector.select(TICK):
            news += self._read(*key.data)
        for child in self.children:
            if child.exit_code is None and child.process.poll() is not None:
                self._kill(child)  # what it had started, in the same session, goes as well
                news += self._read(child, "events") + self._read(child, "output")
                child.exit_code = child.process.returncode
        return news

    def _read(self, child: Child, kind: str) -> list[tuple[Child, dict[str, Any]]]:
        descriptor, waiting = (child.events, child.pending) if kind == "events" else (child.output, child.printed)
        if descriptor is None:
            return []
        with contextlib.suppress(BlockingIOError):
            while more := os.read(descriptor, 1 << 16):
                waiting += more
            with contextlib.suppress(KeyError):  # end of file: nobody holds the other end any more
                self.selector.unregister(descriptor)
        *lines, rest = bytes(waiting).split(b"\n")
        waiting[:] = rest
        if kind == "events":
            return [(child, json.loads(line)) for line in lines]
        for line in lines:
            text = line.decode(errors="replace")
            child.tail.append(text)
            self.on_line(child.rank, text)
        return []

    def result(self, child: Child) -> Any:
        """What the rank's function returned."""
        import pickle

        return pickle.loads(read_whole(child.result))

    def stack(self, child: Child) -> str:
        """Where in its code a rank is that does not answer, innermost call first; "" if it does not say. It has no result any more."""
        if self.board.read(child.rank) == Place(None, ""):
            return ""  # it may not be ready for the signal yet
        child.process.send_signal(SHOW)
        limit, text = time.monotonic() + STACK_WAIT, ""
        while time.monotonic() < limit:
            time.sleep(0.05)
            before, text = text, read_whole(child.result).decode(errors="replace")
            if text and text == before:
                break
        return "\n".join(line for line in text.splitlines() if not any(part in line for part in OUR_START))

    def end(self, patience: float) -> None:
        """Call the run off: ask every process to go, wait `patience` seconds, then kill what is left."""
        self.board.call_off()
        for child in self.children:
            if child.exit_code is None:
                child.process.send_signal(signal.SIGTERM)
        limit = time.monotonic() + patience
        while time.monotonic() < limit and any(child.process.poll() is None for child in self.children):
            time.sleep(0.02)
        for child in self.children:
            if child.exit_code is None:
                self._kill(child)
                child.exit_code = child.process.wait()

    def _kill(self, child: Child) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Leave nothing: kill what runs, close what is open."""
        self.end(patience=0.0)
        for child in self.children:
            for descriptor in (child.events, child.result, child.output):
                if descriptor is not None:
                    os.close(descriptor)
        self.selector.close()
        for descriptor in (self.payload, self.page):
            os.close(descriptor)
