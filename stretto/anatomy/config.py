"""The shape of a model from its config.json, as transformers writes it, without weights and without transformers."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from stretto.anatomy.shape import DecoderShape, Latent
from stretto.errors import JobError


@dataclass(frozen=True)
class Family:
    """What models of one type have that their config.json does not say.

    norms: of a block. biased: matrices with a bias whatever the config says; "*" for all. tied: whether the head is the embedding's
    weight where the config does not say. window: whether sliding_window holds without more being said; every: each n-th block then
    looks back without limit. head_norm: queries and keys are normalised, over each head or over all of them ("all").
    """

    mlp: Literal["swiglu", "gelu"] = "swiglu"
    norm: Literal["rms", "layer"] = "rms"
    position: Literal["rope", "learned"] = "rope"
    norms: int = 2
    biased: tuple[str, ...] = ()
    tied: bool = False
    window: bool = False
    every: int = 0
    head_norm: Literal["", "each", "all"] = ""


_QKV = ("attn.q", "attn.k", "attn.v")

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(),
        "mistral": Family(window=True),
        "ministral": Family(window=True),
        "mixtral": Family(window=True),
        "qwen2": Family(biased=_QKV),
        "qwen2_moe": Family(biased=_QKV),
        "qwen3": Family(head_norm="each"),
        "qwen3_moe": Family(head_norm="each"),
        "gemma": Family(tied=True),
        "gemma2": Family(tied=True, norms=4, window=True, every=2),
        "gemma3_text": Family(tied=True, norms=4, window=True, every=6, head_norm="each"),
        "olmo2": Family(head_norm="all"),
        "granite": Family(),
        "smollm3": Family(),
        "phi3": Family(window=True),
        "deepseek_v2": Family(),
        "deepseek_v3": Family(),
        "gpt_oss": Family(
            window=True, every=2,
            biased=(*_QKV, "attn.o", "mlp.router", "mlp.experts.gate", "mlp.experts.up", "mlp.experts.down"),
        ),
        "starcoder2": Family(mlp="gelu", norm="layer", biased=("*",), tied=True, window=True),
        "gpt2": Family(mlp="gelu", norm="layer", position="learned", biased=("*",), tied=True),
        "gpt_neox": Family(mlp="gelu", norm="layer", biased=("*",)),
    }
)  # fmt: skip

#: What each size is called, the first that is there.
NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "hidden": ("hidden_size", "n_embd", "d_model"),
        "blocks": ("num_hidden_layers", "n_layer"),
        "heads": ("num_attention_heads", "n_head"),
        "vocab": ("vocab_size",),
        "kv_heads": ("num_key_value_heads",),
        "head_dim": ("head_dim",),
        "ffn": ("intermediate_size", "n_inner"),
        "positions": ("max_position_embeddings", "n_positions"),
        "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
        "chosen": ("num_experts_per_tok", "moe_top_k"),
    }
)


def shape_of_folder(name: str) -> DecoderShape:
    """Of a folder with a config.json, of the file itself, or of an id of the hub whose config.json has been fetched before.

    Raises JobError where there is none, or where it does not say enough.
    """
    path = _config_of(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(f'model="hf:{name}": {path} cannot be read ({error}); write a folder that save_pretrained wrote') from None
    if not isinstance(config, dict):
        raise JobError(f'model="hf:{name}": {path} is no table of settings; write a folder that save_pretrained wrote')
    return shape_of_config(config, f'model="hf:{name}"')


def _config_of(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if (path / "config.json").is_file():
        return path / "config.json"
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    stored = sorted(hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json")) if name.count("/") == 1 else []
    if stored:
        return stored[-1]
    raise JobError(
        f'model="hf:{name}": there is no such folder with a config.json, and none of that id was fetched before; write a folder, or fetch '
        f"it alone: hf download {name} config.json"
    )


def shape_of_config(config: Mapping[str, Any], asked: str = "the config") -> DecoderShape:
    """Of the settings of a config.json. asked: what named it, for the message. Raises JobError."""
    config = {**config, **config["text_config"]} if isinstance(config.get("text_config"), Mapping) else config
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES:
        near = difflib.get_close_matches(kind, FAMILIES, n=1)
        raise JobError(
            f"{asked}: plans of model_type {kind!r} are not in this version yet; there are {', '.join(FAMILIES)}; write "
            f"a built-in model of the same sizes{f', or model_type {near[0]!r} in the config' if near else ''}"
        )
    family = FAMILIES[kind]
    hidden, blocks, heads, vocab = (_needed(config, size, asked) for size in ("hidden", "blocks", "heads", "vocab"))
    experts = _number(config, "experts") or 0
    ffn = _number(config, "ffn") or (4 * hidden if family.mlp == "gelu" else 0)
    if not ffn and not experts:
        _needed(config, "ffn", asked)
    window, every = _window(config, family, blocks)
    latent = _latent(config)
    every_bias = family.biased == ("*",)
    return DecoderShape(
        hidden=hidden,
        blocks=blocks,
        heads=heads,
        kv_heads=heads if latent else _number(config, "kv_heads") or heads,
        head_dim=_number(config, "head_dim") or hidden // heads,
        ffn=ffn or 1,
        vocab=vocab,
        positions=_needed(config, "positions", asked) if family.position == "learned" else 0,
        position=family.position,
        norm=family.norm,
        mlp=family.mlp,
        bias=every_bias and config.get("use_bias", True),
        biased=_biased(config, family) if not every_bias else (),
        norms=family.norms,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        head_norm=family.head_norm == "each",
        width_norm=family.head_norm == "all",
        window=window,
        full_every=every,
        latent=latent,
        **_experts(config, experts, blocks, asked),
    )


def _number(config: Mapping[str, Any], size: str) -> int | None:
    found = next((config[name] for name in NAMES[size] if isinstance(config.get(name), int)), None)
    return int(found) if found else None


def _needed(config: Mapping[str, Any], size: str, asked: str) -> int:
    found = _number(config, size)
    if found is None:
        raise JobError(f"{asked}: the config has no {NAMES[size][0]}; write the config.json of the model's own folder")
    return found


def _biased(config: Mapping[str, Any], family: Family) -> tuple[str, ...]:
    """Matrices with a bias."""
    names = [*family.biased]
    if config.get("attention_bias"):
        names += [*_QKV, "attn.o"]
    if config.get("mlp_bias"):
        names += ["mlp.gate", "mlp.up", "mlp.down"]
    return tuple(dict.fromkeys(names))


def _window(config: Mapping[str, Any], family: Family, blocks: int) -> tuple[int, int]:
    """(window, each n-th block without one); the list of layer types says it best."""
    window = config.get("sliding_window") or 0
    if not window or not config.get("use_sliding_window", family.window):
        return 0, 0
    kinds: Sequence[str] | None = config.get("layer_types")
    if kinds:
        full = [n for n, kind in enumerate(kinds, 1) if kind == "full_attention"]
        if len(full) == blocks:
            return 0, 0
        return int(window), full[0] if full else 0
    return int(window), int(config.get("sliding_window_pattern") or family.every)


def _latent(config: Mapping[str, Any]) -> Latent | None:
    if not config.get("kv_lora_rank"):
        return None
    widths = (config.get(name) or 0 for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return Latent(*map(int, widths))


def _experts(config: Mapping[str, Any], experts: int, blocks: int, asked: str) -> dict[str, int]:
    """Fields of a shape with experts; none of a dense one."""
    if not experts:
        return {}
    width = int(config.get("moe_intermediate_size") or _needed(config, "ffn", asked))
    shared = int(config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width)
    dense = int(config.get("first_k_dense_replace") or 0)
    return {
        "experts": experts,
        "chosen": _needed(config, "chosen", asked),
        "expert_ffn": width,
        "shared_ffn": shared,
        "dense_blocks": min(dense, blocks),
    }
