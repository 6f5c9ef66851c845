"""The sizes of a model for frameworks that build it themselves: of a built-in decoder, or of a Llama in a folder by its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.anatomy import DecoderShape
from stretto.errors import JobError
from stretto.export.reading import Reading


def outline(asked: Reading, framework: str) -> DecoderShape:
    """The shape to write. Raises JobError where it is not known, or nothing that the framework could build."""
    shape = asked.shape
    name = asked("model.name")
    if shape is None and name.startswith("hf:"):
        shape = _of_folder(Path(name.removeprefix("hf:")))
    if shape is None:
        known = "a built-in decoder, or of hf:FOLDER with the config.json of a Llama"
        raise JobError(
            f"{framework} builds its model itself, from sizes, and those of model={name} are not known; write the name of {known}"
        )
    if shape.planned_only:
        raise JobError(f"model={name} has {shape.planned_only}, which is not exported to {framework} yet; write a dense decoder, as 30m")
    return shape


def _of_folder(folder: Path) -> DecoderShape | None:
    """The shape that a Llama's config.json says (names as in transformers' LlamaConfig, with its defaults); None of other models."""
    try:
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if config.get("model_type") != "llama":
            return None
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        rope = config.get("rope_parameters") or {}
        return DecoderShape(
            hidden=hidden,
            blocks=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            bias=bool(config.get("attention_bias") or config.get("mlp_bias")),
            tied=bool(config.get("tie_word_embeddings")),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=config.get("rope_theta") or rope.get("rope_theta", 10_000.0),
            init_std=config.get("initializer_range", 0.02),
        )
    except (OSError, ValueError, KeyError, AttributeError):
        return None
