"""Teams of rank processes that take turns, so that ways to train can be compared on a machine whose speed drifts.

All teams live side by side and keep what they have built; the one whose turn it is runs, the others wait for a line of
text, which costs no processor time.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from stretto.launch.worker import die_with_parent

Answer = dict[str, Any]


class TeamFailed(Exception):
    """A rank ended, or did not answer in time; its own words are on stderr."""


class Team:
    """`ranks` processes of one variant. They die with this process, at `deadline` (time.monotonic), and on leaving the context.

    command: what each runs, which must end in `serve`; it gets RANK and WORLD_SIZE, and a file where the ranks can meet.
    """

    def __init__(self, name: str, command: Sequence[str], ranks: int, deadline: float) -> None:
        self.name, self.deadline = name, deadline
        self._folder = tempfile.TemporaryDirectory(prefix="stretto-turns-")
        self._processes: list[subprocess.Popen[bytes]] = []
        shared = {
            "WORLD_SIZE": str(ranks),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "TURNS_PARENT": str(os.getpid()),
            "TURNS_MEET": os.path.join(self._folder.name, "meet"),
            "TURNS_SECONDS": str(max(1, round(deadline - time.monotonic()))),
        }
        for rank in range(ranks):
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            made = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
            self._processes.append(made)

    def ask(self, **request: Any) -> list[Answer]:
        """Send a request to every rank and wait for what each answers, in rank order."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # why it ended is told below
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
        answers: dict[int, Answer] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < len(self._processes):
                ready = selector.select(self.deadline - time.monotonic())
                if not ready:
                    raise TeamFailed(f"{self.name} did not answer within its time limit")
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        raise TeamFailed(f"rank {key.data} of {self.name} ended")
                    answers[key.data] = json.loads(line)
                    selector.unregister(key.fileobj)
        return [answers[rank] for rank in range(len(self._processes))]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]
        self._folder.cleanup()


def serve(answer: Callable[[dict[str, Any]], Answer]) -> None:
    """The end of every rank's main: answer requests until the team is closed. What is printed goes to stderr."""
    line_out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for line in sys.stdin.buffer:
        line_out.write(json.dumps(answer(json.loads(line))).encode() + b"\n")
        line_out.flush()


def limit_life() -> None:
    """The start of every rank's main: end with the parent, and when the time is over, even inside a call that hangs."""
    die_with_parent(int(os.environ["TURNS_PARENT"]))
    signal.alarm(int(os.environ["TURNS_SECONDS"]))
