"""parallelize: from a model and a job to stages of sharded groups, in the one order in which cuts can be made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from stretto.anatomy import Recompute
from stretto.comm.group import Group, Ledger
from stretto.comm.transport import World
from stretto.errors import JobError
from stretto.layout.mesh import Mesh
from stretto.layout.stages import Split
from stretto.layout.zero import REPLICATE_AXES, SHARD_AXES, ZeroPolicy
from stretto.models.dropout import Draws
from stretto.models.stages import block_list
from stretto.parallel import recompute, rules, tensor
from stretto.parallel.chunked import HeadLoss
from stretto.parallel.dropout import name_dropout
from stretto.parallel.flat import Granularity
from stretto.parallel.place import Fill, Place, fill_parts
from stretto.parallel.precision import Precision
from stretto.parallel.sharded import Room, ShardedGroup
from stretto.parallel.stages import Passage, StageModel, homes, let_go, stage_model, tied_stages
from stretto.parallel.units import Unit, units_of
from stretto.parallel.walk import Stop, Walk
from stretto.parallel.weights import write_directly

#: Groups that may hold whole buffers at a time: the one at work and the one ahead (or just behind).
SLOTS = 2


@dataclass(frozen=True)
class Cut:
    """How the model is to be cut, taken from a Job. plan: the styles of its modules over tp, see rules.py; sequence: whether the
    tokens between cut layers are cut too, None: where that is known to be safe. head, loss_chunk: the layer that makes logits is to
    give the loss itself, of so many tokens at a time; 0: it is not."""

    policy: ZeroPolicy
    precision: Precision
    granularity: Granularity = "element"
    recompute: Recompute = "none"
    compile_backend: str | None = None
    keep: tuple[str, ...] = ()
    regular: tuple[str, ...] = ()
    plan: Mapping[str, str] = field(default_factory=dict)
    sequence: bool | None = None
    head: str = ""
    loss_chunk: int = 0


@dataclass(frozen=True)
class Stage:
    """One pipeline stage of this rank. passage: the way of a forward through it. first, last: of the whole model. tied: the groups
    of which other stages have a copy."""

    number: int
    model: nn.Module
    passage: Passage
    walk: Walk
    first: bool
    last: bool
    tied: tuple[ShardedGroup, ...]


@dataclass(frozen=True)
class Content:
    """What a group of some stage holds, known on all ranks: the names and shapes of its tensors."""

    stage: int
    trainable: bool
    copied: bool
    tensors: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Parallel:
    """A cut model: this rank's stages, and names that mean the same parameter (tied weights), by the name that is kept.

    contents: of every group of all stages, in the order of the model; those of this rank's stages are `groups`, in that order.
    buffers: for each stage, the names of persistent buffers that no earlier stage has.
    """

    split: Split
    stages: tuple[Stage, ...]
    groups: tuple[ShardedGroup, ...]
    rooms: tuple[Room, ...]
    aliases: dict[str, tuple[str, ...]]
    tied: tuple[int, ...]
    contents: tuple[Content, ...]
    buffers: tuple[tuple[str, ...], ...]
    shard: Group
    replicas: Group
    pipeline: Group
    tensors: tensor.Tensors
    head_loss: HeadLoss | None

    def stage(self, number: int) -> Stage:
        """This rank's stage of that number."""
        return next(stage for stage in self.stages if stage.number == number)


