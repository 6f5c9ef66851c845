"""The promise, tested: the same steps on the mesh and in one process, compared tensor by tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from stretto.comm.crossing import Bridge
from stretto.comm.group import Group, Ledger
from stretto.comm.transport import World
from stretto.data.batch import Batch, prepare_labels
from stretto.engine import faults
from stretto.engine.engine import Engine
from stretto.engine.loss import call_model, next_token_loss
from stretto.engine.passes import tokens_of, torch_streams
from stretto.engine.plain import PlainStep, plain_steps
from stretto.engine.values import whole
from stretto.engine.wide import widen
from stretto.errors import JobError
from stretto.job import Job
from stretto.layout.mesh import AXES, Mesh
from stretto.models import library
from stretto.models.dropout import Draws
from stretto.models.stages import block_list
from stretto.parallel.dropout import drops, name_dropout
from stretto.parallel.precision import Precision
from stretto.parallel.stream import Stream

#: How far the mesh may be from one process, by the dtype of the computation: its rounding unit times what a sum of
#: thousands of terms in another order makes of it. A wrong scale or a missing term is far above each.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.03}


def run(
    job: Job,
    world: World,
    emit: Callable[[dict[str, Any]], None],
    *,
    dtype: Literal["fp64", "job"] = "fp64",
    steps: int = 3,
    inject: str | None = None,
    blocks: int | None = None,
    model: nn.Module | library.Task | None = None,
) -> None:
    """Check a resolved job on this rank, and emit the findings: {"kind": "check", "ok": ..., ...}. Collective.

    dtype: fp64 computes everything in float64; job, as the job says. blocks: shorten the model to that many. model: a module
    (or Task) of one's own in place of the job's. Dropout stays on where its masks have names, so that both sides drop the same; where
    some of it has not, all is off, and the findings say of what.
    """
    if dtype == "fp64":
        job = job.with_(precision={"compute": "fp64", "master": "fp64", "reduce": "fp64"})
    loaded = load(job, model, blocks)
    batches = batches_of(job, loaded, steps)
    precision = Precision.of(str(job.precision.compute), str(job.precision.reduce), str(job.precision.master))
    if precision.compute == torch.float64:
        if hasattr(loaded.model, "set_experts_implementation"):
            loaded.model.set_experts_implementation("eager")  # type: ignore[operator]  # its grouped products know no float64
        if job.compile.mode == "none":
            widen(loaded.model)
    reference = whole(loaded, job.seed) if world.rank == 0 else None
    trivial = Stream(Bridge.of(Group(world, Mesh.parse(job.mesh), (), Ledger())), False, gathers_again=False)
    draws, dropout = Draws(job.seed), Dropout("none", False)
    if drops(loaded.model):
        if reference is not None and job.compile.mode == "none":
            name_dropout(reference, draws, trivial)
            first = _prepared(batches[0], loaded, next(reference.parameters()).dtype, torch.device("cpu"))
            dropout = _dropout(reference, loaded, first, draws, world.transport.name == "threads")
        everybody = Group(world, Mesh.parse(job.mesh), AXES, Ledger())
        dropout = everybody.objects(dropout, reason="dropout")[0]
    loaded.model.train(dropout.on)
    engine = Engine(loaded, job, world)
    if inject is not None:
        faults.inject(engine, inject)
    plain: list[PlainStep] = []
    if reference is not None:
        prepared = [_prepared(batch, loaded, precision.compute, world.device) for batch in batches]
        forward, number = loaded.forward or call_model, itertools.count()

        def dropping(model: nn.Module, batch: Batch) -> Any:
            draws.begin(next(number), 0, tokens_of(batch))
            return forward(model, batch)

        plain = list(
            plain_steps(
                reference.to(world.device).train(dropout.on),
                prepared,
                job,
                dropping,
                loaded.loss or next_token_loss,
                compute=precision.compute,
                master=precision.master,
            )
        )
    found = _compare(engine, batches, plain, TOLERANCE[precision.compute])
    emit({"kind": "check", **found, "dropout": dropout.word})


class Dropout(NamedTuple):
    """What `check` does about dropout: "none" where there is none, "named" where it stays on, else why it is off."""

    word: str
    on: bool


def _dropout(model: nn.Module, loaded: library.Loaded, batch: Batch, draws: Draws, shared_stream: bool) -> Dropout:
    """Whether all dropout of the one-process model has names, by a forward. shared_stream: ranks are threads, whose draws cannot be
    told apart."""
    before = torch_streams(torch.device("cpu"))
    draws.begin(0, 0, tokens_of(batch))
    with torch.no_grad():
        (loaded.forward or call_model)(model.train(), batch)
    if draws.unnamed:
        return Dropout(f"off: the masks of {', '.join(sorted(draws.unnamed))} have no names", False)
    if not shared_stream and not torch.equal(torch_streams(torch.device("cpu"))[0], before[0]):
        return Dropout("off: the model draws from torch's own random stream", False)
    return Dropout("named", True)


def load(job: Job, model: nn.Module | library.Task | None, blocks: int | None) -> library.Loaded:
    keys = job.model
    if model is None:
        loaded = library.load(keys.name, weights=keys.weights, seed=job.seed, overrides=keys.sizes())
    else:
        task = model if isinstance(model, library.Task) else library.Task(model)
        loaded = library.Loaded(
            task.model,
            None,
            type(task.model).__name__,
            _vocab(task.model),
            forward=task.forward,
            loss=task.loss,
            batches=task.batches,
            stages=tuple(task.stages),
        )
    if blocks is not None:
        name, found = block_list(loaded.model)
        if not found or blocks < 1:
            raise JobError(f"--blocks {blocks}: {loaded.describe} has {len(found)} blocks; leave --blocks out, or write 1 or more")
        parent, _, leaf = name.rpartition(".")
        setattr(loaded.model.get_submodule(parent), leaf, nn.ModuleList(found[:blocks]))
    return loaded


def _vocab(model: nn.Module) -> int | None:
    """Number of token ids: what the model's config says, else the rows of its first embedding."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size or next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)


