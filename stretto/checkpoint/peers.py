"""Copies in memory: each rank's newest state stays with it and with a neighbour, so that a lost rank costs steps, not a checkpoint.

Ranks keep each other's state in disjoint pairs (a last group of three), on another machine where there is one. Pairs are safer than a
ring: fewer sets of two machines take a state with them. (Gemini, Wang et al. 2023, section 4; REFERENCE J5.) What is kept is a
checkpoint in memory: PeerStore gives it to whoever loads, on any mesh, as a folder does.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

from torch.distributed import Store as Board  # type: ignore[attr-defined]

from stretto.checkpoint.manifest import NAME, Manifest
from stretto.checkpoint.parts import HostCopy, Part
from stretto.checkpoint.save import Content, Record, joined, write_file
from stretto.checkpoint.shelf import name_of
from stretto.checkpoint.vault import KEPT, Address, Held, Line, Vault
from stretto.comm.transport import World
from stretto.errors import PeerLost, RunError, StrettoError

Placement = Mapping[int, int]
#: Seconds between looks at what the others have kept.
LOOK = 0.001


def keepers(machines: Sequence[Sequence[int]]) -> dict[int, int]:
    """Which rank keeps the state of which, for the ranks of each machine; {} for a single rank, which has no neighbour."""
    if len(machines) == 1:
        (ranks,) = machines
        return {} if len(ranks) == 1 else keepers([(rank,) for rank in ranks])
    found: dict[int, int] = {}
    starts = list(range(0, len(machines) - 1, 2))
    for start in starts:
        group = machines[start:] if start == starts[-1] else machines[start : start + 2]
        for number, ranks in enumerate(group):
            others = group[(number + 1) % len(group)]
            found |= {rank: others[place % len(others)] for place, rank in enumerate(ranks)}
    return found


class Peers:
    """This rank's vault, and the line to the one that keeps its state. Every rank makes one, alike.

    board: the store of names that all ranks share. machines: the ranks of each. host: the address at which other machines reach this one.
    patience: seconds for a neighbour to appear, and to answer.
    """

    def __init__(self, board: Board, rank: int, machines: Sequence[Sequence[int]], host: str = "127.0.0.1", patience: float = 60.0) -> None:
        self.rank, self.patience, self.board = rank, patience, board
        self.size = sum(map(len, machines))
        self.placement: Placement = keepers(machines)
        self.vault = Vault(host)
        self.copies: list[HostCopy] = []  # the last is the newest
        self.steps: list[int] = []  # of each copy
        self._line: Line | None = None
        board.set(f"vault/{rank}", json.dumps(self.vault.address))

    @staticmethod
    def of(world: World) -> Peers:
        """Of a job's ranks: on several machines each is kept on another one."""
        if world.nodes is None:
            return Peers(world.store, world.rank, [range(world.size)])
        nodes = world.nodes
        machines = [nodes.ranks(node) for node in sorted({post.node for post in nodes.posts})]
        return Peers(world.store, world.rank, machines, nodes.posts[world.rank].address)

    def addresses(self, ranks: Iterable[int]) -> list[Address]:
        """Where the vaults of these ranks are, as far as they were ever made."""
        return [Address(*json.loads(self.board.get(f"vault/{rank}"))) for rank in ranks if self.board.check([f"vault/{rank}"])]

    def take(self, step: int, parts: Sequence[Part], pinned: bool) -> HostCopy:
        """Copy the state after a step: what training has to wait for. Raises PeerLost if a rank has not kept the step before.

        Two copies take turns. The older is written over only when all ranks have kept the newer, so that at any moment there is a
        step that all of them have.
        """
        host: HostCopy | None = None
        if len(self.copies) == KEPT:
            self._all_have(self.steps[-1])
            host = self.copies.pop(0)
            self.vault.forget(self.rank, self.steps.pop(0))
        if host is None or not host.fits(parts):
            host = HostCopy(parts, pinned)
        host.renew(parts)
        host.take()
        self.copies.append(host)
        self.steps.append(step)
        return host

    def keep(self, host: HostCopy, content: Content) -> int:
        """Keep what was taken, here and with the neighbour; the bytes of it. Raises PeerLost if the neighbour is gone: then it is here
        alone. Not collective."""
        written = _Pieces()
        record = write_file(written, "", self.rank, host, content)  # type: ignore[arg-type]
        about = _about(record, content)
        self.vault.put(self.rank, content.step, Held(about, written.pieces))
        keeper = self.placement.get(self.rank)
        if keeper is not None:
            line = self._to(keeper)
            line.ask(written.pieces, what="put", rank=self.rank, step=content.step, about=about, bytes=record.bytes_)
        if self._count(content.step, 1) == self.size:
            self.board.delete_key(_kept(content.step - 2 * KEPT))
        return record.bytes_

    def _all_have(self, step: int) -> None:
        limit = time.monotonic() + self.patience
        while (count := self._count(step, 0)) < self.size:
            if time.monotonic() > limit:
                raise PeerLost(f"{self.size - count} of {self.size} ranks have not kept step {step} within {self.patience:g} s")
            time.sleep(LOOK)

    def _count(self, step: int, more: int) -> int:
        """How many ranks have kept a step, with `more` of them."""
        try:
            return int(self.board.add(_kept(step), more))
        except RuntimeError as error:
            raise PeerLost(f"the rank that keeps the store is gone: {str(error).splitlines()[0]}") from None

    def close(self) -> None:
        self.vault.close()
        if self._line is not None:
            self._line.close()

    def _to(self, keeper: int) -> Line:
        if self._line is None:
            try:
                self.board.wait([f"vault/{keeper}"])
            except RuntimeError as error:
                raise PeerLost(f"rank {keeper}, which is to keep this rank's state, did not come: {error}") from None
            self._line = Line(self.addresses([keeper])[0], self.patience)
        return self._line


