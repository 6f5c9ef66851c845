"""Saving and loading beside torch.distributed.checkpoint: how long the step stalls, how long a save and a load take, memory on top.

    python benchmarks/checkpoint.py                          # job 120m with AdamW on 2 ranks, about 1.5 GB
    python benchmarks/checkpoint.py --job tiny --rounds 2    # a small one
    python benchmarks/checkpoint.py --out benchmarks/results/checkpoint-120m.json    # kept, with a table in markdown beside it

Both save the state of the same kind of run: stretto's Engine at ZeRO 3, and FSDP2 with torch.optim.AdamW on the same model. They take
turns (A B A B) in one run of the same ranks, and each line is the median of its rounds. DCP is asked in its ways: `save`, `async_save`
in a thread, and both with cached plans; in each round the best of them is what stretto is held against. A time is that of the slowest
rank. Files are on the disk when a save is done, for both. Memory is the growth of the process's peak (VmHWM, reset before) over what it
held, on the rank where it is largest.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default="120m")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where checkpoints are written for the time of the run (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="a JSON file; a table in markdown is written beside it")
    asked = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(asked)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={asked.ranks}", __file__, *sys.argv[1:]]
    raise SystemExit(subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}).returncode)


class Memory:
    """The growth of this process's peak since `begin`, in bytes."""

    def begin(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self._field("VmRSS")

    def grown(self) -> int:
        return max(0, self._field("VmHWM") - self.before)

    def _field(self, name: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) * 1024


class Ours:
    """stretto's engine. A save stalls for `saver.save` in the background, and is done when its thread is."""

    def __init__(self, asked: argparse.Namespace) -> None:
        import torch

        from stretto.engine.engine import Engine
        from stretto.job import Job
        from stretto.models import library

        job = Job.load(asked.job, mesh=f"dp={asked.ranks}", zero=3, precision="fp32", device="cpu", steps=9)
        loaded = library.load(job.model.name, overrides=job.model.sizes())
        self.engine = Engine(loaded, job)
        ids = torch.zeros(job.batch.size, 16, dtype=torch.long)
        self.engine.step({"input_ids": ids, "labels": ids})
        self.bytes_ = 0

    def save(self, folder: Path, background: bool) -> tuple[float, float]:
        """(seconds of stall, seconds until all is written)."""
        from stretto.checkpoint.store import place_of

        start = time.perf_counter()
        writing = self.engine.saver.save(*place_of(folder), {}, background=background)
        stall = time.perf_counter() - start
        writing.wait()
        self.bytes_ = writing.bytes_
        return stall, time.perf_counter() - start

    def load(self, folder: Path) -> float:
        start = time.perf_counter()
        self.engine.load(folder)
        return time.perf_counter() - start

    def close(self) -> None:
        self.engine.close()


class Dcp:
    """FSDP2 and torch.distributed.checkpoint."""

    def __init__(self, asked: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        from stretto.job import Job
        from stretto.models import library

        job = Job.load(asked.job)
        model: Any = library.load(job.model.name, overrides=job.model.sizes()).model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01)
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-4)
        ids = torch.zeros(2, 16, dtype=torch.long)
        model(ids).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.group = dist.new_group(backend="gloo")

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path, background: bool, cached: bool) -> tuple[float, float]:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

        start = time.perf_counter()
        options: dict[str, Any] = {
            "storage_writer": FileSystemWriter(folder),
            "planner": DefaultSavePlanner(enable_plan_caching=cached),
            "process_group": self.group,
        }
        if background:
            future = dcp.async_save(self._state(), **options)
            stall = time.perf_counter() - start
            future.result()  # type: ignore[union-attr]
        else:
            dcp.save(self._state(), **options)
            stall = time.perf_counter() - start
        return stall, time.perf_counter() - start

    def load(self, folder: Path) -> float:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        start = time.perf_counter()
        state = self._state()
        dcp.load(state, checkpoint_id=folder, process_group=self.group)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return time.perf_counter() - start


