"""How long does a tensor-parallel step take on two ranks: stretto over shared memory and over gloo, DTensor, Megatron-Core?

    python benchmarks/tensor.py                     # job 30m
    python benchmarks/tensor.py --rounds 1 --steps 1 --rows 1

All take turns in one run (benchmarks/turns.py), start from one set of values, and must have the same loss. The peers send over gloo.
DTensor cuts embedding, head and loss too (loss_parallel), each projection by columns or rows. Megatron-Core runs its GPTModel with CUDA's
calls turned away, where it is installed. `compute` is stretto's step on ranks that do not wait for each other: nothing is sent, and
what would come is made of the rank's own part, so its loss is nobody's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from step import LOSS_STEP, MIB, Row, _line, run_bout
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from turns import TeamFailed
from variants import Batch, Setting, Step, _decoder, _plain_loop
from variants import main as serve_variant

from stretto.comm.fake import Done, Fake, world_of
from stretto.engine.engine import Engine
from stretto.errors import JobError
from stretto.job import Job
from stretto.launch.runfolder import environment_facts
from stretto.models import library

HERE = Path(__file__).parent


def job_of(setting: Setting, transport: str) -> Job:
    keys = {"batch.size": setting.rows, "comm.transport": transport}
    return Job.load(
        setting.job, mesh=f"tp={setting.ranks}", precision=setting.precision, device="cpu", clip=setting.clip, schedule="constant", **keys
    )


def ours(transport: str) -> Callable[[Setting], Step]:
    """stretto's engine. transport: auto is shared memory on one machine."""

    def build(setting: Setting) -> Step:
        job = job_of(setting, transport)
        engine = Engine(library.load(job.model.name, seed=job.seed), job)
        return lambda batch: engine.step(batch).loss

    return build


class Alone(Fake):
    """Nothing is sent; what others would bring is a copy of the rank's own part, so that it is finite."""

    def __init__(self, rank: int, device: torch.device) -> None:
        super().__init__(device)
        self.rank = rank

    def _mine(self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int]) -> Tensor:
        index = ranks.index(self.rank)
        return x[bounds[index] : bounds[index + 1]]

    def all_gather(self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int) -> Done:
        mine = self._mine(x, bounds, ranks)
        for other, (low, high) in zip(ranks, pairwise(bounds), strict=True):
            if other != self.rank:
                theirs = x[low:high]
                theirs[: len(mine)].copy_(mine[: len(theirs)])
                theirs[len(mine) :].zero_()
        return Done()

    def reduce_scatter(
        self, x: Tensor, bounds: Sequence[int], ranks: Sequence[int], channel: int, into: Tensor, accumulate: bool, op: str = "sum"
    ) -> Done:
        mine = self._mine(x, bounds, ranks)
        if accumulate:
            into.add_(mine)
        else:
            into.copy_(mine)
        return Done()


def compute(setting: Setting) -> Step:
    """The same engine, and nobody to wait for."""
    job, device = job_of(setting, "auto"), torch.device("cpu")
    world = replace(world_of(setting.rank, setting.ranks, device, lambda value, reason: value), transport=Alone(setting.rank, device))
    engine = Engine(library.load(job.model.name, seed=job.seed), job, world)
    return lambda batch: engine.step(batch).loss


def dtensor(setting: Setting) -> Step:
    """torch's own: projections by columns, those that follow by rows, embedding and head over the vocabulary, the loss on cut logits."""
    model = _decoder(setting)
    mesh = init_device_mesh("cpu", (setting.ranks,))
    cuts: dict[str, Any] = {name: ColwiseParallel() for name in ("attn.q", "attn.k", "attn.v", "mlp.up", "mlp.gate")}
    cuts |= {name: RowwiseParallel() for name in ("attn.o", "mlp.down")}
    for block in model.layers:
        names = {name for name, _ in block.named_modules()}
        parallelize_module(block, mesh, {name: cut for name, cut in cuts.items() if name in names})
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    one = Setting(setting.job, 1, 0, setting.precision, setting.rows, setting.clip)  # every rank takes all rows
    return _plain_loop(one, model, model.parameters(), loss_parallel)


