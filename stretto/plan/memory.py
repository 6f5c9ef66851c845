"""Bytes that each pipeline rank holds, by kind: what lies there between steps, and what a step adds at its fullest moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stretto.anatomy import Matmul, Part, Recompute
from stretto.layout.zero import Kind, held_elements
from stretto.plan.setting import Setting, dtype_bytes
from stretto.plan.software import Software
from stretto.plan.stages import Moment, Stage

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

    def times(self, count: float) -> Share:
        return Share(count * self.dense, count * self.experts)

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


class PartBytes(NamedTuple):
    """What passing one microbatch through a part takes on one rank. saved: until its backward; working: beside that, while it runs;
    gradient: of its largest matrix, on the way into the sums."""

    saved: float
    working: float
    gradient: float


class Sizes:
    """Weights and bytes of parts, each counted once; settings that differ in dp, pp, ZeRO and schedule alone may share them."""

    def __init__(self, setting: Setting, software: Software) -> None:
        self.setting, self.software = setting, software
        self._shares: dict[str, Share] = {}
        self._bytes: dict[str, PartBytes] = {}

    def share(self, part: Part) -> Share:
        """What a rank has of a part's weights."""
        if part.name not in self._shares:
            self._shares[part.name] = share(part, self.setting)
        return self._shares[part.name]

    def bytes_(self, part: Part) -> PartBytes:
        if part.name not in self._bytes:
            self._bytes[part.name] = PartBytes(
                saved_bytes(part, self.setting, self.software, _mode(part, self.setting)),
                working_bytes(part, self.setting, self.software),
                widest_gradient(part, self.setting, self.software),
            )
        return self._bytes[part.name]


def rank_memory(stages: Sequence[Stage], setting: Setting, software: Software, moments: Sequence[Moment], sizes: Sizes) -> Memory:
    """What a pipeline rank with these stages holds. moments: the fullest of its step."""
    policy = setting.policy
    shares = [(sizes.share(part), count) for stage in stages for part, count in stage.kinds]
    held: dict[Kind, float] = {"param": 0.0, "grad": 0.0, "optim": 0.0}
    for each, count in shares:
        dense = held_elements(policy, round(each.dense), setting.shards)
        experts = held_elements(policy, round(each.experts), setting.expert_shards)
        for kind in held:
            held[kind] += count * (dense[kind] + experts[kind])
    master = dtype_bytes(setting.master)
    moments_of_optimizer = {"adamw": 2, "sgd": 0}.get(setting.optimizer, 1)
    separate = setting.master != setting.compute
    largest = max((each.elements for each, _ in shares), default=0.0)
    buffers = software.buckets if policy.stage and setting.bytes_ == 2 else 0.0
    if "param" in policy.cut:
        whole = sum(count * each.elements for each, count in shares)
        buffers += (min(UNITS * largest, whole) if policy.params == "microbatch" else whole) * setting.bytes_
    if policy.gradients == "each" and "grad" in policy.cut:
        buffers += UNITS * largest * dtype_bytes(setting.reduce)
    twice = software.two_gradients and setting.reduce != setting.compute
    return Memory(
        held["param"] * dtype_bytes(setting.compute, 2),
        held["grad"] * (dtype_bytes(setting.reduce) + twice * dtype_bytes(setting.compute, 2)),
        held["optim"] * master * (moments_of_optimizer + separate + (software.wide_part and setting.reduce == "fp16")),
        fullest(stages, setting, software, moments, sizes),
        buffers,
        software.context,
    )


def fullest(stages: Sequence[Stage], setting: Setting, software: Software, moments: Sequence[Moment], sizes: Sizes) -> float:
    """Activation bytes at the fullest moment of the step: microbatches under way, and what the backward of one adds."""
    kept, extra = [], []
    for stage in stages:
        parts = [(sizes.bytes_(part), count) for part, count in stage.kinds]
        kept.append(sum(count * part.saved for part, count in parts) + handed_bytes(stage, setting, software))
        extra.append(max(part.working for part, _ in parts) + max(part.gradient for part, _ in parts))
    return max(sum(n * bytes_ for n, bytes_ in zip(moment.held, kept, strict=True)) + extra[moment.runs] for moment in moments)


def handed_bytes(stage: Stage, setting: Setting, software: Software) -> float:
    """Hidden states that a stage keeps of a microbatch to hand them on."""
    if setting.size["pp"] == 1:
        return 0.0
    hidden = next((part.saved[0].per_token for part, _ in stage.kinds if part.is_block), 0.0)
    return software.keeps * setting.tokens * hidden * setting.bytes_ / (setting.size["tp"] if setting.sequence else 1)


def _mode(part: Part, setting: Setting) -> Recompute:
    return setting.recompute if part.is_block else "none"


def working_bytes(part: Part, setting: Setting, software: Software) -> float:
    """What passing one microbatch through a part needs beside what it keeps: the logits, or a block made again, or gradients."""
    tp, needs = setting.size["tp"], 0.0
    if part.is_block and setting.recompute != "none":
        needs = saved_bytes(part, setting, software, "none") - saved_bytes(part, setting, software, setting.recompute)
    if part.name == "head":
        return setting.tokens * part.matmuls[0].outputs / tp * LOGIT_BYTES[software.loss]
    if part.matmuls:
        widest = max(max(matmul.inputs, matmul.outputs) * matmul.chosen / (tp if matmul.cut != "none" else 1) for matmul in part.matmuls)
        needs += 2 * setting.tokens * widest * setting.bytes_  # its gradient, and that of what it was made from
    return needs


def widest_gradient(part: Part, setting: Setting, software: Software) -> float:
    """The gradient of a block's largest matrix on its way into the sums. Stacks that fuse gate and up have them as one matrix, and
    its gradient is as wide as the sums where the product adds to them."""
    sizes = [matmul.inputs * matmul.outputs for matmul in part.matmuls if part.is_block and matmul.experts == 1]
    gated = any(matmul.name == "mlp.gate" for matmul in part.matmuls)
    fused = software.accumulate == "fused"
    width = dtype_bytes(setting.reduce) if fused else setting.bytes_
    return max(sizes, default=0) * (GATED if fused and gated else 1) / setting.size["tp"] * width
