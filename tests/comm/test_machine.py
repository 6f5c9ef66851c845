"""Who shares a machine, and memory that has no name."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from stretto.comm import machine as machine_module
from stretto.comm import transport as transport_module
from stretto.comm.machine import File, Machine, Unavailable, file_of, new_memory, peers_memory
from stretto.comm.threads import run_threads
from stretto.comm.transport import World
from stretto.errors import JobError, PeerLost
from stretto.launch.local import launch


def test_memory_without_a_name_is_shared_by_those_who_map_it_and_ends_with_them() -> None:
    mine, descriptor = new_memory(10_000)
    theirs = peers_memory(file_of(descriptor), 10_000)
    os.close(descriptor)
    assert theirs.tolist() == [0] * 10_000
    mine[7] = 3
    assert theirs[7] == 3
    del mine
    theirs[8] = 4
    assert theirs[7:9].tolist() == [3, 4]


def test_another_file_than_the_one_told_is_not_taken_for_it() -> None:
    _, descriptor = new_memory(64)
    told = file_of(descriptor)
    os.close(descriptor)
    other, descriptor = new_memory(64)
    try:
        with pytest.raises(OSError):
            peers_memory(File(told.pid, descriptor, told.inode), 64)
        assert peers_memory(file_of(descriptor), 64).numel() == other.numel()
    finally:
        os.close(descriptor)


def _meet(world: World) -> Any:
    machine = Machine.meet(world.rank, world.size, world.store)
    found = machine.rank, machine.ranks, machine.machines, set(machine.pids.values())
    machine.close()
    return found


def test_ranks_find_out_who_shares_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_threads(_meet, 3) == [(rank, (0, 1, 2), ((0, 1, 2),), {os.getpid()}) for rank in range(3)]
    places = iter("abab")
    monkeypatch.setattr(machine_module, "_place", lambda: next(places))
    found = run_threads(_meet, 4)
    assert sorted(map(sorted, found[0][2])) == sorted(map(sorted, found[3][2]))
    assert sorted(map(len, found[0][2])) == [2, 2]
    assert all(rank in ranks for rank, ranks, _, _ in found)


def test_what_one_rank_lacks_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = threading.local()

    def rank(world: World) -> str:
        lacks.why = "no files without a name here" if world.rank == 1 else ""
        with pytest.raises(Unavailable) as told:
            Machine.meet(world.rank, world.size, world.store)
        return str(told.value)

    monkeypatch.setattr(machine_module, "_lacking", lambda: lacks.why)
    descriptors = len(os.listdir("/proc/self/fd"))
    assert run_threads(rank, 3) == ["rank 1: no files without a name here"] * 3
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_memory_that_cannot_be_mapped_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: File, bytes_: int) -> torch.Tensor:
        raise PermissionError(13, "Permission denied", f"/proc/{file.pid}/fd/{file.descriptor}")

    monkeypatch.setattr(machine_module, "peers_memory", refuse)

    def rank(world: World) -> None:
        with pytest.raises(Unavailable, match=r"^rank 0: memory of rank 0 cannot be mapped: .*Permission denied"):
            Machine.meet(world.rank, world.size, world.store)

    run_threads(rank, 2)


def test_only_x86_promises_the_order_of_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "aarch64" in machine_module._lacking()


def test_memory_of_a_rank_that_is_gone_is_a_lost_peer() -> None:
    def rank(world: World) -> None:
        machine = Machine.meet(world.rank, world.size, world.store)
        with pytest.raises(PeerLost, match="memory of rank 0 cannot be mapped"):
            machine.peers_memory(0, (1_000_000, 1), 8)
        machine.close()

    run_threads(rank, 1)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("asked", ["auto", "gloo", "shm"])
def test_ranks_of_one_machine_share_memory_unless_told_otherwise(asked: str) -> None:
    """And where memory cannot be shared they fall back to gloo and say why; only if nothing else was allowed they refuse."""

    def rank(asked: str) -> list[Any]:
        import torch

        from stretto.comm import machine
        from stretto.comm.transport import World
        from stretto.errors import JobError

        found: list[Any] = []
        worlds = [World.from_environment("cpu", asked)]
        found.append((worlds[0].transport.name, worlds[0].why))
        machine._lacking = lambda: "not here"
        try:
            worlds.append(World.from_environment("cpu", asked))
            found.append((worlds[1].transport.name, worlds[1].why))
        except JobError as error:
            found.append(str(error))
        machine._place = lambda: str(worlds[0].rank)
        machine._lacking = lambda: ""
        try:
            worlds.append(World.from_environment("cpu", asked))
            found.append((worlds[-1].transport.name, worlds[-1].why))
        except JobError as error:
            found.append(str(error))
        worlds[0].transport.all_reduce(torch.ones(1), (0, 1), 0).wait()  # gloo fails on the other rank if one leaves while both still meet
        for world in reversed(worlds):
            world.close()
        return found

    apart = "the ranks are on 2 machines, and shared memory reaches over one"
    expected = {
        "auto": [("shm", ""), ("gloo", "rank 0: not here"), ("gloo", apart)],
        "gloo": [("gloo", "")] * 3,
        "shm": [
            ("shm", ""),
            "comm.transport=shm: rank 0: not here; write comm.transport=gloo",
            f"comm.transport=shm: {apart}; write comm.transport=gloo",
        ],
    }
    assert launch(rank, 2, (asked,)) == [expected[asked]] * 2


def test_shared_memory_is_refused_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(transport_module, "_device", lambda name, rank: torch.device("cuda", 0))
    with pytest.raises(JobError, match="write comm.transport=nccl, or device=cpu"):
        World.from_environment(transport="shm")
