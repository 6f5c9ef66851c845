"""Saving: each rank writes its share of all tensors to a file of its own; when all have, one of them makes it a checkpoint.

[Note: never half there] Everything is written to a folder under a temporary name and brought to the medium; then rank 0 checks that
every element is stored once, writes the manifest and gives the folder its name. A crash at any moment before leaves what was there
before, and a folder that the next start removes.
"""

from __future__ import annotations

import errno
import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stretto.checkpoint.manifest import BLOCK, Entry, Manifest, Scalar, Stored
from stretto.checkpoint.meeting import Meeting
from stretto.checkpoint.parts import HostCopy, Part
from stretto.checkpoint.store import CHUNK, Store
from stretto.checkpoint.tensorfile import header, key_of
from stretto.errors import JobError, RunError, StrettoError
from stretto.layout.layout import Box


@dataclass(frozen=True)
class Content:
    """What a checkpoint holds beside tensors; see Manifest. All ranks have the same, but for scalars (each those of its own parts) and
    for what a rank does not know: there `state` has None."""

    step: int
    mesh: str
    ranks: int
    scalars: Mapping[str, Scalar] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)
    job: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)


class Record(NamedTuple):
    """What a rank tells of its file."""

    file: str
    bytes_: int
    tensors: dict[str, Entry]
    scalars: dict[str, Scalar]
    state: dict[str, Any]


class Save:
    """One save, as one rank takes part in it: `begin` on the way of the training, `finish` there or in the background."""

    def __init__(self, meeting: Meeting, store: Store, name: str, content: Content) -> None:
        self.meeting, self.store, self.name, self.content = meeting, store, name, content
        self.path = store.path(name)
        self.temporary = ""

    def begin(self, bytes_: int, patience: float, trouble: StrettoError | None = None) -> None:
        """All ranks agree that there is to be this checkpoint, and rank 0 that there can be: bytes_ of this rank. trouble: why this
        rank cannot take part.

        Raises that on all ranks; JobError if a rank is missing for `patience` seconds, or the folder is in use; RunError where there is
        no room.
        """
        asked = self.meeting.call((self.path, self.content.step, bytes_, trouble), patience)
        for rank, (path, step, _, error) in enumerate(asked):
            if error is not None:
                raise error
            if (path, step) != asked[0][:2]:
                raise JobError(
                    f"rank 0 saves step {asked[0][1]} in {asked[0][0]} and rank {rank} step {step} in {path}; give every rank one folder"
                )
        if self.meeting.rank == 0:
            self.meeting.say("go", self._look(sum(need for _, _, need, _ in asked)))
        error, token = self.meeting.hear("go", 0, patience)
        if error is not None:
            raise error
        self.temporary = self.store.temporary(self.name, token)

    def _look(self, need: int) -> tuple[StrettoError | None, str]:
        """Why there cannot be a checkpoint of `need` bytes here, or the name of this attempt."""
        token = uuid.uuid4().hex[:8]
        try:
            free = self.store.free()
            if self.store.complete(self.name):
                return JobError(f"{self.path} holds a checkpoint already; write another folder, or remove it"), token
            if free is not None and free < need:
                return RunError(_no_room(self.path, need, free)), token
            if self.name in self.store.folders():
                if self.store.temporary(self.name, token) != self.name:
                    return JobError(f"{self.path} is there already and holds no checkpoint; write a folder that does not exist"), token
                self.store.remove(self.name)  # what an earlier attempt left: here a folder counts once it has its manifest
        except OSError as error:
            return RunError(told(error, self.path, need)), token
        return None, token

    def finish(self, host: HostCopy, patience: float) -> None:
        """Write this rank's file; on rank 0 also wait for the others', and make the folder a checkpoint. Raises RunError everywhere
        if anything failed anywhere: nothing is left of it then."""
        try:
            record: Record | str = write_file(self.store, self.temporary, self.meeting.rank, host, self.content)
        except Exception as error:
            record = told(error, self.path, host.written)
        self.meeting.say("wrote", record)
        if self.meeting.rank == 0:
            self.meeting.say("verdict", self._commit(patience))
        failure = self.meeting.hear("verdict", 0, patience)
        if failure is not None:
            raise RunError(f"step {self.content.step} was not saved: {failure}")

    def _commit(self, patience: float) -> str | None:
        """Make it a checkpoint; what went wrong, if something did."""
        try:
            records = [self.meeting.hear("wrote", rank, patience) for rank in range(self.meeting.size)]
            failed = [f"rank {rank}: {record}" for rank, record in enumerate(records) if isinstance(record, str)]
            if not failed:
                manifest = joined(records, self.content)
                manifest.check()
                self.store.commit(self.temporary, self.name, manifest.to_json().encode())
                return None
        except Exception as error:
            failed = [told(error, self.path, 0)]
        try:
            if self.temporary in self.store.folders():
                self.store.remove(self.temporary)
        except OSError as error:
            failed.append(f"and {self.store.path(self.temporary)} could not be removed ({error.strerror})")
        return "; ".join(failed)


