"""The ranks of a job: joined as a launcher's environment says, and left again."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from stretto.comm.threads import run_threads
from stretto.comm.transport import World
from stretto.errors import JobError, PeerLost
from stretto.launch.local import launch

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "STRETTO_LISTEN_FD", "TORCHELASTIC_USE_AGENT_STORE")
SLURM = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher has set anything."""
    for name in LAUNCHERS + SLURM:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


def test_without_a_launcher_there_is_one_rank(bare: pytest.MonkeyPatch) -> None:
    world = World.from_environment(device="cpu")
    assert (world.rank, world.size, world.local_rank, world.device) == (0, 1, 0, torch.device("cpu"))


def test_a_launcher_of_one_rank_needs_no_meeting(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("RANK", "0")
    bare.setenv("WORLD_SIZE", "1")
    assert World.from_environment(device="cpu").size == 1


def test_nccl_without_gpus_is_refused_before_anybody_waits(bare: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        bare.setenv(name, value)
    with pytest.raises(JobError, match=r"write comm\.transport=auto"):
        World.from_environment(device="cpu", transport="nccl")


def test_ranks_without_an_address_to_meet_at_are_told_what_is_missing(bare: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        bare.setenv(name, value)
    with pytest.raises(JobError, match="MASTER_ADDR is not"):
        World.from_environment(device="cpu")


def test_ranks_that_do_not_meet_in_time_say_so(bare: pytest.MonkeyPatch) -> None:
    for name, value in (TORCHRUN | {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}).items():
        bare.setenv(name, value)
    with pytest.raises(PeerLost, match=r"8 ranks did not meet at 127\.0\.0\.1"):
        World.from_environment(device="cpu", init_timeout=0.2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(JobError, match="device=cpu"):
        World.alone("cuda")


def test_a_rank_alone_can_add_gather_and_broadcast_to_itself() -> None:
    transport, x, into = World.alone("cpu").transport, torch.arange(4.0), torch.ones(4)
    transport.all_reduce(x, (0,), 0).wait()
    transport.all_gather(x, (0, 4), (0,), 0).wait()
    transport.broadcast(x, (0,), 0, 0).wait()
    transport.reduce_scatter(x, (0, 4), (0,), 0, into, True).wait()
    assert x.tolist() == [0, 1, 2, 3]
    assert into.tolist() == [1, 2, 3, 4]


def test_a_rank_alone_has_nobody_to_talk_to() -> None:
    with pytest.raises(PeerLost, match="one rank"):
        World.alone("cpu").transport.broadcast(torch.ones(1), (0, 1), 1, 0).wait()


def test_the_first_ranks_can_be_a_world_of_their_own() -> None:
    def rank(world: World) -> float:
        if world.rank == 2:
            with pytest.raises(ValueError, match="not among the first 2"):
                world.limited(2)
            return 0.0
        few = world.limited(2)
        x = torch.ones(3)
        few.transport.all_reduce(x, range(few.size), 0).wait()
        return float(x[0])

    assert run_threads(rank, 3) == [2.0, 2.0, 0.0]


def test_of_all_ranks_that_ask_for_a_name_one_is_first() -> None:
    def rank(world: World) -> list[bool]:
        return [world.first("a"), world.first("b"), world.first("a")]

    results = run_threads(rank, 3)
    assert [sum(answers) for answers in zip(*results, strict=True)] == [1, 1, 0]
    alone = World.alone("cpu")
    assert [alone.first("a"), alone.first("a")] == [True, False]


@pytest.mark.usefixtures("warm_ranks")
def test_a_world_ends_the_process_group_that_it_made_and_no_other() -> None:
    def rank() -> tuple[list[bool], bool, bool]:
        import torch.distributed as dist

        one = World.from_environment(device="cpu")
        asked = [one.first("a"), one.first("b")]
        two = World.from_environment(device="cpu")  # finds the group of the first, as it would find a user's own
        two.close()
        one.limited(1).close() if one.rank == 0 else None
        kept = dist.is_initialized()
        one.close()
        return asked, kept, dist.is_initialized()

    results = launch(rank, 2)
    assert [sum(answers) for answers in zip(*(asked for asked, *_ in results), strict=True)] == [1, 1]
    assert [(kept, left) for _, kept, left in results] == [(True, False)] * 2


def test_a_process_group_of_the_users_own_is_used_and_stays(bare: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = World.from_environment(device="cpu")
        assert (world.rank, world.size, world.local_rank, world.transport.name) == (0, 1, 0, "shm")
        assert [world.first("a"), world.first("a")] == [True, False]
        world.close()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
