"""Published runs as settings: a row of a table of measured runs becomes what was asked, and the seconds and bytes that it took.

The columns are listed in docs/validation.md. A row that does not say enough is skipped, with the reason. What a source leaves
open and its stack decides (the width of an MLP, the size of a vocabulary) is filled in here.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType

from stretto.anatomy import Anatomy, DecoderShape, Latent, Recompute
from stretto.errors import JobError
from stretto.layout.mesh import Mesh
from stretto.plan.hardware import Cluster
from stretto.plan.setting import Setting
from stretto.plan.software import Software
from stretto.plan.sources import Row, cluster_of, seconds_of, source_of, stack_of

#: Columns without which a row says too little.
NEEDED = ("source", "gpu", "gpus", "dp", "tp", "pp", "layers", "hidden", "heads", "seq", "global_batch")
#: Columns that a blank cell shares with the rows that agree with it in these.
SHARED: Mapping[str, tuple[str, ...]] = MappingProxyType({"precision": ("source",), "heads": ("source", "hidden", "layers")})
#: Heads of keys and values, and widths of an expert, of models whose rows leave them out, as the runs' own configurations have them.
GROUPED: Mapping[str, int] = MappingProxyType({"llama3_405b": 16})
WIDTHS: Mapping[str, int] = MappingProxyType({"deepseekv2": 1536, "deepseekv3": 2048, "Qwen3_30B": 768, "Qwen3_235B": 1536})
#: Tokens that GPT-2's vocabulary has once it is padded, as Megatron does.
VOCABULARY = 51200
#: How a dtype's name begins -> ours; all others are bf16.
DTYPES: Mapping[str, str] = MappingProxyType({"nvfp4": "fp4", "mxfp8": "fp8", "fp8": "fp8", "fp16": "fp16", "fp32": "fp32"})


@dataclass(frozen=True)
class Run:
    """One measured run. seconds: of a step, None where only memory was told; memory: bytes of the fullest device, None if not told.

    sweep: names the runs that differ in layout alone, so that their order can be compared. oom: whether it ran out of memory.
    of_device: memory is what the device had taken, not what the framework had allocated.
    """

    line: int
    source: str
    sweep: str
    anatomy: Anatomy
    setting: Setting
    cluster: Cluster
    software: Software
    seconds: float | None
    memory: float | None
    oom: bool
    of_device: bool


@dataclass(frozen=True)
class Skipped:
    """A row that cannot be foretold, and why."""

    line: int
    source: str
    why: str


def read_runs(path: Path) -> list[Run | Skipped]:
    """Every row of a table of measured runs, in order. Raises JobError where it is no such table."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path} cannot be read: {error}; write the path of a table of measured runs (CSV)") from None
    missing = [column for column in NEEDED if not rows or column not in rows[0]]
    if missing:
        raise JobError(f"{path} is no table of measured runs: it has no column {missing[0]}; docs/validation.md lists them")
    said = {column: _said(rows, column, alike) for column, alike in SHARED.items()}
    return [_run(line, _completed(row, said)) for line, row in enumerate(rows, 2)]


def _said(rows: Sequence[Row], column: str, alike: Sequence[str]) -> dict[tuple[str, ...], set[str]]:
    """What the rows that agree in `alike` have in a column."""
    found: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        if row.get(column):
            found.setdefault(tuple(row[key] for key in alike), set()).add(row[column])
    return found


def _completed(row: Row, said: Mapping[str, Mapping[tuple[str, ...], set[str]]]) -> Row:
    """A row whose dtype or heads are blank, with what the other rows of its table have, if those agree."""
    found = dict(row)
    for column, alike in SHARED.items():
        others = said[column].get(tuple(row[key] for key in alike), set())
        if not found.get(column) and len(others) == 1:
            found[column] = next(iter(others))
    return found


def _run(line: int, row: Row) -> Run | Skipped:
    source = source_of(row)
    try:
        return _read(line, source, row)
    except (JobError, ValueError) as error:
        return Skipped(line, source, str(error))


def _read(line: int, source: str, row: Row) -> Run:
    for column in NEEDED:
        if not row[column]:
            raise ValueError(f"{column} is not stated")
    shape, stack = _shape(row), stack_of(source, row)
    setting = _setting(row, shape, stack)
    cluster = cluster_of(row, setting.mesh.size)
    seconds = seconds_of(row, shape)
    memory = float(row["measured_mem_gb_per_gpu"]) * 2**30 if row.get("measured_mem_gb_per_gpu") else None
    oom = row["notes"].startswith("OOM")
    if seconds is None and memory is None and not oom:
        raise ValueError("neither time nor memory was measured")
    alike = (source, row["model_name"], row["gpus"], row["seq"], row["global_batch"], shape.hidden, shape.blocks, setting.compute)
    return Run(
        line, source, "|".join(map(str, alike)), Anatomy.of_decoder(shape), setting, cluster, stack, seconds, memory, oom,
        of_device=source in ("BLOOM", "InternEvo"),
    )  # fmt: skip


# --- the setting ----------------------------------------------------------------------------------


