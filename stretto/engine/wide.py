"""Wide: where a model computes part of its forward in float32 whatever it is given, a float64 check computes it in float64.

Norms and softmaxes of many models do so. Their sums over tokens would differ by float32's rounding between any two cuts, and hide
whatever is smaller; what is checked is whether the sums are the same, not how they are rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stretto.models.stages import block_list


class Wide(TorchFunctionMode):
    """Inside, float64 tensors stay float64 where they are asked to become float32."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        options = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            options = {name: torch.float64 if option is torch.float32 else option for name, option in options.items()}
        return func(*args, **options)


def widen(model: nn.Module) -> None:
    """Let the forwards of the model and of its blocks be wide. Theirs, not all that happens around them: what is computed again in
    backward runs where no mode of the caller's holds. The forward is that of a subclass, so that copies of a module have their own.
    """
    for module in {id(module): module for module in (model, *block_list(model)[1])}.values():
        kind = type(module)
        module.__class__ = type(kind.__name__, (kind,), {"forward": _wide(kind.forward), "__module__": kind.__module__})


def _wide(forward: Any) -> Any:
    @functools.wraps(forward)
    def wide(*args: Any, **kwargs: Any) -> Any:
        with Wide():
            return forward(*args, **kwargs)

    return wide
