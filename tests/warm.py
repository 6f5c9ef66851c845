"""Processes that start at once: forked from a server that has torch loaded, where `python` would load it for seconds.

`run` and `Program` stand for `python WORDS`, each a process of its own with its own folder, variables, output and exit code; the ranks
that it starts are forked as well, and so are those of a test that asks for `warm_ranks`. What is not as in a fresh process: modules are
loaded already, and a rank's parent is the server. That fresh processes do the same is seen where tests start `python` itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import multiprocessing
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NoReturn

from dying import FORKS

WORKER = ["-P", "-m", "stretto.launch.worker"]


class Process:
    """A forked process, as subprocess.Popen shows one. It leads a session of its own."""

    def __init__(self, target: Any, *args: Any) -> None:
        self.forked = FORKS.Process(target=_begin, args=(os.getpid(), target, args), daemon=True)
        self.forked.start()
        self.pid: int = self.forked.pid  # type: ignore[assignment]

    @property
    def returncode(self) -> int | None:
        return self.forked.exitcode

    def poll(self) -> int | None:
        return self.forked.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.forked.join(timeout)
        if self.forked.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self.forked.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, and what it has started in its session."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.forked.join(10)


class Program(Process):
    """`python WORDS` in `cwd`, under way: WORDS begin with a file, or are -m MODULE. into: a folder for what it writes."""

    def __init__(self, words: Sequence[str], cwd: Path, environment: Mapping[str, str], into: Path) -> None:
        into.mkdir(parents=True, exist_ok=True)
        self.words, self.out, self.err = list(words), into / "stdout", into / "stderr"
        super().__init__(_program, self.words, str(cwd), dict(environment), str(self.out), str(self.err))

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; what it wrote. Raises TimeoutExpired, and ends it."""
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise subprocess.TimeoutExpired(self.words, timeout, self.out.read_text(), self.err.read_text()) from None
        return self.out.read_text(encoding="utf-8"), self.err.read_text(encoding="utf-8")


def run(words: Sequence[str], cwd: Path, environment: Mapping[str, str], into: Path, timeout: float) -> subprocess.CompletedProcess[str]:
    """`python WORDS`, to its end."""
    program = Program(words, cwd, environment, into)
    out, err = program.communicate(timeout)
    return subprocess.CompletedProcess(list(words), program.returncode or 0, out, err)


class Worker(Process):
    """What launch/ranks.py asks of subprocess.Popen: a rank."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], stdin: int, stdout: int, stderr: int, pass_fds: Iterable[int], **more: Any
    ) -> None:
        assert list(command[1:4]) == WORKER and stdin == subprocess.DEVNULL and more == {"start_new_session": True}
        super().__init__(_worker, list(command[4:]), dict(env), Handed(stdout), Handed(stderr), {fd: Handed(fd) for fd in pass_fds})


#: In place of the module `subprocess` in launch/ranks.py.
STAND_IN = types.SimpleNamespace(Popen=Worker, DEVNULL=subprocess.DEVNULL)


class Handed:
    """A descriptor that a forked process gets as an argument, under a number of its own."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, (reduction.DupFd(self.descriptor),)


def _taken(handed: Any) -> int:
    return int(handed.detach())


def _begin(parent: int, target: Any, args: Sequence[Any]) -> None:
    """In the new process: end with the one that asked for it, whatever the server does; signals as they are at a start."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        watched = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()
    import torch

    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may start processes of its own
    target(*args)


def _end_with(watched: int) -> None:
    select.select([watched], [], [])
    os.killpg(0, signal.SIGKILL)


def become(environment: Mapping[str, str], stdout: int, stderr: int) -> None:
    """Variables and standard streams as of a new process."""
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), stdout, stderr)):
        os.dup2(stream, number)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    faulthandler.disable()
    tempfile.tempdir = None  # TMPDIR is read anew


def _program(words: list[str], cwd: str, environment: dict[str, str], out: str, err: str) -> None:
    from stretto.launch import ranks

    os.chdir(cwd)
    become(environment, *(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for file in (out, err)))
    ranks.subprocess = STAND_IN  # type: ignore[assignment]
    own = [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if words[0] == "-m":
        sys.argv[:], sys.path[:0] = words[1:], [cwd, *own]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:], sys.path[:0] = words, [str(Path(words[0]).parent), *own]
        runpy.run_path(words[0], run_name="__main__")


def _worker(arguments: list[str], environment: dict[str, str], stdout: int, stderr: int, passed: dict[int, int]) -> NoReturn:
    code = 1
    try:
        become(environment, stdout, stderr)
        above = {number: fcntl.fcntl(mine, fcntl.F_DUPFD, 512) for number, mine in passed.items()}  # out of each other's way
        for number, mine in above.items():
            os.dup2(mine, number)
            os.close(mine)
        from stretto.launch import worker

        arguments[arguments.index("--parent") + 1] = str(os.getppid())  # the server; the launcher is watched already
        sys.modules["__main__"] = worker
        sys.argv[:] = [worker.__file__, *arguments]
        code = worker.main(arguments)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
