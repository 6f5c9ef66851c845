"""How a model is called and what is minimised, where the user says nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.data.batch import NOT_COUNTED, Batch
from stretto.errors import JobError
from stretto.models import library
from stretto.parallel.chunked import HeadLoss
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


def head_of(model: nn.Module, chunk: int, *, own_loss: bool) -> str:
    """The head that is to give the loss itself, `chunk` tokens at a time; "" if none is. own_loss: the loss is next_token_loss.
    Raises JobError where it cannot."""
    if not chunk:
        return ""
    if not own_loss:
        raise JobError("loss_chunk is for the next-token loss of stretto's own, and another loss was given; write loss_chunk=0")
    head = library.head_of(model)
    if not head:
        raise JobError(f"loss_chunk: nothing says which layer of {type(model).__name__} makes logits; write loss_chunk=0")
    return head


def loss_of_head(head: HeadLoss, output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """next_token_loss where the head has given it in place of logits."""
    return head.take(logits_of(output)), (batch["shift_labels"] != NOT_COUNTED).sum()


def logits_of(output: Any) -> Tensor:
    """The logits in what a model returned."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if logits is None:
        raise JobError(f"the model returned a {type(output).__name__} without logits; hand loss=... to Engine")
    return logits  # type: ignore[no-any-return]