class PeerStore:
    """What living vaults hold, as a store of checkpoints named by their steps: complete is a step of which every rank's part is held.

    A vault that does not answer holds nothing. Nothing can be written.
    """

    def __init__(self, addresses: Sequence[Address], patience: float = 20.0) -> None:
        self.where = "memory of the ranks"
        self._held: dict[str, dict[int, tuple[Line, int]]] = {}
        self._manifests: dict[str, Manifest] = {}
        self._lines: list[Line] = []
        for address in addresses:
            with contextlib.suppress(PeerLost):
                line = Line(address, patience)
                self._lines.append(line)
                for rank, step, bytes_ in line.ask(what="list"):
                    self._held.setdefault(name_of(step), {}).setdefault(rank, (line, bytes_))

    def folders(self) -> list[str]:
        return sorted(self._held)

    def files(self, name: str) -> list[str]:
        """Of a folder that is complete, without its manifest."""
        return [*self._manifest(name).files]

    def complete(self, name: str) -> bool:
        try:
            return len(self._held[name]) == self._manifest(name).ranks
        except (KeyError, StrettoError):
            return False

    def has(self, name: str) -> bool:
        folder, _, file = name.partition("/")
        return self.complete(folder) and (file == NAME or file in self._manifest(folder).files)

    def size(self, name: str) -> int:
        folder, _, file = name.partition("/")
        if file == NAME:
            return len(self.read(name))
        return self._of(folder, file)[1]

    def read(self, name: str) -> bytes:
        folder, _, file = name.partition("/")
        if file == NAME:
            if folder not in self._held:
                raise FileNotFoundError(name)
            manifest = self._manifest(folder)
            manifest.check()
            return manifest.to_json().encode()
        with self.open(name) as opened:
            return opened.read()

    def open(self, name: str) -> IO[bytes]:
        folder, _, file = name.partition("/")
        rank = _rank_of(file)
        line, bytes_ = self._of(folder, file)
        return io.BufferedReader(_Remote(line, rank, int(folder.rpartition("-")[2]), bytes_), 1 << 20)

    def path(self, name: str) -> str:
        return f"{self.where}: {name}"

    def free(self) -> int | None:
        return 0

    def close(self) -> None:
        for line in self._lines:
            line.close()

    def _of(self, folder: str, file: str) -> tuple[Line, int]:
        try:
            return self._held[folder][_rank_of(file)]
        except (KeyError, ValueError):
            raise FileNotFoundError(f"{folder}/{file}") from None

    def _manifest(self, name: str) -> Manifest:
        """All ranks' parts of a step together."""
        if name not in self._manifests:
            step = int(name.rpartition("-")[2])
            texts = [(line, line.ask(what="about", rank=rank, step=step)) for rank, (line, _) in sorted(self._held[name].items())]
            parts = [Manifest.from_json(text, f"{self.path(name)} at {line.address.host}:{line.address.port}") for line, text in texts]
            records = [Record(*next(iter(part.files.items())), dict(part.tensors), dict(part.scalars), dict(part.state)) for part in parts]
            one = parts[0]
            content = Content(one.step, one.mesh, one.ranks, notes=one.notes, job=one.job, facts=one.facts)
            self._manifests[name] = joined(records, content)
        return self._manifests[name]

    def _refuse(self, *_: Any) -> Any:
        raise RunError("the memory of the ranks cannot be written as a folder; save in one")

    temporary = commit = write = rename = remove = claim = _refuse


class _Remote(io.RawIOBase):
    """A rank's file in a vault."""

    def __init__(self, line: Line, rank: int, step: int, bytes_: int) -> None:
        self.line, self.rank, self.step, self.bytes_, self.at = line, rank, step, bytes_, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.bytes_)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(self.bytes_ - self.at, 0)]
        if len(view):
            self.line.ask(into=view, what="get", rank=self.rank, step=self.step, start=self.at, stop=self.at + len(view))
        self.at += len(view)
        return len(view)


class _Pieces:
    """Takes what is written to one file as it is, without a copy."""

    def __init__(self) -> None:
        self.pieces: list[memoryview] = []

    def write(self, name: str, chunks: Iterable[memoryview]) -> None:
        self.pieces = [chunk for chunk in chunks if len(chunk)]


def _kept(step: int) -> str:
    """Where ranks count that they have kept a step."""
    return f"vault/kept/{step}"


def _about(record: Record, content: Content) -> str:
    """A manifest of one rank's part."""
    told = (record.state, content.notes, content.job, content.facts)
    files = {record.file: record.bytes_}
    return Manifest(content.step, content.mesh, content.ranks, record.tensors, record.scalars, files, *told).to_json()


def _rank_of(file: str) -> int:
    return int(file.removeprefix("rank-").removesuffix(".safetensors"))
