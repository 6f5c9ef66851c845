"""How a model can be cut in pipeline stages: the parts that run one after the other, and how a later stage is called."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from stretto.anatomy import DECODERS, Anatomy, Recompute
from stretto.errors import JobError
from stretto.layout.stages import Item
from stretto.models.decoder import Decoder


@dataclass(frozen=True)
class StagePlan:
    """items: names of modules in the order in which a forward runs them, each once; all parameters are in them.

    A later stage runs the model's own forward, with what the stage before made as `entry` in place of the batch's `replaced`, and
    with positions 0, 1, ... under `positions` if the batch has none.
    """

    items: tuple[Item, ...]
    entry: str = "inputs_embeds"
    replaced: str = "input_ids"
    positions: str = "position_ids"


def stage_plan(model: nn.Module, seq_len: int, recompute: Recompute = "none") -> StagePlan:
    """How `model` can be cut. Raises JobError for a model of which that is not known."""
    if isinstance(model, Decoder):
        shape = model.shape.with_({"blocks": len(model.layers)})
        return StagePlan(tuple(Item(*part) for part in Anatomy.of_decoder(shape).work(seq_len, recompute)))
    known = ", ".join(DECODERS)
    raise JobError(
        f"{type(model).__name__} cannot be cut in pipeline stages in this version yet; write a mesh without pp, "
        f"or a built-in model ({known})"
    )
