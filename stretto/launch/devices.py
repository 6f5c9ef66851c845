"""Which GPUs there are, asked before torch is loaded."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import Literal, NamedTuple


class Devices(NamedTuple):
    """The kind of device that ranks here run on, and the number of GPUs seen."""

    kind: Literal["cpu", "cuda"]
    visible: int


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
