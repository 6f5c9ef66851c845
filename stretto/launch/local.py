"""Runs a function on ranks of this machine: starts them, hears what they say, and reports the first failure once."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from stretto.errors import JobError, RunError
from stretto.launch.failure import Failure, first
from stretto.launch.payload import pack
from stretto.launch.ranks import Child, Ranks
from stretto.launch.worker import Event, Rank

ECHO_WAIT = 2.0  # seconds that the others have to tell their side when only echoes of a failure are known
ROOT_WAIT = 0.3  # seconds, when a cause is known: only an even earlier one could still come
RESCUE_WAIT = 90.0  # seconds, where the others save what their memory holds of the lost one: until each has told its loss
FAREWELL = 1.5  # seconds from SIGTERM to SIGKILL
LEAVING = 5.0  # seconds that a rank whose work is done may take to end by itself


class Askable(Protocol):
    """As a Board."""

    def ask_to_stop(self) -> None: ...


class HasBoard(Protocol):
    """Ranks that can be asked to stop."""

    @property
    def board(self) -> Askable: ...


def launch(function: Callable[..., Any], ranks: int, args: Sequence[Any] = (), *, timeout: float | None = None) -> list[Any]:
    """Run `function(*args)` on `ranks` processes of this machine, also from a notebook; results in rank order.

    Each process has torchrun's variables (RANK, WORLD_SIZE, ...), and what it prints comes out here behind its rank.
    Raises RankFailed with the first failing rank's own error once all ranks are gone; `timeout` is in seconds.
    """
    return run_local(_call, ranks, (function, tuple(args)), on_line=_print_line, timeout=timeout, of=function)


def run_local(
    function: Callable[..., Any],
    ranks: int,
    args: tuple[Any, ...] = (),
    *,
    on_event: Callable[[Event], None] = lambda event: None,
    on_line: Callable[[int, str], None] = lambda rank, line: None,
    logs: Path | None = None,
    stoppable: bool = False,
    timeout: float | None = None,
    of: Callable[..., Any] | None = None,
) -> list[Any]:
    """Run `function(rank: Rank, *args)` in every rank; results in rank order.

    on_event: hears the events of rank 0. logs: folder for the ranks' output, else on_line(rank, line) gets it.
    stoppable: Ctrl-C, SIGTERM and SIGUSR1 ask the ranks to end after their step (a second Ctrl-C ends them at once, as
    KeyboardInterrupt); otherwise they do here what they always do, and the ranks end with this process.
    of: the function whose module decides how the payload travels, where it is not `function` itself.
    Raises JobError and CheckFailed of a rank as such, every other failure as RankFailed; no process is left then.
    """
    if ranks < 1:
        raise JobError(f"ranks={ranks}: a run has at least 1 rank; write ranks=1")
    try:
        payload = pack(function, args, of or function)
    except Exception as error:  # pickling runs code of any class that the arguments hold
        raise JobError(f"{_name(of or function)} cannot be sent to the ranks: {error}; make what it needs inside it") from error
    with Ranks(payload, ranks, logs=logs, stoppable=stoppable, on_line=on_line) as group, stop_signals(group, stoppable) as asked:
        _watch(group, on_event, asked, None if timeout is None else time.monotonic() + timeout)
        return [group.result(child) for child in group.children]


def _watch(group: Ranks, on_event: Callable[[Event], None], asked: list[str], limit: float | None) -> None:
    """Until every rank has finished and gone; raises the failure to report."""
    heard, trouble, done = 0, None, None
    while not all(child.finished and child.exit_code is not None for child in group.children):
        for child, event in group.listen():
            if event["kind"] == "failure":
                child.failure = Failure.from_event(event)
            elif event["kind"] == "finished":
                child.finished = True
            else:
                on_event(event)
        if len(asked) > heard:
            heard = len(asked)
            on_event({"kind": "stop", "signal": asked[-1]})
        now = time.monotonic()
        trouble = trouble or (now if any(_failed(child) for child in group.children) else None)
        if trouble and _enough_said(group, now - trouble):
            _raise_first(group)
        done = done or (now if all(child.finished for child in group.children) else None)
        if done and now - done > LEAVING:
            return
        if limit and now > limit:
            places = "; ".join(f"rank {child.rank}: {group.board.read(child.rank)}" for child in group.children if not child.finished)
            group.end(FAREWELL)
            raise RunError(f"the ranks did not end in time and were stopped; {places}")


def _failed(child: Child) -> bool:
    return child.failure is not None or (child.exit_code is not None and not child.finished)


def _enough_said(group: Ranks, waited: float) -> bool:
    """Whether the failure to report can be chosen: everybody spoke, or nothing better is to be expected."""
    cause_known = any(_failed(child) and not (child.failure and child.failure.consequence) for child in group.children)
    everybody = all(_failed(child) or child.finished for child in group.children)
    if group.board.promised:
        return everybody or waited > RESCUE_WAIT
    return everybody or waited > (ROOT_WAIT if cause_known else ECHO_WAIT)


def _raise_first(group: Ranks) -> None:
    accounts = [_account(child, group) for child in group.children if _failed(child)]
    if all(account.consequence for account in accounts):
        accounts += _stood_still(group, first(accounts))
    group.end(FAREWELL)
    failure = first(accounts)
    log = group.children[failure.rank].log
    failure.throw(str(log) if log else None)


def _stood_still(group: Ranks, waited: Failure) -> list[Failure]:
    """Of a run in which ranks only miss others: the one that all the others have waited for, if it is one."""
    silent = [child for child in group.children if not _failed(child) and not child.finished]
    if len(silent) != 1:
        return []
    rank, place = silent[0].rank, group.board.read(silent[0].rank)
    words = f"it stood still, and rank {waited.rank} waited for it in vain ({waited.error.splitlines()[0]})"
    return [Failure(rank, place.step, place.action, "", words, group.stack(silent[0]), time.time(), False)]


def _account(child: Child, group: Ranks) -> Failure:
    """The rank's own words, or what can be said of its death."""
    if child.failure:
        return child.failure
    return Failure.of_death(child.exit_code or 0, child.rank, group.board.read(child.rank), child.last_lines())


@contextlib.contextmanager
def stop_signals(group: HasBoard, stoppable: bool) -> Iterator[list[str]]:
    """Within it signals ask the ranks to stop; the list tells which came. Only the main thread can hear signals."""
    asked: list[str] = []
    if not stoppable or threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def hear(number: int, frame: FrameType | None) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(signal.Signals(number).name)
        group.board.ask_to_stop()

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _call(here: Rank, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A plain function needs no line to the parent; its name is where it is, should it die."""
    here.emit({"kind": "at", "action": f"in {_name(function)}"})
    return function(*args)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


def _print_line(rank: int, line: str) -> None:
    print(f"[{rank}] {line}", file=sys.stdout, flush=True)