def megatron(setting: Setting) -> Step:
    """Megatron-Core, as `stretto compare` runs it."""
    from stretto.adapters.megatron import Megatron
    from stretto.adapters.runner import Setting as Given
    from stretto.data.batch import Batch as Rows

    job = job_of(setting, "gloo").resolve(setting.ranks, "cpu", 0)
    runner = Megatron(Given(job, setting.rank, setting.ranks, torch.device("cpu")))

    def step(batch: Batch) -> float:
        told = runner.step(Rows.of(batch)).loss
        return told * (setting.ranks if setting.rank == 0 else 0)  # the first rank tells it, and the mean over ranks is taken

    return step


VARIANTS: dict[str, Callable[[Setting], Step]] = {
    "tp-shm": ours("auto"),
    "tp-gloo": ours("gloo"),
    "compute": compute,
    "dtensor": dtensor,
    "megatron": megatron,
}
#: (ours, peer, what the peer's time is to be of ours at least)
WANTED = (
    ("tp-gloo", "dtensor", 1.13),
    ("tp-gloo", "megatron", 1.0),
    ("tp-shm", "dtensor", 1.25),
    ("tp-shm", "megatron", 1.08),
    ("tp-shm", "compute", 1 / 1.08),
)


def table(rows: Sequence[Row]) -> str:
    """The rows, and the ratios that are wanted, as markdown."""
    titles = ["", "s a step (quartiles)", "peak private MiB a rank", f"loss of step {LOSS_STEP}"]
    lines = [titles, ["---"] * len(titles)]
    for row in rows:
        low, middle, high = quantiles(row.all_seconds, n=4, method="inclusive") if len(row.all_seconds) > 1 else row.all_seconds * 3
        loss = "" if row.variant == "compute" else f"{row.loss:.5f}"
        lines.append([row.variant, f"{middle:.3f} ({low:.3f}-{high:.3f})", f"{row.private_bytes / MIB:.0f}", loss])
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n\n"
    by_name = {row.variant: row for row in rows}
    for name, peer, wanted in WANTED:
        if name in by_name and peer in by_name:
            ratios = by_name[peer].ratios(by_name[name])
            text += f"{peer} takes {median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f}) of {name}'s time; wanted: {wanted:.3f}\n"
    return text


def main() -> int:
    args = _arguments()
    signal.alarm(args.limit + 10)
    shown = ["python", "benchmarks/tensor.py", *sys.argv[1:]]
    machine = {key: value for key, value in environment_facts(shown, "cpu", 0).items() if key not in ("host", "gpus", "threads")}
    rows = args.rows or Job.load(args.job).batch.size
    text = f"# A tensor-parallel step: tp=2, job {args.job}, {rows} rows, {args.precision}; {args.rounds} rounds of {args.steps} steps\n\n"
    text += f"{_line(machine)}\n\n"
    print(text, flush=True)
    here = [name for name in args.variants if name != "megatron" or importlib.util.find_spec("megatron") is not None]
    command = [sys.executable, __file__]
    found = run_bout(here, lambda name: [*command, name, args.job, args.precision, str(rows), "0.0"], args, time.monotonic() + args.limit)
    text += table(found)
    agree = len({f"{row.loss:.4f}" for row in found if row.variant != "compute"}) <= 1
    if not agree:
        text += f"\nThe losses of step {LOSS_STEP} differ.\n"
    print(text, flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in found]}, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    return 0 if agree else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("job", nargs="?", default="30m", help="a built-in job with a built-in decoder (default: 30m)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--rows", type=int, help="sequences a step (default: the job's)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    names = list(VARIANTS)
    parser.add_argument("--variants", nargs="+", choices=names, default=names, metavar="VARIANT", help=", ".join(names))
    parser.add_argument("--limit", type=int, default=1800, help="seconds after which everything is stopped")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "tensor.json", help="a table in markdown is written beside it")
    parser.set_defaults(ranks=2)
    return parser.parse_args()


if __name__ == "__main__":
    try:
        if "TURNS_PARENT" in os.environ:
            serve_variant(VARIANTS)
            sys.exit(0)
        sys.exit(main())
    except (JobError, TeamFailed) as problem:
        sys.exit(f"tensor.py: {problem}")
