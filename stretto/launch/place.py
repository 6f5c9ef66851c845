"""What this process finds around it before torch is loaded: whether somebody started it as a rank, and which GPUs there are."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple


class Seat(NamedTuple):
    """This process among ranks that torchrun, srun or stretto.launch started."""

    rank: int
    ranks: int
    local_rank: int


class Devices(NamedTuple):
    """The kind of device that ranks here run on, and the number of GPUs seen."""

    kind: Literal["cpu", "cuda"]
    visible: int


def seat(environment: Mapping[str, str]) -> Seat | None:
    """The seat that torchrun's variables give, else those of an srun step of several tasks; None: nobody started us as a rank.

    The rule of World.from_environment, which a launcher must know without loading torch (a test holds the two together).
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        return Seat(rank, ranks, int(environment.get("LOCAL_RANK", rank)))
    # SLURM_STEP_ID: in a batch script the other two are set as well, yet nobody started several of us
    if int(environment.get("SLURM_NTASKS", "1")) > 1 and "SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment:
        rank = int(environment["SLURM_PROCID"])
        return Seat(rank, int(environment["SLURM_NTASKS"]), int(environment.get("SLURM_LOCALID", rank)))
    return None


def devices() -> Devices:
    """What torch would see, asked of the driver itself (which honours CUDA_VISIBLE_DEVICES), in milliseconds without a GPU."""
    count = _driver_count() if _torch_has_cuda() else 0
    return Devices("cuda" if count else "cpu", count)


def _torch_has_cuda() -> bool:
    """Whether the torch that is installed was built for CUDA, read from its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = Path(spec.origin).with_name("version.py")
    text = version.read_text(encoding="utf-8") if version.exists() else ""
    return re.search(r"^cuda(?:\s*:[^=]*)?\s*=\s*['\"]", text, re.MULTILINE) is not None


def _driver_count() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