def rank_main(asked: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    place = [tempfile.mkdtemp(dir=asked.folder) if rank == 0 else None]
    dist.broadcast_object_list(place)
    root, memory = Path(str(place[0])), Memory()
    ours, theirs = Ours(asked), Dcp(asked)
    ways: dict[str, Callable[[Path], tuple[float, float]]] = {
        "stretto background": lambda folder: ours.save(folder, True),
        "DCP async_save": lambda folder: theirs.save(folder, True, False),
        "stretto": lambda folder: ours.save(folder, False),
        "DCP save": lambda folder: theirs.save(folder, False, False),
        "DCP async_save, cached plans": lambda folder: theirs.save(folder, True, True),
        "DCP save, cached plans": lambda folder: theirs.save(folder, False, True),
    }
    found: dict[str, dict[str, list[float]]] = {way: {"stall": [], "save": [], "load": [], "memory": []} for way in ways}
    try:
        for turn in range(asked.rounds + 1):  # the first warms up: memory allocated once, modules loaded
            for way, save in ways.items():
                folder = root / f"{turn}-{way.replace(' ', '-').replace(',', '')}"
                dist.barrier()
                memory.begin()
                stall, whole = save(folder)
                grown = memory.grown()
                dist.barrier()
                loaded = (ours if way.startswith("stretto") else theirs).load(folder)
                dist.barrier()
                if rank == 0:
                    shutil.rmtree(folder)
                seen = torch.tensor([stall, whole, loaded, float(grown)], dtype=torch.float64)
                dist.all_reduce(seen, dist.ReduceOp.MAX)
                if turn:
                    for key, value in zip(("stall", "save", "load", "memory"), seen.tolist(), strict=True):
                        found[way][key].append(value)
                elif way == "stretto background" and rank == 0:
                    found[way]["first memory"] = [float(grown)]  # with the host copy, which later saves have already
        if rank == 0:
            tell(asked, found, ours.bytes_)
    finally:
        ours.close()
        if rank == 0:
            shutil.rmtree(root, ignore_errors=True)
    dist.destroy_process_group()


def tell(asked: argparse.Namespace, found: dict[str, dict[str, list[float]]], bytes_: int) -> None:
    """The table, and the ratios that are aimed at: of each round, then their median."""
    ours, theirs = [found["stretto"], found["stretto background"]], [row for way, row in found.items() if way.startswith("DCP")]
    rounds = range(asked.rounds)
    best = lambda rows, key, turn: min(row[key][turn] for row in rows)
    waits = [row for way, row in found.items() if "async" in way]
    ratios = {
        "stall of async_save / ours": [best(waits, "stall", turn) / ours[1]["stall"][turn] for turn in rounds],
        "DCP's best save / ours": [best(theirs, "save", turn) / best(ours, "save", turn) for turn in rounds],
        "DCP's best load / ours": [best(theirs, "load", turn) / best(ours, "load", turn) for turn in rounds],
        "memory on top / own state": [found["stretto background"]["first memory"][0] / bytes_],
    }
    aims = dict(zip(ratios, (">= 3", ">= 1", ">= 1", "1"), strict=True))
    lines = ["| | stall s | save s | load s | memory on top MB |", "| --- | --- | --- | --- | --- |"]
    for way, row in found.items():
        times = " | ".join(f"{statistics.median(row[key]):.3f}" for key in ("stall", "save", "load"))
        lines.append(f"| {way} | {times} | {statistics.median(row['memory']) / 1e6:.1f} |")
    lines += ["", "| | median | rounds | aimed at |", "| --- | --- | --- | --- |"]
    for what, values in ratios.items():
        lines.append(f"| {what} | {statistics.median(values):.2f} | {min(values):.2f}-{max(values):.2f} | {aims[what]} |")
    size = f"{asked.ranks} ranks, {bytes_ / 1e6:.0f} MB a rank, {asked.rounds} rounds in turn"
    title = f"# Checkpoints beside DCP: {asked.job} with AdamW, {size}"
    print("\n".join([title, "", *lines]), flush=True)
    if asked.out:
        from stretto.launch.runfolder import environment_facts

        command = ["python", "benchmarks/checkpoint.py", *sys.argv[1:]]
        machine = {name: fact for name, fact in environment_facts(command, "cpu", 0).items() if name not in ("host", "gpus", "threads")}
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        content = {"machine": machine, "bytes_a_rank": bytes_, "rounds": found, "ratios": ratios}
        asked.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        versions = f"python {machine['python']}, torch {machine['versions']['torch']}, commit {machine['commit']}"
        where = f"`{' '.join(command)}` on {machine['cpu']}, {machine['cores']} cores; {versions}; {machine['time']}"
        asked.out.with_suffix(".md").write_text("\n".join([title, "", where, "", *lines]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