def parallelize(
    model: nn.Module,
    cut: Cut,
    mesh: Mesh,
    world: World,
    ledger: Ledger,
    initial: Fill | None,
    split: Split | None = None,
    draws: Draws | None = None,
) -> Parallel:
    """Cut `model` in place. initial: gives a named parameter's first values, asked only for what this rank holds (a model on
    the meta device needs it); None: rank 0's values are everybody's. split: its pipeline stages; None: one. draws: what the masks
    of dropout follow; None: no forward trains with any.

    Order: tensor rules cut weights, dropout gets its names, recompute wraps the blocks' forwards, then compile, then stages, then
    units and groups, and values last: a model on the meta device never exists whole on a rank that has a part of it.
    """
    split = split or Split((), (0, 0), (0,))
    _refuse_batch_norm(model, mesh)
    _, blocks = block_list(model)
    aliases = _aliases(model)
    own: dict[str, Tensor] = {}
    if initial is None:
        _check_real(model)
        _same_on_all_ranks(model, world, mesh)
        own = {name: param.data for name, param in model.named_parameters()}
        initial = _from(own)
    # where tensors have no memory there is nothing to compile: what a compiled block keeps, an eager one does with recompute
    compiled = cut.compile_backend is not None and world.device.type != "meta"
    tensors = _cut_tensors(model, cut, mesh, Group(world, mesh, ("tp",), ledger))
    initial = fill_parts(initial, tensors.places, mesh, world.rank)
    remember: list[recompute.Remember] = [tensors.stream.remember]
    if draws is not None:
        name_dropout(model, draws, tensors.stream, compiled=compiled)
        remember.append(draws.remember)
    recompute.apply(blocks, cut.recompute, world.transport.name != "threads", compiled=compiled, remember=remember)
    if compiled:
        _compile(blocks, str(cut.compile_backend))
    _leave_meta(model, world.device)
    where = homes(model, split)
    pipeline = Group(world, mesh, ("pp",), ledger)
    nothing = _nan(tensors.places, cut.precision.compute, world.device)
    numbers = [number for number, rank in enumerate(split.rank_of) if rank == pipeline.index]
    parts = [stage_model(model, split, number, where, tensors.stream, nothing) for number in numbers]
    kept = {name: first for first, names in aliases.items() for name in names}
    shard = Group(world, mesh, SHARD_AXES, ledger)
    replicas = Group(world, mesh, REPLICATE_AXES, ledger)
    summed = shard if cut.policy.reduction == "reduce_scatter" else Group(world, mesh, REPLICATE_AXES + SHARD_AXES, ledger)
    stops: list[list[Stop]] = []
    for part in parts:
        _to_device(part.module, world.device)
        tied = part.tied.values()
        units = units_of(part.module, regular=cut.regular, keep=cut.keep, tied=tied)
        stops.append([Stop(i, unit, _groups(unit, cut, summed, replicas, kept, tensors.places)) for i, unit in enumerate(units)])
    rooms = _assign_rooms([stop for mine in stops for stop in mine], cut)
    stages = []
    for part, mine in zip(parts, stops, strict=True):
        for group in (group for stop in mine for group in stop.groups):
            group.allocate(initial)
            for name in group.names:
                if len(where[name]) == 1:  # else another stage of this rank may read it too
                    own.pop(name, None)  # read, and let go
        _move_buffers(part.module, world.device, cut.precision)
        stages.append(_stage(part, mine, cut, world, split, where))
    groups = tuple(group for stage in stages for group in stage.walk.groups)
    let_go(model, [param for group in groups for param in group.params])
    head_loss = _head_loss(stages[-1], cut, tensors) if cut.loss_chunk and stages[-1].last else None
    contents, buffers = _contents(stages, pipeline, split)
    return Parallel(
        split,
        tuple(stages),
        groups,
        rooms,
        aliases,
        tied_stages(where),
        contents,
        buffers,
        shard,
        replicas,
        pipeline,
        tensors,
        head_loss,
    )


def _head_loss(stage: Stage, cut: Cut, tensors: tensor.Tensors) -> HeadLoss:
    bridge = tensors.stream.bridge
    if bridge.size > 1 and tensors.vocab is None:
        raise JobError(f'loss_chunk: {cut.head} does not leave logits cut over the vocabulary; its rule has to be "head" (or loss_chunk=0)')
    head = stage.model.get_submodule(cut.head)
    vocab = tensors.vocab or int(head.weight.shape[0])  # type: ignore[index]
    return HeadLoss(head, bridge, vocab, cut.loss_chunk)


def sum_over_tp(parallel: Parallel) -> None:
    """Add, in one all-reduce an axis, the gradients of which each tp rank has only its own tokens' or heads' share (REFERENCE D3).
    After the reduction over dp: a sum of sums comes to the same, and the parts are small."""
    trainable = [group for group in parallel.groups if group.trainable]
    axes = dict.fromkeys(place.summed for group in trainable for place in group.places.values() if place.summed)
    for axis in sorted(axes):
        parts = [part for group in trainable for part in group.summed_gradient(axis)]
        if not parts:
            continue  # this dp rank updates none of them, and so do its tp neighbours
        flat = torch.cat(parts)
        tp = parallel.tensors.group
        Group(tp.world, tp.mesh, (axis,), tp.ledger).all_reduce(flat, reason="sum over tp", lane="tensor").wait()
        at = 0
        for part in parts:
            part.copy_(flat[at : at + part.numel()])
            at += part.numel()


