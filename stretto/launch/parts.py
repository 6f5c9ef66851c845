"""The way of `stretto measure JOB --parts FILE`: one rank times the parts of the job's model, for a cut by measured seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stretto.errors import JobError, RunError
from stretto.job import Job
from stretto.launch.rehearsing import resolved
from stretto.launch.worker import Event, Rank
from stretto.layout.balance import Item, PartTime, read_parts, write_parts
from stretto.layout.mesh import Mesh
from stretto.layout.stages import split_model
from stretto.schedule.request import requested


def measure_parts(job: Job, out: Path, blocks: int | None) -> tuple[Mapping[str, Any], str]:
    """Time the parts, write `out`, and return what was found, for programs and for people. Raises JobError."""
    from stretto.launch.local import run_local

    if out.exists():
        read_parts(str(out))  # nothing else is written over
    if not out.parent.is_dir():
        raise JobError(f"--parts {out}: there is no folder {out.parent}; write --parts FILE.json in a folder that is there")
    ready = resolved(job.with_(pipeline={"measured": ""}))
    heard: list[Event] = []
    run_local(parts_rank, 1, (ready, blocks), on_event=heard.append, on_line=lambda _, line: print(line, file=sys.stderr, flush=True))
    told = [event for event in heard if event["kind"] == "parts"]
    if not told:
        raise RunError("the rank ended without a finding; this is a fault of stretto's own")
    parts = {name: PartTime(*part) for name, part in told[-1]["parts"].items()}
    items = [Item(*item) for item in told[-1]["items"]]
    about = {"model": ready.model.name, "device": ready.device, "time": time.strftime("%Y-%m-%d %H:%M:%S %z"), "job": ready.name}
    write_parts(out, parts, about)
    plain = {"file": str(out), "parts": {name: part._asdict() for name, part in parts.items()}}
    return plain, table(ready, items, parts, out, shortened=told[-1]["shortened"])


def parts_rank(here: Rank, job: Job, blocks: int | None) -> None:
    """The one rank's part."""
    here.emit({"kind": "at", "action": "while loading torch"})
    from stretto.comm.transport import World
    from stretto.engine.parts import time_parts

    world = World.from_environment(job.device, "auto")
    here.first = world.first
    here.emit({"kind": "at", "action": "while timing parts of the model"})
    found = time_parts(job, world, blocks=blocks)
    told = {name: tuple(part) for name, part in found.parts.items()}
    here.emit({"kind": "parts", "parts": told, "items": [tuple(item) for item in found.items], "shortened": found.shortened})
    world.close()


def table(job: Job, items: Sequence[Item], parts: Mapping[str, PartTime], out: Path, *, shortened: bool) -> str:
    """Seconds and bytes beside what is counted, and the cuts that follow."""
    seconds, work = sum(part.seconds for part in parts.values()), sum(item.work for item in items)
    rows = job.batch.micro_size or job.rows_per_rank
    lines = [f"{job.name}: {rows} rows of {job.batch.seq_len} tokens, forward and back, on one {job.device}", ""]
    lines.append(f"{'':<28}{'ms':>10}{'share':>8}{'of flops':>10}{'bytes a token':>15}{'counted':>10}")
    for item in items:
        part = parts[item.name]
        saved = "-" if part.saved is None else f"{part.saved:.0f}"
        share = f"{part.seconds / seconds:>8.1%}{item.work / (work or 1):>10.1%}"
        lines.append(f"{item.name:<28}{1e3 * part.seconds:>10.2f}{share}{saved:>15}{item.saved:>10.0f}")
    lines += ["", f"written to {out}; a cut by these seconds: pipeline.measured={out}"]
    ranks = Mesh.parse(job.mesh)["pp"]
    if ranks > 1 and not shortened:
        keys = job.pipeline
        step = requested(keys.schedule, ranks, job.microbatches, keys.chunks)
        measured = job.with_(pipeline={"measured": str(out)})
        lines.append(f"  by counted work:     {split_model(items, step.rank_of, (), job.balance(step.held))}")
        lines.append(f"  by measured seconds: {split_model(items, step.rank_of, (), measured.balance(step.held))}")
    return "\n".join(lines)
