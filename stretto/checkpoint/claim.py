"""A folder that one process holds at a time: by a lock of the system, which ends with the process, however that ends. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from stretto.errors import JobError


def hold(folder: Path, refusal: str) -> Callable[[], None]:
    """Be the one process that holds a folder until what is returned is called, or the process ends however it does.

    Raises JobError(refusal) if another one has it. On systems and file systems without such locks everybody gets it.
    """
    if sys.platform == "win32":
        return lambda: None
    import fcntl

    file = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise JobError(refusal) from None
    except OSError:
        pass
    held = [file]
    return lambda: os.close(held.pop()) if held else None
