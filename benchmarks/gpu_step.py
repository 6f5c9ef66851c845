"""What does the engine cost on one GPU, where it shares with nobody: stretto beside the plain PyTorch loop, world size 1, bf16?

    python benchmarks/gpu_step.py                      # the decoder of 120m, 128 sequences a step
    python benchmarks/gpu_step.py --job 30m --rows 512

`plain` is the loop with the engine's own recipe written out (bf16 weights, fp32 master copy and update), so losses can be
compared; `autocast` is the loop most people write. They take turns on the GPU; memory is measured before, each alone.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor
from variants import BATCH_SEEDS, Batch, adamw, mean_loss

from stretto.anatomy import DECODERS, Anatomy
from stretto.comm.transport import World
from stretto.engine.engine import Engine
from stretto.errors import JobError
from stretto.job import Job
from stretto.launch.runfolder import environment_facts
from stretto.models import library
from stretto.models.decoder import Decoder, fill

HERE = Path(__file__).parent
#: Dense bf16 TFLOP/s by a part of the device's name, the first that fits (NVIDIA's data sheets, without sparsity; torchtitan's
#: tools/utils.py lists the same).
PEAK_TFLOPS = (("H100 PCIe", 756), ("H100 NVL", 835), ("H100", 989), ("H200", 989), ("A100", 312), ("B200", 2250))
WARMUP = 5  # steps, and those whose losses are compared
#: Relative difference of losses after the same steps that bf16 may make by rounding once in another place.
LOSS_TOLERANCE = 3e-4
MIB = 1 << 20

#: One optimizer step; returns its loss. A tensor where reading it would make the host wait.
Step = Callable[[Batch], Tensor | float]


@dataclass(frozen=True)
class Row:
    """One variant. seconds: of each step, by round. peak_bytes: of the allocator, alone on the GPU. mfu: None if no peak is known."""

    variant: str
    seconds: list[list[float]]
    losses: list[float]
    peak_bytes: int
    mfu: float | None


def plain(job: Job, device: torch.device) -> Step:
    """bf16 weights for forward and backward, an fp32 master copy that AdamW updates."""
    shape = DECODERS[job.model.name]
    master = fill(Decoder(shape), job.seed).to(device)
    work = fill(Decoder(shape), job.seed).to(device, torch.bfloat16)
    masters: list[Tensor] = list(master.parameters())
    copies: list[Tensor] = list(work.parameters())
    optimizer = adamw(master.parameters(), job)

    def step(batch: Batch) -> Tensor:
        loss = mean_loss(work(batch["input_ids"]), batch["shift_labels"])
        loss.backward()
        for kept, copy in zip(masters, copies, strict=True):
            assert copy.grad is not None
            kept.grad, copy.grad = copy.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(copies, masters)
        return loss.detach()

    return step


def autocast(job: Job, device: torch.device) -> Step:
    """fp32 weights under torch.autocast."""
    model = fill(Decoder(DECODERS[job.model.name]), job.seed).to(device)
    optimizer = adamw(model.parameters(), job)

    def step(batch: Batch) -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = mean_loss(model(batch["input_ids"]), batch["shift_labels"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def engine(stage: int) -> Callable[[Job, torch.device], Step]:
    """The engine at a ZeRO stage: with one rank there is nothing to cut, but it takes the same road."""

    def build(job: Job, device: torch.device) -> Step:
        made = Engine(library.load(job.model.name, seed=job.seed), job.with_(zero=stage), World.alone(device.type))
        return lambda batch: made.step(batch).loss

    return build


VARIANTS: Mapping[str, Callable[[Job, torch.device], Step]] = {
    "plain": plain,
    "autocast": autocast,
    "zero0": engine(0),
    "zero1": engine(1),
    "zero3": engine(3),
}


def batches_of(job: Job, device: torch.device) -> list[Batch]:
    """Random tokens and the tokens after them, [rows, seq_len], on the device."""
    vocab, size = DECODERS[job.model.name].vocab, (job.batch.size, job.batch.seq_len + 1)
    drawn = [torch.randint(0, vocab, size, generator=torch.Generator().manual_seed(seed)).to(device) for seed in BATCH_SEEDS]
    return [{"input_ids": tokens[:, :-1].contiguous(), "shift_labels": tokens[:, 1:].contiguous()} for tokens in drawn]


def alone(build: Callable[[Job, torch.device], Step], job: Job, batches: Sequence[Batch], device: torch.device) -> tuple[list[float], int]:
    """The first losses, and the most bytes the variant needs when it has the GPU to itself (0 on a CPU)."""
    gpu = device.type == "cuda"
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if gpu else 0
    step = build(job, device)
    losses = [float(step(batches[i % len(batches)])) for i in range(WARMUP)]
    return losses, torch.cuda.max_memory_allocated(device) - before if gpu else 0


def timed(step: Step, batches: Sequence[Batch], steps: int, device: torch.device) -> list[float]:
    """Seconds of each of `steps` steps, from the end of one to the end of the next as the GPU sees it (a CPU: its own clock)."""
    if device.type != "cuda":
        moments = [time.perf_counter()]
        for i in range(steps):
            step(batches[i % len(batches)])
            moments.append(time.perf_counter())
        return [after - before for before, after in pairwise(moments)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for i in range(steps):
        step(batches[i % len(batches)])
        marks[i + 1].record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]


def measure(job: Job, variants: Sequence[str], rounds: int, steps: int, device: torch.device, peak: float | None) -> list[Row]:
    """A row for each variant."""
    batches = batches_of(job, device)
    solo = {name: alone(VARIANTS[name], job, batches, device) for name in variants}
    gc.collect()
    built = {name: VARIANTS[name](job, device) for name in variants}
    for step in built.values():
        timed(step, batches, WARMUP, device)
    seconds: dict[str, list[list[float]]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, step in built.items():
            seconds[name].append(timed(step, batches, steps, device))
        print(f"round {number + 1}: " + ", ".join(f"{name} {median(turns[-1]):.4f} s" for name, turns in seconds.items()), flush=True)
    flops = Anatomy.of_decoder(DECODERS[job.model.name]).flops_per_token(job.batch.seq_len) * job.batch.size * job.batch.seq_len
    return [
        Row(name, seconds[name], *solo[name], flops / median(s for turn in seconds[name] for s in turn) / peak if peak else None)
        for name in variants
    ]


def table(rows: Sequence[Row], tokens: int) -> str:
    """The rows as a markdown table. tokens: of a step."""
    titles = ["", "s a step (quartiles)", "of plain (rounds)", "tokens/s", "MFU", "peak MiB", f"loss of step {WARMUP}", "losses off plain"]
    lines = [titles, ["---"] * len(titles)]
    reference = next((row for row in rows if row.variant == "plain"), None)
    for row in rows:
        low, middle, high = quantiles([s for turn in row.seconds for s in turn], n=4, method="inclusive")
        ratio, apart = "", ""
        if reference is not None:
            ratios = [median(mine) / median(theirs) for mine, theirs in zip(row.seconds, reference.seconds, strict=True)]
            ratio, apart = f"{median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})", f"{distance(row, reference):.1e}"
        mfu = "" if row.mfu is None else f"{100 * row.mfu:.1f}%"
        timing, peak = [f"{middle:.4f} ({low:.4f}-{high:.4f})", ratio], f"{row.peak_bytes / MIB:.0f}"
        lines.append([row.variant, *timing, f"{tokens / middle:.0f}", mfu, peak, f"{row.losses[-1]:.5f}", apart])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def distance(row: Row, reference: Row) -> float:
    """Largest relative difference of losses step by step."""
    return max(abs(a - b) / abs(b) for a, b in zip(row.losses, reference.losses, strict=True))


def main() -> int:
    args = _arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu_step.py: torch sees no GPU here, and this measures one; nothing was run", file=sys.stderr)
        return 2
    device = torch.device(args.device)
    overrides = {"batch.size": args.rows, "batch.seq_len": args.seq_len or Job.load(args.job).batch.seq_len}
    # clip and schedule: the plain loops have neither
    job = Job.load(args.job, mesh="dp=1", precision="bf16", device=args.device, clip=0, schedule="constant", **overrides)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    tflops = next((value for part, value in PEAK_TFLOPS if part.lower() in name.lower()), None)
    facts = environment_facts(["python", "benchmarks/gpu_step.py", *sys.argv[1:]], name, 1)
    machine = {key: value for key, value in facts.items() if key != "host"}
    head = heading(job, args, machine, tflops)
    print(head, flush=True)
    rows = measure(job, args.variants, args.rounds, args.steps, device, tflops * 1e12 if tflops else None)
    found = table(rows, job.batch.size * job.batch.seq_len)
    print(f"\n{found}", flush=True)
    asked = job.to_toml(comments=False)
    result: dict[str, Any] = {"machine": machine, "job": asked, "peak_tflops": tflops, "rows": list(map(asdict, rows))}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(f"{head}\n{found}\n", encoding="utf-8")
    return 0 if losses_agree(rows) else 1


def heading(job: Job, args: argparse.Namespace, machine: Mapping[str, Any], tflops: float | None) -> str:
    """What was measured, where and with what."""
    peak = f"MFU of {tflops} TFLOP/s" if tflops else "no peak known for this device, so no MFU"
    told = f"python {machine['python']}, torch {machine['versions'].get('torch')}, commit {machine['commit']}; {machine['time']}"
    shape = f"{job.model.name}, {job.batch.size} sequences of {job.batch.seq_len} tokens, bf16"
    turns = f"{args.rounds} rounds of {args.steps} steps in turn"
    return f"# A training step on one GPU: {shape}; {turns}\n\n`{machine['command']}` on {machine['device']}; {peak}; {told}\n"


def losses_agree(rows: Sequence[Row]) -> bool:
    """Whether the engine's losses are those of the plain loop of the same recipe, but for rounding."""
    reference = next((row for row in rows if row.variant == "plain"), None)
    return reference is None or all(distance(row, reference) <= LOSS_TOLERANCE for row in rows if row.variant.startswith("zero"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--job", default="120m", help="a built-in job with a built-in decoder")
    parser.add_argument("--rows", type=int, default=128, help="sequences a step")
    parser.add_argument("--seq-len", type=int, help="tokens of a sequence (default: the job's)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    names = list(VARIANTS)
    parser.add_argument("--variants", nargs="+", choices=names, default=names, metavar="VARIANT", help=", ".join(names))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: try the script itself; its times mean nothing")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu_step.json", help="a table in markdown is written beside it")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except JobError as problem:
        sys.exit(f"gpu_step.py: {problem}")
