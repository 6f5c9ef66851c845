"""What published sources call things, in our words: their names, stacks, devices, networks and conventions of counting flops."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from stretto.anatomy import Anatomy, DecoderShape
from stretto.plan.devices import device_of
from stretto.plan.hardware import LINKS, Cluster
from stretto.plan.software import STACKS, Software

Row = Mapping[str, str]

#: How a source begins -> its short name.
SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "Narayanan et al. 2021 (arXiv 2104.04473) Table 1": "Narayanan T1",
        "Narayanan et al. 2021 (arXiv 2104.04473) Table 2": "Narayanan T2",
        "Korthikanti": "Korthikanti T5",
        "NVIDIA/Megatron-LM README": "Megatron README H100",
        "NVIDIA/Megatron-LM@5281919420": "Megatron-LM 2020",
        "NVIDIA/Megatron-LM tests": "Megatron-Core CI",
        "bigscience": "BLOOM",
        "VIA-Research/vTrain data/ground_truth_multi": "vTrain multi-node",
        "VIA-Research/vTrain data/ground_truth_single": "vTrain single-node",
        "mosaicml": "llm-foundry",
        "pytorch/torchtitan": "torchtitan",
        "MooreThreads/SimuMax": "SimuMax",
        "huggingface/nanotron": "nanotron",
        "InternLM": "InternEvo",
        "foundation-model-stack": "fms-fsdp",
        "NVIDIA/NeMo docs/source/performance/performance_long": "NeMo long context",
        "NVIDIA/NeMo docs": "NeMo 24.07",
        "NVIDIA/NeMo-Megatron-Launcher": "NeMo launcher",
        "NVIDIA-NeMo/Megatron-Bridge": "Megatron-Bridge",
        "NVIDIA-NeMo/Automodel": "NeMo AutoModel",
        "yanring": "Megatron MoE zoo",
        "AMD-AGI/Primus": "Primus",
        "deepspeedai": "DeepSpeed Azure",
        "THUDM": "GLM-130B",
    }
)

#: How a framework's name begins -> the stack that stands for it.
FRAMEWORKS: Mapping[str, str] = MappingProxyType(
    {
        "Megatron-LM (2020)": "Megatron-LM 2020",
        "Megatron-LM PTD-P": "Megatron-LM 2021",
        "Megatron-LM + DeepSpeed ZeRO-3": "Composer",
        "Megatron-LM 0.14": "Megatron-Core, no overlap",
        "Megatron-LM 285": "Megatron-LM 2022",
        "MegaScale": "Megatron-LM 2022",
        "Megatron-LM": "Megatron-LM 2021",
        "Megatron-Core": "Megatron-Core 2024",
        "Megatron-DeepSpeed": "Megatron-DeepSpeed",
        "LargeScale": "Megatron-DeepSpeed",
        "DeepSpeed": "Composer",
        "Megatron-Bridge": "Megatron-Bridge",
        "NeMo AutoModel": "FSDP, compiled",
        "NeMo": "Megatron-Core 2024",
        "llm-foundry": "Composer",
        "PyTorch FSDP1 (ibm": "FSDP, compiled",
        "PyTorch FSDP": "Composer",
        "nanotron": "nanotron",
        "InternEvo": "InternEvo",
        "Primus": "Megatron-Core 2024",
    }
)

#: What torchtitan's notes say -> the stack.
TORCHTITAN: Mapping[str, str] = MappingProxyType(
    {"float8 rowwise": "FSDP, compiled, rowwise", "async": "FSDP, compiled, async TP", "eager": "FSDP, eager", "": "FSDP, compiled"}
)

#: How a device's name begins -> ours.
GPUS: Mapping[str, str] = MappingProxyType(
    {
        "v100": "v100", "a100-40": "a100-40gb", "a100-80gb pcie": "a100-pcie", "a100": "a100", "a800": "a800", "h100-96": "h100-96gb",
        "h100": "h100", "h800": "h100", "h200": "h200", "gh200": "gh200", "b200": "b200", "b300": "b300", "gb200": "gb200",
        "gb300": "gb300", "mi300x": "mi300x", "mi325x": "mi325x", "mi355x": "mi355x",
    }
)  # fmt: skip

#: What a source says of its network -> the link between machines.
NETWORKS: Mapping[str, str] = MappingProxyType(
    {
        "800 ?Gb/s per node": "hdr4",
        "inter_node_bandwidth 800": "hdr4",
        "4x100Gb RoCE": "edr4",
        "Jean Zay": "edr4",
        "400Gb/s per node": "edr4",
    }
)


def source_of(row: Row) -> str:
    """The name under which a row is scored: its source, and what in the source differs in kind."""
    text, experts, dtype = row["source"], row.get("experts"), row.get("precision", "")
    name = next((short for start, short in SOURCES.items() if text.startswith(start)), re.split(r"[ ,(]", text)[0])
    if name == "Narayanan T2" and row.get("zero_stage") == "3":
        return "ZeRO-3 2021"
    if name == "llm-foundry":
        return f"{name} {row['gpu']}" + (" fp8" if dtype == "fp8" else "")
    if name == "torchtitan":
        return f"{name} {dtype}"
    if name == "Megatron-LM 2020":
        return f"{name} {row['gpu'].split('-')[0]}"
    if experts and name not in ("Megatron MoE zoo",):
        return f"{name} MoE"
    return f"{name} fp4" if dtype.startswith("nvfp4") else name


def stack_of(source: str, row: Row) -> Software:
    """The stack that stands for a row's software. Raises ValueError where none does."""
    if source.startswith("torchtitan"):
        return STACKS[next(stack for words, stack in TORCHTITAN.items() if words in row["notes"])]
    if source.startswith("Korthikanti"):
        return STACKS["Megatron-LM 2022"]
    framework = row.get("framework", "")
    for start, name in FRAMEWORKS.items():
        if framework.startswith(start):
            return STACKS[name]
    raise ValueError(f"how {framework or 'the software'} behaves is not known here")


