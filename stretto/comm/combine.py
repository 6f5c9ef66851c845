"""How values of several ranks become one: always in the same order, so that the result has the same bits on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Each takes two tensors and `out`.
OPERATIONS: dict[str, Callable[..., Tensor]] = {
    **{"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul},
    **{"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor},
}
#: Operations as numbers that are the same in every process.
CODES = {op: code for code, op in enumerate(OPERATIONS)}


def check(x: Tensor, op: str) -> None:
    """Raises ValueError if `op` is not known, or not for this dtype."""
    if op not in OPERATIONS:
        raise ValueError(f"op={op}: use one of {', '.join(OPERATIONS)}")
    if op == "avg" and not x.dtype.is_floating_point:
        raise ValueError(f"op=avg of {x.dtype}: whole numbers have no average; use sum")
    if op in ("and", "or", "xor") and x.dtype.is_floating_point:
        raise ValueError(f"op={op} of {x.dtype}: it combines the bits of whole numbers")


def combine(
    parts: Sequence[Tensor], out: Tensor, op: str = "sum", accumulate: bool = False, spare: Callable[[], Tensor] | None = None
) -> None:
    """out = (or +=) parts[0] op parts[1] op ..., in this order. All are flat and of one size.

    out may be one of the parts. spare: gives memory of that size for results in between; a new tensor if it is not said.
    """
    function, n = OPERATIONS[op], len(parts)
    if n == 2 and not accumulate:
        function(parts[0], parts[1], out=out)
    elif n == 1 and not accumulate:
        if out.data_ptr() != parts[0].data_ptr():
            out.copy_(parts[0])
    elif n == 1:
        out.add_(parts[0])
        return
    else:
        total = spare() if spare else torch.empty_like(parts[0])
        function(parts[0], parts[1], out=total)
        for part in parts[2 : n if accumulate else -1]:
            function(total, part, out=total)
        if accumulate:
            out.add_(total.div_(n) if op == "avg" else total)
            return
        function(total, parts[-1], out=out)
    if op == "avg":
        out.div_(n)
