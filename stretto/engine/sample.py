"""The model writes: tokens drawn one after another. All ranks draw the same, so it works under every cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stretto.data.batch import Batch
from stretto.engine.loss import logits_of

if TYPE_CHECKING:
    from stretto.engine.engine import Engine


def write(engine: Engine, prompt: list[int], length: int, *, seed: int = 0, temperature: float = 0.8, context: int = 128) -> list[int]:
    """`prompt` and `length` more tokens, each drawn from the model's distribution over what follows the last `context`.

    Collective: every rank runs the same forwards on the same tokens. No cache of keys and values: for a look, not for serving.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens, drawn = list(prompt), torch.zeros(1, dtype=torch.int64, device=engine.world.device)
    last = engine.parallel.split.rank_of[-1]

    def draw(output: Any, _: Batch) -> None:
        odds = (logits_of(output)[0, -1].float().cpu() / temperature).softmax(-1)
        drawn.copy_(torch.multinomial(odds, 1, generator=generator))

    was_training = engine.train(False)
    try:
        for _ in range(length):
            row = torch.tensor([tokens[-context:]], device=engine.world.device)
            engine.forward_only([Batch.of({"input_ids": row})], draw, whole=True)
            engine.parallel.pipeline.broadcast(drawn, last, reason="text").wait()
            tokens.append(int(drawn))
    finally:
        engine.train(was_training)
    return tokens