def batches_of(job: Job, loaded: library.Loaded, steps: int) -> list[Mapping[str, Any]]:
    """Seeded tokens with labels of which an unequal number counts in each row, and none in the first; or the model's own batches."""
    if loaded.batches is not None:
        given = loaded.batches() if callable(loaded.batches) else loaded.batches
        return [batch for batch, _ in zip(given, range(steps), strict=False)]
    if loaded.vocab is None:
        raise JobError(f"{loaded.describe}: nothing says what its batches are; give a stretto.Task(model, batches=...) with a few of them")
    length = min(job.batch.seq_len, loaded.positions or job.batch.seq_len)
    made: list[Mapping[str, Any]] = []
    for step in range(steps):
        draw = torch.Generator().manual_seed(job.seed * 1000003 + step)
        ids = torch.randint(0, loaded.vocab, (job.batch.size, length), generator=draw)
        share = torch.rand(job.batch.size, 1, generator=draw)
        counted = torch.rand(job.batch.size, length, generator=draw) < share
        if job.batch.size > 1:
            counted[0] = False
        counted[-1, -1] = True  # at least one
        made.append({"input_ids": ids, "labels": torch.where(counted, ids, -100)})
    return made


def _prepared(batch: Mapping[str, Any], loaded: library.Loaded, compute: torch.dtype, device: torch.device) -> Batch:
    return Batch.of(prepare_labels(batch) if loaded.loss is None else batch).to(device, compute)