def _setting(row: Row, shape: DecoderShape, stack: Software) -> Setting:
    sizes = {axis: _int(row, axis) or 1 for axis in ("pp", "dp", "cp", "tp")}
    devices = int(row["gpus"])
    if prod(sizes.values()) != devices:
        raise ValueError(f"tp x pp x cp x dp is {prod(sizes.values())}, not the {devices} devices")
    core = "Core" in stack.name or "Bridge" in stack.name
    compute = next((ours for start, ours in DTYPES.items() if (row.get("precision") or stack.usual).startswith(start)), "bf16")
    chunks = _int(row, "vpp") or _usual_chunks(sizes["pp"], shape.blocks, core)
    layers = _layers(row, stack, shape.blocks, sizes["pp"] * chunks)
    if shape.blocks < sizes["pp"] * chunks and not layers:
        raise ValueError(f"{shape.blocks} layers do not fill {sizes['pp'] * chunks} stages")
    batch = int(row["global_batch"])
    zero = _int(row, "zero_stage")
    sums = compute if stack.sums_in == "compute" or stack.sums_in == compute else "fp32"
    return Setting(
        _mesh(row, sizes),
        batch,
        min(_int(row, "micro_batch") or 1, -(-batch // sizes["dp"])),
        int(row["seq"]),
        zero=zero if zero is not None else int(core),
        schedule="interleaved" if chunks > 1 else "1f1b",
        chunks=chunks,
        recompute=_recompute(row),
        compute=compute,
        reduce=sums,
        sequence=row.get("sp") == "1" or (not row.get("sp") and core),
        layers=layers,
    )


def _mesh(row: Row, sizes: Mapping[str, int]) -> Mesh:
    """Experts lie on ranks of dp. Where a source cuts the optimizer over fewer ranks than dp has, the rest are copies."""
    island = re.search(r"zero1 group size (\d+)", row["notes"]) or re.search(r"zero1=(\d+)", row["notes"])
    dp = min(int(island[1]), sizes["dp"]) if island else sizes["dp"]
    ep = min(_int(row, "ep") or 1, dp)
    return Mesh.of(pp=sizes["pp"], dp_replicate=sizes["dp"] // dp, dp=dp // ep, cp=sizes["cp"], ep=ep, tp=sizes["tp"])


def _layers(row: Row, stack: Software, blocks: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage where a stack or a source does not cut evenly; () where it does.

    Megatron counts the embedding and the head as a block each where that makes stages equal; a source may say the same, or that
    the last stage has what the others leave.
    """
    each, left = divmod(blocks + 2, stages)
    counts_ends = stack.name == "Megatron-Bridge" or "own pipeline slot" in row["notes"]
    if stages > 2 and blocks % stages and not left and counts_ends:
        return (each - 1, *([each] * (stages - 2)), each - 1)
    most = -(-blocks // stages)
    rest = blocks - most * (stages - 1)
    return (*([most] * (stages - 1)), rest) if "uneven" in row["notes"] and 0 < rest < most else ()


def _usual_chunks(pp: int, blocks: int, core: bool) -> int:
    """Stages a rank where a source does not say: Megatron-Core interleaves if the blocks allow it."""
    if pp == 1 or not core or blocks % pp:
        return 1
    return next((v for v in range(2, blocks // pp + 1) if blocks // pp % v == 0), 1)


def _recompute(row: Row) -> Recompute:
    """As stated; where it is not, flops that are said to include recompute tell it."""
    text = row.get("recompute")
    if text == "full" or (not text and "incl. recompute" in row.get("flops_convention", "")):
        return "full"
    return "selective" if text == "selective" else "none"


# --- the model ------------------------------------------------------------------------------------


def _shape(row: Row) -> DecoderShape:
    """A Llama-like decoder if its MLP is gated, a GPT-like one if not."""
    hidden, heads, experts = int(row["hidden"]), int(row["heads"]), _int(row, "experts") or 0
    gated = row.get("gated_mlp") == "1" or (not row.get("gated_mlp") and bool(experts))
    ffn = _int(row, "ffn_hidden") or (-(-8 * hidden // 3 // 256) * 256 if gated else 4 * hidden)
    width = -(-hidden // heads)
    shape = DecoderShape(
        hidden,
        int(row["layers"]),
        heads,
        _int(row, "kv_heads") or _of_model(row, GROUPED) or heads,
        width + width % 2,
        ffn,
        _int(row, "vocab") or VOCABULARY,
        positions=0 if gated else int(row["seq"]),
        position="rope" if gated else "learned",
        norm="rms" if gated else "layer",
        mlp="swiglu" if gated else "gelu",
        bias=not gated,
        tied=not gated,
    )
    return _with_experts(row, shape, experts) if experts else shape


def _with_experts(row: Row, shape: DecoderShape, experts: int) -> DecoderShape:
    notes = row["notes"]
    stated = re.search(r"moe_ffn=(\d+)", notes)
    width = int(stated[1]) if stated else _of_model(row, WIDTHS) or _int(row, "ffn_hidden")
    chosen = _int(row, "topk")
    if not width or not chosen:
        raise ValueError("how many experts a token visits, or how wide they are, is not stated")
    deepseek = "MLA" in notes or row["model_name"].lower().startswith("deepseek")
    dense = re.search(r"first (\d+) layers dense", notes)
    first = int(dense[1]) if dense else int(deepseek)
    latent = Latent(1536, 512, 128, 64, 128) if deepseek else None
    return replace(shape, experts=experts, chosen=chosen, expert_ffn=width, dense_blocks=first, latent=latent, shared_ffn=width * deepseek)


def _of_model(row: Row, known: Mapping[str, int]) -> int | None:
    return next((size for name, size in known.items() if row["model_name"].startswith(name)), None)


def _int(row: Row, column: str) -> int | None:
    text = row.get(column, "")
    return int(text) if text.isdigit() else None
