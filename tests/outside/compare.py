"""Hold Engine against a plain torch loop written here, as a user would: nothing of stretto's own checks is used.

    torchrun --standalone --nproc-per-node 2 tests/outside/compare.py
    python tests/outside/compare.py                    # starts its two ranks itself

float64, 3 steps, ZeRO 0 and 3, on a module with a loss of its own and on a small transformers Llama. Prints the largest relative
error of losses, gradient norms and parameters; exits 1 if it is above LIMIT.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import stretto

LIMIT = 1e-10
RANKS = 2
STEPS = 3
ROWS = 5  # 3 on one rank, 2 on the other
LENGTH, VOCAB = 12, 96

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model and how it is trained; `loss` and `optimizer` serve both sides, the rest says what the engine is told."""

    name: str
    model: Callable[[], nn.Module]
    batches: Callable[[], list[Batch]]
    loss: Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]
    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    clip: float
    engine: Mapping[str, Any]


# -- a module and a loss of one's own ----------------------------------------------------------------------------------


class Forecast(nn.Module):
    """A residual network whose `spare` part runs for some batches only, and whose `fixed` part is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(7, 24)
        self.fixed = nn.Linear(24, 24).requires_grad_(False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24)) for _ in range(3))
        self.spare = nn.Linear(24, 24, bias=False)
        self.outlet = nn.Linear(24, 2)
        self.gain = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, detour: bool) -> Tensor:
        h = self.inlet(x) + torch.sin(self.fixed(self.inlet(x)))
        for block in self.blocks:
            h = h + block(h)
        if detour:
            h = h + self.spare(h)
        y: Tensor = self.outlet(h) * self.gain
        return y


def forecasts() -> list[Batch]:
    draw = torch.Generator().manual_seed(11)
    made: list[Batch] = []
    for step in range(STEPS):
        values = {name: torch.randn(ROWS, width, generator=draw, dtype=torch.float64) for name, width in (("x", 7), ("y", 2))}
        weight = torch.rand(ROWS, 1, generator=draw, dtype=torch.float64)
        made.append({**values, "weight": weight, "detour": torch.tensor(step == 1)})
    return made


def forecast(model: nn.Module, batch: Batch) -> Tensor:
    y: Tensor = model(batch["x"], bool(batch["detour"]))
    return y


def weighted_error(y: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    return (batch["weight"] * (y - batch["y"]) ** 2).sum(), 2 * batch["weight"].sum()


# -- a small Llama ----------------------------------------------------------------------------------------------------


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": LENGTH, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**sizes))


def texts() -> list[Batch]:
    """Tokens of which an unequal number counts in each row."""
    draw = torch.Generator().manual_seed(12)
    made: list[Batch] = []
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=draw)
        counted = torch.rand(ROWS, LENGTH, generator=draw) < torch.rand(ROWS, 1, generator=draw)
        counted[0, -1] = True
        made.append({"input_ids": tokens, "labels": torch.where(counted, tokens, -100)})
    return made


def next_token(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """What transformers means by labels: position t predicts label t + 1."""
    logits, targets = model(batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"), (targets != -100).sum()


CASES = (
    Case(
        "a module and a loss of one's own",
        Forecast,
        forecasts,
        lambda model, batch: weighted_error(forecast(model, batch), batch),
        lambda groups: torch.optim.SGD(groups, lr=0.2, momentum=0.9),
        clip=0.0,
        engine={"forward": forecast, "loss": weighted_error},
    ),
    Case(
        "transformers Llama",
        llama,
        texts,
        next_token,
        lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)),
        clip=0.3,
        engine={},
    ),
)


# -- the two sides ----------------------------------------------------------------------------------------------------

#: Loss, gradient norm before clipping, parameters after the update.
Step = tuple[float, float, dict[str, Tensor]]


def plain(model: nn.Module, case: Case, decay: float) -> Iterator[Step]:
    """The whole batch in one process."""
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed, others = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
    optimizer = case.optimizer([{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}])
    for batch in case.batches():
        optimizer.zero_grad()
        total, count = case.loss(model, batch)
        loss = total / count
        loss.backward()
        for parameter in trained:
            if parameter.grad is None:  # of a part that did not run: no gradient is a zero gradient
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(trained, case.clip or torch.inf)
        optimizer.step()
        yield loss.item(), norm.item(), {name: p.detach().clone() for name, p in model.named_parameters()}


def ours(model: nn.Module, case: Case, job: stretto.Job) -> Iterator[Step]:
    """The engine, on all ranks; parameters on rank 0."""
    with stretto.Engine(model, job, optimizer=case.optimizer, **case.engine) as engine:
        for batch in case.batches():
            report = engine.step(batch)
            yield report.loss, report.grad_norm, {name: tensor for name, tensor in engine.full_state() if tensor is not None}


def worst_error(case: Case, stage: int) -> float:
    """The largest relative error of a case, on rank 0; 0 on the others."""
    rank = int(os.environ["RANK"])
    torch.manual_seed(5 + rank)  # the engine is to give every rank the values of rank 0
    model = case.model()
    reference = copy.deepcopy(model).double()
    rows = {"size": 2 * ROWS, "micro_size": 2}
    job = stretto.Job(mesh=f"dp={RANKS}", zero=stage, precision="fp64", clip=case.clip, schedule="constant", device="cpu", batch=rows)
    worst = 0.0
    truth = plain(reference, case, job.optimizer.weight_decay)
    for loss, norm, parameters in ours(model, case, job):
        if rank == 0:
            true_loss, true_norm, true_parameters = next(truth)
            assert parameters.keys() == true_parameters.keys(), sorted(parameters.keys() ^ true_parameters.keys())
            scalars = [abs(loss - true_loss) / abs(true_loss), abs(norm - true_norm) / abs(true_norm)]
            tensors = [((parameters[name] - value).norm() / value.norm()).item() for name, value in true_parameters.items()]
            worst = max(worst, *scalars, *tensors)
    return worst


def compare() -> float:
    """Every case at every stage, on this rank; prints on rank 0 and returns its largest error."""
    torch.set_num_threads(1)
    worst = 0.0
    for case in CASES:
        for stage in (0, 3):
            error = worst_error(case, stage)
            worst = max(worst, error)
            if os.environ["RANK"] == "0":
                print(f"{case.name}, zero={stage}: {error:.2e}", flush=True)
    if os.environ["RANK"] == "0":
        print(f"maximal relative error: {worst:.3e}", flush=True)
    dist.destroy_process_group()
    return worst


def main() -> int:
    errors = [compare()] if "RANK" in os.environ else stretto.launch(compare, ranks=RANKS)
    return 0 if errors[0] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
