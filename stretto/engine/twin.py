"""A tiny twin: before a class of transformers model that no test has proved is cut over tp, a small model of its class is.

Published plans can be wrong for training, or a forward can read what a cut changes, and then a model trains wrongly without a word.
So a model of the same class and number of heads, two blocks and a few hidden units wide, takes one forward and backward, cut by the
same plan on threads and whole. It takes a second or two, on rank 0.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.comm.group import Group, Ledger
from stretto.comm.threads import run_threads
from stretto.comm.transport import World
from stretto.engine.loss import logits_of
from stretto.engine.wide import widen
from stretto.errors import JobError
from stretto.layout.mesh import AXES, Mesh
from stretto.models.plans import PROVED, transformers_plan
from stretto.parallel import rules, tensor
from stretto.parallel.vocab import vocab_cross_entropy

EXACT = 1e-9
LENGTH, VOCAB = 6, 64
#: What a twin has of each; other sizes follow the number of heads, which it keeps.
SMALL = {
    "vocab_size": VOCAB, "max_position_embeddings": 64, "sliding_window": 4, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 12, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
WIDTH = 8  # of a head


class Outcome(NamedTuple):
    """What one forward and backward gave: the loss, and the gradients of what a rank holds, by name."""

    loss: float
    gradients: dict[str, Tensor]


def proved_sequence(model: nn.Module, tp: int, sequence: bool | None, world: World, mesh: Mesh) -> bool | None:
    """`sequence` as the model may use it: as it is where its class is proved; else as its twin proves, where nothing was said without
    cut tokens if need be. Raises JobError where the twin disagrees. Collective."""
    kind = type(model).__name__
    if tp == 1 or kind in PROVED or not transformers_plan(model, tp):
        return sequence
    found: tuple[bool | None, str] = (sequence, "")
    if world.rank == 0:
        for choice in (sequence, False) if sequence is None else (sequence,):
            found = choice, difference(model, tp, choice)
            if not found[1]:
                break
    told: list[tuple[bool | None, str]] = Group(world, mesh, AXES, Ledger()).objects(found, reason="twin")
    choice, why = told[0]
    if why:
        raise JobError(f"tp={tp}: {kind} is not proved, and a tiny model of its class {why}; write tp=1, or hand rules=... to Engine")
    return choice


def difference(model: nn.Module, tp: int, sequence: bool | None) -> str:
    """What a twin of `model` cut over tp does otherwise than whole; "" where it does the same."""
    threads = torch.get_num_threads()
    try:
        twin = _twin(model)
        # a row more than ranks: where tokens are cut, it is inside a row
        ids = (torch.arange((tp + 1) * max(LENGTH, tp)) * 5 % VOCAB).view(tp + 1, -1)
        truth = _whole(copy.deepcopy(twin), ids)
        mesh = Mesh.of(tp=tp)
        parts = run_threads(lambda world: _cut(copy.deepcopy(twin), truth, ids, sequence, mesh, world), tp)
    except Exception as problem:  # whatever somebody else's forward meets is an answer
        return f"fails there ({type(problem).__name__}: {' '.join(str(problem).split())[:200]})"
    finally:
        torch.set_num_threads(threads)
    return next((part for part in parts if part), "")


def _twin(model: Any) -> nn.Module:
    config = copy.deepcopy(model.config)
    config.use_cache = False
    kinds = getattr(config, "layer_types", None)
    blocks = max(2, *(kinds.index(kind) + 1 for kind in kinds)) if kinds else 2
    wide = config.num_attention_heads * WIDTH
    sizes = SMALL | {"num_hidden_layers": blocks, "hidden_size": wide, "head_dim": WIDTH, "intermediate_size": wide + 4}
    if kinds:
        config.layer_types = list(kinds[:blocks])
    for name, size in sizes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, size)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        twin: Any = type(model)(config)
    if hasattr(twin, "set_experts_implementation"):
        twin.set_experts_implementation("eager")
    widen(twin)
    return twin.to(torch.float64).eval()  # type: ignore[no-any-return]


def _whole(model: nn.Module, ids: Tensor) -> Outcome:
    logits = logits_of(model(input_ids=ids))
    loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1), reduction="sum")
    loss.backward()
    return Outcome(loss.item(), {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()})


def _cut(model: nn.Module, truth: Outcome, ids: Tensor, sequence: bool | None, mesh: Mesh, world: World) -> str:
    """One rank's forward and backward of the twin, and where it differs."""
    group = Group(world, mesh, ("tp",), Ledger())
    values = {name: param.detach() for name, param in model.named_parameters()}
    plan = rules.resolve(model, transformers_plan(model, group.size), group.size, sequence)
    tensors = tensor.cut(model, plan, mesh, group, gathers_again=False)
    params = dict(model.named_parameters())
    for name, place in tensors.places.items():
        params[name].data = _part(values[name], place, mesh, world.rank)
    tensors.stream.cuts_logits = tensors.vocab is not None
    logits = logits_of(model(input_ids=ids))
    if tensors.vocab is None:
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1), reduction="sum")
    else:
        loss = vocab_cross_entropy(logits, ids, tensors.stream.bridge, tensors.vocab, -100)
    loss.backward()
    if not abs(loss.item() - truth.loss) <= EXACT * abs(truth.loss):
        return f"has a loss of {loss.item():.6f} there and of {truth.loss:.6f} whole"
    floor = 1e-6 * float(torch.stack([grad.norm() for grad in truth.gradients.values()]).norm())
    for name, place in tensors.places.items():
        grad = params[name].grad
        mine = torch.zeros_like(params[name]) if grad is None else grad
        if place.summed:
            Group(world, mesh, (place.summed,), Ledger()).all_reduce(mine.view(-1), reason="twin").wait()
        right = _part(truth.gradients[name], place, mesh, world.rank)
        error = float((mine - right).norm()) / max(float(right.norm()), floor)
        if not error <= EXACT:
            return f"has a gradient of {name} that is off by {error:.1e} there"
    return ""


def _part(whole: Tensor, place: Any, mesh: Mesh, rank: int) -> Tensor:
    """What `rank` holds of a tensor."""
    mine = whole.new_empty(place.local_shape(mesh, rank))
    for there, here in place.layout.place(place.shape, mesh, rank):
        mine[here] = whole[there]
    return mine
