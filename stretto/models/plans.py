"""How each model is cut over tp: names of its modules -> styles, as plain words. What the styles do is in parallel/rules.py.

transformers models publish plans: `base_model_tp_plan` of the config, for names below the base model, and `_tp_plan` of the class.
They say what is cut; the rest is whole on every rank. Some need more, see OWN.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from stretto.anatomy import DecoderShape

Plan = dict[str, str]


def decoder_plan(shape: DecoderShape) -> Plan:
    """The plan of our own decoder. The stream begins with the embedding, and the last norm is on it."""
    plan = {
        "embed": "embedding_to_stream",
        "layers.*.norm1": "sequence_parallel",
        "layers.*.attn.q": f"colwise:{shape.heads}",
        "layers.*.attn.k": f"shared_colwise:{shape.kv_heads}",
        "layers.*.attn.v": f"shared_colwise:{shape.kv_heads}",
        "layers.*.attn.o": "rowwise",
        "layers.*.norm2": "sequence_parallel",
        "layers.*.mlp.up": "colwise",
        "layers.*.mlp.down": "rowwise",
        "norm": "sequence_parallel",
        "head": "head",
    }
    if shape.mlp == "swiglu":
        plan["layers.*.mlp.gate"] = "colwise"
    if shape.position == "learned":
        plan["positions"] = "positions"
    return plan


# -- transformers ------------------------------------------------------------------------------------------------------


def _gpt2(config: Any) -> Plan:
    """Publishes nothing. q, k and v are one Conv1D, taken apart by `split_size`."""
    heads, each = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    return {
        "h.*.attn": "local:split_size",
        "h.*.attn.c_attn": f"packed_colwise:{','.join([f'{heads}*{each}'] * 3)}",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    }


def _phi3(config: Any) -> Plan:
    """Publishes a plan that computes attention whole on every rank: q, k and v are one layer, taken apart by the config's heads."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    each = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "layers.*.self_attn": "local:num_key_value_heads,config.num_attention_heads",
        "layers.*.self_attn.qkv_proj": f"packed_colwise:{heads}*{each},{kv_heads}*{each},{kv_heads}*{each}",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_up_proj": f"packed_colwise:{config.intermediate_size},{config.intermediate_size}",
        "layers.*.mlp.down_proj": "rowwise",
    }


def _olmo2(config: Any) -> Plan:
    """Its q and k norms are over all heads, so the published plan joins what q, k and v give; what it leaves out is said here."""
    return {**config.base_model_tp_plan, "layers.*.self_attn.q_norm": "alike", "layers.*.self_attn.k_norm": "alike"}


def _gpt_oss(config: Any) -> Plan:
    """Publishes the embedding only. Its experts stay whole: each rank takes its own tokens, or all of them, through all experts."""
    return {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.sinks": f"colwise:{config.num_attention_heads}",
        "layers.*.self_attn.o_proj": "rowwise",
    }


#: model_type -> plan in place of the published one, for names below the base model.
OWN: Mapping[str, Callable[[Any], Plan]] = MappingProxyType({"gpt2": _gpt2, "phi3": _phi3, "olmo2": _olmo2, "gpt_oss": _gpt_oss})
#: Classes that tests hold against one process on every mesh, with our own; a tiny model of any other is proved where the engine starts.
PROVED = frozenset(
    f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3", "Mistral", "Gemma3", "Phi3", "GPTNeoX", "Olmo2", "GptOss")
) | {"GPT2LMHeadModel", "Decoder"}
#: Styles of experts, which only ep cuts. What lies in them stays whole.
EXPERTS = ("moe_tp_experts", "moe_identity_expert", "grouped_gemm", "ep_dispatch_experts")


def transformers_plan(model: nn.Module, tp: int) -> Plan:
    """The plan of a transformers model, complete: heads are counted, the embedding is cut, and the rest is named as whole. {} where
    nothing is published."""
    whole: Any = model
    config = whole.config.get_text_config()
    family = str(config.model_type)
    published = OWN[family](config) if family in OWN else dict(getattr(config, "base_model_tp_plan", None) or {})
    prefix = f"{whole.base_model_prefix}." if hasattr(whole, str(whole.base_model_prefix)) else ""
    cut = {prefix + pattern: style for pattern, style in published.items()} | dict(getattr(type(whole), "_tp_plan", None) or {})
    names = [name for name, _ in (*model.named_modules(remove_duplicate=False), *model.named_parameters(remove_duplicate=False))]
    experts = [pattern for pattern, style in cut.items() if style in EXPERTS]
    cut = {pattern: style for pattern, style in cut.items() if not any(f"{pattern}.".startswith(f"{inside}.") for inside in experts)}
    cut = {pattern: style for pattern, style in cut.items() if any(_means(pattern, name) for name in names)}
    if not cut:
        return {}
    cut = _by_heads(model, cut, config, tp)
    for end, style in ((whole.get_input_embeddings(), "embedding_rowwise"), (whole.get_output_embeddings(), "head")):
        cut.update({name: style for name, module in model.named_modules() if module is end})
    return _rest(model, cut) | cut


def _by_heads(model: nn.Module, cut: Plan, config: Any, tp: int) -> Plan:
    """Attention is cut between heads, of which k and v may have so few that neighbours share one; what attention remembers of that."""
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    units = {"q_proj": f"colwise:{heads}", "query_key_value": f"colwise:{heads}"}
    units |= dict.fromkeys(("k_proj", "v_proj"), f"shared_colwise:{kv_heads}")
    counted = {pattern: units.get(pattern.rpartition(".")[2], style) if style == "colwise" else style for pattern, style in cut.items()}
    remembers = {}
    for pattern, style in counted.items():
        parent, _, leaf = pattern.rpartition(".")
        if leaf == "k_proj" and style != cut[pattern] and tp > kv_heads:
            holders = [module for name, module in model.named_modules() if _means(parent, name)]
            if holders and all(hasattr(module, "num_key_value_groups") for module in holders):
                remembers[parent] = f"local:num_key_value_groups={heads // tp}"
    return counted | remembers


def _rest(model: nn.Module, cut: Plan) -> Plan:
    """What the plan cuts nothing of is whole on every rank."""
    styled = [pattern for pattern, style in cut.items() if not style.startswith("local:")]
    found: Plan = {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        module = name.rpartition(".")[0]
        if not any(_means(pattern, name) or _means(pattern, module) for pattern in styled):
            found[".".join("*" if word.isdigit() else word for word in module.split("."))] = "replicated"
    return found


def _means(pattern: str, name: str) -> bool:
    """Whether the pattern means this name; * stands for one part of it."""
    parts, words = name.split("."), pattern.split(".")
    return len(parts) == len(words) and all(map(fnmatch.fnmatchcase, parts, words))
