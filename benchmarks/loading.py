"""Loading a Hugging Face folder into a mesh: what each rank holds at its most, and what the machine reads.

    python benchmarks/loading.py                # a folder of 1 GB, on tp=2 and on dp=2 with zero=3
    python benchmarks/loading.py --gb 0.2       # a small one

The folder is made for the time of the run: a Llama of random fp32 values in several files. Before each load its pages are dropped from
the system's cache, so that what is read comes from the disk. Memory is RssAnon + RssShmem, looked at all the time; `before` is what the
process held with everything imported. `disk` is what the kernel fetched for the process (read_bytes of /proc/self/io), `asked` what
it asked for of the files, counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import stretto
from stretto.checkpoint.huggingface import Listed, write_folder
from stretto.checkpoint.store import place_of
from stretto.engine.watch import MemoryWatch

WAYS = (("tp=2", 0), ("dp=2", 3))
VOCAB, HIDDEN, FFN, HEADS = 32000, 1024, 2816, 16
SHARD = 300 * 10**6  # bytes a file


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the folder")
    parser.add_argument("--folder", help="where it is made (default: a temporary folder)")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stretto-loading-", dir=asked.folder) as place:
        folder = Path(place) / "model"
        bytes_ = make(folder, int(asked.gb * 10**9))
        found = []
        for mesh, zero in WAYS:
            drop(folder)
            ranks = stretto.launch(load, 2, (str(folder), mesh, zero), timeout=600)
            found.append({"mesh": mesh, "zero": zero, "bytes": bytes_, "ranks": ranks})
            if not asked.json:
                tell(found[-1])
    if asked.json:
        print(json.dumps(found))
    return 0


def make(folder: Path, wanted: int) -> int:
    """Write a Llama of about that many bytes, one tensor at a time; returns the bytes of its tensors."""
    block = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * FFN + 2 * HIDDEN
    blocks = max(1, round((wanted / 4 - 2 * VOCAB * HIDDEN) / block))
    layer = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    layer |= {f"self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkvo"}
    layer |= {"mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(blocks) for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": blocks, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "vocab_size": VOCAB,
        "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False,
    }  # fmt: skip

    def values() -> Iterator[Tensor]:
        for shape in shapes.values():
            yield torch.randn(shape).mul_(0.02)

    listed = [Listed(name, "F32", shape) for name, shape in shapes.items()]
    write_folder(*place_of(folder), config, listed, values(), SHARD)
    return sum(one.bytes_ for one in listed)


def drop(folder: Path) -> None:
    """Take the folder's pages out of the system's cache; they are on the disk."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def load(folder: str, mesh: str, zero: int) -> dict[str, Any]:
    """One rank: the folder becomes an engine, and a step could begin."""
    import torch
    import transformers  # noqa: F401 (before it is measured)

    from stretto.checkpoint.values import FolderValues
    from stretto.comm.transport import World
    from stretto.engine.engine import Engine
    from stretto.job import Job
    from stretto.models import library

    torch.set_num_threads(1)
    job = Job.load({"model": f"hf:{folder}", "mesh": mesh, "zero": zero, "batch": 2, "batch.seq_len": 16, "device": "cpu"})
    world = World.from_environment("cpu")
    kept: list[FolderValues] = []
    made = FolderValues.__init__

    def noted(self: FolderValues, *given: Any) -> None:
        made(self, *given)
        kept.append(self)

    FolderValues.__init__ = noted  # type: ignore[method-assign]
    before, read = private(), disk()
    started = time.perf_counter()
    with MemoryWatch() as watch:
        engine = Engine(library.load(job.model.name), job, world)
    seconds = time.perf_counter() - started
    held = engine.bytes_held()["parameters"]
    asked = sum(values.bytes_read for values in kept)
    return {"seconds": seconds, "before": before, "peak": watch.private_bytes, "parameters": held, "disk": disk() - read, "asked": asked}


def private() -> int:
    """RssAnon + RssShmem of this process."""
    watch = MemoryWatch()
    watch._look()
    return watch.private_bytes


def disk() -> int:
    """Bytes that the kernel has fetched from a disk for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def tell(found: dict[str, Any]) -> None:
    whole, mib = found["bytes"], 2**20
    limit = (whole / 2 + 4e8) / mib
    print(f"\n{found['mesh']} zero={found['zero']}: {whole / mib:.0f} MiB of tensors, half of it + 400 MB is {limit:.0f} MiB")
    for rank, one in enumerate(found["ranks"]):
        figures = ", ".join(f"{name} {one[name] / mib:.0f}" for name in ("before", "peak", "parameters", "disk", "asked"))
        print(f"  rank {rank}: MiB {figures}; {one['seconds']:.2f} s")
    for name in ("disk", "asked"):
        print(f"  {name}, all ranks: {sum(one[name] for one in found['ranks']) / whole:.3f} of the tensors")


if __name__ == "__main__":
    sys.exit(main())