def _compare(engine: Engine, batches: Sequence[Mapping[str, Any]], plain: list[PlainStep], tolerance: float) -> dict[str, Any]:
    """Run the mesh's steps and hold each against the plain one. Rank 0's findings are the ones that count."""
    worst = {"loss_error": 0.0, "gradient_error": 0.0, "parameter_error": 0.0, "grad_norm_error": 0.0}
    named: str | None = None
    last: tuple[float, str] = (-1.0, "")
    compared: set[str] = set()
    gradients: dict[str, Tensor] = {}
    update = engine.do["UPDATE"]

    def look(action: Any) -> None:
        gradients.clear()
        gradients.update({name: value for name, value in engine.full_gradients() if value is not None})
        update(action)

    engine.do["UPDATE"] = look
    for number, batch in enumerate(batches):
        report = engine.step(batch)
        state = {name: value for name, value in engine.full_state() if value is not None}
        copies = _copies(engine, plain[number].parameters if plain else {})
        if not plain:
            continue
        truth = plain[number]
        loss_error = abs(report.loss - truth.loss) / max(abs(truth.loss), 1e-30)
        norm_error = abs(report.grad_norm - truth.grad_norm) / max(truth.grad_norm, 1e-30)
        of_gradients = _errors(gradients, truth.gradients)
        of_parameters = _errors(state, truth.parameters)
        for name, error in copies.items():
            of_parameters[name] = max(of_parameters.get(name, 0.0), error, key=_badness)
        compared |= set(of_gradients) | set(of_parameters)
        for errors, key in ((of_gradients, "gradient_error"), (of_parameters, "parameter_error")):
            name = max(errors, key=lambda n: _badness(errors[n]), default="")
            if name:
                worst[key] = max(worst[key], errors[name], key=_badness)
                last = max(last, (_badness(errors[name]), name))
                if named is None and not errors[name] <= tolerance:
                    named = name
        worst["loss_error"] = max(worst["loss_error"], loss_error, key=_badness)
        worst["grad_norm_error"] = max(worst["grad_norm_error"], norm_error, key=_badness)
    held = engine.everybody.objects({k: v for k, v in engine.bytes_held().items() if k != "buffers"}, reason="check")
    return {
        "ok": all(value <= tolerance for value in worst.values()),
        "mesh": str(engine.mesh),
        **{key: value if math.isfinite(value) else None for key, value in worst.items()},
        "worst_parameter": named or last[1],
        "tolerance": tolerance,
        "steps": len(batches),
        "compared": len(compared),
        "bytes": held,
    }


def _errors(mine: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """For each tensor of the truth norm(a - b) / max(norm(b), 1e-6 of the global norm): elementwise, gradients that are zero by
    symmetry would look wrong. A tensor that is missing is infinitely wrong."""
    floor = 1e-6 * math.sqrt(sum(float(b.double().norm()) ** 2 for b in truth.values()))
    found = {}
    for name, b in truth.items():
        if name not in mine:
            found[name] = math.inf
            continue
        a, b = mine[name].double().cpu(), b.double().cpu()
        found[name] = float((a - b).norm()) / max(float(b.norm()), floor, 1e-30)
    return found


def _copies(engine: Engine, truth: Mapping[str, Tensor]) -> dict[str, float]:
    """The same error for what each rank really computes with: its copy, gathered if need be. Collective; the largest of all ranks."""
    found: dict[str, float] = {}
    floor = 1e-6 * math.sqrt(sum(float(b.double().norm()) ** 2 for b in truth.values()))
    floor = engine.everybody.objects(floor, reason="check")[0]
    parallel, mine = engine.parallel, iter(engine.parallel.groups)
    for content in parallel.contents:  # of all stages: every rank hears of every tensor, and looks at those that it has
        group = next(mine) if parallel.split.rank_of[content.stage] == parallel.pipeline.index else None
        if group is not None and group.cuts("param"):
            group.gather("check")
            group.ready()
        for number, (name, shape) in enumerate(content.tensors):
            right = torch.zeros(shape, dtype=engine.precision.compute, device=engine.world.device)
            if truth:
                right.copy_(truth[name])
            engine.everybody.broadcast(right.view(-1), 0, reason="check").wait()
            if group is None or group.whole is None:
                continue
            slot, place = group.plan.slots[number], group.places[name]
            a, b = group.whole[slot.start : slot.stop].view(slot.shape).double(), torch.empty(slot.shape, dtype=torch.float64)
            for there, here in place.layout.place(place.shape, engine.mesh, engine.world.rank):
                b[here] = right[there].double().to(b.device)
            error = float((a - b.to(a.device)).norm()) / max(float(b.norm()), floor, 1e-30)
            found[name] = max(found.get(name, 0.0), error, key=_badness)
        if group is not None and group.cuts("param"):
            group.free()
    parts = engine.everybody.objects(found, reason="check")
    names = {name for part in parts for name in part}
    return {name: max((part[name] for part in parts if name in part), key=_badness) for name in sorted(names)}


def _badness(error: float) -> float:
    return error if math.isfinite(error) else math.inf
