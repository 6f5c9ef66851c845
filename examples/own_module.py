"""A classifier of images with a loss of its own: dataset, loader, accuracy, and a check against one process.

    python examples/own_module.py
    torchrun --nproc_per_node 2 examples/own_module.py
    stretto check model='python:examples.own_module:task' batch.size=12 mesh='dp=2' zero=2      # in the folder above
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import stretto

job = stretto.Job(
    mesh="dp=2",
    zero=2,
    batch={"size": 32, "micro_size": 8},  # 16 rows a rank, in 2 forwards
    optimizer={"lr": 1e-2},
    schedule="constant",
    steps=24,
    device="cpu",
)


class Stripes(torch.utils.data.Dataset[Mapping[str, Any]]):
    """Noisy pictures of stripes: lying, standing, or neither. A sample is a mapping of names to tensors or numbers."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed = length, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + i)
        kind = i % 3
        wave = torch.sin(torch.arange(12) * 1.5 + 6 * torch.rand(1, generator=draw))
        picture = (wave[:, None] + torch.zeros(12, 12), wave[None, :] + torch.zeros(12, 12), torch.zeros(12, 12))[kind]
        return {"picture": picture[None] + 0.5 * torch.randn(1, 12, 12, generator=draw), "kind": kind}


def network() -> nn.Module:
    """GroupNorm, not BatchNorm: the statistics of a batch would depend on how many ranks share it."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(400, 3),
    )


def forward(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """How the model is called with a batch."""
    return model(batch["picture"])


def loss(output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    """(sum, count), never a mean: only sums can be added over ranks and microbatches."""
    return F.cross_entropy(output, batch["kind"], reduction="sum"), len(output)


def accuracy(output: Tensor, batch: Mapping[str, Any]) -> Mapping[str, tuple[Tensor, int]]:
    """Metrics too are (sum, count)."""
    return {"accuracy": ((output.argmax(1) == batch["kind"]).sum(), len(output))}


def task() -> stretto.Task:
    """The model and how it is trained, for `stretto check`: with a few batches, since nothing else says what they are."""
    samples = Stripes(36, seed=2)
    batches = [torch.utils.data.default_collate([samples[i] for i in range(start, start + 12)]) for start in (0, 12, 24)]
    return stretto.Task(network(), forward, loss, batches)


def main() -> None:
    """What each rank runs. The loader gives each rank its own rows; one pass over it is an epoch."""
    with stretto.Engine(network(), job, forward=forward, loss=loss) as engine:
        train, test = engine.loader(Stripes(400, seed=0)), engine.loader(Stripes(100, seed=1))
        for epoch in range(2):
            for batch in train:
                report = engine.step(batch)
            result = engine.evaluate(test, metrics=accuracy)  # over the 100 samples, however ranks share them
            if engine.world.rank == 0:
                print(f"epoch {epoch}: loss {report.loss:.4f}, of new pictures {result['loss']:.4f}, right {result['accuracy']:.0%}")
        if engine.world.rank == 0:
            print("it learned" if result["accuracy"] > 0.9 else "it did not learn")


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        stretto.launch(main, ranks=2)
