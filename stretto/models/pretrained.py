"""What a Hugging Face folder says of a model: its config.json, and the names that our decoder's tensors have there."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from stretto.anatomy import DecoderShape
from stretto.errors import JobError
from stretto.models.decoder import Decoder

Config = Mapping[str, Any]
#: The key of a config.json that says: these are the weights of our own decoder.
OURS = "stretto_decoder"
#: Modules of our decoder -> those of transformers' Llama.
LLAMA: Mapping[str, str] = MappingProxyType(
    {
        "embed": "model.embed_tokens",
        "norm": "model.norm",
        "head": "lm_head",
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        **{f"attn.{part}": f"self_attn.{part}_proj" for part in "qkvo"},
        **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    }
)
#: Keys of a config.json that change nothing of what is computed in training, or that names and shapes of tensors tell as well.
FREE = frozenset(
    {
        "architectures", "transformers_version", "dtype", "torch_dtype", "tie_word_embeddings", "vocab_size", "initializer_range",
        "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "output_attentions", "output_hidden_states",
        "return_dict", "problem_type", "id2label", "label2id", "is_encoder_decoder", "chunk_size_feed_forward", "pretraining_tp",
        "num_hidden_layers", "n_layer",
    }
)  # fmt: skip
BACK: Mapping[str, str] = MappingProxyType({there: here for here, there in LLAMA.items()})


def config_of(model: nn.Module) -> dict[str, Any]:
    """The config.json with which transformers opens the model's weights. Raises JobError for a model that it does not know."""
    if isinstance(model, Decoder):
        return config_of_shape(model.shape)
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise JobError(
            f"{type(model).__name__} cannot be written as a Hugging Face folder: transformers has no such model; "
            "write a checkpoint (engine.save), whose safetensors files any program can read"
        )
    found: dict[str, Any] = json.loads(config.to_json_string())
    for key in ("_name_or_path", "use_cache"):  # where it came from; and what training switched off
        found.pop(key, None)
    return {**found, "architectures": [type(model).__name__]}


def config_of_shape(shape: DecoderShape) -> dict[str, Any]:
    """The config.json of our decoder: with rope, RMSNorm and SwiGLU it computes what Llama does, element for element. Raises JobError."""
    if (shape.position, shape.norm, shape.mlp) != ("rope", "rms", "swiglu"):
        raise JobError(
            f"a decoder with {shape.position} positions, {shape.norm} norm and {shape.mlp} has no match in transformers; "
            "one with rope, rms and swiglu (tiny, llama3-8b) has; write a checkpoint (engine.save) of others"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.blocks,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "rope_theta": shape.rope_theta,
        "attention_bias": shape.bias,
        "mlp_bias": shape.bias,
        "tie_word_embeddings": shape.tied,
        "initializer_range": shape.init_std,
        "bos_token_id": None,
        "eos_token_id": None,
        OURS: True,
    }


def computes(model: nn.Module) -> dict[str, Any]:
    """What a model computes with its tensors, as far as their names and shapes do not tell it; {} where nothing says so."""
    if isinstance(model, Decoder):
        return decoder_computes(model.shape)
    try:
        config = config_of(model)
    except JobError:
        return {}
    return {key: value for key, value in config.items() if key not in FREE and "drop" not in key}


def decoder_computes(shape: DecoderShape) -> dict[str, Any]:
    """Of our decoder: with the same matrices, heads may be cut in another way."""
    return {name: getattr(shape, name) for name in ("heads", "kv_heads", "head_dim", "position", "norm", "mlp", "norm_eps", "rope_theta")}


def decoder_of(config: Config) -> DecoderShape:
    """The shape of our decoder, by the config.json that `config_of` made of it. Raises JobError for one that lacks something."""
    try:
        return DecoderShape(
            hidden=config["hidden_size"],
            blocks=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            bias=config["attention_bias"],
            tied=config["tie_word_embeddings"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=config["rope_parameters"]["rope_theta"],
            init_std=config["initializer_range"],
        )
    except (KeyError, TypeError) as problem:
        raise JobError(f"config.json says that it is of stretto's decoder and lacks {problem}; copy it again") from None


def name_there(name: str, config: Config) -> str:
    """A tensor's name in the folder, by its name in the model."""
    if OURS not in config:
        return name
    layer = re.fullmatch(r"(layers\.\d+\.)(.+)\.(weight|bias)", name)
    if layer:
        return f"model.{layer[1]}{LLAMA[layer[2]]}.{layer[3]}"
    module, _, kind = name.rpartition(".")
    return f"{LLAMA[module]}.{kind}"


def name_here(name: str, config: Config) -> str:
    """A tensor's name in the model, by its name in the folder. Raises JobError for one that our decoder has not."""
    if OURS not in config:
        return name
    layer = re.fullmatch(r"model\.(layers\.\d+\.)(.+)\.(weight|bias)", name)
    module, _, kind = name.rpartition(".")
    found = BACK.get(layer[2] if layer else module)
    if found is None:
        raise JobError(f"{name} is no tensor of the decoder that config.json describes; remove {OURS!r} from it to read it as any Llama")
    return f"{layer[1]}{found}.{layer[3]}" if layer else f"{found}.{kind}"


def kinds(config: Config) -> tuple[dict[str, tuple[str, ...]], frozenset[str]]:
    """Of the model that a config.json describes: each parameter with the other names of it (tied weights), and persistent buffers.

    Needs transformers, but for our own decoder. Raises JobError.
    """
    if OURS in config:
        return ({"embed.weight": ("head.weight",)} if config["tie_word_embeddings"] else {}), frozenset()
    try:
        import transformers

        known = transformers.AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(known)
    except (ImportError, OSError, ValueError, KeyError) as problem:
        raise JobError(f"config.json cannot be read: {' '.join(str(problem).split())[:300]}; give a causal language model's") from None
    model.tie_weights()
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    kept = set(model.state_dict())
    buffers = frozenset(name for name, _ in model.named_buffers() if name in kept)
    return {first: tuple(others) for first, *others in names.values()}, buffers
