"""A training run of megatron-core: six steps, saved after the third as its own training script saves, in format torch_dist.

torchrun ... mcore.py FOLDER MESH ZERO PRECISION NUMBERED
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from stretto.adapters.megatron import Megatron
from stretto.adapters.runner import Setting
from stretto.data.batch import Batch
from stretto.job import Job

STEPS, SAVED = 6, 3
SHAPE = {"name": "tiny", "blocks": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": 64}


def job(mesh: str, **keys: object) -> Job:
    options = {"optimizer.lr": 1e-2, "optimizer.betas": (0.9, 0.95), "optimizer.weight_decay": 0.1, "clip": 1.0, "steps": STEPS}
    return Job.load({"model": SHAPE, "batch": 8, "batch.seq_len": 8, "schedule": "constant"}, mesh=mesh, **options, **keys)


def batch(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (8, 9), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids[:, :-1], "shift_labels": ids[:, 1:]}


def arguments() -> argparse.Namespace:
    """What of its arguments training puts beside the weights."""
    sizes = {"num_layers": 2, "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2, "kv_channels": 8}
    rest = {"ffn_hidden_size": 48, "vocab_size": 64, "padded_vocab_size": 64, "normalization": "RMSNorm", "norm_epsilon": 1e-5}
    flags = {"swiglu": True, "add_bias_linear": False, "rotary_base": 10000, "rotary_percent": 1.0, "apply_layernorm_1p": False}
    return argparse.Namespace(**sizes, **rest, **flags, hidden_size=32, consumed_train_samples=8 * SAVED)


def main(folder: str, mesh: str, zero: str, precision: str, numbered: str) -> None:
    dist.init_process_group("gloo")
    asked = job(mesh, zero=int(zero), precision=precision).resolve(None, "cpu", 0)
    runner = Megatron(Setting(asked, dist.get_rank(), dist.get_world_size(), torch.device("cpu")))
    from megatron.core import dist_checkpointing

    metadata = {
        "non_homogeneous_layers": numbered == "numbered",
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    for step in range(STEPS):
        told = runner.step(Batch.of(batch(step)))
        loss = torch.tensor(told.loss)
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"loss {loss.item()!r}", flush=True)
        if step + 1 == SAVED:
            model = runner.model.module.sharded_state_dict(metadata=metadata)
            state = {"args": arguments(), "checkpoint_version": 3.0, "iteration": SAVED, "model": model}
            state["optimizer"] = runner.optimizer.sharded_state_dict(model, metadata=metadata)
            place = Path(folder) / f"iter_{SAVED:07d}"
            if dist.get_rank() == 0:
                place.mkdir(parents=True)
                (place.parent / "latest_checkpointed_iteration.txt").write_text(str(SAVED))
            dist.barrier()
            dist_checkpointing.save(state, str(place), content_metadata=metadata)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
