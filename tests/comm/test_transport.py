"""Who am I among the ranks: read from the environment of torchrun, of srun, or of nobody."""

from __future__ import annotations

import pytest
import torch

from stretto.comm.threads import run_threads
from stretto.comm.transport import World, environment_rank, first_node
from stretto.errors import JobError, PeerLost

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "STRETTO_LISTEN_FD", "TORCHELASTIC_USE_AGENT_STORE")
SLURM = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST")


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher has set anything."""
    for name in LAUNCHERS + SLURM:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SRUN = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (TORCHRUN, (5, 8, 1)),
        ({"RANK": "5", "WORLD_SIZE": "8"}, (5, 8, 5)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (0, 1, 0)),
        ({"RANK": "5"}, None),
        ({"WORLD_SIZE": "8"}, None),
        (SRUN, (3, 4, 1)),
        ({name: value for name, value in SRUN.items() if name != "SLURM_LOCALID"}, (3, 4, 3)),
        (TORCHRUN | SRUN, (5, 8, 1)),  # torchrun under srun: the inner launcher counts
        (SRUN | {"SLURM_NTASKS": "1"}, None),  # one task is one rank, or the shell of an allocation
        ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, None),  # a batch script: the tasks come with its srun
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),
    ],
)
def test_the_environment_says_rank_size_and_local_rank(environment: dict[str, str], place: tuple[int, int, int] | None) -> None:
    assert environment_rank(environment) == place


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("cpu1", "cpu1"),
        ("cpu1,cpu2", "cpu1"),
        ("gpu[003-006,9],cpu1", "gpu003"),
        ("gpu[7,9]", "gpu7"),
        ("cpu1,gpu[003-006]", "cpu1"),
        ("node-a,node-b", "node-a"),
        ("rack-2-gpu[1-2]", "rack-2-gpu1"),
        ("gpu[1-2]-ib", "gpu1-ib"),
        ("rack[0-1]node[3-4]", "rack0node3"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_the_first_node_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


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
    with pytest.raises(JobError, match=r"write comm\.transport=gloo"):
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
