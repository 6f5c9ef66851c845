"""Which parts a model has for pipeline stages, in which order, and what each costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from truth import Small

from stretto.anatomy import DECODERS, Anatomy
from stretto.errors import JobError
from stretto.models.decoder import Decoder
from stretto.models.stages import block_list, stage_items


class Nested(nn.Module):
    """The head stands first, the blocks lie two levels down, and two parameters in no module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 5)
        self.scale = nn.Parameter(torch.ones(4))
        self.inner = nn.Module()
        self.inner.first = nn.Parameter(torch.ones(4))
        self.inner.embed = nn.Embedding(5, 4)
        self.inner.drop = nn.Dropout(0.1)
        self.inner.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.inner.norm = nn.LayerNorm(4)


def names(model: nn.Module, **keys) -> list[str]:
    return [item.name for item in stage_items(model, 8, **keys)]


def published(family: str, **sizes) -> nn.Module:
    usual = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model(family, vocab_size=32, **usual, **sizes)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_parts_stand_in_the_order_of_definition_from_the_outside_in():
    before = ["scale", "head", "inner.first", "inner.embed"]
    assert names(Nested()) == [*before, "inner.layers.0", "inner.layers.1", "inner.norm"]


def test_an_order_of_ones_own_replaces_that_of_definition():
    order = ["inner.embed", "inner.first", "inner.layers", "inner.norm", "scale", "head"]
    assert names(Nested(), order=order) == [*order[:2], "inner.layers.0", "inner.layers.1", *order[3:]]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        (["inner.embed", "inner.layers"], "scale lies in none of the parts .6 parameters in all"),
        (["inner.embed", "head"], "leaves out inner.layers"),
        (["embed", "inner.layers"], "has no module or parameter embed"),
    ],
)
def test_an_order_that_cannot_be_is_refused(order, says):
    with pytest.raises(JobError, match=says):
        stage_items(Nested(), 8, order=order)


def test_a_model_without_a_list_of_blocks_is_refused_with_what_to_write():
    says = r"Sequential has no nn.ModuleList, .*; put its blocks in one, say in which order its modules run with stages=.*, or write a mesh"
    with pytest.raises(JobError, match=says):
        stage_items(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 8)


def test_without_a_list_of_blocks_the_modules_that_are_named_are_what_stages_share():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 5))
    items = stage_items(model, 8, order=["0", "2"])
    assert [(item.name, item.block, item.elements, item.saved) for item in items] == [("0", True, 9, 20), ("2", True, 20, 32)]
    with pytest.raises(JobError, match="0.weight is a parameter, and no stage can begin with one"):
        stage_items(model, 8, order=["0.weight", "2"])
    with pytest.raises(JobError, match="2.weight lies in none of the parts"):
        stage_items(model, 8, order=["0"])


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("llama", ["model.embed_tokens"], ["model.norm", "lm_head"]),
        ("gpt2", ["transformer.wte", "transformer.wpe"], ["transformer.ln_f", "lm_head"]),
        ("gpt_neox", ["gpt_neox.embed_in"], ["gpt_neox.final_layer_norm", "lm_head"]),
    ],
)
def test_a_transformers_model_is_cut_by_its_published_plan_or_its_definition(family, before, after):
    model = published(family)
    assert names(model) == [*before, *(f"{block_list(model)[0]}.{i}" for i in range(2)), *after]


def test_the_work_of_a_decoder_counted_from_its_modules_is_that_of_its_anatomy():
    """Two countings of one model: by formula, and by looking at modules. Those know no heads without a config, hence the difference."""
    shape = DECODERS["tiny"]
    counted = {item.name: item.work for item in stage_items(Decoder(shape, device="meta"), 8, order=["embed", "layers", "norm", "head"])}
    for part in Anatomy.of_decoder(shape).parts:
        scores = 3 * int(part.scores.flops_per_key * part.scores.keys(8)) if part.scores else 0
        assert counted[part.name] == part.flops_per_token(8) - scores


def test_attention_and_windows_are_counted_where_a_config_says_them():
    """REFERENCE C1: 4 T hidden a token for a block's attention, causal halves it; a window lets a query meet w - w^2 / 2T keys."""
    kinds = ["sliding_attention", "full_attention"]
    sliding, full = (
        item.work for item in stage_items(published("gemma3_text", head_dim=8, sliding_window=4, layer_types=kinds), 64) if item.block
    )
    width, length, window = 2 * 8, 64, 4
    assert full - sliding == 3 * 4 * width * (length / 2 - (window - window**2 / (2 * length)))


def test_a_token_goes_through_the_experts_that_are_chosen_for_it():
    sizes = {"moe_intermediate_size": 8, "num_experts_per_tok": 2, "head_dim": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
    few, many = (next(i.work for i in stage_items(published("qwen3_moe", num_experts=n, **sizes), 8) if i.block) for n in (4, 8))
    router = 6 * 16
    assert many - few == 4 * router


def test_full_recompute_costs_blocks_a_forward_more_and_ends_nothing():
    model = Small()
    plain, again = ({i.name: i.work for i in stage_items(model, 8, mode)} for mode in ("none", "full"))
    assert {name: again[name] / work for name, work in plain.items() if work} == {
        **{f"layers.{i}": 4 / 3 for i in range(3)},
        "head": 1.0,
    }
