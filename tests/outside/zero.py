"""A training script with DeepSpeed: six steps, saved after the third.

torchrun ... zero.py STAGE FOLDER [KEY=VALUE of zero_optimization] [bf16]
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROWS, STEPS, SAVED = 8, 6, 3


class Net(nn.Module):
    """A tied pair, a frozen layer, a buffer, sizes that 2 does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.mid = nn.Embedding(17, 9), nn.Linear(9, 23), nn.Linear(23, 9)
        self.norm, self.head = nn.LayerNorm(9), nn.Linear(9, 17, bias=False)
        self.head.weight = self.embed.weight
        self.mid.requires_grad_(False)
        self.register_buffer("seen", torch.full((3,), 7.0))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.norm(x + self.mid(torch.tanh(self.up(x)))))


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens [ROWS, 6] of a step and what comes after each."""
    ids = torch.randint(0, 17, (ROWS, 7), generator=torch.Generator().manual_seed(step))
    return ids[:, :-1], ids[:, 1:]


def main(stage: str, folder: str, *keys: str) -> None:
    import deepspeed

    model = net(0)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0}]
    options = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}
    zero = {key: json.loads(value) for key, _, value in (word.partition("=") for word in keys if "=" in word)}
    config = {
        "train_micro_batch_size_per_gpu": ROWS // 2,
        "zero_optimization": {"stage": int(stage), **zero},
        "optimizer": {"type": "AdamW", "params": options},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": "bf16" in keys},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=groups)
    for step in range(STEPS):
        ids, targets = (x.chunk(2)[dist.get_rank()] for x in batch(step))
        loss = nn.functional.cross_entropy(engine(ids).flatten(0, 1).float(), targets.flatten())
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"loss {mean.item() / 2!r}", flush=True)
        if step + 1 == SAVED:
            engine.save_checkpoint(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
