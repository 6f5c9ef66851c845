"""The way of a rehearsal: which ranks of which world, and what they hold and send, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stretto.draw.numbers import bytes_
from stretto.errors import JobError
from stretto.job import Job
from stretto.launch.devices import devices
from stretto.launch.training import check_pipeline
from stretto.layout.mesh import AXES, Mesh

if TYPE_CHECKING:
    from stretto.engine.rehearse import Rehearsal

Findings = Mapping[str, Any]  # what `rehearse --json` prints; see CONTRACTS


def resolved(job: Job) -> Job:
    """The job as the ranks of its mesh would run it, however many there are, on the kind of device it names (auto: that of this
    machine). Raises JobError."""
    found = devices()
    size = Mesh.parse(job.mesh or "dp=auto", max(found.visible, 1)).size
    ready = job.resolve(size, found.kind if job.device == "auto" else job.device, size)
    check_pipeline(ready)
    return ready


def ranks_of(mesh: Mesh, asked: str | None) -> list[int]:
    """The ranks to rehearse: as in "0,8192"; else the first, a middle and the last one of the first pipeline. Raises JobError."""
    if asked is None:
        last = mesh["pp"] - 1
        return sorted({mesh.rank(pp=at) for at in (0, mesh["pp"] // 2, last)})
    words = [word.strip() for word in asked.split(",")]
    ranks = [int(word) if word.isdecimal() else mesh.size for word in words]
    if any(rank >= mesh.size for rank in ranks):
        last = mesh.size - 1
        raise JobError(f"--rank {asked}: mesh={mesh} has ranks 0 to {last}; write one of them, or several as --rank 0,{last}")
    return list(dict.fromkeys(ranks))


def run_rehearsal(job: Job, rank: str | None = None) -> Findings:
    """What ranks of a job do and hold in one step; that of the first of them stands in front."""
    ready = resolved(job)
    ranks = ranks_of(Mesh.parse(ready.mesh), rank)
    from stretto.engine.rehearse import rehearse

    each = [_plain(rehearse(ready, one), ready) for one in ranks]
    about = {"mesh": ready.mesh, "device": ready.device, "compute": ready.precision.compute, "world_size": Mesh.parse(ready.mesh).size}
    return {**about, **each[0], "ranks": each, "seconds": round(sum(one["seconds"] for one in each), 3)}


def _plain(found: Rehearsal, job: Job) -> dict[str, Any]:
    from stretto.comm.group import width

    mesh = Mesh.parse(job.mesh)
    ledger = [
        {
            "collective": entry.collective,
            "axes": list(entry.axes),
            "calls": calls,
            "bytes": calls * entry.elements * width(entry.dtype),
            "elements": entry.elements,
            "dtype": entry.dtype,
            "reason": entry.reason,
        }
        for entry, calls in found.ledger
    ]
    return {
        "rank": found.rank,
        "at": {axis: place for axis, place in found.at.items() if mesh[axis] > 1},
        "peak_bytes": found.peak,
        "bytes": dict(found.bytes_),
        "fullest": found.moment,
        "held": dict(found.held),
        "sent_bytes": found.ledger.bytes_sent(mesh),
        "ledger": ledger,
        "microbatches": found.microbatches,
        "rehearsed": found.rehearsed,
        "seconds": round(found.seconds, 3),
    }


# -- for people --------------------------------------------------------------------------------------------------------


def table(findings: Findings, name: str) -> str:
    """What was found, a column a rank."""
    each: Sequence[Findings] = findings["ranks"]
    one = each[0]
    step = f"one step of {findings['world_size']} ranks in {findings['compute']}, as on {findings['device']}"
    lines = [
        f"{name} on mesh {findings['mesh']}: {step}",
        "",
        _row("at the fullest moment", [f"rank {found['rank']}" for found in each]),
        *([_row("", [f"pp={found['at']['pp']}" for found in each])] if "pp" in one["at"] else []),
    ]
    for kind in one["bytes"]:
        lines.append(_row(f"  {kind}", [bytes_(found["bytes"][kind]) for found in each]))
    lines.append(_row("peak", [bytes_(found["peak_bytes"]) for found in each]))
    lines.append(_row("  in action", [found["fullest"] for found in each]))
    lines.append(_row("microbatches", [str(found["microbatches"]) for found in each]))
    lines.append(_row("  run, the rest being alike", [str(found["rehearsed"]) for found in each]))
    lines += ["", _row("bytes sent in a step", [bytes_(found["sent_bytes"]) for found in each])]
    calls = [_calls(found["ledger"], Mesh.parse(findings["mesh"])) for found in each]
    lines.append("calls, and bytes of their buffers")
    for key in dict.fromkeys(key for found in calls for key in found):
        cells = [f"{found[key][0]} x, {bytes_(found[key][1])}" if key in found else "-" for found in calls]
        lines.append(_row(f"  {key}", cells))
    lines += ["", "--json lists every call; --rank N rehearses another rank"]
    return "\n".join(line.rstrip() for line in lines)


def _row(title: str, cells: Sequence[str]) -> str:
    return f"{title:<34}" + "".join(f"{cell:>20}" for cell in cells)


def _calls(ledger: Sequence[Mapping[str, Any]], mesh: Mesh) -> dict[str, tuple[int, int]]:
    """Collective and axes (those of more than one rank) -> calls, and bytes of their buffers."""
    found: dict[str, tuple[int, int]] = {}
    for entry in ledger:
        whole = len(entry["axes"]) == len(AXES)
        axes = [axis for axis in entry["axes"] if mesh[axis] > 1] or entry["axes"][:1]
        key = f"{entry['collective']} over {'all ranks' if whole else ' '.join(axes)}"
        calls, size = found.get(key, (0, 0))
        found[key] = calls + entry["calls"], size + entry["bytes"]
    return found
