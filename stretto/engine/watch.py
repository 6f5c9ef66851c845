"""How much memory a process needs at its most, seen from inside."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

STATUS = Path("/proc/self/status")
ROLLUP = Path("/proc/self/smaps_rollup")
EVERY = 0.002  # seconds between looks
EVERY_SHARE = 10  # looks between those at shared pages, for which the kernel goes through all of them


class MemoryWatch:
    """Within it a thread reads this process's own memory all the time; only for steps that are not timed. Linux.

    private_bytes: the most of RssAnon + RssShmem seen, so without mapped files such as torch's libraries.
    share_bytes: the most of Pss seen: a page that n processes have mapped counts 1/n, so that the sum over ranks is the machine's.
    high_water_bytes: the kernel's own VmHWM since the process began, mapped files included, as `ps` and most reports count.
    """

    def __init__(self) -> None:
        self.private_bytes = self.share_bytes = self.high_water_bytes = self._looks = 0
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
        if self._looks % EVERY_SHARE == 0:
            pss = next(line.split()[1] for line in ROLLUP.read_text().splitlines() if line.startswith("Pss:"))
            self.share_bytes = max(self.share_bytes, int(pss) * 1024)
        self._looks += 1
