"""How much memory a process needs at its most, seen from inside."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

STATUS = Path("/proc/self/status")
EVERY = 0.002  # seconds between looks


class MemoryWatch:
    """Within it a thread reads this process's own memory all the time; only for steps that are not timed. Linux.

    private_bytes: the most of RssAnon + RssShmem seen, so without mapped files such as torch's libraries.
    high_water_bytes: the kernel's own VmHWM since the process began, mapped files included, as `ps` and most reports count.
    """

    def __init__(self) -> None:
        self.private_bytes = self.high_water_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        self._look()

    def _run(self) -> None:
        while not self._over.wait(EVERY):
            self._look()

    def _look(self) -> None:
        fields = {name: value.split() for name, _, value in (line.partition(":") for line in STATUS.read_text().splitlines())}
        kib = {name: int(fields[name][0]) for name in ("RssAnon", "RssShmem", "VmHWM")}
        self.private_bytes = max(self.private_bytes, (kib["RssAnon"] + kib["RssShmem"]) * 1024)
        self.high_water_bytes = kib["VmHWM"] * 1024
