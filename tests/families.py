"""Tiny transformers models of each family, and `check` as what they are held to."""

from __future__ import annotations

import copy
import itertools

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stretto.comm.threads import run_threads
from stretto.engine import check
from stretto.job import Job
from stretto.layout.mesh import Mesh

EXACT = 1e-10
SIZES = {
    "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 51, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
WINDOWS = {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {**WINDOWS, "final_logit_softcapping": 5.0},
    "phi3": {"num_key_value_heads": 4},
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_neox": {},
    "olmo2": {},
    "gpt_oss": {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def model_of(family: str, tied: bool = False, **sizes):
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **sizes}, tie_word_embeddings=tied, use_cache=False)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def agrees(model, mesh: str, **keys) -> None:
    """`check` finds no difference. By SGD: the gradient of a key's bias is zero but for rounding, and AdamW would make a step of it."""
    usual = {"batch.size": 4, "batch.seq_len": 6, "optimizer": "sgd", "optimizer.lr": 3e-2, "schedule": "constant", "clip": 0.5}
    ranks, told = Mesh.parse(mesh).size, {}
    job = Job.load({**usual, "mesh": mesh}, **keys).resolve(ranks, "cpu", 0, own_model=True)

    def rank(world):
        check.run(job, world, lambda e: told.update(e) if world.rank == 0 else None, steps=2, model=copy.deepcopy(model))

    run_threads(rank, ranks)
    assert told["ok"] and max(value for key, value in told.items() if key.endswith("_error")) <= EXACT, told


def pairwise(cells: list[tuple]) -> list[tuple]:
    """Some of the cells, such that any two values of any two axes meet in one of them."""
    pairs = lambda cell: set(itertools.combinations(enumerate(cell), 2))
    missing, chosen = set().union(*map(pairs, cells)), []
    while missing:
        chosen.append(max(cells, key=lambda cell: len(pairs(cell) & missing)))
        missing -= pairs(chosen[-1])
    return chosen
