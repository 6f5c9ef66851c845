"""Ranks for the test-suite that start once: each loads torch and meets the others one time, then runs what tests send.

    pool = Pool(ranks=4)
    pool.run(lambda world: world.rank, ranks=2)   # [0, 1]

A function gets a World of the first `ranks` ranks and may return anything that can be pickled. Every wait ends. A pool in
which a rank died, hung, or failed alone (the others may hold half a message) is started anew at its next use.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import warm

from stretto.launch.board import Place
from stretto.launch.failure import Failure, first
from stretto.launch.payload import nameless_file, pack, read_whole, unpack
from stretto.launch.ranks import environment_of, listening_socket

START = 120.0  # seconds for all ranks to load torch and meet, on a machine that is busy
GRACE = 3.0  # seconds that the others have once one rank failed
HEADER = struct.Struct("<Q")


def stretto_world() -> Any:
    """The World of the environment: what a pool opens if it is not told otherwise."""
    from stretto.comm.transport import World

    return World.from_environment(device="cpu")


@dataclass
class Member:
    """One long-lived rank."""

    rank: int
    process: warm.Process
    line: socket.socket
    errors: int  # a nameless file that its stderr goes to

    def last_words(self) -> str:
        return "\n".join(read_whole(self.errors).decode(errors="replace").splitlines()[-30:])


class Pool:
    """Long-lived rank processes; nothing starts before the first run. They die with this process."""

    def __init__(self, ranks: int = 4, open_world: Callable[[], Any] = stretto_world) -> None:
        self.ranks = ranks
        self.open_world = open_world
        self.members: list[Member] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], ranks: int | None = None, args: Sequence[Any] = (), timeout: float = 60.0) -> list[Any]:
        """`function(world, *args)` on the first `ranks` ranks (default: all); their results in rank order.

        Raises the first failing rank's own error (RankFailed with its traceback; JobError and CheckFailed as such), and
        TimeoutError with every rank's stack if they do not answer within `timeout` seconds.
        """
        wanted = self.ranks if ranks is None else ranks
        if not 1 <= wanted <= self.ranks:
            raise ValueError(f"ranks={wanted}: this pool has {self.ranks}")
        payload = pack(function, tuple(args), function)  # before the start: what cannot travel costs nothing
        if any(member.process.poll() is not None for member in self.members):
            self.close()
        if not self.members:
            self._start()
        members = self.members[:wanted]
        for member in members:
            member.line.settimeout(timeout)
            _send(member.line, pickle.dumps((wanted, payload)))
        return self._gather(members, timeout)

    def close(self) -> None:
        """End all ranks; the next run starts new ones."""
        for member in self.members:
            member.process.kill()
            member.line.close()
            os.close(member.errors)
        self.members = []

    def _start(self) -> None:
        with listening_socket() as listener:
            for rank in range(self.ranks):
                ours, theirs = socket.socketpair()
                errors = nameless_file("errors")
                environment = environment_of(rank, self.ranks, listener.getsockname()[1], {**os.environ, "OMP_NUM_THREADS": "1"})
                with theirs:
                    process = warm.Process(_member, theirs, listener if rank == 0 else None, environment, rank, warm.Handed(errors))
                self.members.append(Member(rank, process, ours, errors))
        try:
            for member in self.members:
                member.line.settimeout(START)
                _send(member.line, pack(self.open_world, (), self.open_world))
            self._gather(self.members, START)
        except BaseException:
            self.close()
            raise

    def _gather(self, members: Sequence[Member], timeout: float) -> list[Any]:
        """The answer of every member, or the error to raise."""
        answers: dict[int, tuple[bool, Any]] = {}
        limit = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for member in members:
                selector.register(member.line, selectors.EVENT_READ, member)
            while len(answers) < len(members) and time.monotonic() < limit:
                for key, _ in selector.select(max(0.0, limit - time.monotonic())):
                    answers[key.data.rank] = answer = self._receive(key.data)
                    selector.unregister(key.data.line)
                    if not answer[0]:
                        died = not answer[1].type  # a death ends the pool in any case
                        limit = min(limit, time.monotonic() + (0.0 if died else GRACE))
        failures = [failure for ok, failure in answers.values() if not ok]
        if failures:
            if len(failures) < len(members) or len({failure.type for failure in failures}) > 1:
                self.close()
            first(failures).throw()
        if len(answers) < len(members):
            silent = [member for member in members if member.rank not in answers]
            raise self._hung(silent, timeout)
        return [answers[member.rank][1] for member in members]

    def _receive(self, member: Member) -> tuple[bool, Any]:
        """(True, result) or (False, Failure)."""
        try:
            ok, answer = pickle.loads(_receive(member.line))
            return ok, answer
        except (OSError, EOFError):
            exit_code = member.process.wait(GRACE)
            return False, Failure.of_death(exit_code, member.rank, Place(None, "in a function of a test"), member.last_words())

    def _hung(self, silent: Sequence[Member], timeout: float) -> TimeoutError:
        for member in silent:
            member.process.send_signal(signal.SIGUSR1)  # faulthandler writes the stacks
        time.sleep(0.3)
        words = "\n\n".join(f"rank {member.rank}:\n{member.last_words()}" for member in silent)
        self.close()
        return TimeoutError(f"no answer within {timeout:g} s from ranks {[member.rank for member in silent]}\n{words}")


def _send(line: socket.socket, content: bytes) -> None:
    line.sendall(HEADER.pack(len(content)) + content)


def _receive(line: socket.socket) -> bytes:
    return _exactly(line, HEADER.unpack(_exactly(line, HEADER.size))[0])


def _exactly(line: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = line.recv(min(left, 1 << 20))
        if not part:
            raise EOFError("the other side is gone")
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def serve(line: socket.socket, rank: int) -> None:
    """The life of a rank: open the world, then answer one function after the other until the parent hangs up."""
    worlds: dict[int, Any] = {}

    def answer(work: Callable[[], Any]) -> None:
        try:
            reply = cloudpickle.dumps((True, work()))
        except BaseException as exception:
            reply = pickle.dumps((False, Failure.of(exception, rank, Place(None, "in a function of a test"))))
        _send(line, reply)

    def open_world() -> None:
        function, _ = unpack(_receive(line))
        worlds[0] = function()

    def call() -> Any:
        wanted, payload = pickle.loads(_receive(line))
        function, args = unpack(payload)
        if wanted not in worlds:
            worlds[wanted] = worlds[0].limited(wanted)
        return function(worlds[wanted], *args)

    answer(open_world)
    with contextlib.suppress(EOFError):
        while True:
            _wait_for_words(line)
            answer(call)


def _wait_for_words(line: socket.socket) -> None:
    """Until there is something to read; EOFError if the parent has hung up (an answer to it would be in vain)."""
    if not line.recv(1, socket.MSG_PEEK):
        raise EOFError


def _member(line: socket.socket, listener: socket.socket | None, environment: Mapping[str, str], rank: int, errors: int) -> None:
    """The process of a rank."""
    named = {} if listener is None else {"STRETTO_LISTEN_FD": str(listener.detach())}
    warm.become({**environment, **named}, errors, errors)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    with line:
        serve(line, rank)
    os._exit(0)
