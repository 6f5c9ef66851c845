"""Machine: the ranks that can share memory, whether they still live, and memory that has no name.

Memory is a memfd: a file that no folder lists. A peer maps it through /proc/PID/fd while its owner keeps it open, and the
system frees it with the last process that has it mapped, however that process ends. So nothing is ever to be cleaned up, and
two jobs cannot meet: where a file is to be found is told in the job's own store alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from stretto.errors import PeerLost


class Unavailable(Exception):
    """Ranks cannot share memory here; the message says why."""


class File(NamedTuple):
    """Where a peer finds memory of mine. inode: so that no other file is taken for it."""

    pid: int
    descriptor: int
    inode: int


def new_memory(bytes_: int) -> tuple[Tensor, int]:
    """Zeros that peers can map, uint8 [bytes_], and the descriptor that must stay open until they have. Raises OSError.

    Pages cost memory only once they are written. The memory lives as long as a tensor over it, here or in a peer.
    """
    descriptor = os.memfd_create("stretto", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, max(bytes_, 1))
        return _map(f"/proc/self/fd/{descriptor}", bytes_), descriptor
    except BaseException:
        os.close(descriptor)
        raise


def file_of(descriptor: int) -> File:
    """What to tell peers of an open descriptor of mine."""
    return File(os.getpid(), descriptor, os.fstat(descriptor).st_ino)


def peers_memory(file: File, bytes_: int) -> Tensor:
    """A peer's memory, uint8 [bytes_]. Raises OSError if it is not to be had (any more)."""
    path = f"/proc/{file.pid}/fd/{file.descriptor}"
    if os.stat(path).st_ino != file.inode:
        raise FileNotFoundError(f"{path} is another file")
    return _map(path, bytes_)


def _map(path: str, bytes_: int) -> Tensor:
    try:
        return torch.from_file(path, shared=True, size=max(bytes_, 1), dtype=torch.uint8)[:bytes_]
    except RuntimeError as error:
        raise OSError(str(error).splitlines()[0]) from error


class Machine:
    """The ranks on this rank's machine, which can share memory. Made by `meet`. compiled: all of them have the compiled steps."""

    def __init__(self, rank: int, machines: Sequence[tuple[int, ...]], pids: dict[int, int], store: Store, compiled: bool = False) -> None:
        self.rank, self.machines, self.store, self.compiled = rank, tuple(machines), store, compiled
        self.ranks = next(ranks for ranks in machines if rank in ranks)
        #: Cores that these ranks have together.
        self.cores = len(os.sched_getaffinity(0))
        self.pids = {peer: pids[peer] for peer in self.ranks}
        self._ends: dict[int, int] = {}
        try:
            for peer, pid in self.pids.items():
                self._ends[peer] = os.pidfd_open(pid)
        except OSError as error:
            self.close()
            raise Unavailable(f"process {pid} of rank {peer} cannot be watched: {error.strerror}") from error

    @staticmethod
    def meet(rank: int, size: int, store: Store, compiled: bool = False) -> Machine:
        """Find out, together with all other ranks, who shares my machine, and try out that memory can be shared.

        compiled: whether this rank has the compiled steps of comm/execute.py. Collective.
        Raises Unavailable on all ranks if it fails on one, naming the first.
        """
        number = store.add(f"shm/meetings/{rank}", 1)  # each rank's n-th meeting is everybody's
        store = PrefixStore(f"shm/{number}", store)
        here, descriptor, why = "", -1, _lacking()
        if not why:
            try:
                memory, descriptor = new_memory(8)
                memory.fill_(rank % 251)
                here = _place()
            except OSError as error:
                why = f"a nameless file cannot be made and mapped: {error}"
        told = {"place": here, "file": file_of(descriptor) if descriptor >= 0 else (0, 0, 0), "compiled": compiled}
        places = [json.loads(text) for text in _exchange(store, "place", rank, size, json.dumps(told))]
        machines: dict[str, list[int]] = {}
        for peer, place in enumerate(places):
            machines.setdefault(place["place"], []).append(peer)
        files = {peer: File(*place["file"]) for peer, place in enumerate(places)}
        machine = None
        if not why:
            try:
                for peer in machines[here]:
                    if int(peers_memory(files[peer], 8)[7]) != peer % 251:
                        raise FileNotFoundError("it holds other values")
                everybody = [tuple(ranks) for ranks in machines.values()]
                compiled = all(places[peer]["compiled"] for peer in machines[here])
                machine = Machine(rank, everybody, {p: f.pid for p, f in files.items()}, store, compiled)
            except OSError as error:
                why = f"memory of rank {peer} cannot be mapped: {error}"
            except Unavailable as error:
                why = str(error)
        whys = _exchange(store, "why", rank, size, why, machine.gone if machine is not None else None)
        if descriptor >= 0:
            os.close(descriptor)  # only now: whoever could map it has
        first = next(((peer, text) for peer, text in enumerate(whys) if text), None)
        if first is None:
            assert machine is not None
            return machine
        if machine is not None:
            machine.close()
        raise Unavailable(f"rank {first[0]}: {first[1]}")

    def gone(self, rank: int) -> bool:
        """Whether the process of this rank has ended; of ranks on other machines nobody here knows."""
        if rank not in self._ends:
            return False
        poll = select.poll()
        poll.register(self._ends[rank], select.POLLIN)
        return bool(poll.poll(0))

    def left(self, rank: int) -> bool:
        """Whether this rank does not come any more: it said so, its process has ended, or nobody keeps the store by now."""
        if self.gone(rank):
            return True
        try:
            return bool(self.store.check([f"left/{rank}"]))
        except RuntimeError:
            return True

    def peers_memory(self, rank: int, file: Sequence[int], bytes_: int) -> Tensor:
        """Memory of a rank of this machine, uint8 [bytes_]. file: its descriptor and inode. Raises PeerLost."""
        try:
            return peers_memory(File(self.pids[rank], *file), bytes_)
        except OSError as error:
            raise PeerLost(f"memory of rank {rank} cannot be mapped, it seems to be gone: {error}") from error

    def leave(self) -> None:
        """Say that I do not come any more."""
        with contextlib.suppress(RuntimeError):
            self.store.set(f"left/{self.rank}", "1")

    def close(self) -> None:
        """Watch nobody any more."""
        for descriptor in self._ends.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._ends = {}


def _lacking() -> str:
    """What this system lacks for ranks to share memory; empty if nothing."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "nameless files and watching processes need Linux 5.3"
    if platform.machine() not in ("x86_64", "AMD64"):
        # a flag written after data must not be seen before it; without fences in Python only x86 promises that
        return f"the order in which memory is written is not known on {platform.machine()}"
    return ""


def _place() -> str:
    """The same text for processes that see each other's /proc: one running kernel, one namespace of process ids, one user."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"


def _exchange(store: Store, name: str, rank: int, size: int, text: str, gone: Callable[[int], bool] | None = None) -> list[str]:
    """Every rank's text, in rank order. gone: whether a rank that has not told can still do so. Raises PeerLost."""
    store.set(f"{name}/{rank}", text)
    found = []
    for peer in range(size):
        try:
            while gone is not None and not store.check([f"{name}/{peer}"]):
                if gone(peer):
                    raise PeerLost(f"rank {peer} is gone: its process ended while the ranks met")
                time.sleep(1e-3)
            found.append(bytes(store.get(f"{name}/{peer}")).decode())
        except RuntimeError as error:
            raise PeerLost(f"rank {peer} did not come to where the ranks meet: {str(error).splitlines()[0]}") from error
    return found
