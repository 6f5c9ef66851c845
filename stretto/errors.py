"""What can go wrong, as one tree; the exit code of a command is read from here."""

from __future__ import annotations


class StrettoError(Exception):
    """Anything stretto itself raises. `exit_code` is what the command line returns for it."""

    exit_code = 1


class JobError(StrettoError):
    """The request is wrong: the message says what was asked, what is possible and what to write."""

    exit_code = 2


class CheckFailed(StrettoError):
    """A comparison did not hold: the mesh and the one process differ by more than rounding."""

    exit_code = 3


class RunError(StrettoError):
    """The request was right, but running it failed."""


class PeerLost(RunError):
    """Another rank is gone or stopped answering; its own report, not this one, says why."""


class Mismatch(RunError):
    """Ranks asked for different things: other collectives, other sizes, other models."""


class NonFinite(RunError):
    """Too many steps in a row had a gradient that is not finite; the message names tensor and rank."""


class Damaged(RunError):
    """A checkpoint does not hold what it says: a flipped bit, a file cut short or gone; the message names tensor and file."""
