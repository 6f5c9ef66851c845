"""How each model is cut over tp: names of its modules -> styles, as plain words. What the styles do is in parallel/rules.py."""

from __future__ import annotations

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
