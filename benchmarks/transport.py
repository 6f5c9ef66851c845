"""How much faster do ranks of one machine exchange tensors in shared memory than over gloo?

    python benchmarks/transport.py                     # 2 ranks; 4 KB, 1 MB and 128 MB
    python benchmarks/transport.py --ranks 4 --bytes 4096 134217728

The two take turns within one run, so that a machine that gets slower does so for both. A call's time is that of the slowest rank.
`shared` is the same over memory of the transport's own (Transport.own; for all-gather Transport.common), beside memcpy of the same
bytes on all ranks at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from stretto.launch import launch
from stretto.launch.runfolder import environment_facts

HERE = Path(__file__).parent
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "send")
WAYS = ("gloo", "private", "shared", "memcpy")
#: What was promised: gloo's time / that of private tensors in shared memory, for (ranks, bytes); of 128 MB over shared tensors, memcpy's.
PROMISED: Mapping[tuple[int, int], float] = {(2, 4 << 10): 30, (2, 1 << 20): 8, (2, 128 << 20): 4, (4, 4 << 10): 20, (4, 128 << 20): 3}
PROMISED_SEND = 3.0
PROMISED_SHARED = 1.3
#: Seconds that a way may take in one turn, roughly; at least 3 calls.
TURN = 0.12


def calls(over: Any, bytes_: int, rank: int, ranks: int) -> dict[tuple[str, str], Callable[[], object]]:
    """(collective, way) -> one call of it, ended. over: shared memory; gloo's are torch.distributed's own."""
    import torch
    import torch.distributed as dist

    elements, everybody = bytes_ // 4, range(ranks)
    bounds = [elements * i // ranks for i in everybody] + [elements]
    x, y = torch.zeros(elements), torch.zeros(elements)
    mine = x[bounds[rank] : bounds[rank + 1]]
    own, common, into = over.own(elements, x.dtype, everybody), over.common(elements, x.dtype, everybody), torch.zeros_like(mine)
    made: dict[tuple[str, str], Callable[[], object]] = {
        ("all_reduce", "gloo"): lambda: dist.all_reduce(x),
        ("all_reduce", "private"): lambda: over.all_reduce(x, everybody, 0).wait(),
        ("all_reduce", "shared"): lambda: over.all_reduce(own, everybody, 0).wait(),
        ("all_gather", "gloo"): lambda: dist.all_gather_single(y, mine),
        ("all_gather", "private"): lambda: over.all_gather(x, bounds, everybody, 0).wait(),
        ("all_gather", "shared"): lambda: over.all_gather(common, bounds, everybody, 0).wait(),
        ("reduce_scatter", "gloo"): lambda: dist.reduce_scatter_single(into, x),
        ("reduce_scatter", "private"): lambda: over.reduce_scatter(x, bounds, everybody, 0, into, False).wait(),
        ("reduce_scatter", "shared"): lambda: over.reduce_scatter(own, bounds, everybody, 0, into, False).wait(),
        ("send", "gloo"): lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None,
        ("send", "private"): lambda: (over.send(x, 1, 0) if rank == 0 else over.receive(x, 0, 0)).wait() if rank < 2 else None,
    }
    return made | {(name, "memcpy"): lambda: y.copy_(x) for name in COLLECTIVES[:3]}


def measure(ranks: int, sizes: list[int], rounds: int) -> dict[str, Any]:
    """Seconds of a call by size, collective, way and round, as this rank sees them; all ranks make the same calls in turn."""
    import torch

    from stretto.comm.transport import World

    torch.set_num_threads(1)
    world = World.from_environment("cpu", "shm")
    over, everybody = world.transport, range(ranks)

    def seconds(call: Callable[[], object], times: int) -> float:
        over.all_reduce(torch.zeros(1), everybody, 2).wait()
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / times

    found: dict[str, Any] = {}
    for bytes_ in sizes:
        made = calls(over, bytes_, world.rank, ranks)
        times = {}
        for key, call in made.items():
            seconds(call, 1)
            pace = torch.tensor([seconds(call, 3)])
            over.all_reduce(pace, everybody, 2, "max").wait()
            times[key] = max(3, min(2000, int(TURN / pace.item())))
        for _ in range(rounds):
            for (name, way), call in made.items():
                found.setdefault(f"{bytes_} {name} {way}", []).append(seconds(call, times[name, way]))
    world.close()
    return found


def rows(found: list[dict[str, Any]], ranks: int, sizes: list[int]) -> list[dict[str, Any]]:
    """One row for a size and collective: median seconds of each way, the ratio round by round, and what was promised."""
    turns = {key: [max(every) for every in zip(*(mine[key] for mine in found), strict=True)] for key in found[0]}
    made = []
    for bytes_ in sizes:
        for name in COLLECTIVES:
            of = {way: turns.get(f"{bytes_} {name} {way}") for way in WAYS}
            assert of["gloo"] and of["private"]
            ratios = sorted(a / b for a, b in zip(of["gloo"], of["private"], strict=True))
            promised = PROMISED.get((ranks, bytes_)) if name != "send" else PROMISED_SEND if bytes_ == 1 << 20 else None
            row = {"bytes": bytes_, "collective": name, "turns": of, "ratio": median(ratios), "low": ratios[0], "high": ratios[-1]}
            if of["shared"] and of["memcpy"]:
                row["of_memcpy"] = median(a / b for a, b in zip(of["shared"], of["memcpy"], strict=True))
            made.append(row | {"promised": promised})
    return made


def table(made: list[dict[str, Any]]) -> str:
    """The rows as a markdown table."""
    titles = ["bytes", "collective", "gloo us", "private us", "gloo / private (rounds)", "promised", "shared us", "shared / memcpy"]
    lines = [titles, ["---"] * len(titles)]
    for row in made:
        of = {way: f"{median(turns) * 1e6:.1f}" if turns else "" for way, turns in row["turns"].items()}
        promised = f">= {row['promised']:g}" if row["promised"] else ""
        shared = f"{row['of_memcpy']:.2f}" if "of_memcpy" in row else ""
        ratio = f"{row['ratio']:.1f} ({row['low']:.1f}-{row['high']:.1f})"
        lines.append([str(row["bytes"]), row["collective"], of["gloo"], of["private"], ratio, promised, of["shared"], shared])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bytes", type=int, nargs="+", default=[4 << 10, 1 << 20, 128 << 20])
    parser.add_argument("--rounds", type=int, default=7, help="turns of each way")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which everything is stopped")
    parser.add_argument("--out", type=Path, help="a JSON file; a table in markdown is written beside it")
    args = parser.parse_args()
    machine = environment_facts(["python", "benchmarks/transport.py", *sys.argv[1:]], "cpu", 0)
    machine = {key: value for key, value in machine.items() if key not in ("host", "gpus", "threads")}
    made = rows(launch(measure, args.ranks, (args.ranks, args.bytes, args.rounds), timeout=args.limit), args.ranks, args.bytes)
    told = f"python {machine['python']}, torch {machine['versions'].get('torch')}, commit {machine['commit']}; {machine['time']}"
    text = f"# Shared memory beside gloo: {args.ranks} ranks x 1 thread, fp32, {args.rounds} rounds in turn\n\n"
    text += f"`{machine['command']}` on {machine['cpu']}, {machine['cores']} cores; {told}\n\n{table(made)}\n\n"
    text += f"Promised for shared tensors of 128 MB: at most {PROMISED_SHARED} of memcpy.\n"
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"machine": machine, "rows": made}, indent=1) + "\n", encoding="utf-8")
        args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
