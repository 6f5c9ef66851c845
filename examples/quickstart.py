"""A model of your own, trained on two ranks with everything cut (ZeRO 3).

    python examples/quickstart.py
    torchrun --nproc_per_node 2 examples/quickstart.py      # the same, with ranks that torchrun starts
"""

import os

import torch
from torch import nn

import stretto

# device="cpu": two processes of any machine. Leave it out for one GPU a rank.
job = stretto.Job(mesh="dp=2", zero=3, batch={"size": 16, "seq_len": 32}, optimizer={"lr": 3e-3}, steps=40, device="cpu")


class Model(nn.Module):
    """Guesses each next number from the one before it. stretto takes the largest ModuleList as the blocks."""

    def __init__(self, vocab: int = 32, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(4))
        self.head = nn.Linear(width, vocab)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def batch(step: int) -> dict[str, torch.Tensor]:
    """Rows that count on by 3 from a random start. labels are input_ids as they are: the engine shifts them."""
    starts = torch.randint(0, 32, (16, 1), generator=torch.Generator().manual_seed(step))
    ids = (starts + 3 * torch.arange(32)) % 32
    return {"input_ids": ids, "labels": ids}


def main() -> None:
    """What each rank runs. Every rank sees the whole batch and takes its own rows of it."""
    torch.manual_seed(0)
    with stretto.Engine(Model(), job) as engine:  # the first values are those of rank 0
        for step in range(40):
            report = engine.step(batch(step))
            if engine.world.rank == 0 and step % 10 == 0:
                print(f"step {step:2}: loss {report.loss:.4f} over {report.tokens} targets, gradient norm {report.grad_norm:.3f}")
        weights = dict(engine.full_state())  # whole tensors on rank 0, None elsewhere; all ranks must ask
        if engine.world.rank == 0:
            held = engine.bytes_held()["parameters"]
            total = sum(tensor.numel() * tensor.element_size() for tensor in weights.values() if tensor is not None)
            print(f"rank 0 held {held} of {total} bytes of parameters (with padding)")
            print(f"loss {report.loss:.4f}: {'it learned' if report.loss < 0.5 else 'it did not learn'}")


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun has started the ranks: this process is one of them
        main()
    else:
        stretto.launch(main, ranks=2)
