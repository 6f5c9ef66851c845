"""Engine: one training step, the same on any mesh of ranks. It goes through a Schedule, action by action."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from stretto.checkpoint.store import place_of
from stretto.comm.group import Group, Ledger
from stretto.comm.transport import World
from stretto.data.batch import Batch, count_targets, prepare_labels
from stretto.data.loader import Loader
from stretto.engine.ending import Ending
from stretto.engine.evaluation import Metrics, evaluate
from stretto.engine.exporting import save_pretrained
from stretto.engine.look import bytes_held, whole_buffers, whole_tensors
from stretto.engine.loss import Forward, Loss, call_model, cut_next_token_loss, head_of, loss_of_head, next_token_loss
from stretto.engine.memory import PeakMemory
from stretto.engine.optimizer import MakeOptimizer, make_optimizer, parameter_groups
from stretto.engine.passes import Passes
from stretto.engine.precision import LossScale
from stretto.engine.runner import StepReport
from stretto.engine.saving import Saver
from stretto.engine.twin import proved_sequence
from stretto.engine.underway import Finish, Underway
from stretto.engine.values import values_of
from stretto.errors import JobError
from stretto.job import Job
from stretto.layout.layout import split
from stretto.layout.mesh import AXES, Mesh
from stretto.layout.stages import split_model
from stretto.layout.zero import ZeroPolicy
from stretto.models import library
from stretto.models.dropout import Draws
from stretto.models.stages import stage_items
from stretto.parallel.parallelize import Cut, parallelize
from stretto.parallel.place import Fill
from stretto.parallel.precision import Precision
from stretto.schedule.action import Action, Schedule
from stretto.schedule.pipelines import microbatches_of, pipeline
from stretto.schedule.request import requested
from stretto.schedule.step import forward_step

#: The axes along which rows of a batch are shared.
ROW_AXES = ("dp_replicate", "dp")


class Engine:
    """Trains `model` as `job` says, on the ranks of `world`. Every rank makes one, with the same model and job.

    model: any nn.Module (its parameters become views of flat buffers), or what models.library.load gives. Where `initial` is
    None the values of rank 0 are everybody's. world: None reads torchrun's or srun's environment. forward(model, batch)
    defaults to model(**batch) without labels; loss(output, batch) -> (sum, count) to next-token cross-entropy; optimizer: a
    function from parameter groups to a torch optimizer. regular: names of modules outside the block list that run exactly
    once a forward, in order; ZeRO 3 then frees them between uses. stages: what pipeline stages share, in the order in which it
    runs, as ["embed", "layers", "norm", "head"], where that is not the order of definition. Raises JobError for what cannot work.
    """

    def __init__(
        self,
        model: nn.Module | library.Loaded,
        job: Job,
        world: World | None = None,
        *,
        rules: Mapping[str, str] | None = None,
        loss: Loss | None = None,
        forward: Forward | None = None,
        optimizer: MakeOptimizer | None = None,
        initial: Fill | None = None,
        regular: Sequence[str] | None = None,
        stages: Sequence[str] = (),
    ) -> None:
        if isinstance(model, library.Loaded):
            loss, forward, initial = loss or model.loss, forward or model.forward, initial or values_of(model, job.seed)
            stages = stages or model.stages
            model = model.model
        self.world = world or World.from_environment(job.device, job.comm.transport, job.comm.init_timeout, job.comm.step_timeout)
        on_gpu = self.world.device.type == "cuda"
        visible = max(torch.cuda.device_count() if on_gpu else 0, self.world.size)
        self.job = job = job.resolve(self.world.size, "cuda" if on_gpu else "cpu", visible, own_model=True)
        self.mesh = Mesh.parse(job.mesh)
        assert job.precision.compute and job.precision.reduce and job.precision.master
        self.precision = Precision.of(job.precision.compute, job.precision.reduce, job.precision.master)
        self.ledger = Ledger()
        self.draws = Draws(job.seed)
        self.model = model
        plan = rules if rules is not None else library.tensor_plan(model, self.mesh["tp"])
        sequence = job.tensor.sequence
        if rules is None and plan:
            sequence = proved_sequence(model, self.mesh["tp"], sequence, self.world, self.mesh)
        cut = Cut(
            ZeroPolicy.of(job.zero.stage, job.zero.gradients, job.zero.params),
            self.precision,
            job.zero.granularity,
            job.recompute,
            job.compile.backend if job.compile.mode == "block" else None,
            tuple(job.zero.keep),
            tuple(library.regular_modules(model) if regular is None else regular),
            plan,
            sequence,
            head_of(model, job.loss_chunk, own_loss=loss is None),
            job.loss_chunk,
        )
        keys, compiled = job.pipeline, job.compile.mode == "block"
        step = requested(keys.schedule, self.mesh["pp"], job.microbatches, keys.chunks, compiled=compiled)
        width = self.precision.compute.itemsize
        items = () if step.stages == 1 else stage_items(model, job.batch.seq_len, job.recompute, stages, width)
        parts = split_model(items, step.rank_of, keys.split, job.balance(step.held))
        self.parallel = parallelize(model, cut, self.mesh, self.world, self.ledger, initial, parts, self.draws)
        self.everybody = Group(self.world, self.mesh, AXES, self.ledger)
        self.rows = Group(self.world, self.mesh, ROW_AXES, self.ledger)
        self.tensors, self.head_loss = self.parallel.tensors, self.parallel.head_loss
        #: Of the ranks that compute the same loss of the same rows, the one that counts it.
        self.counts = self.tensors.group.index == 0
        self.forward = forward or call_model
        self.counts_targets = loss is None
        self.loss = loss or next_token_loss
        #: The same loss of logits that are cut over the vocabulary, where nobody else looks at them.
        self._cut_loss = cut_next_token_loss(self.tensors) if loss is None and self.tensors.vocab else None
        pieces = [piece for group in self.parallel.groups for piece in group.pieces]
        groups = parameter_groups(pieces, job.optimizer.weight_decay)
        self.own_optimizer = optimizer is not None
        self.optimizer = (optimizer or make_optimizer(job.optimizer))(groups) if groups else None
        self.base_lr = [group["lr"] for group in self.optimizer.param_groups] if self.optimizer else []
        self.total_steps = job.schedule.steps or job.total_steps() or 1
        self.scale = LossScale(job.precision.initial_scale, job.precision.scale_window) if self.precision.scaled else None
        self.memory = PeakMemory(self.world.device)
        self.steps = self.updates = self.skips = 0
        self.watch: Callable[[int, str], None] = lambda step, action: None
        self.asked_to_stop: Callable[[], bool] = lambda: False
        self.stopping = False
        self.loaders: list[Loader] = []
        self._parameters = {name: (p, p.requires_grad) for name, p in model.named_parameters()}
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._served_local = False
        self.passes = Passes(self)
        if step.stages == 1:
            model.register_forward_pre_hook(self._own_forward, with_kwargs=True)
        self.ending = Ending(self)
        self.do: dict[str, Callable[[Action], None]] = {**self.passes.do, **self.ending.do}
        self.now = Underway(self.world.device, self.world.rank)
        self.saver = Saver(self)
        self.ledger.take()

    # -- a step ----------------------------------------------------------------------------------------------------

    def step(self, batch: Mapping[str, Any] | Batch | None, local: bool = False) -> StepReport:
        """One optimizer step. batch: that of the whole job, the same on every rank, of which each rank takes its rows; with
        local=True this dp rank's own rows (None: it has none, and takes part with weight zero). Collective."""
        schedule = self._begin(batch, local)
        for action in schedule.order[self.parallel.pipeline.index]:
            self.watch(self.steps, str(action))
            with self.now.timeline.span(action):
                self.do[action.kind](action)
        return self._report()

    def _pipeline(self, microbatches: int) -> dict[str, Any]:
        """Which schedule, in the words of schedule/pipelines.py."""
        keys, ranks = self.job.pipeline, self.mesh["pp"]
        count = microbatches_of(keys.schedule, ranks, microbatches)
        return {"asked": keys.schedule, "ranks": ranks, "microbatches": count, "chunks": keys.chunks}

    def schedule_of(self, microbatches: int, training: bool = True) -> Schedule:
        """The step, or the evaluation, of that many microbatches: of more, some of them empty, where the schedule needs more."""
        key = (microbatches, training)
        if key not in self._schedules:
            asked = self._pipeline(microbatches)
            made = requested(**asked, tied=self.parallel.tied) if training else forward_step(pipeline(**asked))
            self._schedules[key] = made
        return self._schedules[key]

    def _begin(self, batch: Mapping[str, Any] | Batch | None, local: bool) -> Schedule:
        """This rank's microbatches, and the number of targets of the whole step where it can be known before."""
        self.now = Underway(self.world.device, self.world.rank)
        self._check_parameters()
        if batch is None:
            if not local:
                raise JobError("step(None) has no batch; only step(None, local=True) can: a rank that has no rows of its own left")
            mine, count = None, self.job.microbatches
        else:
            whole = Batch.of(prepare_labels(batch) if self.counts_targets else batch, local=local)
            local = whole.local
            if self.counts_targets and "shift_labels" not in whole:
                raise JobError(
                    "the batch has neither labels nor shift_labels, and no loss was given; add labels, or hand loss=... to Engine"
                )
            mine = self._numbered(whole) if local else whole.part(self.rows.size, self.rows.index)
            count = self.job.microbatches if local else self.forwards(whole.rows)
            if self.counts_targets and not local:
                self.now.expected = count_targets(whole)
        if self.steps == 0:
            self._same_rows(mine)
        if local:
            self._roll_call(mine, closing=False)
        return self._ready(mine, count)

    def _numbered(self, mine: Batch) -> Batch:
        """This rank's own rows with their numbers in the step: after those of earlier ranks, if each brings as many as it is to."""
        return replace(mine, first=mine.first or split(self.job.batch.size, self.rows.size, self.rows.index)[0])

    def _ready(self, mine: Batch | None, count: int) -> Schedule:
        schedule = self.schedule_of(count)
        self.now.microbatches = mine.microbatches(schedule.microbatches) if mine is not None else [None] * schedule.microbatches
        self.now.finish = self._lose
        order = schedule.order[self.parallel.pipeline.index]
        self.now.lasts = {action.stage: action for action in order if action.kind in ("B", "W")}
        return schedule

    def _same_rows(self, mine: Batch | None) -> None:
        """Ranks that differ only along pp and tp compute the same rows, so a loader that gives each rank its own is refused."""
        if self.mesh.extent("pp", "tp") == 1:
            return
        prints = self.everybody.objects(None if mine is None else mine.fingerprint(), reason="same rows")
        for rank, found in enumerate(prints):
            first = self.mesh.group(rank, "pp", "tp")[0]
            if found != prints[first]:
                at = " ".join(f"{axis}={self.mesh.at(rank)[axis]}" for axis in ROW_AXES if self.mesh[axis] > 1) or "dp=0"
                raise JobError(
                    f"rank {rank} was given other rows than rank {first}, and both stand at {at}: ranks that differ only along pp or tp "
                    "take the same rows; give each those of its dp coordinate (engine.loader does), or the whole batch to all"
                )

    def forwards(self, rows: int) -> int:
        """Forwards that `rows` rows of the whole job take on every rank, also on one with a row less."""
        return self.forwards_local(-(-rows // self.rows.size))

    def forwards_local(self, rows: int) -> int:
        """Forwards that `rows` rows of one rank take."""
        return max(1, -(-rows // (self.job.batch.micro_size or max(rows, 1))))

    def _roll_call(self, mine: Batch | None, closing: bool) -> None:
        """Ranks with rows of their own tell how many targets they have, and whether they have come to their end."""
        speaks = self.counts and self.parallel.pipeline.index == 0  # the ranks of a pipeline have the same rows
        targets = count_targets(mine) if mine is not None and self.counts_targets and speaks else 0
        self.now.roll = torch.tensor([targets, float(closing)], dtype=torch.float64, device=self.world.device)
        self.now.roll_work = self.everybody.all_reduce(self.now.roll, reason="roll call", lane="vote")
        self._served_local = True

    def forward_only(self, microbatches: Sequence[Batch | None], finish: Finish, *, whole: bool) -> None:
        """Forwards through all stages, of which the last hands each output to `finish`. For evaluation: collective, without gradients.
        whole: `finish` looks at the output itself, so that logits that would be cut over the vocabulary are joined first."""
        schedule = self.schedule_of(len(microbatches), training=False)
        kept, self.now = self.now, Underway(self.world.device, self.world.rank)
        self.now.microbatches = [*microbatches, *[None] * (schedule.microbatches - len(microbatches))]
        self.now.finish, self.now.whole = finish, whole
        try:
            with torch.no_grad():
                for action in schedule.order[self.parallel.pipeline.index]:
                    self.do[action.kind](action)
            self.passes.boundary.settle()
        finally:
            self.now = kept

    def train(self, mode: bool = True) -> bool:
        """Set all stages to training or evaluation; returns what they were."""
        was = self.model.training
        for module in (self.model, *(stage.model for stage in self.parallel.stages)):
            module.train(mode)
        return was

    def _lose(self, output: Any, microbatch: Batch) -> Tensor:
        """The loss of a microbatch, written to this step's sums."""
        loss, count = self.criterion(output, microbatch)
        self._add(loss, count, microbatch.rows)
        return loss

    @property
    def cuts_logits(self) -> bool:
        """Whether the model's output in the forward under way is this rank's part of the logits: nobody but the loss sees it."""
        return self._cut_loss is not None and not self.now.whole

    def criterion(self, output: Any, microbatch: Batch) -> tuple[Tensor, Tensor | float]:
        """(sum of losses, number of targets) of the forward under way."""
        if self.head_loss is not None and not self.now.whole:
            return loss_of_head(self.head_loss, output, microbatch)
        loss = self._cut_loss if self._cut_loss is not None and self.cuts_logits else self.loss
        return loss(output, microbatch)

    def _add(self, loss: Tensor, count: Tensor | float, rows: int) -> None:
        if not self.counts:
            return
        self.now.sums[0] += loss.detach().to(torch.float64)
        self.now.sums[1] += count if isinstance(count, Tensor) else float(count)
        self.now.sums[2] += rows

    def multiplier(self) -> float:
        """What the sum of losses is multiplied with before backward.

        1 / (targets of the whole step) where that is known; else, for a loss that tells its count only after the forward, a
        power of two near 1 / rows (exact to undo), and the update makes up for the rest.
        """
        if self.now.roll_work is not None:
            self.now.roll_work.wait()
            self.now.roll_work = None
            if self.counts_targets:
                self.now.expected = int(self.now.roll[0].item())
        if self.now.expected is not None:
            self.now.before = 1.0 / max(self.now.expected, 1)
        else:
            self.now.before = 2.0 ** -round(math.log2(self.job.batch.size))
        return self.now.before * (self.scale.scale if self.scale else 1.0)

    def _report(self) -> StepReport:
        now = time.perf_counter()
        report = StepReport(
            step=self.steps,
            loss=self.now.loss_sum / self.now.count if self.now.count else 0.0,
            tokens=round(self.now.count),
            samples=round(self.now.rows),
            grad_norm=self.now.grad_norm,
            lr=self.now.lr,
            status=self.now.status,
            why=self.now.why or ("no rank had a target that counts" if self.now.status == "empty" else ""),
            seconds=now - self.now.started,
            peak_bytes=self.memory.look(),
            ledger=self.ledger.take(),
            timeline=self.now.timeline,
            nonfinite=self.now.culprits,
        )
        self.steps += 1
        return report

    def _check_parameters(self) -> None:
        for name, param in self.model.named_parameters():
            known, trainable = self._parameters.get(name, (None, False))
            if param is not known:
                raise JobError(
                    f"{name} is another parameter than when the engine was made (was the model resized?), which the engine does not train; "
                    "change the model first, then make the engine"
                )
            if param.requires_grad is not trainable:
                raise JobError(
                    f"requires_grad of {name} has changed since the engine was made, which planned memory and traffic by it; "
                    "freeze or unfreeze first, then make the engine"
                )

    # -- one's own loop --------------------------------------------------------------------------------------------

    def backward(self, loss_sum: Tensor, count: Tensor | float, *, also: Sequence[Engine] = (), through: Sequence[Engine] = ()) -> None:
        """Backward of a sum of losses over `count` targets of this rank, after one's own forward through `engine.model`.
        Any number of times before `update`, the same number on every rank. Collective where gradients are reduced each time.

        A loss may run through models of other engines: those of `also` get their gradients of it, and update by themselves; those
        of `through` get none (a generator learns through a discriminator). A gradient for an engine that is in neither is an error.
        """
        every = [self, *also]
        for engine in (*every, *through):
            if engine.parallel.split.stages > 1:
                raise JobError(
                    f"engine.backward: the model is cut in {engine.parallel.split.stages} pipeline stages, and a loop of one's own sees "
                    "only its rank's; call engine.step(batch), or write a mesh without pp"
                )
        if len({id(engine) for engine in (*every, *through)}) < len(every) + len(through):
            raise JobError("engine.backward: name each other engine once, in also or in through, and not the one that is called")
        before, scale = 2.0 ** -round(math.log2(self.job.batch.size)), self.scale.scale if self.scale else 1.0
        for engine in also:
            theirs = 2.0 ** -round(math.log2(engine.job.batch.size)), engine.scale.scale if engine.scale else 1.0
            if theirs != (before, scale):
                raise JobError(
                    f"engine.backward(also=...): gradients of one loss need one scale, and these engines differ: batch.size "
                    f"{self.job.batch.size} and {engine.job.batch.size}, loss scale {scale:g} and {theirs[1]:g}; give their jobs the same "
                    "batch.size, and bf16 or fp32 in place of fp16"
                )
        for engine in every:
            engine._add(loss_sum, count, 0)
            engine.watch(engine.steps, "backward")
            engine.now.before = before
            engine.parallel.stages[0].walk.begin_backward(last=False)
        for engine in through:
            engine.parallel.stages[0].walk.begin_backward(last=False, discard=True)
        if loss_sum.requires_grad:
            (loss_sum * before * scale).backward()
        for engine in (*every, *through):
            engine.parallel.stages[0].walk.end_backward()

    def _own_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward of the user's own loop begins: its rows follow those of the forwards before it."""
        given = [x for x in (kwargs.get("input_ids"), *args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim > 1]
        if self.passes.calling:
            return
        self.tensors.stream.forget()  # a block that ran again in backward has left it elsewhere
        if not given:
            return
        first = split(self.job.batch.size, self.rows.size, self.rows.index)[0] + self.now.seen
        self.now.seen += len(given[0])
        self.draws.begin(self.steps, first, (given[0].shape[0], given[0].shape[1]))

    def update(self) -> StepReport:
        """Reduce what `backward` has gathered, clip, and update: the gradient is that of all sums / all counts. Collective."""
        for action in (Action("REDUCE", 0), Action("VOTE", 0), Action("UPDATE", 0)):
            self.watch(self.steps, str(action))
            with self.now.timeline.span(action):
                self.do[action.kind](action)
        report = self._report()
        self.now = Underway(self.world.device, self.world.rank)
        return report

    def evaluate(
        self, batches: Iterable[Mapping[str, Any] | Batch], metrics: Metrics | None = None, local: bool = False
    ) -> dict[str, float]:
        """{"loss": ...} and the means of `metrics(output, batch) -> {name: (sum, count)}` over real samples. Collective."""
        return evaluate(self, batches, metrics, local)

    def loader(self, dataset: Any, collate_fn: Callable[[Sequence[Any]], Mapping[str, Any]] | None = None, num_workers: int = 0) -> Loader:
        """A torch DataLoader over a dataset of one's own (the same on every rank) that gives this rank's rows of batch.size samples
        a step, for `step` and `evaluate` as they are. One pass over it is an epoch, shuffled by data.seed: each sample once, the
        last batch smaller. Where it stands belongs to the engine's state: `loaders` has them in the order they were made."""
        seed = self.job.seed if self.job.data.seed is None else self.job.data.seed
        size, parts, index = self.job.batch.size, self.rows.size, self.rows.index
        made = Loader(dataset, size=size, seed=seed, parts=parts, index=index, collate_fn=collate_fn, num_workers=num_workers)
        self.loaders.append(made)
        return made

    # -- saving ----------------------------------------------------------------------------------------------------

    def save(self, folder: str | os.PathLike[str], notes: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint: parameters, optimizer, counters, random streams, where the loaders stand. `folder` appears when it is
        complete; there must be none of that name. notes: anything JSON can hold, which `load` returns. Collective."""
        self.saver.save(*place_of(folder), notes or {}).wait()

    def load(self, folder: str | os.PathLike[str], allow_missing: str | Sequence[str] = ()) -> Mapping[str, Any]:
        """Go on from a checkpoint that was saved on any mesh; returns its notes. Nothing changes unless all of it is there and whole.

        allow_missing: patterns of names that may be missing in it (they stay as they are) or in the model. Raises JobError for
        another model's checkpoint, Damaged for one that is not whole. Collective.
        """
        allow = (allow_missing,) if isinstance(allow_missing, str) else tuple(allow_missing)
        return self.saver.load(*place_of(folder), allow)

    def save_pretrained(self, folder: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
        """Write the model as a new folder that transformers' from_pretrained opens: parameters in `dtype`, None: at full precision, as
        they are trained. Raises JobError for a model that transformers does not know. Collective."""
        save_pretrained(self, *place_of(folder), dtype)

    # -- looking inside --------------------------------------------------------------------------------------------

    def full_state(self) -> Iterator[tuple[str, Tensor | None]]:
        """Every parameter and persistent buffer, whole and at full precision, one at a time: (name, CPU tensor) on rank 0,
        (name, None) on the others. Collective: all ranks must go through to the end."""
        yield from whole_tensors(self.parallel, "state", lambda group: group.values())
        yield from whole_buffers(self.parallel)

    def full_gradients(self) -> Iterator[tuple[str, Tensor | None]]:
        """Every gradient, whole, as the update will see it but for clipping; between VOTE and UPDATE. Collective."""
        after = self.ending.after()
        yield from whole_tensors(self.parallel, "gradients", lambda group: group.update_gradient() * after, trainable=True)

    def bytes_held(self) -> dict[str, int]:
        """Bytes this rank holds, by kind, counted from live storages: parameters and gradients between steps, optimizer (master
        copy and moments), and buffers (gathered parameters, gradient buckets, the model's own buffers, counters)."""
        return bytes_held(self.parallel, self.optimizer)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """This rank has no more steps. After local steps it goes on to take part in those of ranks that have, with weight zero; what is
        being saved is written to its end."""
        self.saver.wait()
        while self._served_local:
            self.now = Underway(self.world.device, self.world.rank)
            self._roll_call(None, closing=True)
            assert self.now.roll_work is not None
            self.now.roll_work.wait()
            if self.now.roll[1].item() == self.world.size:
                self._served_local = False
                break
            self._join()

    def _join(self) -> None:
        count = self.job.microbatches
        self.now.roll_work = None
        if self.counts_targets:
            self.now.expected = int(self.now.roll[0].item())
        for action in self._ready(None, count).order[self.parallel.pipeline.index]:
            self.do[action.kind](action)
        self._report()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
