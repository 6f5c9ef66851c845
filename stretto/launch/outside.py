"""A rank that somebody else started (torchrun, srun, stretto.launch): the same work in this very process."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any, TextIO

from stretto.comm.environment import Seat
from stretto.errors import JobError, StrettoError
from stretto.launch.board import Board, Place
from stretto.launch.failure import Failure
from stretto.launch.worker import STOP_SIGNALS, Event, Rank

ECHO_WAIT = 0.5  # seconds a rank that only lost a peer holds its tongue, so that the cause is told first
TELL_WAIT = 5.0  # seconds, at most, that a silent rank stays: torchrun ends everybody at the first exit, and who tells may be slower
TOLD = "another rank had failed before"  # the note on an error that need not be told: that rank tells its own


def run_here(function: Callable[..., Any], args: tuple[Any, ...], seat: Seat, on_event: Callable[[Event], None]) -> Any:
    """Run `function(rank: Rank, *args)` as the rank at `seat`; on_event hears the events of rank 0.

    Signals ask for a stop after the step. An exception goes on as it is, with a note of the rank, step and action it ended, and
    the note TOLD if it was not the first of the run.
    """
    here = Rank(seat.rank, seat.ranks, Board.private(seat.ranks), on_event)
    with here.listening((*STOP_SIGNALS, signal.SIGINT)):
        try:
            return function(here, *args)
        except Exception as exception:
            exception.add_note(f"rank {seat.rank} failed {here.board.read(seat.rank)}")
            if not _first(exception, here, seat):
                exception.add_note(TOLD)
            raise


def tell(error: Exception, seat: Seat, stream: TextIO) -> int:
    """Print a rank's error if it is the first of the run to be told; returns the exit code.

    A rank that leaves it to another of its machine does not exit before that one can have told it.
    """
    where, told = _noted(error)
    if told or (not where and _same_everywhere(error) and seat.local_rank > 0):
        if _same_everywhere(error) and seat.local_rank > 0:
            time.sleep(TELL_WAIT)
    else:
        what = f"{where or f'rank {seat.rank} failed'}: {type(error).__name__}: {error}"
        print(f"stretto: {'; '.join(str(error).splitlines()) if isinstance(error, JobError) else what}", file=stream)
        if not isinstance(error, StrettoError):
            print(Failure.of(error, seat.rank, Place(None, "")).traceback, end="", file=stream)
        stream.flush()
    return error.exit_code if isinstance(error, StrettoError) else 1


def _noted(error: Exception) -> tuple[str, bool]:
    """What run_here noted, taken off again: where the error was ("": it never got there), and whether another rank failed before."""
    notes: list[str] = getattr(error, "__notes__", [])
    told = notes[-1:] == [TOLD]
    if told:
        notes.pop()
    return (notes.pop() if notes else ""), told


def _same_everywhere(error: Exception) -> bool:
    """Whether all ranks have this error: a wrong request found before they met. Once a machine will do."""
    return isinstance(error, JobError)


def _first(error: Exception, here: Rank, seat: Seat) -> bool:
    """Whether no other rank has failed before, as far as can be known."""
    echo = Failure.of(error, seat.rank, Place(None, "")).consequence
    if echo:
        time.sleep(ECHO_WAIT)
    if here.first is None:  # the ranks have not met: nobody can be asked
        return seat.local_rank == 0 or not _same_everywhere(error)
    try:
        return here.first("failure")
    except Exception:  # the store went with the rank that kept it, which had its say; or with its node, which nobody else hears
        return not echo or seat.local_rank == 0
