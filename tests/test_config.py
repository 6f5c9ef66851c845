"""A config.json says what a model is made of: the same parameters, name for name where it matters, as transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stretto.anatomy import Anatomy
from stretto.anatomy.config import FAMILIES, shape_of_config, shape_of_folder
from stretto.errors import JobError

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "vocab_size": 128, "max_position_embeddings": 64, "head_dim": 16,
}  # fmt: skip
#: What a family's config needs beside the sizes.
MORE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "gemma2": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip
#: What it has not.
LACKS = {
    "gpt2": ("num_key_value_heads", "intermediate_size", "head_dim"),
    "gpt_neox": ("num_key_value_heads", "head_dim"),
}
#: Families whose models have weights that no plan needs to tell apart (sinks of attention, gates of shared experts).
INEXACT = {"gpt_oss": "sinks of attention", "qwen2_moe": "a gate of the shared expert", "deepseek_v2": "as deepseek_v3"}


@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - set(INEXACT)))
def test_a_config_has_the_parameters_of_the_model_that_transformers_builds(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    sizes = {name: size for name, size in SIZES.items() if name not in LACKS.get(kind, ())}
    config = transformers.AutoConfig.for_model(kind, pad_token_id=0, **{**sizes, **MORE.get(kind, {})})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    anatomy = Anatomy.of_decoder(shape_of_config(json.loads(config.to_json_string(use_diff=False))))
    assert anatomy.parameters() == sum(p.numel() for p in model.parameters())
    blocks: dict[str, int] = {}
    for name, p in model.named_parameters():
        number = next((word for word in name.split(".") if word.isdigit()), "")
        blocks[number] = blocks.get(number, 0) + p.numel()
    assert [part.parameters for part in anatomy.blocks] == [blocks[str(n)] for n in range(3)]
    ours = sorted(w.shape for w in anatomy.weights() if w.elements and len(w.shape) == 2)
    theirs = sorted(tuple(p.shape) for p in model.parameters() if p.ndim == 2)
    assert kind in ("gpt2", "gpt_neox", "phi3", "mixtral", "qwen3_moe", "deepseek_v3") or ours == theirs  # the others fuse or turn matrices


def test_windows_are_read_from_the_list_of_layers_where_there_is_one() -> None:
    base = {**SIZES, "model_type": "gemma3_text", "sliding_window": 8, "num_hidden_layers": 12}
    kinds = ["full_attention" if n % 6 == 0 else "sliding_attention" for n in range(1, 13)]
    for config in (base, {**base, "layer_types": kinds}):
        shape = shape_of_config(config)
        assert (shape.window, shape.full_every) == (8, 6)
        scores = [block.scores for block in Anatomy.of_decoder(shape).blocks]
        assert [one.window for one in scores if one] == [0 if n % 6 == 0 else 8 for n in range(1, 13)]
    assert shape_of_config({**base, "model_type": "qwen3", "use_sliding_window": False}).window == 0
    assert shape_of_config({**base, "model_type": "mistral", "layer_types": ["full_attention"] * 12}).window == 0


def test_a_text_config_inside_another_is_the_one_that_counts() -> None:
    inner = {**SIZES, "model_type": "llama"}
    assert shape_of_config({"model_type": "llava", "text_config": inner}) == shape_of_config(inner)


def test_a_folder_a_file_and_an_id_that_was_fetched_name_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({**SIZES, "model_type": "llama"})
    stored = tmp_path / "hub" / "models--owner--name" / "snapshots" / "abc"
    stored.mkdir(parents=True)
    (stored / "config.json").write_text(text)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    shape = shape_of_folder("owner/name")
    assert shape == shape_of_folder(str(stored)) == shape_of_folder(str(stored / "config.json"))
    assert (shape.hidden, shape.kv_heads, shape.ffn) == (64, 2, 96)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "bert"}, "model_type 'bert' are not in this version yet; there are llama"),
        ({"model_type": "lama"}, "or model_type 'llama' in the config"),
        ({"hidden_size": None}, "the config has no hidden_size; write the config.json"),
        ({"intermediate_size": None}, "the config has no intermediate_size"),
        ({"num_local_experts": 4, "model_type": "mixtral"}, "the config has no num_experts_per_tok"),
    ],
)
def test_a_config_without_what_is_needed_is_refused_by_name(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    config = {key: value for key, value in {**SIZES, "model_type": "llama", **change}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(JobError) as refused:
        shape_of_folder(str(tmp_path))
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("text", "said"), [("{", "cannot be read"), ("[]", "no table of settings")])
def test_a_config_that_is_none_is_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(JobError, match=said):
        shape_of_folder(str(tmp_path))
    with pytest.raises(JobError, match="no such folder with a config.json"):
        shape_of_folder(str(tmp_path / "nothing"))
