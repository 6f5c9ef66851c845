"""Wide: where a model computes part of its forward in float32 whatever it is given, a float64 check computes it in float64.

Norms and softmaxes of many models do so. Their sums over tokens would differ by float32's rounding between any two cuts, and hide
whatever is smaller; what is checked is whether the sums are the same, not how they are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


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