def _cut_tensors(model: nn.Module, cut: Cut, mesh: Mesh, group: Group) -> tensor.Tensors:
    """On one tp rank nothing is cut, and no rule is needed."""
    if group.size == 1:
        return tensor.cut(model, rules.Rules({}, {}, False), mesh, group, gathers_again=False)
    # what is computed again in backward is gathered again there anyway; the compiler decides for itself what it keeps
    again = cut.recompute == "none" and cut.compile_backend is None
    return tensor.cut(model, rules.resolve(model, cut.plan, group.size, cut.sequence), mesh, group, gathers_again=again)


def _stage(part: StageModel, stops: Sequence[Stop], cut: Cut, world: World, split: Split, where: Mapping[str, Sequence[int]]) -> Stage:
    eager = cut.compile_backend is None
    walk = Walk(part.module, stops, cut.policy, world.rank, watch_inside=eager, pipelined=split.stages > 1)
    if eager:  # a compiled backward is one kernel after another, with no place for a layer's own
        write_directly(part.module, walk)
    tied = tuple(group for group in walk.groups if group.names[0] in part.tied)
    for group in tied:
        group.copied = where[group.names[0]][0] != part.number
    part.passage.sound = lambda: all(bool(group.values().isfinite().all()) for group in walk.groups)
    return Stage(part.number, part.module, part.passage, walk, part.number == 0, part.number == split.stages - 1, tied)


def _contents(stages: Sequence[Stage], pipeline: Group, split: Split) -> tuple[tuple[Content, ...], tuple[tuple[str, ...], ...]]:
    """What all stages hold. Collective over pp."""
    mine: dict[int, tuple[list[Content], list[str]]] = {}
    for stage in stages:
        contents = [
            Content(stage.number, group.trainable, group.copied, tuple((name, place.shape) for name, place in group.places.items()))
            for group in stage.walk.groups
        ]
        persistent = stage.model.state_dict(keep_vars=True)
        mine[stage.number] = contents, [name for name, _ in stage.model.named_buffers() if name in persistent]
    found = {number: content for part in pipeline.objects(mine, reason="stages") for number, content in part.items()}
    told: set[str] = set()
    buffers = []
    for number in range(split.stages):
        buffers.append(tuple(name for name in found[number][1] if name not in told))
        told.update(found[number][1])
    return tuple(content for number in range(split.stages) for content in found[number][0]), tuple(buffers)


def _groups(
    unit: Unit, cut: Cut, shard: Group, replicas: Group, kept: Mapping[str, str], places: Mapping[str, Place]
) -> list[ShardedGroup]:
    """One group of the unit's trainable parameters, one of its frozen ones: a group is reduced and updated as a whole. kept: the
    name by which the whole model knows a parameter."""
    groups = []
    for trainable, label in ((True, ""), (False, " (frozen)")):
        params = [(kept[name], p) for name, p in unit.params if p.requires_grad is trainable]
        if params:
            params.sort(key=lambda named: _order(places[named[0]]))
            groups.append(
                ShardedGroup(
                    unit.name + label,
                    params,
                    shard,
                    replicas,
                    cut.policy,
                    cut.precision,
                    granularity=cut.granularity,
                    kept=not unit.regular or cut.policy.params == "step",
                    places=places,
                )
            )
    return groups


def _order(place: Place) -> tuple[str, str]:
    """First what tp cuts, then what neighbours share, then what is whole and complete, last what is whole and to be summed: each is
    then one range of the buffer."""
    return ("" if place.axis == "tp" else place.axis or "whole", place.summed)


def _assign_rooms(stops: Sequence[Stop], cut: Cut) -> tuple[Room, ...]:
    """Give regular units shared slots for whole parameters and gradient buckets, in turn; the others have memory of their own. Where
    ranks share memory, parameters are looked at where they lie."""
    shared = [group.meet() for stop in stops for group in stop.groups]
    regular = [stop for stop in stops if stop.unit.regular]
    rooms: list[Room] = []

    def room(members: list[tuple[int, ShardedGroup]], dtype: torch.dtype, attribute: str) -> None:
        if members:
            made = Room(max(group.plan.total for _, group in members), SLOTS, dtype, members[0][1].group)
            rooms.append(made)
            for position, group in members:
                setattr(group, attribute, (made, position % SLOTS))

    for trainable in (True, False):
        members = [(i, group) for i, stop in enumerate(regular) for group in stop.groups if group.trainable is trainable]
        if "param" in cut.policy.cut and cut.policy.params == "microbatch" and not all(shared):
            room(members, cut.precision.compute, "param_room")
        if trainable and members and members[0][1].reduces_each:
            room(members, cut.precision.reduce, "bucket_room")
    return tuple(rooms)


