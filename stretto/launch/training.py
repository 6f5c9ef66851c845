"""The way of a training run: checked, resolved, given a folder, run on its ranks, and shown at the end."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TextIO

from stretto.anatomy import DECODERS, Anatomy
from stretto.checkpoint.shelf import Keep, Resume
from stretto.comm.environment import Seat, seat
from stretto.draw.curve import text_curve
from stretto.draw.numbers import bytes_, count, measure
from stretto.errors import JobError, PeerLost
from stretto.job import Job
from stretto.launch.agreeing import join
from stretto.launch.devices import Devices, devices
from stretto.launch.failure import RankFailed
from stretto.launch.progress import progress_on
from stretto.launch.record import Recorder, Trained
from stretto.launch.resuming import check_there_is_one, job_of_run, place_of_checkpoints
from stretto.launch.runfolder import RunFolder, Status, default_folder, environment_facts, holds_a_run, refuse_a_run
from stretto.launch.worker import Event, Rank
from stretto.layout.balance import Item, read_parts
from stretto.layout.mesh import Mesh
from stretto.layout.stages import split_model
from stretto.limits import blocks_of_folder
from stretto.schedule.request import requested


class Ready(NamedTuple):
    """A job that fits this machine, and where this process stands."""

    job: Job
    seat: Seat | None
    devices: Devices

    @property
    def ranks(self) -> int:
        return Mesh.parse(self.job.mesh).size

    def line(self) -> str:
        """One line on how the batch is shared: what nobody wrote but follows."""
        job, micro = self.job, self.job.microbatches
        rows = f"{job.rows_per_rank} in {micro} microbatch{'es' if micro > 1 else ''} on each of {job.shards} dp ranks"
        how = f"mesh {job.mesh}, zero {job.zero.stage}, {job.precision.compute} on {job.device}"
        return f"{job.name}: {how}; {job.batch.size} rows a step: {rows}"


class Starter(Protocol):
    """Where a job runs. again: what a command that goes on with it must say besides. prepare: the job as it fits there.

    start: runs it to its end; its events are heard by on_event, what its ranks print goes to files in `logs`.
    """

    @property
    def again(self) -> str: ...

    def prepare(self, job: Job) -> Ready: ...

    def start(self, prepared: Ready, job: Job, keep: Keep, logs: Path | None, on_event: Callable[[Event], None]) -> None: ...


def ready(job: Job, own_model: bool = False) -> Ready:
    """The job resolved on this machine, on as many ranks as were started, or as its mesh says. Raises JobError."""
    return fitting(job, seat(os.environ), devices(), own_model)


def fitting(job: Job, here: Seat | None, found: Devices, own_model: bool = False) -> Ready:
    """The job resolved for such devices. here: this process, where it is one of the ranks. Raises JobError."""
    resolved = job.resolve(here.ranks if here else None, found.kind, found.visible, own_model=own_model)
    check_pipeline(resolved, own_model)
    return Ready(resolved, here, found)


def elsewhere(job: Job) -> Job:
    """The job resolved for machines with a place for each rank of its mesh: with GPUs if it says device=cuda, else of this machine's kind.

    Raises JobError for what cannot be on any machine.
    """
    found = devices()
    ranks = Mesh.parse(job.mesh or "dp=auto", max(found.visible, 1)).size
    kind = found.kind if job.device == "auto" else job.device
    resolved = job.resolve(ranks, kind, ranks)
    check_pipeline(resolved)
    return resolved


def check_pipeline(job: Job, own_model: bool = False) -> None:
    """Refuse a pipeline that a resolved job cannot have, before there are ranks."""
    ranks, keys = Mesh.parse(job.mesh)["pp"], job.pipeline
    step = requested(keys.schedule, ranks, job.microbatches, keys.chunks, compiled=job.compile.mode == "block")
    if job.model.name in DECODERS and not own_model:
        anatomy = Anatomy.of_decoder(DECODERS[job.model.name].with_(job.model.sizes()))
        items = [Item(*part) for part in anatomy.work(job.batch.seq_len, job.recompute)] if step.stages > 1 else []
        split_model(items, step.rank_of, keys.split, job.balance(step.held))
        return
    if keys.measured and step.stages > 1:
        read_parts(keys.measured)
    blocks = None if own_model else blocks_of_folder(job.model.name)
    if blocks is not None and step.stages > 1 and not keys.split:
        split_model([Item(f"block {number}", 1) for number in range(blocks)], step.rank_of)


def train(
    job: Job | str | Path,
    out: str | Path | None = None,
    *,
    until: int | None = None,
    resume: Resume = "no",
    stream: TextIO | None = None,
    allow_missing: tuple[str, ...] = (),
    place: Starter | None = None,
) -> Trained | None:
    """stretto.train, with a say in where progress is shown (default stderr) and where it runs (default here)."""
    stream, place = stream or sys.stderr, place or Here()
    asked = job if isinstance(job, Job) else Job.load(job)
    prepared = place.prepare(asked)
    cut = shortened(prepared.job, until)
    check_data(prepared.job)
    path = Path(out) if out is not None else default_folder(asked.name, time.localtime())
    keep = Keep(
        place_of_checkpoints(prepared.job, path),
        resume,
        last=cut is not prepared.job,
        allow=allow_missing,
        export=str(path / "huggingface"),
    )
    if prepared.seat and prepared.seat.rank > 0:
        place.start(prepared, cut, keep, None, lambda event: None)
        return None
    if resume == "no":
        refuse_a_run(path)
    elif resume == "yes":
        check_there_is_one(prepared.job, path)
    facts = environment_facts(sys.argv, prepared.job.device, prepared.devices.visible)
    progress = progress_on(stream, asked.log.every)
    opened = RunFolder.reopen if resume != "no" and holds_a_run(path) else RunFolder.create
    folder = opened(path, prepared.job.to_toml(), facts, prepared.job.mesh)
    recorder = Recorder(folder, progress, prepared.job.mesh, cut.total_steps())
    progress.note(prepared.line())
    progress.note(f"run folder: {path}")
    again = f"{'torchrun ... -m ' if prepared.seat else ''}stretto train --out {shlex.quote(str(path))} --resume{place.again}"
    start = functools.partial(place.start, prepared, cut, keep, folder.logs, recorder)
    return _recorded(recorder, prepared.job.total_steps(), cut.total_steps(), again, start)


def train_or_go_on(
    job: Job | str | Path | None, out: str | Path | None, until: int | None, resume: bool | Literal["auto"]
) -> Trained | None:
    """stretto.train: `resume` as a user says it, and the job of the run where none is given."""
    if resume and out is None:
        raise JobError("resume goes on with the run in a folder; write out=FOLDER")
    if job is None:
        job = job_of_run(out, {}) if resume and out is not None else None
        if job is None:
            raise JobError('there is no job: job=None is for resume=True with the folder of a run; write job="tiny", or a Job')
    return train(job, out, until=until, resume="auto" if resume == "auto" else "yes" if resume else "no")


def shortened(job: Job, until: int | None) -> Job:
    """The job that stops after step `until`, with the schedule still laid over all of its steps."""
    if until is None:
        return job
    total = job.total_steps()
    if until < 1:
        raise JobError(f"--until {until}: a run has at least 1 step; write --until 1 or more")
    if total is None:
        raise JobError(f"--until {until} needs to know how many steps there are, and epochs={job.epochs} does not say; write steps=N")
    if until >= total:
        return job
    timed = [step for step in job.profile.steps if step <= until]
    return job.with_(steps=until, **{"schedule.steps": job.schedule.steps or total, "profile.steps": timed})


def check_data(job: Job) -> None:
    """Refuse data that cannot be read, before there are ranks and without torch."""
    from stretto.data.source import check_source

    shape = DECODERS.get(job.model.name)
    vocab = job.model.vocab or (shape.vocab if shape else None)
    data, seed = job.data, job.seed if job.data.seed is None else job.data.seed
    parts: list[tuple[str, Any]] = [(data.source, "learn")]
    if job.eval.data or job.eval.every:
        parts.append((job.eval.data, "whole") if job.eval.data else (data.source, "held_out"))
    for spec, part in parts:
        if spec == "random" and vocab is None:
            continue  # the model says how many tokens there are, and only a rank opens the model
        check_source(
            spec,
            seq_len=job.batch.seq_len,
            vocab=vocab,
            split=data.split if part != "whole" else None,
            column=data.column,
            tokenizer=data.tokenizer,
            seed=seed,
            part=part,
        )


class Here:
    """On ranks of this machine; or in this very process, where it is one of the ranks."""

    again = ""

    def prepare(self, job: Job) -> Ready:
        return ready(job)

    def start(self, prepared: Ready, job: Job, keep: Keep, logs: Path | None, on_event: Callable[[Event], None]) -> None:
        from stretto.launch.local import run_local
        from stretto.launch.outside import run_here

        if prepared.seat:
            run_here(train_rank, (job, keep), prepared.seat, on_event)
        else:
            run_local(train_rank, prepared.ranks, (job, keep), on_event=on_event, logs=logs, stoppable=True)


def train_rank(here: Rank, job: Job, keep: Keep) -> None:
    """The training of one rank."""
    here.emit({"kind": "at", "action": "while loading torch"})
    from stretto.engine.loop import train as fit

    world, keep = join(here, job, keep)
    try:
        fit(job, world, here.emit, here.stop, keep)
    except PeerLost as error:
        raise world.lost(error) from error
    world.close()  # not after an error: it would wait for ranks that are gone


def _recorded(recorder: Recorder, total: int | None, until: int | None, again: str, run: Callable[[], None]) -> Trained:
    """Run, and leave a true status however it ends. total: number of steps without --until; until: with it; again: the command to go on."""
    try:
        run()
    except JobError:
        recorder.progress.close()
        recorder.folder.discard()  # refused by a rank: as if it had been refused here
        raise
    except KeyboardInterrupt:
        recorder.finish("interrupted", "ended at once by a second Ctrl-C")
        raise
    except Exception as error:
        why = error.failure.headline if isinstance(error, RankFailed) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # a full disk may be what it failed of
            recorder.finish("failed", why)
        recorder.folder.close()
        raise
    total = total or recorder.total
    whole = total is None or recorder.step >= total
    status: Status = "done" if whole else "interrupted"
    asked = recorder.stop_asked or ("--until" if recorder.step == until else "a signal")
    why = "" if whole else f"stopped after step {recorder.step} of {total}, as asked ({asked})"
    if not whole:
        recorder.progress.note(f"{why}; all is saved, and this goes on with it:\n  {again}")
    return recorder.finish(status, why)


def summary(trained: Trained, braille: bool) -> str:
    """What is shown at the end: the curve, what the model wrote before and after, and where to look on."""
    lines = ["", text_curve(list(enumerate(trained.losses, 1)), braille=braille), ""]
    for when in ("before", "after"):
        if when in trained.texts:
            lines += [f"The model writes, {when} training:", _indented(trained.texts[when]), ""]
    loss = "none" if trained.final_loss is None else f"{trained.final_loss:.4f}"
    if trained.entropy is not None and trained.final_loss is not None:
        share = trained.final_loss / trained.entropy
        lines.append(f"bigram entropy of the text: {measure(trained.entropy)} nats a byte; final loss {loss} ({share:.2f} of it)")
    speed = f", {count(trained.tokens_per_second)} tokens/s" if trained.tokens_per_second else ""
    peak = f", {bytes_(max(trained.peak_bytes))} at most on a rank" if trained.peak_bytes else ""
    lines.append(f"{trained.status}: {trained.steps} steps, final loss {loss}{speed}{peak}")
    if trained.saved:
        lines.append(f"checkpoint: {trained.saved}")
    lines.append(f"report: {Path(trained.out) / 'report.html'}")
    return "\n".join(lines)


def _indented(text: str) -> str:
    shown = "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return "\n".join(f"  | {line}" for line in shown.splitlines())
