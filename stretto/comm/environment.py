"""Who am I among ranks that somebody else started, and where do they meet: as torchrun's or srun's variables say.

No torch: a launcher asks before it is loaded. What they are read from is handed in; the process's own are read by World and the
command line alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from stretto.errors import JobError


class Seat(NamedTuple):
    """This process among `ranks` that torchrun, srun or stretto.launch started; local_rank counts those of one machine.

    node: the number of this machine, of `nodes`.
    """

    rank: int
    ranks: int
    local_rank: int
    node: int = 0
    nodes: int = 1


def seat(environment: Mapping[str, str]) -> Seat | None:
    """The seat that torchrun's variables give, else those of an srun step of several tasks; None: nobody started us as a rank."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, ranks = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        if not rank < ranks:
            raise JobError(f"RANK={rank} is none of WORLD_SIZE={ranks} ranks, which count from 0; let torchrun or srun set them")
        node, nodes = _number(environment, "GROUP_RANK", 0), _number(environment, "GROUP_WORLD_SIZE", 1)
        return Seat(rank, ranks, _number(environment, "LOCAL_RANK", rank), node, nodes)
    # SLURM_STEP_ID: in a batch script the other two are set as well, yet nobody started several of us
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        rank = int(environment["SLURM_PROCID"])
        node, nodes = int(environment.get("SLURM_NODEID", 0)), int(environment.get("SLURM_STEP_NUM_NODES", 1))
        return Seat(rank, int(environment["SLURM_NTASKS"]), int(environment.get("SLURM_LOCALID", rank)), node, nodes)
    return None


def meeting_point(environment: Mapping[str, str]) -> tuple[str, int]:
    """Address and port of rank 0: MASTER_ADDR and MASTER_PORT, else the first node of the Slurm job and a port made from its number.

    Raises JobError where neither is said.
    """
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"], _number(environment, "MASTER_PORT", 29500)
    if "SLURM_JOB_ID" in environment:
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "127.0.0.1")
        return first_node(nodes), 20000 + int(environment["SLURM_JOB_ID"]) % 20000
    raise JobError("RANK and WORLD_SIZE are set, but MASTER_ADDR is not; set it to rank 0's address, or start with torchrun")


def first_node(nodes: str) -> str:
    """The first host of a Slurm node list: 'gpu[003-006,9],cpu1' -> 'gpu003', 'rack[0-1]node[3-4]' -> 'rack0node3'."""
    first = re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes)  # of each range its first number
    return first.split(",")[0]


def check_interfaces(environment: Mapping[str, str], present: Sequence[str], backend: str) -> None:
    """JobError where the backend (gloo or nccl) is told to use network interfaces that this machine has not.

    present: those that it has. gloo takes whole names, each of which must be there; NCCL takes beginnings of names, whole ones behind a
    "=", and with a "^" those that it must not use.
    """
    variable = f"{backend.upper()}_SOCKET_IFNAME"
    asked = environment.get(variable, "")
    names = asked.lstrip("=^").split(",")
    if backend == "gloo":
        there = all(name in present for name in names)
    elif asked.startswith("^"):
        there = any(not have.startswith(tuple(names)) for have in present)
    else:
        there = any(have == name if asked.startswith("=") else have.startswith(name) for have in present for name in names)
    if asked and not there:
        raise JobError(f"{variable}={asked}: this machine has {', '.join(present)}; write one of these, or leave it out")


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable that is a number. Raises JobError where it is not."""
    text = environment.get(name, default)
    try:
        return int(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise JobError(f"{name}={text} is not a number; leave it to torchrun or srun, or write one") from None