def _refuse_batch_norm(model: nn.Module, mesh: Mesh) -> None:
    if mesh.extent("dp", "dp_replicate", "cp") == 1:
        return
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
            raise JobError(
                f"{name or type(model).__name__} is a {type(module).__name__}: its statistics would be those of each rank's rows, "
                "not of the batch, so the step would depend on the mesh; use GroupNorm or LayerNorm, or "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) on GPUs"
            )


def _check_real(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        if param.is_meta:
            raise JobError(f"parameter {name} is on the meta device and nothing says what its values are; give a model with real values")


def _compile(blocks: Sequence[nn.Module], backend: str) -> None:
    """Compile each block's forward once. A block that cannot be compiled is an error, not a silent eager block."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 4 * len(blocks) + 8)
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # under tp a block notes what it has sent through where; a checkpoint that is compiled may do so in its forward only
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
    for block in blocks:
        outer = block.forward
        if isinstance(outer, recompute.Recomputed) and not outer.inside:
            outer.forward = torch.compile(outer.forward, backend=backend, fullgraph=True)
        else:
            block.forward = torch.compile(outer, backend=backend, fullgraph=True)


def _aliases(model: nn.Module) -> dict[str, tuple[str, ...]]:
    first: dict[int, str] = {}
    found: dict[str, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        kept = first.setdefault(id(param), name)
        found.setdefault(kept, []).append(name)
    return {kept: tuple(names) for kept, names in found.items()}


def _same_on_all_ranks(model: nn.Module, world: World, mesh: Mesh) -> None:
    """Rank 0's values and buffers on every rank: ranks that had drawn their own would otherwise train a chimera."""
    everybody = Group(world, mesh, tuple(name for name, _ in mesh.axes), Ledger())
    if everybody.size == 1:
        return
    shapes = everybody.objects([(n, tuple(p.shape), p.requires_grad) for n, p in model.named_parameters()], reason="same model")
    for rank, other in enumerate(shapes):
        if other != shapes[0]:
            differs = next((a for a, b in zip(other, shapes[0], strict=False) if a != b), ("the number of parameters", (), True))
            raise JobError(f"rank {rank} was given another model than rank 0: {differs[0]} differs; give every rank the same model")
    with torch.no_grad():
        for _, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.numel() and not tensor.is_meta:
                flat = tensor.detach().to(world.device).contiguous().view(-1)
                everybody.broadcast(flat, 0, reason="same model").wait()
                tensor.data.copy_(flat.view(tensor.shape))


def _from(values: Mapping[str, Tensor]) -> Fill:
    """A Fill that reads a real model's own values."""

    def fill(name: str, start: int, out: Tensor) -> None:
        out.copy_(values[name].reshape(-1)[start : start + out.numel()])

    return fill


def _nan(places: Mapping[str, Place], dtype: torch.dtype, device: torch.device) -> Callable[[str], Tensor]:
    """NaN in place of a whole parameter, without memory."""
    return lambda name: torch.full((), float("nan"), dtype=dtype, device=device).expand(places[name].shape)


def _leave_meta(model: nn.Module, device: torch.device) -> None:
    """Real parameters without memory in place of those on the meta device; groups give them their values."""
    real: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param.is_meta:
                if id(param) not in real:
                    empty = torch.zeros((), dtype=param.dtype, device=device).expand(param.shape)
                    real[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
                module._parameters[name] = real[id(param)]


def _to_device(model: nn.Module, device: torch.device) -> None:
    for param in model.parameters():
        if param.device != device:
            param.data = param.data.to(device)


def _move_buffers(model: nn.Module, device: torch.device, precision: Precision) -> None:
    """Buffers go to the device in the dtype they have (rotary tables in bf16 lose whole radians); in a float64 check they widen."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            wide = buffer.is_floating_point() and precision.compute == torch.float64
            module._buffers[name] = buffer.to(device, torch.float64 if wide else buffer.dtype)
