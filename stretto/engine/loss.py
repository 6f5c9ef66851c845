"""How a model is called and what is minimised, where the user says nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.data.batch import NOT_COUNTED, Batch
from stretto.errors import JobError
from stretto.parallel.tensor import Tensors
from stretto.parallel.vocab import vocab_cross_entropy

Forward = Callable[[nn.Module, Batch], Any]
#: (sum of losses, number of targets) of a microbatch. Sums, because only sums over ranks and microbatches mean one thing.
Loss = Callable[[Any, Batch], tuple[Tensor, Tensor | float]]

_LABELS = ("labels", "shift_labels")


def call_model(model: nn.Module, batch: Batch) -> Any:
    """model(**batch) without its labels."""
    return model(**{name: value for name, value in batch.items() if name not in _LABELS})


def next_token_loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each position's next token, summed over the targets that count, and their number.

    output: logits [B, T, V], or an object with such `.logits`. batch["shift_labels"]: [B, T], -100 is not counted.
    """
    logits = logits_of(output)
    targets = batch["shift_labels"]
    if logits.shape[:-1] != targets.shape:
        raise JobError(
            f"logits {list(logits.shape)} do not fit shift_labels {list(targets.shape)}; a next-token loss needs [B, T, V] and [B, T]"
        )
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()  # the sum over the vocabulary needs more than 8 bits
    total = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=NOT_COUNTED, reduction="sum")
    return total, (targets != NOT_COUNTED).sum()


def cut_next_token_loss(tensors: Tensors) -> Loss:
    """next_token_loss of a model whose head gives each rank the logits of its own part of the vocabulary."""
    vocab = tensors.vocab
    assert vocab is not None

    def loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        targets = batch["shift_labels"]
        total = vocab_cross_entropy(logits_of(output), targets, tensors.stream.bridge, vocab, NOT_COUNTED)
        return total, (targets != NOT_COUNTED).sum()

    return loss


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if logits is None:
        raise JobError(f"the model returned a {type(output).__name__} without logits; hand loss=... to Engine")
    return logits  # type: ignore[no-any-return]
