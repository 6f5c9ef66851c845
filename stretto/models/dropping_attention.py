"""Attention of transformers models that drop some of its probabilities, with a dropout that is handed in.

They call what is registered under the name that their config has. Where nothing is dropped the call goes to torch's fused attention, as
it would by itself; else it is written out, since the fused one draws masks of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from stretto.errors import JobError
from stretto.models.attention import causal_bias, written_out

NAME = "stretto"
#: How configs call the share of probabilities that is dropped.
SHARES = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
#: What a call may ask for that is not written out here.
UNKNOWN = ("softcap", "s_aux", "position_bias")
#: The attribute of an attention module that holds its dropout: (probabilities, share) -> probabilities.
HELD = "stretto_dropout"


def attention_share(model: nn.Module) -> float:
    """The share of attention's probabilities that a transformers model drops by a function while it trains; 0 for any other model."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "_attn_implementation"):
        return 0.0
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return max((float(getattr(text, name, 0.0) or 0.0) for name in SHARES), default=0.0)


def hand_in(model: nn.Module, dropout_of: Callable[[str], Callable[[Tensor, float], Tensor]]) -> None:
    """Let every attention of a transformers model drop by what `dropout_of` gives for its name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    for name, module in model.named_modules():
        if any(module.children()):
            setattr(module, HELD, dropout_of(name))
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):  # some have a copy of their own
            config._attn_implementation = NAME


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """What transformers calls. query: [B, heads, T, head_dim]; attention_mask: where to look, None: causal.

    Result: [B, T, heads, head_dim].
    """
    if dropout == 0:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        done: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=0.0, scaling=scaling, is_causal=is_causal, **more
        )
        return done
    asked = [name for name in UNKNOWN if more.get(name) is not None]
    if asked:
        raise JobError(
            f"{type(module).__name__} drops attention's probabilities and has {asked[0]}, which does not go together here; "
            f"set config.{SHARES[0]} to 0"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    bias = causal_bias(query, key) if attention_mask is None and causal else attention_mask
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    dropped = getattr(module, HELD)
    out = written_out(query, key, value, bias, scale, lambda probabilities: dropped(probabilities, dropout))
    return out.transpose(1, 2).contiguous(), None
