"""Bytes that each pipeline rank holds, by kind: what lies there between steps, and what a step adds at its fullest moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stretto.anatomy import Matmul, Part, Recompute
from stretto.layout.zero import Kind, held_elements
from stretto.plan.setting import Setting, dtype_bytes
from stretto.plan.software import Software
from stretto.schedule.action import Schedule

#: Bytes of a logit that the loss keeps or makes on its way: 16 bits and fp32 copies, softmax and gradient (REFERENCE B6).
LOGIT_BYTES = {"fused": 6, "compiled": 12, "eager": 14}
#: Units of parameters that ZeRO 3 holds whole at a time: the one that runs and the one that is fetched.
UNITS = 2


#: What a block keeps that products made; a recompute that repeats products keeps fewer.
PRODUCTS = frozenset({"q", "k and v", "sum after attention", "gate and up", "up"})
#: Tensors that a gated activation makes one after the other; one kernel keeps the last alone.
GATED = 2


class Share(NamedTuple):
    """Elements of a part's weights on one tp and ep rank: those that all dp, cp and ep ranks share, and those of experts, which
    only dp and cp ranks share."""

    dense: float = 0.0
    experts: float = 0.0

    def __add__(self, other: object) -> Share:
        assert isinstance(other, Share)
        return Share(self.dense + other.dense, self.experts + other.experts)

    @property
    def elements(self) -> float:
        return self.dense + self.experts


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. activations: kept for backward at the fullest moment of the step, and what the loss and recompute add to
    them. buffers: whole parameters and gradients that live for a while. context: what the device holds beside tensors."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    context: float

    @property
    def allocated(self) -> float:
        """What the framework's own counter reads at its peak."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def peak(self) -> float:
        """What the device has taken."""
        return self.allocated + self.context


def share(part: Part, setting: Setting) -> Share:
    """What tp and ep leave of a part's weights on one rank."""
    tp, ep = setting.size["tp"], setting.size["ep"]
    cuts: dict[str, Matmul] = {matmul.name: matmul for matmul in part.matmuls}
    dense = experts = 0.0
    for weight in part.weights:
        name = weight.name.removeprefix(f"{part.name}.").removesuffix(".weight").removesuffix(".bias")
        matmul = cuts.get(name)
        cut = part.name in ("embed", "head") or (matmul is not None and matmul.cut != "none")
        elements = weight.elements / (tp if cut else 1)
        if matmul is not None and matmul.experts > 1:
            experts += elements / ep
        else:
            dense += elements
    return Share(dense, experts)


def saved_bytes(part: Part, setting: Setting, software: Software, recompute: Recompute) -> float:
    """What one microbatch's forward through a part keeps until its backward, on one rank."""
    tp = setting.size["tp"]
    total = 0.0
    for saved in part.saved:
        if recompute in saved.kept:
            kept = 1.0
            if saved.what == "activation and product" and "activation" in software.fused:
                kept = 1 / (GATED if any(matmul.name.endswith(".gate") for matmul in part.matmuls) else 1)
            if recompute == "selective" and saved.what in PRODUCTS:
                kept = 1 - software.again
            total += kept * saved.bytes_per_token(setting.bytes_) / (tp if saved.cut or setting.sequence else 1)
    total *= setting.tokens
    if software.dropout and part.is_block and recompute != "full":
        hidden = part.saved[0].per_token
        total += setting.tokens * 2 * hidden / (tp if setting.sequence else 1)  # a byte for each element of two masks
    if software.attention == "scores" and part.scores and recompute == "none":
        square = part.scores.heads / tp * setting.micro_size * setting.seq_len**2
        total += square * (2 * setting.bytes_ + software.dropout)  # softmax and what dropout left of it, and the mask
    return total


