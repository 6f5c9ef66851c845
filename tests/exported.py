"""A small job, and what the scripts that are exported for it print."""

from __future__ import annotations

import os
import re
from pathlib import Path

import warm

import stretto
from stretto.launch.ranks import environment_of, listening_socket

SMALL = {
    "model.blocks": 2, "model.hidden": 32, "model.heads": 2, "model.kv_heads": 1, "model.ffn": 48, "batch.size": 8, "batch.micro_size": 2,
    "batch.seq_len": 16, "steps": 4, "device": "cpu", "schedule.shape": "cosine", "schedule.warmup": 2, "clip": 0.3, "mesh": "dp=2",
}  # fmt: skip


def losses_of(folder: Path, script: str, **variables: str) -> list[float]:
    """What a script prints on 2 ranks. variables: of the environment, besides torchrun's."""
    with listening_socket() as listener:
        port = listener.getsockname()[1]
    base = {**os.environ, **variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(stretto.__file__).parents[1])}
    started = [warm.Program([script], folder, environment_of(rank, 2, port, base), folder / f"told-{rank}") for rank in range(2)]
    try:
        said = [process.communicate(timeout=100) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    return [float(loss) for loss in re.findall(r"loss (\S+)", said[0][0])]
