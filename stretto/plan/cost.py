"""Seconds of one microbatch through a part of the model on one rank, forward and backward.

What parts are made of is said in anatomy, and which collective a crossing of tp is in layout/transition.py: this file only
prices them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from stretto.anatomy import Matmul, Part, Pass, Scores
from stretto.layout.transition import TRANSITIONS, Have, Want
from stretto.plan.hardware import Cluster
from stretto.plan.kernels import Kernels
from stretto.plan.setting import Setting, dtype_bytes
from stretto.plan.software import Software
from stretto.plan.traffic import Seats, collective_seconds

#: How sharply the slower of host and device decides: kernels of unequal length make a queue that runs dry now and then.
SHARP = 8
#: The fused softmax of 2021 serves scores by fours of matrices; for others the host takes as many times as long.
FOURS, SLOWER_HOST = 4, 1.4
#: Kernels of a pass that is not fused. Host time of a part that is no block, beside a block's.
STEPS, SMALL = 4.0, 0.25
#: Bytes moved for a logit by the loss, forward and backward.
LOSS_BYTES = {"fused": (4, 4), "compiled": (8, 8), "eager": (22, 18)}
#: Shares of a residual sum's traffic that dropout adds, forward and backward.
DROPPED = (1 / 6, 5 / 6)


class Work(NamedTuple):
    """Seconds of one pass of a part on one rank. compute: kernels; crossing: collectives of tp, cp and ep that computation waits
    for; beside: collectives that run beside it; host: issuing it all."""

    compute: float = 0.0
    crossing: float = 0.0
    beside: float = 0.0
    host: float = 0.0

    def __add__(self, other: object) -> Work:
        assert isinstance(other, Work)
        return Work(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, count: float) -> Work:
        """Of so many parts that are alike."""
        return Work(*(count * each for each in self))

    @property
    def seconds(self) -> float:
        """What is seen from outside: the host runs ahead of the device unless it is the slower one."""
        device = max(self.compute, self.beside) + self.crossing
        return float((device**SHARP + self.host**SHARP) ** (1 / SHARP))


@dataclass
class Costs:
    """Prices of one setting on one cluster with one stack; each part is priced once.

    known: prices that were found before; settings that differ in recompute alone may share them.
    """

    setting: Setting
    cluster: Cluster
    software: Software
    known: dict[tuple[str, str], Work] = field(default_factory=dict)
    _products: dict[Matmul, tuple[float, float, float]] = field(default_factory=dict)

    @cached_property
    def kernels(self) -> Kernels:
        return Kernels(self.cluster.device, self.setting.compute, self.setting.bytes_, self.software.narrow)

    @cached_property
    def narrow(self) -> bool:
        """Whether products are of 8- or 4-bit floats, cast from 16 bits and back."""
        return self.setting.compute in ("fp8", "fp4")

    # -- parts -----------------------------------------------------------------------------------------------------

    def forward(self, part: Part) -> Work:
        return self._once("F", part)

    def backward(self, part: Part) -> Work:
        return self._once("B", part)

    def pair(self, part: Part) -> tuple[Work, Work]:
        """Forward and backward."""
        return self.forward(part), self.backward(part)

    def weights(self, part: Part) -> float:
        """The half of a backward that nobody waits for: gradients of weights."""
        return self._once("W", part).compute

    def _once(self, kind: str, part: Part) -> Work:
        """F, B or W of a part; G is the B of which nothing is made again."""
        mode = self.setting.recompute
        key = (f"{kind} {mode}" if kind == "B" else f"{kind} {mode == 'full'}" if kind == "G" else kind, part.name)
        if key not in self.known:
            self.known[key] = {"F": self._forward, "B": self._backward, "G": self._gradients, "W": self._weights}[kind](part)
        return self.known[key]

    def _backward(self, part: Part) -> Work:
        """With recompute what was not kept is computed again first."""
        return self._once("G", part) + self._again(part)

    def _weights(self, part: Part) -> Work:
        return Work(sum(self._matmul(matmul)[2] for matmul in part.matmuls))

    def _forward(self, part: Part) -> Work:
        products = sum(self._matmul(matmul)[0] for matmul in part.matmuls)
        compute = products + sum(self._pass(p)[0] for p in part.passes)
        crossing, beside = self._hidden(self._crossings(part)[0], products)
        if part.scores:
            compute += self._scores(part.scores)[0]
            crossing += self._rows(part.scores)[0]
        if part.name == "head":
            compute += self._loss(part)[0]
        return Work(compute, crossing, beside, self._host(part))

    def _gradients(self, part: Part) -> Work:
        """The gradients of inputs and of weights."""
        inputs, weights = (sum(self._matmul(matmul)[i] for matmul in part.matmuls) for i in (1, 2))
        compute = inputs + weights + sum(self._pass(p)[1] for p in part.passes)
        crossing, beside = self._hidden(self._crossings(part)[1], inputs + weights)
        if self.software.tensor == "overlap":  # the input is gathered beside its gradient's product, that is reduced beside the weight's
            beside = min(self._enters(part)[1], weights) + min(self._regathers(part), inputs)
            crossing -= beside
        if part.scores:
            compute += self._scores(part.scores)[1]
            crossing += self._rows(part.scores)[1]
        if part.name == "head":
            compute += self._loss(part)[1]
        return Work(compute, crossing, beside, self._host(part) * self.software.host_backward)

    def _again(self, part: Part) -> Work:
        """What recompute does in backward."""
        mode = self.setting.recompute if part.is_block else "none"
        if mode == "full":
            return self._once("F", part)
        if mode == "none":
            return Work()
        if self.software.attention == "scores":  # selective then means the scores alone (Korthikanti et al. 2022)
            return Work(self._scores(part.scores)[0] if part.scores else 0.0)
        compute = sum(self._pass(p)[0] for p in part.passes if p.kind in ("norm", "activation"))
        compute += self.software.again * sum(self._matmul(matmul)[0] for matmul in part.matmuls)
        return Work(compute, self._enters(part)[0] if self.software.again else 0.0)

    def _host(self, part: Part) -> float:
        slow = self.software.attention == "scores" and part.scores is not None and not self._by_fours(part.scores)
        return self.software.host * (1.0 if part.is_block else SMALL) * (SLOWER_HOST if slow else 1.0)

    def _hidden(self, crossing: float, products: float) -> tuple[float, float]:
        """(waited for, beside). In a ring crossings are cut in as many pieces as there are ranks: the first waits."""
        if self.software.tensor != "ring" or not crossing:
            return crossing, 0.0
        beside = self.software.ring * min(crossing * (1 - 1 / self.setting.size["tp"]), products)
        return crossing - beside, beside

    # -- one operator ----------------------------------------------------------------------------------------------

    def _matmul(self, matmul: Matmul) -> tuple[float, float, float]:
        """Forward, gradient of the input, gradient of the weight."""
        if matmul not in self._products:
            self._products[matmul] = self._multiplied(matmul)
        return self._products[matmul]

    def _multiplied(self, matmul: Matmul) -> tuple[float, float, float]:
        setting, kernels, tp = self.setting, self.kernels, self.setting.size["tp"]
        rows, count = float(setting.tokens), 1.0
        if matmul.experts > 1:  # the experts here serve tokens of all ep ranks
            count = matmul.experts / setting.size["ep"]
            rows = rows * matmul.chosen / count
        k, n = matmul.inputs / (tp if matmul.cut == "rows" else 1), matmul.outputs / (tp if matmul.cut == "columns" else 1)
        if matmul.cut == "none" and setting.sequence:
            rows /= tp
        sums = dtype_bytes(setting.reduce)
        written = 2 * sums if self.software.accumulate == "fused" else setting.bytes_
        traffic = setting.bytes_ * rows * (k + n) + written * k * n
        weight = kernels.product(n, rows, k, count, traffic)
        if self.software.accumulate == "separate":
            weight += kernels.stream(k * n * count * (setting.bytes_ + 2 * sums))
        return (
            kernels.product(rows, k, n, count) + self._cast(count * (rows * k + k * n / setting.microbatches)),
            kernels.product(rows, n, k, count) + self._cast(count * rows * n),
            weight,
        )

    def _cast(self, elements: float) -> float:
        return self.kernels.stream(self.software.cast * elements) if self.narrow else 0.0

    def _pass(self, p: Pass) -> tuple[float, float]:
        setting = self.setting
        elements = setting.tokens * setting.bytes_ / (setting.size["tp"] if p.cut or setting.sequence else 1)
        fused = p.kind in self.software.fused
        scale, kernels = (1.0, 1.0) if fused else (p.eager / (p.forward + p.backward), STEPS)
        dropped = DROPPED if p.kind == "residual" and self.software.dropout else (0.0, 0.0)
        forward, backward = p.forward * (scale + dropped[0]), p.backward * (scale + dropped[1])
        return self.kernels.stream(elements * forward, kernels), self.kernels.stream(elements * backward, kernels)

    def _scores(self, scores: Scores) -> tuple[float, float]:
        """Attention without its projections, on this rank's heads and queries."""
        setting = self.setting
        heads = scores.heads / setting.size["tp"]
        if self.software.attention == "scores":
            count = heads * setting.micro_size
            return self.kernels.scores(setting.seq_len, scores.key_dim, scores.value_dim, count, self._by_fours(scores))
        flops = scores.flops_per_key / setting.size["tp"] * setting.tokens * scores.keys(setting.seq_len)
        if not self.software.zigzag:
            flops *= 2 - 1 / setting.size["cp"]
        return self.kernels.flash(flops, heads * setting.tokens, setting.seq_len, self.software.attention)

    def _by_fours(self, scores: Scores) -> bool:
        return scores.heads // self.setting.size["tp"] * self.setting.micro_size % FOURS == 0

    def _loss(self, part: Part) -> tuple[float, float]:
        """Cross-entropy on this rank's logits."""
        logits = self.setting.tokens * part.matmuls[0].outputs / self.setting.size["tp"]
        forward, backward = LOSS_BYTES[self.software.loss]
        return self.kernels.stream(logits * forward, 3), self.kernels.stream(logits * backward, 3)

    # -- crossings -------------------------------------------------------------------------------------------------

    def _crossings(self, part: Part) -> tuple[float, float]:
        """Collectives of tp and ep, of one forward and one backward."""
        enters, leaves, visits = self._enters(part), self._leaves(part), self._visits(part)
        return enters[0] + leaves[0] + visits, enters[1] + leaves[1] + visits + self._regathers(part)

    def _regathers(self, part: Part) -> float:
        """Inputs of cut matrices, gathered again for the gradients of their weights."""
        way, made = self.software.regather, self.setting.recompute == "full" and part.is_block
        return self._enters(part)[0] if self.setting.sequence and (way == "always" or (way == "kept" and not made)) else 0.0

    def _enters(self, part: Part) -> tuple[float, float]:
        """Values enter what tp cuts: matrices that share an input enter once."""
        times = sum("columns" in cuts for cuts in self._cut_groups(part))
        return self._border("cut" if self.setting.sequence else "same", "same", times, part)

    def _leaves(self, part: Part) -> tuple[float, float]:
        """Values leave what tp cuts, as sums that are still to be added; so does a looked-up embedding."""
        times = sum("rows" in cuts for cuts in self._cut_groups(part)) + (part.name == "embed")
        return self._border("sum", "cut" if self.setting.sequence else "same", times, part)

    def _border(self, have: Have, want: Want, times: int, part: Part) -> tuple[float, float]:
        seats = Seats.of(self.setting.mesh, ("tp",), self.cluster.per_node)
        if seats.ranks == 1 or not times:
            return 0.0, 0.0
        bytes_ = self.setting.tokens * _hidden_size(part) * self.setting.bytes_
        forward, backward = TRANSITIONS[have, want]
        light = 0.5 if self.narrow and self.software.narrow_gather and forward == "all_gather" else 1.0
        there = collective_seconds(self.cluster, seats, forward, light * bytes_)
        return times * there, times * collective_seconds(self.cluster, seats, backward, bytes_)

    def _cut_groups(self, part: Part) -> list[set[str]]:
        """How the matrices of each group (attn, mlp) of a part are cut."""
        groups: dict[str, set[str]] = {}
        for matmul in part.matmuls:
            if matmul.cut != "none":
                groups.setdefault(matmul.name.rpartition(".")[0], set()).add(matmul.cut)
        return list(groups.values())

    def _rows(self, scores: Scores) -> tuple[float, float]:
        """Keys and values of the other pieces of a row, gathered forward and again backward, their gradients scattered."""
        setting = self.setting
        seats = Seats.of(setting.mesh, ("cp",), self.cluster.per_node)
        if seats.ranks == 1:
            return 0.0, 0.0
        heads = max(1.0, scores.kv_heads / setting.size["tp"])
        bytes_ = setting.micro_size * setting.seq_len * heads * (scores.key_dim + scores.value_dim) * setting.bytes_
        gather = collective_seconds(self.cluster, seats, "all_gather", bytes_)
        return gather, gather + collective_seconds(self.cluster, seats, "reduce_scatter", bytes_)

    def _visits(self, part: Part) -> float:
        """Tokens go to their experts and back, in a forward as in a backward."""
        setting = self.setting
        seats = Seats.of(setting.mesh, ("ep",), self.cluster.per_node)
        routed = next((m for m in part.matmuls if m.experts > 1), None)
        if routed is None or seats.ranks == 1:
            return 0.0
        tokens = setting.tokens / (setting.size["tp"] if setting.sequence else 1)
        return 2 * collective_seconds(self.cluster, seats, "all_to_all", tokens * routed.chosen * routed.inputs * setting.bytes_)


def _hidden_size(part: Part) -> int:
    """Elements of a token where it enters or leaves a part."""
    for matmul in part.matmuls:
        if matmul.cut == "rows":
            return matmul.outputs
    return part.matmuls[0].inputs if part.matmuls else part.weights[0].shape[-1]
