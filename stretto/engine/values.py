"""Where the first values of a loaded model come from: seeds, a folder, or the module itself."""

from __future__ import annotations

import copy

import torch
from torch import nn

from stretto.checkpoint.values import FolderValues
from stretto.models.library import Loaded
from stretto.parallel.place import Fill


def values_of(loaded: Loaded, seed: int) -> Fill | None:
    """A loaded model's first values, in the form groups ask for them; None where the module has them. Raises JobError, Damaged."""
    if loaded.stored is not None:
        return FolderValues(loaded.stored.folder, loaded.stored.names)
    give = loaded.initial
    return None if give is None else lambda name, start, out: give(loaded.model, name, out, start, seed)


def whole(loaded: Loaded, seed: int) -> nn.Module:
    """A copy of the loaded model with all its values, for whoever runs it in one process."""
    model, fill = copy.deepcopy(loaded.model), values_of(loaded, seed)
    if fill is None:
        return model
    real: dict[int, nn.Parameter] = {}  # by identity: tied weights stay one
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in real:
                real[id(param)] = nn.Parameter(torch.empty(param.shape, dtype=param.dtype), requires_grad=param.requires_grad)
            module._parameters[name] = real[id(param)]
    with torch.no_grad():
        for name, param in model.named_parameters():
            fill(name, 0, param.data.view(-1))
    return model
