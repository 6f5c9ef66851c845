"""The main of every rank that stretto starts."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from stretto.errors import StrettoError
from stretto.launch.board import Board
from stretto.launch.failure import Failure
from stretto.launch.payload import read_whole, unpack, write_whole

Event = dict[str, Any]  # plain values under a "kind"; at the edge between processes it is a line of JSON
PR_SET_PDEATHSIG = 1


@dataclass
class Rank:
    """One rank's line to whoever started it: `emit` events, ask `stop()` between steps.

    Events of kind "at" (step, action) and "holds" are only noted on the board: they cost a microsecond, so send one for each
    action. Of all others those of rank 0 reach the parent, so that every rank may emit the same ones.
    """

    rank: int
    ranks: int
    board: Board
    deliver: Callable[[Event], None]
    first: Callable[[str], bool] | None = None  # World.first, once the ranks have met
    signalled: bool = False
    heard: float = 0.0  # when the last signal came, seconds of a monotonic clock

    def emit(self, event: Event) -> None:
        """Tell an event; see the class."""
        if event["kind"] == "at":
            self.board.write(self.rank, event.get("step"), event.get("action", ""))
        elif event["kind"] == "holds":
            self.board.promise()
        elif self.rank == 0:
            self.deliver(event)

    def stop(self) -> bool:
        """Whether this rank was asked to end after the current step. Ranks may be asked at different moments: agree."""
        return self.signalled or self.board.asked_to_stop

    def failure(self, exception: BaseException) -> Failure:
        """This rank's account of the exception that ended it."""
        return Failure.of(exception, self.rank, self.board.read(self.rank))

    @contextlib.contextmanager
    def listening(self, signals: tuple[signal.Signals, ...]) -> Iterator[None]:
        """Within it, `signals` ask this rank to stop after its step; a second Ctrl-C, a second later, ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._hear) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.board.called_off:
            raise SystemExit(1)
        # torchrun passes Ctrl-C on to ranks that the terminal has already told: two at once count as one
        if self.signalled and number == signal.SIGINT and now - self.heard > 1.0:
            raise KeyboardInterrupt
        self.signalled, self.heard = True, now


STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
#: Lets a rank write where in its code it is, in place of a result: also one that hangs in native code.
SHOW = signal.SIGUSR2


def main(argv: list[str] | None = None) -> int:
    """Run what the parent packed as this rank, and tell the parent how it ended."""
    asked = _arguments(argv)
    die_with_parent(asked.parent)
    faulthandler.enable()
    if signal.getsignal(SHOW) == signal.SIG_DFL:
        faulthandler.register(SHOW, file=asked.result, all_threads=False)
    os.set_inheritable(asked.events, False)
    lock = threading.Lock()

    def deliver(event: Event) -> None:
        line = json.dumps(event, default=_as_plain).encode() + b"\n"
        with lock:
            write_whole(asked.events, line)

    here = Rank(asked.rank, asked.ranks, Board.over(asked.board, asked.ranks), deliver)
    with here.listening(STOP_SIGNALS if asked.stoppable else ()):
        try:
            function, args = unpack(read_whole(asked.payload))
            _hand_back(function(here, *args), asked.result)
        except BaseException as exception:
            return _report(exception, here, asked.logged)
        deliver({"kind": "finished"})
    return 0


def _as_plain(value: Any) -> Any:
    """A tensor or array of one number as that number, all else as text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def _hand_back(result: Any, file: int) -> None:
    import cloudpickle

    try:
        content = cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(f"the result ({type(result).__name__}) cannot be sent to the parent: {error}") from error
    write_whole(file, content)


def _report(exception: BaseException, here: Rank, logged: bool) -> int:
    """Tell the parent, and this rank's log if it has one of its own, why the rank ends; returns the exit code."""
    if here.board.called_off:
        return 1
    failure = here.failure(exception)  # now: it carries the time
    if logged:
        traceback.print_exception(exception)  # before the parent knows: it may end this rank at once
    here.deliver(failure.to_event())
    return exception.exit_code if isinstance(exception, StrettoError) else 1


def die_with_parent(parent: int) -> None:
    """Make the system kill this process when `parent` (a process id) is gone, however that came about."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it went before the system was asked
        os._exit(1)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="stretto.launch.worker", description="One rank; started by stretto.launch.local.")
    for name in ("rank", "ranks", "parent", "payload", "board", "events", "result"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("stoppable", "logged"):
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args(argv)


if __name__ == "__main__":
    from stretto.launch import worker  # by its own name, so that no class in here exists twice

    sys.exit(worker.main())
