"""How a training stack behaves where stacks differ: what it fuses, what it overlaps, how long its host takes.

A prediction is of one stack. STRETTO is ours. The others stand for published runs, by the generation of software that their
source names, so that `plan --validate` can tell errors of the model of machines from errors of the model of a stack. Flags are
what a source or its code says; the few numbers and where they come from are listed in docs/validation.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

MICRO = 1e-6
#: Kinds of passes over memory (anatomy.Pass) that can each be one kernel.
ALL = frozenset({"norm", "rope", "activation", "residual", "gather", "route"})


@dataclass(frozen=True)
class Software:
    """One stack. Times are seconds, sizes bytes."""

    name: str
    #: "flash" keeps no scores, with a kernel made for the device; "portable" with one of the generation before; "early" with the
    #: first; "scores" writes the whole square of them, the masked half included.
    attention: Literal["flash", "portable", "early", "scores"] = "flash"
    #: Passes that are one kernel each; others are a kernel a step.
    fused: frozenset[str] = ALL
    #: "fused" reads the logits once, "compiled" makes one fp32 copy, "eager" several.
    loss: Literal["fused", "compiled", "eager"] = "eager"
    #: How a weight's gradient meets those of earlier microbatches: in the product itself, in a pass of its own, or never.
    accumulate: Literal["fused", "separate", "none"] = "separate"
    #: Share of the products that recompute="selective" repeats.
    again: float = 0.0
    #: Whether hidden states are dropped out.
    dropout: bool = False

    # -- collectives -----------------------------------------------------------------------------------------------
    #: Reducing gradients beside the backward pass, or after it.
    reduce: Literal["overlap", "after"] = "overlap"
    #: Bringing updated parameters to everybody beside the next forward pass, or before it.
    gather: Literal["overlap", "after"] = "overlap"
    #: Whether cut parameters are fetched for backward ahead of need.
    backward_gather: Literal["overlap", "wait"] = "overlap"
    #: tp: "overlap" runs the all-reduce of an input's gradient beside the weight's, "ring" cuts crossings in pieces inside products.
    tensor: Literal["none", "overlap", "ring"] = "none"
    #: Share of a crossing that "ring" hides.
    ring: float = 0.85
    #: Whether backward gathers the inputs of cut matrices anew (with sequence parallelism); "kept": where they are not made again.
    regather: Literal["never", "kept", "always"] = "never"
    #: Whether a rank waits for its messages to other stages, or computes beside them.
    messages: Literal["overlap", "wait"] = "wait"
    #: With cp, whether ranks have equal shares of a causal row's work; else the last has twice the mean.
    zigzag: bool = True

    # -- 8-bit products --------------------------------------------------------------------------------------------
    #: Bytes moved to cast an element: 6 to seek the largest, read, and write it straight and transposed; less if others do part.
    cast: float = 6.0
    #: Rate beside the device's best.
    narrow: float = 1.0
    #: Whether values are gathered over tp in 8 bits.
    narrow_gather: bool = False

    #: Whether blocks are compiled.
    compiled: bool = False
    #: How a model is cut in stages: as many blocks each, or so that the busiest rank has as little work as can be.
    stages: Literal["even", "work"] = "even"

    # -- gradients and memory --------------------------------------------------------------------------------------
    #: Dtype in which gradients are added; "fp16": that of compute where it is fp16.
    sums_in: Literal["fp32", "compute", "fp16"] = "fp32"
    #: Dtype of compute where a run does not say.
    usual: str = "bf16"
    #: Whether 16-bit gradients stay beside their wider sums.
    two_gradients: bool = False
    #: Whether what a rank updates has a wide gradient of its own beside 16-bit sums (REFERENCE B1, 4 + 16/N).
    wide_part: bool = False
    #: Hidden states that a stage keeps of each microbatch under way, to hand them on.
    keeps: int = 1
    #: Fixed buffers through which a 16-bit run with ZeRO sends.
    buckets: float = 0.0
    #: What the device holds beside tensors: driver, communicators, fragments.
    context: float = 1.5e9

    # -- host ------------------------------------------------------------------------------------------------------
    #: In which Python and the driver issue a block's forward.
    host: float = 300 * MICRO
    #: A backward's beside a forward's.
    host_backward: float = 1.3
    #: Moved by the optimizer for each parameter that a rank updates.
    optimizer_bytes: int = 30


#: Ours, block by block as Python calls it. On a Hopper or Blackwell chip torch's attention is cuDNN's, which is made for it.
STRETTO = Software("stretto", fused=frozenset({"gather"}), regather="kept", messages="overlap", stages="work", host=600 * MICRO)
#: Ours with compile="block": passes become one kernel each, and what a cut layer was given is kept whole.
STRETTO_COMPILED = replace(STRETTO, name="stretto, compiled", compiled=True, fused=ALL, regather="never", host=200 * MICRO)

_MEGATRON_2020 = Software(
    "Megatron-LM 2020", "scores", accumulate="none", reduce="after", gather="after", dropout=True, sums_in="compute"
)  # fmt: skip
_MEGATRON_CORE = Software(
    "Megatron-Core 2024", loss="fused", accumulate="fused", tensor="ring", regather="always", messages="overlap", cast=4.0, host=200 * MICRO
)
_COMPILED = Software(
    "FSDP, compiled", "portable", loss="compiled", again=0.5, zigzag=False, cast=4.0, narrow_gather=True, host=200 * MICRO
)  # fmt: skip
_PLAIN = frozenset({"gather"})

STACKS: Mapping[str, Software] = MappingProxyType(
    {
        software.name: software
        for software in (
            STRETTO,
            STRETTO_COMPILED,
            _MEGATRON_2020,
            replace(_MEGATRON_2020, name="Megatron-LM 2021"),
            replace(_MEGATRON_2020, name="Megatron-LM 2022", tensor="overlap", accumulate="fused", regather="always", sums_in="fp32"),
            replace(
                _MEGATRON_2020, name="Megatron-DeepSpeed", accumulate="separate", sums_in="fp16", usual="fp16", two_gradients=True,
                wide_part=True, keeps=2, buckets=4e9, context=6.5e9, host=950 * MICRO, host_backward=1.8,
            ),
            _MEGATRON_CORE,
            replace(
                _MEGATRON_CORE, name="Megatron-Core, no overlap", tensor="none", messages="wait", reduce="after", gather="after",
                host=1800 * MICRO, host_backward=1.2,
            ),
            replace(_MEGATRON_CORE, name="Megatron-Bridge", cast=3.0, host=100 * MICRO),
            Software("FSDP, eager", "portable", fused=_PLAIN, again=0.5, host=400 * MICRO),
            Software("Composer", "early", fused=_PLAIN, backward_gather="wait", sums_in="compute", host=400 * MICRO),
            _COMPILED,
            replace(_COMPILED, name="FSDP, compiled, async TP", tensor="ring", ring=0.5),
            replace(_COMPILED, name="FSDP, compiled, rowwise", cast=8.0, narrow=0.6, narrow_gather=False),
            Software("nanotron", "portable", fused=_PLAIN | {"norm", "rope"}, reduce="after", gather="after", host=400 * MICRO),
            Software("InternEvo", "portable", reduce="after", gather="after", sums_in="compute", host=300 * MICRO),
        )
    }
)  # fmt: skip
