"""What a failing rank says, and which of many failures is the one to report."""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from stretto import errors
from stretto.errors import PeerLost, RunError, StrettoError
from stretto.launch.board import Place

LATE_NOTICE = 1.0  # seconds: a death is noticed later than it happened, an exception is dated by the rank itself
HERE = str(Path(__file__).parent)
SIGNAL_HINTS = {
    signal.SIGKILL: "perhaps out of memory: the system kills the largest process",
    signal.SIGBUS: "perhaps the shared memory (/dev/shm) is full",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up; its log says why",
}


@dataclass(frozen=True)
class Failure:
    """One rank's own account of why it stopped, or what its parent saw of its death.

    time: seconds since the epoch. consequence: true when the rank only noticed that another one was gone.
    """

    rank: int
    step: int | None
    action: str
    type: str  # the exception's class name; "" for a death without words
    error: str  # the exception's own text
    traceback: str
    time: float
    consequence: bool

    @classmethod
    def of(cls, exception: BaseException, rank: int, place: Place) -> Failure:
        """The account of an exception that ended `rank` at `place`."""
        lines = traceback.format_exception(type(exception), exception, _below_launcher(exception))
        words, kind = str(exception) or "(no message)", type(exception).__name__
        return cls(rank, place.step, place.action, kind, words, "".join(lines), time.time(), _is_echo(exception))

    @classmethod
    def of_death(cls, exit_code: int, rank: int, place: Place, log: str) -> Failure:
        """The account of a rank that ended without one; exit_code as subprocess gives it, negative for a signal."""
        noticed = time.time() - LATE_NOTICE * (exit_code < 0)
        return cls(rank, place.step, place.action, "", _how_it_died(exit_code), log, noticed, False)

    @classmethod
    def from_event(cls, event: dict[str, Any]) -> Failure:
        """From an event of kind "failure"."""
        return cls(**{field.name: event[field.name] for field in fields(cls)})

    def to_event(self) -> dict[str, Any]:
        """The event that tells it to the parent."""
        return {"kind": "failure", **asdict(self)}

    @property
    def headline(self) -> str:
        """One line: which rank, where, and its own error."""
        first, *more = self.error.strip().splitlines() or [""]
        what = f"{self.type}: {first}" if self.type else first
        return f"rank {self.rank} failed {Place(self.step, self.action)}: {what}{' ...' if more else ''}"

    def throw(self, log: str | None = None) -> NoReturn:
        """Raise it in the parent: a wrong request and a failed check as what they are, all else as RankFailed."""
        known = getattr(errors, self.type, None) if self.type else None
        if isinstance(known, type) and issubclass(known, StrettoError) and not issubclass(known, RunError):
            raise known(self.error)
        raise RankFailed(self, log)


class RankFailed(RunError):
    """A rank failed and the others were stopped; says once which rank, at which step and action, and its own error."""

    def __init__(self, failure: Failure, log: str | None = None) -> None:
        self.failure = failure
        self.log = log
        lines = [failure.headline, *([f"its log: {log}"] if log else []), failure.traceback.rstrip()]
        super().__init__("\n".join(line for line in lines if line))


def first(failures: Iterable[Failure]) -> Failure:
    """The failure to report: the earliest that is not merely the echo of another one."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time, failure.rank))


def _is_echo(exception: BaseException) -> bool:
    """Whether the exception, or one that it was raised from, is the loss of another rank."""
    cause: BaseException | None = exception
    while cause is not None and not isinstance(cause, PeerLost):
        cause = cause.__cause__
    return cause is not None


def _below_launcher(exception: BaseException) -> TracebackType | None:
    """The traceback from where the launcher called what it was given: the frames above say nothing about the error."""
    start = frame = exception.__traceback__
    while frame is not None:
        ours = frame.tb_frame.f_code.co_filename.startswith(HERE)
        frame = frame.tb_next
        start = frame if ours else start
    return start or exception.__traceback__


def _how_it_died(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code} without saying why"
    try:
        name = signal.Signals(-exit_code)
    except ValueError:
        return f"killed by signal {-exit_code}"
    hint = SIGNAL_HINTS.get(name)
    return f"killed by signal {-exit_code} ({name.name}){', ' + hint if hint else ''}"
