"""What a model is made of: its parts in the order they run, their weights, and what a token costs in each.

The planner prices these numbers and the engine is tested against them, so each formula stands here once.
No torch: a plan is made without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

Recompute = Literal["none", "selective", "full"]
#: How tensor parallelism may cut something: a matrix by its outputs or inputs; an activation with the heads or the ffn. "none":
#: every tp rank has it whole, or a share of the tokens with sequence parallelism.
Cut = Literal["columns", "rows", "none"]
ALWAYS: frozenset[Recompute] = frozenset(("none", "selective", "full"))
UNLESS_FULL: frozenset[Recompute] = frozenset(("none", "selective"))
ONLY_NONE: frozenset[Recompute] = frozenset(("none",))


@dataclass(frozen=True)
class Weight:
    """One parameter: its name in the model, its shape, and the part it lies in if that part is a block."""

    name: str
    shape: tuple[int, ...]
    block: str | None = None
    trainable: bool = True

    @property
    def elements(self) -> int:
        return prod(self.shape)


class Saved(NamedTuple):
    """One tensor that a forward keeps for its backward.

    width: "compute" as wide as the compute dtype; "statistic" fp32 (fp64 when computing in fp64); "index" int64.
    kept: the recompute modes under which it is kept; under the others it is computed again in backward. cut: whether tensor
    parallelism gives each rank its part of the elements.
    """

    what: str
    per_token: float  # elements; a share where not every token has them
    kept: frozenset[Recompute]
    width: Literal["compute", "statistic", "index"] = "compute"
    cut: bool = False

    def bytes_per_token(self, bytes_per_element: int) -> float:
        return self.per_token * {"compute": bytes_per_element, "statistic": max(4, bytes_per_element), "index": 8}[self.width]


class Matmul(NamedTuple):
    """Every token times one matrix, or times `chosen` of `experts` matrices; a multiply-add is 2 flops."""

    name: str
    inputs: int
    outputs: int
    cut: Cut = "none"
    experts: int = 1
    chosen: int = 1

    @property
    def flops_per_token(self) -> int:
        return 2 * self.inputs * self.outputs * self.chosen


class Scores(NamedTuple):
    """Attention between the projections: each query meets earlier keys, at most `window` of them (0: all)."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0

    @property
    def flops_per_key(self) -> int:
        return 2 * self.heads * (self.key_dim + self.value_dim)

    def keys(self, seq_len: int) -> float:
        """Keys that a query of a row of `seq_len` meets on average, half of them where nothing is out of sight."""
        w = min(self.window or seq_len, seq_len)
        return w - w * w / (2 * seq_len)


class Pass(NamedTuple):
    """Elements a token that an operator without a matrix product moves to and from memory.

    forward, backward: with one kernel an operator; eager: both together where each step of it is a kernel of its own.
    cut: whether tensor parallelism gives each rank its part.
    """

    kind: Literal["norm", "rope", "activation", "residual", "gather", "route", "layout"]
    forward: float
    backward: float
    eager: float
    cut: bool = False


@dataclass(frozen=True)
class Part:
    """One module that runs once in a forward: a block, or an end of the model."""

    name: str
    weights: tuple[Weight, ...]
    matmuls: tuple[Matmul, ...] = ()
    scores: Scores | None = None
    passes: tuple[Pass, ...] = ()
    saved: tuple[Saved, ...] = ()
    is_block: bool = False

    @property
    def parameters(self) -> int:
        return sum(weight.elements for weight in self.weights)

    @property
    def matmul_flops(self) -> int:
        """One token's forward through the matrices."""
        return sum(matmul.flops_per_token for matmul in self.matmuls)

    @cached_property
    def price_key(self) -> tuple[object, ...]:
        """What tells its cost: parts with equal work take equal time and memory."""
        return (self.matmuls, self.scores, self.passes, self.saved, self.is_block)

    def flops_per_token(self, seq_len: int, recompute: Recompute = "none") -> int:
        """Training flops of one token: backward costs two forwards, full recompute of a block one more.

        Causal: a query meets half of the `seq_len` keys on average (Llama 3 and Megatron count it so).
        """
        forward = self.matmul_flops + (int(self.scores.flops_per_key * self.scores.keys(seq_len)) if self.scores else 0)
        return forward * (4 if recompute == "full" and self.is_block else 3)

    def saved_bytes_per_token(self, recompute: Recompute, bytes_per_element: int) -> int:
        """Bytes that one token's forward keeps until its backward."""
        return round(sum(saved.bytes_per_token(bytes_per_element) for saved in self.saved if recompute in saved.kept))
