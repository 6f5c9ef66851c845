"""The ranks of a run find out whether they are to do the same, before the first of them begins.

Ranks that torchrun or srun started each read the job for themselves, on machines where its file, a checkout of stretto or the user's own
module may be another. With two learning rates or two losses they would train without a word. So each says what it has read, and
the first difference from rank 0 is everybody's error. Where checkpoints go, rank 0 says: it is the one that made the run folder.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stretto.checkpoint.shelf import Keep
from stretto.errors import JobError, PeerLost
from stretto.job import Job

if TYPE_CHECKING:
    from stretto.comm.transport import World
    from stretto.launch.worker import Rank

READ = 5.0  # seconds that the one who keeps the store waits for all to have read why the run is not begun
PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Reading:
    """What one rank has read. job: key -> value; code: file -> checksum, of stretto and of modules that the job names."""

    host: str
    torch: str
    job: Mapping[str, Any]
    code: Mapping[str, int]
    keep: Keep

    @classmethod
    def of(cls, job: Job, keep: Keep) -> Reading:
        """This rank's."""
        import torch

        code = {str(path.relative_to(PACKAGE.parent)): zlib.crc32(path.read_bytes()) for path in sorted(PACKAGE.rglob("*.py"))}
        for spec in (job.model.name, job.data.source):
            code |= _own_module(spec)
        return cls(socket.gethostname(), torch.__version__, _flat(job.model_dump(mode="json")), code, keep)

    def differs(self, rank: int, first: Reading) -> str:
        """How this differs from what rank 0 has read, and what to do; "" if it does not."""
        who, other = f"rank {rank} ({self.host})", f"rank 0 ({first.host})"
        for key in {**first.job, **self.job}:
            mine, its = self.job.get(key), first.job.get(key)
            if mine != its:
                return f"{who} has {key}={_shown(mine)} and {other} has {key}={_shown(its)}; start all ranks with the same job"
        if self.torch != first.torch:
            return f"{who} has torch {self.torch} and {other} has torch {first.torch}; install the same on all nodes"
        files = [file for file in {**first.code, **self.code} if self.code.get(file) != first.code.get(file)]
        if files:
            more = f" and {len(files) - 1} more files are" if files[1:] else " is"
            return f"{files[0]}{more} not the same on {who} and {other}; put the same commit on all nodes"
        for option, mine, its in (
            ("--resume", self.keep.resume, first.keep.resume),
            ("--allow-missing", self.keep.allow, first.keep.allow),
        ):
            if mine != its:
                return f"{who} was started with {option} {mine} and {other} with {its}; start all ranks alike"
        return ""

    def text(self) -> str:
        """For the store."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def read(cls, text: bytes) -> Reading:
        """What `text` wrote."""
        values = json.loads(text)
        keep: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.pop("keep").items()}
        return cls(**values, keep=Keep(**keep))


def join(here: Rank, job: Job, keep: Keep | None = None) -> tuple[World, Keep]:
    """This rank among all, once they have met and have the same job and code, and what rank 0 was told of checkpoints.

    Raises JobError on all of them where they have not the same, PeerLost where they do not meet.
    """
    here.emit({"kind": "at", "action": "while loading torch"})
    from stretto.comm.transport import World

    here.emit({"kind": "at", "action": "while joining the other ranks"})
    world = World.from_environment(job.device, job.comm.transport, job.comm.init_timeout, job.comm.step_timeout)
    here.first = world.first
    first = agree(Reading.of(job, keep or Keep()), world)
    here.emit({"kind": "at", "action": "while building the model"})
    return world, first.keep


def agree(mine: Reading, world: World) -> Reading:
    """What rank 0 has read, if all others have read the same. Collective; each asks the store a few times, however many there are.

    Raises JobError on all ranks if one differs, and PeerLost if one is gone before it said anything.
    """
    store: Any = world.store
    meeting = store.add(f"agree/{world.rank}", 1)  # each rank's n-th is everybody's

    def name(what: str) -> str:
        return f"agree/{meeting}/{what}"

    try:
        if world.rank == 0:
            store.set(name("first"), mine.text())
        first = Reading.read(store.get(name("first")))
        if apart := mine.differs(world.rank, first):
            store.set(name("apart"), apart)
        if store.add(name("came"), 1) == world.size:
            store.set(name("verdict"), store.get(name("apart")) if store.check([name("apart")]) else "")
        verdict = store.get(name("verdict")).decode()
        read = store.add(name("read"), 1)
    except RuntimeError as error:  # of the store: its time-out, or its rank is gone; torch's DistError is one too
        raise PeerLost(f"not all of {world.size} ranks said which job they have: {str(error).splitlines()[0]}") from error
    if not verdict:
        return first
    limit = time.monotonic() + READ
    while world.rank == 0 and read < world.size and time.monotonic() < limit:
        time.sleep(0.02)
        read = store.add(name("read"), 0)
    raise JobError(verdict)


def _own_module(spec: str) -> dict[str, int]:
    """The file of the module in python:MODULE:FUNCTION and its checksum; nothing for other names, or where it is not found."""
    kind, _, rest = spec.partition(":")
    if kind != "python":
        return {}
    module = rest.partition(":")[0]
    try:
        found = importlib.util.find_spec(module)
        return {f"{module.replace('.', '/')}.py": zlib.crc32(Path(found.origin or "").read_bytes())} if found else {}
    except (ImportError, ValueError, OSError):
        return {}  # whoever builds it says what is wrong


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested keys by their full names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{above}{key}.") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return flat


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
