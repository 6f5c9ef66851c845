"""A rank that somebody else started (torchrun, srun, stretto.launch): the same work in this very process."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from stretto.errors import JobError, StrettoError
from stretto.launch.board import Board, Place
from stretto.launch.failure import Failure
from stretto.launch.place import Seat
from stretto.launch.worker import STOP_SIGNALS, Event, Rank

ECHO_WAIT = 0.5  # seconds a rank that only lost a peer holds its tongue, so that the cause is told first


def run_here(function: Callable[..., Any], args: tuple[Any, ...], seat: Seat, on_event: Callable[[Event], None]) -> Any:
    """Run `function(rank: Rank, *args)` as the rank at `seat`; on_event hears the events of rank 0.

    Signals ask for a stop after the step. An exception goes on as it is, with a note of the rank, step and action it ended.
    """
    here = Rank(seat.rank, seat.ranks, Board.private(seat.ranks), on_event)
    with here.listening((*STOP_SIGNALS, signal.SIGINT)):
        try:
            return function(here, *args)
        except Exception as exception:
            exception.add_note(f"rank {seat.rank} failed {here.board.read(seat.rank)}")
            raise


def tell(error: Exception, seat: Seat, stream: TextIO) -> int:
    """Print a rank's error if it is the first of the run to be told; returns the exit code."""
    notes = getattr(error, "__notes__", [])
    where = notes.pop() if notes else f"rank {seat.rank} failed"
    failure = Failure.of(error, seat.rank, Place(None, ""))
    if failure.consequence:
        time.sleep(ECHO_WAIT)
    if _first(error, seat, failure.consequence):
        headline = "; ".join(str(error).splitlines()) if isinstance(error, JobError) else f"{where}: {type(error).__name__}: {error}"
        print(f"stretto: {headline}", file=stream)
        if not isinstance(error, StrettoError):
            print(failure.traceback, end="", file=stream)
        stream.flush()
    return error.exit_code if isinstance(error, StrettoError) else 1


def _first(error: Exception, seat: Seat, echo: bool) -> bool:
    """Whether no other rank has told of a failure yet, as the store knows in which the ranks met."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        # before the ranks meet a wrong request is the same wrong request everywhere: once a machine will do
        return seat.local_rank == 0 or not isinstance(error, JobError)
    try:
        return bool(distributed.distributed_c10d._get_default_store().add("stretto/told", 1) == 1)
    except Exception:  # the store went with the rank that kept it, which had its say
        return not echo