def write_file(store: Store, folder: str, rank: int, host: HostCopy, content: Content, block: int = BLOCK) -> Record:
    """Write what this rank's host copy holds for others to read; what it is and where, for the manifest. block: bytes a checksum."""
    file = f"rank-{rank:05d}.safetensors"
    written = [place for place in host.places if place.part.speaks]
    listed = [(key_of(p.part.name, p.part.shape, box), p.part.dtype, box.shape) for p in written for box in p.boxes]
    head = header(listed, {"format": "pt"})
    sums: list[list[int]] = []

    def chunks() -> Iterator[memoryview]:
        yield memoryview(head)
        data = memoryview(host.buffer.numpy())  # type: ignore[arg-type]
        sent = at = 0
        for place in written:
            for box in place.boxes:
                stop = at + _bytes(place.part, box)
                sums.append([])
                for start in range(at, stop, block):
                    sums[-1].append(zlib.crc32(data[start : min(start + block, stop)]))
                    if start - sent >= CHUNK:
                        yield data[sent:start]
                        sent = start
                at = stop
        if sent < at:
            yield data[sent:at]

    store.write(f"{folder}/{file}", chunks())
    tensors: dict[str, Entry] = {}
    number, at = 0, len(head)
    for place in written:
        part, stored = place.part, []
        for box in place.boxes:
            stored.append(Stored(box, file, at, tuple(sums[number])))
            at += _bytes(part, box)
            number += 1
        tensors[part.name] = Entry(part.shape, part.dtype, tuple(stored), part.aliases, part.trainable)
    return Record(file, at, tensors, dict(content.scalars), dict(content.state))


def joined(records: list[Record], content: Content) -> Manifest:
    """The manifest of all ranks' files. Raises RunError where ranks do not agree on what a tensor is."""
    tensors: dict[str, Entry] = {}
    scalars: dict[str, Scalar] = {}
    state: dict[str, Any] = {}
    for record in records:
        scalars |= record.scalars
        state |= {key: value for key, value in record.state.items() if value is not None or key not in state}
        for name, entry in record.tensors.items():
            known = tensors.setdefault(name, entry)
            if known is not entry:
                if (known.shape, known.dtype, known.trainable) != (entry.shape, entry.dtype, entry.trainable):
                    raise RunError(
                        f"{name} is {known.dtype} {list(known.shape)} on one rank and {entry.dtype} {list(entry.shape)} on another"
                    )
                have = {stored.box for stored in known.stored}
                more = tuple(stored for stored in entry.stored if stored.box not in have)
                tensors[name] = Entry(entry.shape, entry.dtype, known.stored + more, known.aliases, entry.trainable)
    files = {record.file: record.bytes_ for record in records}
    told = (state, content.notes, content.job, content.facts)
    return Manifest(content.step, content.mesh, content.ranks, tensors, scalars, files, *told)


def told(error: Exception, path: str, need: int) -> str:
    """An error of writing in words: what, where, and what helps."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_room(path, need, None)
    if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{path} cannot be written ({error.strerror}); give a folder that may be written"
    if isinstance(error, OSError):
        return f"{path} cannot be written ({error.strerror or error})"
    return str(error) if isinstance(error, StrettoError) else f"{type(error).__name__}: {error}"


def _no_room(path: str, need: int, free: int | None) -> str:
    there = "" if free is None else f", and {free / 1e6:.1f} MB are free"
    return f"no space left for {path}: {need / 1e6:.1f} MB are to be written{there}; make room, or keep fewer (checkpoint.keep)"


def _bytes(part: Part, box: Box) -> int:
    return box.elements * part.values.element_size()
