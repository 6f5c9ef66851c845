"""The pipelines that are compared: torch.distributed.pipelining's schedules, Megatron-Core's 1F1B, and stretto's.

One model with the same first values, one loss, one update. Run as a program it is one rank of a team (benchmarks/turns.py):
pipelines.py PEER:SCHEDULE JOB MICROBATCHES SPLIT, SPLIT being the numbers of the blocks that begin the later stages, as 3,5,7.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from turns import Answer, limit_life, serve
from variants import BATCH_SEEDS, adamw, mean_loss

from stretto.anatomy import DECODERS
from stretto.data.batch import Batch
from stretto.engine.engine import Engine
from stretto.engine.runner import StepReport
from stretto.job import Job
from stretto.models import library
from stretto.models.attention import rotation
from stretto.models.decoder import Decoder, fill
from stretto.schedule.pipelines import PIPELINES, chunks_of, ranks_of_stages

#: Ours -> the class of torch's that runs the same order.
TORCH: Mapping[str, str] = MappingProxyType(
    {
        "gpipe": "ScheduleGPipe",
        "1f1b": "Schedule1F1B",
        "interleaved": "ScheduleInterleaved1F1B",
        "bfs": "ScheduleLoopedBFS",
        "zb-v": "ScheduleZBVZeroBubble",
        "dualpipe-v": "ScheduleDualPipeV",
    }
)
#: One optimizer step on the whole batch; the loss on the rank that has it, and the step's spans if it tells them.
Step = Callable[[Mapping[str, Tensor]], "Done"]


@dataclass(frozen=True)
class Done:
    """loss: None on a rank that does not know it. spans: (action, start, stop) in seconds of this machine's clock."""

    loss: float | None
    spans: Sequence[tuple[str, float, float]] = ()


@dataclass(frozen=True)
class Setting:
    """What every variant is given alike; a row a microbatch."""

    job: str
    schedule: str
    ranks: int
    rank: int
    microbatches: int
    split: tuple[int, ...]

    @property
    def decoder(self) -> str:
        return Job.load(self.job).model.name


def batches(setting: Setting) -> list[Mapping[str, Tensor]]:
    """Random tokens and the tokens after them, [microbatches, seq_len]."""
    vocab, length = DECODERS[setting.decoder].vocab, Job.load(setting.job).batch.seq_len
    drawn = [
        torch.randint(0, vocab, (setting.microbatches, length + 1), generator=torch.Generator().manual_seed(seed)) for seed in BATCH_SEEDS
    ]
    return [{"input_ids": tokens[:, :-1].contiguous(), "shift_labels": tokens[:, 1:].contiguous()} for tokens in drawn]


class Piece(nn.Module):
    """Some blocks of the decoder, with the embedding before the first and the head after the last."""

    def __init__(self, model: Decoder, start: int, stop: int) -> None:
        super().__init__()
        self.shape = model.shape
        self.embed = model.embed if start == 0 else None
        self.positions = model.positions if start == 0 else None
        self.layers = nn.ModuleList(list(model.layers)[start:stop])
        self.norm = model.norm if stop == len(model.layers) else None
        self.head = model.head if stop == len(model.layers) else None

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        if self.embed is not None:
            x = self.embed(x)
        if self.positions is not None:
            x = x + self.positions(places)
        turn = rotation(places, self.shape.head_dim, self.shape.rope_theta, x.dtype) if self.shape.position == "rope" else ()
        for layer in self.layers:
            x = layer(x, *turn)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def torch_pipeline(setting: Setting) -> Step:
    """torch's schedule over gloo, as its documentation shows it."""
    model = fill(Decoder(DECODERS[setting.decoder]), Job.load(setting.job).seed)
    known = PIPELINES[setting.schedule]
    rank_of = ranks_of_stages(setting.ranks, chunks_of(setting.schedule, setting.ranks, None), known.vee)
    bounds = (0, *setting.split, len(model.layers))
    mine = [number for number, rank in enumerate(rank_of) if rank == setting.rank]
    pieces = {number: Piece(model, bounds[number], bounds[number + 1]) for number in mine}
    stages = [PipelineStage(piece, number, len(rank_of), torch.device("cpu")) for number, piece in pieces.items()]
    kind: Any = getattr(pipelining.schedules, TORCH[setting.schedule])
    # a schedule of one stage a rank takes the stage itself
    order = kind(stages[0] if known.chunks == 1 else stages, setting.microbatches, loss_fn=mean_loss)
    optimizer = adamw([p for piece in pieces.values() for p in piece.parameters()], Job.load(setting.job))
    first, last = 0 in pieces, len(rank_of) - 1 in pieces

    def step(batch: Mapping[str, Tensor]) -> Done:
        losses: list[Tensor] = []
        given = (batch["input_ids"],) if first else ()
        if last:
            order.step(*given, target=batch["shift_labels"], losses=losses)
        else:
            order.step(*given)
        optimizer.step()
        optimizer.zero_grad()
        return Done(torch.stack(losses).mean().item() if last else None)

    return step


