"""Who am I among the ranks: read from the environment of torchrun, of srun, or of nobody."""

from __future__ import annotations

import subprocess
import sys

import pytest

from stretto.comm.environment import first_node, meeting_point, seat
from stretto.errors import JobError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SRUN = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (TORCHRUN, (5, 8, 1, 0, 1)),
        (TORCHRUN | {"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "4"}, (5, 8, 1, 2, 4)),
        ({"RANK": "5", "WORLD_SIZE": "8"}, (5, 8, 5, 0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, (0, 1, 0, 0, 1)),
        ({"RANK": "5"}, None),
        ({"WORLD_SIZE": "8"}, None),
        (SRUN, (3, 4, 1, 0, 1)),
        (SRUN | {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2"}, (3, 4, 1, 1, 2)),
        ({name: value for name, value in SRUN.items() if name != "SLURM_LOCALID"}, (3, 4, 3, 0, 1)),
        (TORCHRUN | SRUN, (5, 8, 1, 0, 1)),  # torchrun under srun: the inner launcher counts
        (SRUN | {"SLURM_NTASKS": "1"}, None),  # one task is one rank, or the shell of an allocation
        ({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}, None),  # a batch script, not a step of it
        ({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, None),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),
    ],
)
def test_the_environment_says_rank_size_local_rank_and_node(environment: dict[str, str], place: tuple[int, ...] | None) -> None:
    assert seat(environment) == place


@pytest.mark.parametrize(
    ("environment", "point"),
    [
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}, ("10.0.0.1", 1234)),
        ({"MASTER_ADDR": "10.0.0.1"} | SRUN, ("10.0.0.1", 29500)),
        (SRUN | {"SLURM_JOB_NODELIST": "cpu[3-4]"}, ("cpu3", 20077)),
        (SRUN | {"SLURM_JOB_NODELIST": "cpu[3-4]", "SLURM_STEP_NODELIST": "cpu4"}, ("cpu4", 20077)),
        (SRUN | {"SLURM_JOB_ID": "7654321"}, ("127.0.0.1", 34321)),
    ],
)
def test_the_environment_says_where_rank_0_is(environment: dict[str, str], point: tuple[str, int]) -> None:
    assert meeting_point(environment) == point


def test_ranks_without_an_address_to_meet_at_are_told_what_is_missing() -> None:
    with pytest.raises(JobError, match="MASTER_ADDR is not"):
        meeting_point(TORCHRUN)


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


def test_a_launcher_can_ask_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import stretto.comm.environment"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
