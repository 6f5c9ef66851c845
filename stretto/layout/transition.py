"""From how a value lies to how it is wanted, along one axis: the collective of the forward pass and of the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

#: How a value lies along an axis: the same on every rank, cut along a dim, or a summand of the true value on each rank.
Have = Literal["same", "cut", "sum"]
#: alike: the same on every rank, and every rank goes on to do the same with it, so that its gradient arrives whole.
Want = Literal["same", "cut", "alike"]
Collective = Literal["none", "all_reduce", "reduce_scatter", "all_gather", "slice"]

#: (have, want) -> (forward, backward). The backward collective is the transpose of the forward one (REFERENCE D1):
#: a gradient arriving where a value was made `same` from parts is, on each rank, only that rank's share of it.
TRANSITIONS: Mapping[tuple[Have, Want], tuple[Collective, Collective]] = MappingProxyType(
    {
        ("same", "same"): ("none", "all_reduce"),  # f: enters a column-parallel layer
        ("sum", "same"): ("all_reduce", "none"),  # f-bar: leaves a row-parallel layer
        ("cut", "same"): ("all_gather", "reduce_scatter"),  # g: enters, with sequence parallelism
        ("sum", "cut"): ("reduce_scatter", "all_gather"),  # g-bar: leaves, with sequence parallelism
        ("same", "cut"): ("slice", "all_gather"),
        ("cut", "cut"): ("none", "none"),
        ("cut", "alike"): ("all_gather", "slice"),  # g's other end: a reduce-scatter would count each gradient once a rank
    }
)