def rank_memory(
    stages: Sequence[tuple[int, tuple[Part, ...]]], setting: Setting, software: Software, schedule: Schedule, rank: int
) -> Memory:
    """What pipeline rank `rank` holds. stages: (number, parts) of each of its stages. schedule: the step, long enough to be full."""
    policy = setting.policy
    shares = [share(part, setting) for _, parts in stages for part in parts]

    def held(kind: Kind) -> float:
        return float(
            sum(
                held_elements(policy, round(each.dense), setting.shards)[kind]
                + held_elements(policy, round(each.experts), setting.expert_shards)[kind]
                for each in shares
            )
        )

    master = dtype_bytes(setting.master)
    moments = {"adamw": 2, "sgd": 0}.get(setting.optimizer, 1)
    separate = setting.master != setting.compute
    largest = max((each.elements for each in shares), default=0.0)
    buffers = software.buckets if policy.stage and setting.bytes_ == 2 else 0.0
    if "param" in policy.cut:
        buffers += UNITS * largest * setting.bytes_
    if policy.gradients == "each" and "grad" in policy.cut:
        buffers += UNITS * largest * dtype_bytes(setting.reduce)
    twice = software.two_gradients and setting.reduce != setting.compute
    return Memory(
        held("param") * dtype_bytes(setting.compute, 2),
        held("grad") * (dtype_bytes(setting.reduce) + twice * dtype_bytes(setting.compute, 2)),
        held("optim") * master * (moments + separate + (software.wide_part and setting.reduce == "fp16")),
        fullest(stages, setting, software, schedule, rank),
        buffers,
        software.context,
    )


def fullest(stages: Sequence[tuple[int, tuple[Part, ...]]], setting: Setting, software: Software, schedule: Schedule, rank: int) -> float:
    """Activation bytes at the fullest moment of the step: microbatches under way, and what the backward of one adds."""
    kept = {number: sum(saved_bytes(part, setting, software, _mode(part, setting)) for part in parts) for number, parts in stages}
    if setting.size["pp"] > 1:
        handed = setting.tokens * _hidden(stages) * setting.bytes_ / (setting.size["tp"] if setting.sequence else 1)
        kept = {number: bytes_ + software.keeps * handed for number, bytes_ in kept.items()}
    extra = {number: working_bytes(parts, setting, software) for number, parts in stages}
    now = most = 0.0
    for action in schedule.order[rank]:
        if action.kind == "F":
            now += kept[action.stage]
        if action.kind in ("F", "B", "I", "W"):
            most = max(most, now + extra[action.stage])
        if action.kind in ("B", "W"):
            now -= kept[action.stage]
    return most


def _mode(part: Part, setting: Setting) -> Recompute:
    return setting.recompute if part.is_block else "none"


def _hidden(stages: Sequence[tuple[int, tuple[Part, ...]]]) -> float:
    """Elements of a token's hidden state."""
    return next((part.saved[0].per_token for _, parts in stages for part in parts if part.is_block), 0.0)


def working_bytes(parts: Sequence[Part], setting: Setting, software: Software) -> float:
    """What passing one microbatch through a stage needs beside what it keeps: the logits, or a block made again, or gradients."""
    most = 0.0
    tp = setting.size["tp"]
    for part in parts:
        needs = 0.0
        if part.is_block and setting.recompute != "none":
            needs = saved_bytes(part, setting, software, "none") - saved_bytes(part, setting, software, setting.recompute)
        if part.name == "head":
            needs = setting.tokens * part.matmuls[0].outputs / tp * LOGIT_BYTES[software.loss]
        elif part.matmuls:
            widest = max(
                max(matmul.inputs, matmul.outputs) * matmul.chosen / (tp if matmul.cut != "none" else 1) for matmul in part.matmuls
            )
            needs += 2 * setting.tokens * widest * setting.bytes_  # its gradient, and that of what it was made from
        most = max(most, needs)
    return most + widest_gradient(parts, setting, software)


def widest_gradient(parts: Sequence[Part], setting: Setting, software: Software) -> float:
    """The gradient of the largest matrix on its way into the sums. Stacks that fuse gate and up have them as one matrix, and its
    gradient is as wide as the sums where the product adds to them."""
    sizes = [matmul.inputs * matmul.outputs for part in parts if part.is_block for matmul in part.matmuls if matmul.experts == 1]
    gated = any(matmul.name == "mlp.gate" for part in parts for matmul in part.matmuls)
    fused = software.accumulate == "fused"
    width = dtype_bytes(setting.reduce) if fused else setting.bytes_
    return max(sizes, default=0) * (GATED if fused and gated else 1) / setting.size["tp"] * width