def cluster_of(row: Row, devices: int) -> Cluster:
    """The machines, with the network that the source states where it is not the device's usual one."""
    text = row["gpu"].lower()
    name = next((ours for start, ours in GPUS.items() if text.startswith(start)), None)
    if name is None:
        raise ValueError(f"the device {row['gpu']} is not known here")
    device = device_of(name)
    per_node = min(device.domain, devices)
    if devices % per_node:
        raise ValueError(f"{devices} devices do not fill machines of {per_node}")
    said = row["notes"] + text
    across = next((link for pattern, link in NETWORKS.items() if re.search(pattern, said)), device.across)
    nodes = devices // per_node
    return Cluster(f"{nodes}x{per_node} {device.name}", device, nodes, per_node, LINKS[device.inside], LINKS[across])


def seconds_of(row: Row, shape: DecoderShape) -> float | None:
    """Seconds of a step, from whichever rate the source gives, by the source's own way of counting flops."""
    if row.get("measured_step_s"):
        return float(row["measured_step_s"])
    devices, seq = int(row["gpus"]), int(row["seq"])
    tokens = int(row["global_batch"]) * seq / devices
    if row.get("measured_tokens_per_s_per_gpu"):
        return tokens / float(row["measured_tokens_per_s_per_gpu"])
    convention = row.get("flops_convention", "")
    model = Anatomy.of_decoder(shape).flops_per_token(seq)
    masked = 2 * shape.heads * shape.head_dim * seq * shape.blocks  # the half of attention that a causal mask hides, forward
    if convention.startswith("Narayanan"):  # with full recompute of blocks, and the masked half
        flops = 4 * (model / 3 + masked) - 2 * shape.hidden * shape.vocab
    elif re.search("non-causal|nanotron", convention, re.IGNORECASE):
        flops = model + 3 * masked
    elif re.search("causal|Megatron model", convention, re.IGNORECASE):
        flops = model
    else:
        return None
    if row.get("measured_tflops_per_gpu"):
        return flops * tokens / (float(row["measured_tflops_per_gpu"]) * 1e12)
    if row.get("measured_mfu_pct"):
        return flops * tokens / (float(row["measured_mfu_pct"]) / 100 * device_of(GPUS[_known(row)]).peak("bf16"))
    return None


def _known(row: Row) -> str:
    return next(start for start in GPUS if row["gpu"].lower().startswith(start))