def megatron_pipeline(setting: Setting) -> Step:
    """Megatron-Core's 1F1B over gloo, as `stretto compare` runs it: with as many blocks on each rank, for it knows no other cut."""
    from stretto.adapters.megatron import Megatron
    from stretto.adapters.runner import Setting as Given

    job = job_of(setting, {}).with_(zero=0).resolve(setting.ranks, "cpu", 0)
    runner = Megatron(Given(job, setting.rank, setting.ranks, torch.device("cpu")))
    last = setting.rank == setting.ranks - 1

    def step(batch: Mapping[str, Tensor]) -> Done:
        told = runner.step(Batch.of(batch)).loss
        return Done(told if last else None)

    return step


def job_of(setting: Setting, more: Mapping[str, Any]) -> Job:
    """The job with a row a microbatch, and what an update is in every variant."""
    keys = {"batch.size": setting.microbatches, "batch.micro_size": 1, "pipeline": setting.schedule, **more}
    return Job.load(setting.job, mesh=f"pp={setting.ranks}", device="cpu", clip=0.0, schedule="constant", **keys)


def our_pipeline(setting: Setting) -> Step:
    """The engine."""
    job = job_of(setting, {"pipeline.split": [f"layers.{number}" for number in setting.split]})
    engine = Engine(library.load(job.model.name, seed=job.seed), job)

    def step(batch: Mapping[str, Tensor]) -> Done:
        report: StepReport = engine.step(batch)
        return Done(report.loss, [(str(span.action), span.start, span.stop) for span in report.timeline.spans])

    return step


PEERS: Mapping[str, Callable[[Setting], Step]] = MappingProxyType(
    {"torch": torch_pipeline, "megatron": megatron_pipeline, "stretto": our_pipeline}
)


def main() -> None:
    """Build a variant and run steps of it whenever the team is asked to."""
    limit_life()
    named, job, microbatches, split = sys.argv[1:]
    peer, _, schedule = named.partition(":")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["TURNS_MEET"], ranks), rank=rank, world_size=ranks)
    cuts = tuple(int(number) for number in split.split(",") if number)
    setting = Setting(job, schedule, ranks, rank, int(microbatches), cuts)
    drawn, step, done = batches(setting), PEERS[peer](setting), 0

    def answer(request: dict[str, Any]) -> Answer:
        nonlocal done
        dist.barrier()
        clock, losses, spans = [time.monotonic()], [], []
        for _ in range(request["steps"]):
            made = step(drawn[done % len(drawn)])
            losses.append(made.loss)
            spans.append(made.spans)
            clock.append(time.monotonic())
            done += 1
        return {"clock": clock, "losses": losses, "spans": spans}

    serve(answer)


if __name__ == "__main__":
    main()
