"""Who a job can be exported to, by name; and an export written into a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from stretto.errors import JobError
from stretto.export import accelerate, deepspeed, fsdp2, megatron, torchtitan
from stretto.export.reading import Exported, Reading
from stretto.job import Job
from stretto.keys import nearest

EXPORTS: Mapping[str, Callable[[Reading], Exported]] = MappingProxyType(
    {
        "deepspeed": deepspeed.export,
        "megatron": megatron.export,
        "fsdp2": fsdp2.export,
        "torchtitan": torchtitan.export,
        "accelerate": accelerate.export,
    }
)


def export(job: Job, framework: str) -> Exported:
    """A resolved job in the framework's own terms. Raises JobError for a framework that is none, or cannot have such a model."""
    if framework not in EXPORTS:
        near = nearest(framework, EXPORTS) or "deepspeed"
        raise JobError(f"--to {framework}: a job can be exported to {', '.join(EXPORTS)}; write --to {near}")
    return EXPORTS[framework](Reading(job, framework))


def write(exported: Exported, folder: Path) -> list[Path]:
    """Put the files into a folder, the configuration first. Raises JobError where a file holds something else already."""
    paths = [folder / file.name for file in exported.files]
    for path, file in zip(paths, exported.files, strict=True):
        if path.exists() and (not path.is_file() or path.read_text(encoding="utf-8", errors="replace") != file.text):
            raise JobError(f"--out {folder}: there is another {path.name} already; write another --out DIR, or remove that file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, file in zip(paths, exported.files, strict=True):
            path.write_text(file.text, encoding="utf-8")
    except OSError as error:
        raise JobError(f"--out {folder} cannot be written ({error.strerror}); write --out DIR with a folder that you may write") from None
    return paths
