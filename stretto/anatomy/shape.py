"""The sizes of a decoder, and the decoders that are known by name. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

from stretto.errors import JobError


class Latent(NamedTuple):
    """Attention through compressed queries, keys and values (DeepSeek-V2, "multi-head latent attention").

    query_rank (0: queries are not compressed), kv_rank: widths of what is kept; plain, turned: head widths of queries and keys
    without and with rope; value: head width of values.
    """

    query_rank: int
    kv_rank: int
    plain: int
    turned: int
    value: int


@dataclass(frozen=True)
class DecoderShape:
    """The sizes and choices that make one decoder; wrong combinations raise JobError.

    What models/decoder.py builds, and more that is only planned: experts, windows, compressed attention.
    """

    hidden: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int = 0  # longest sequence that learned positions can number; 0 with rope, which has no limit
    position: Literal["rope", "learned"] = "rope"
    norm: Literal["rms", "layer"] = "rms"
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    bias: bool = False
    biased: tuple[str, ...] = ()  # matrices of a block that have a bias where not all have one, as attn.q
    norms: int = 2  # of a block
    tied: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    init_std: float = 0.02
    dropout: float = 0.0  # share dropped of the embedding and of what each block adds to the residual stream
    attention_dropout: float = 0.0  # share dropped of attention's probabilities, which are then kept, T x T of them
    head_norm: bool = False  # queries and keys are normalised a head
    width_norm: bool = False  # and over all heads together
    experts: int = 0  # MLPs of which each token visits `chosen`; 0 = one MLP for all
    chosen: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0  # width of the MLP that every token visits beside its experts
    dense_blocks: int = 0  # the first blocks, which have an ordinary MLP
    window: int = 0  # keys a query may look back; 0 = all
    full_every: int = 0  # each n-th block looks back without limit, the others through the window; 0 = none
    latent: Latent | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "blocks", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            if getattr(self, name) < 1:
                raise JobError(f"model.{name}={getattr(self, name)}: a decoder needs at least 1")
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise JobError(f"model.{name}={getattr(self, name)}: a share below 1 can be dropped; write 0.1 or 0")
        if self.heads % self.kv_heads:
            fits = ", ".join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)
            raise JobError(f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}; use one of {{{fits}}}")
        if self.position == "rope" and self.head_dim % 2:
            raise JobError(
                f"model.head_dim={self.head_dim} is odd, but rope turns pairs; choose hidden and heads so that hidden / heads is even"
            )
        if self.position == "learned" and self.positions < 1:
            raise JobError(f"model.positions={self.positions}: learned positions need a longest sequence; write the number of tokens")
        if self.experts and not (0 < self.chosen <= self.experts and self.expert_ffn > 0):
            raise JobError(f"model.experts={self.experts} needs model.chosen from 1 to {self.experts} and model.expert_ffn above 0")

    @property
    def planned_only(self) -> str:
        """What of this shape models/decoder.py cannot build yet, in words; "" where it can build all."""
        asks = {
            "experts": self.experts,
            "a window": self.window,
            "latent attention": self.latent,
            "normed heads": self.head_norm or self.width_norm,
            "other norms": self.norms != 2,
            "some biases": self.biased,
        }
        return " and ".join(name for name, asked in asks.items() if asked)

    def with_(self, overrides: Mapping[str, object]) -> DecoderShape:
        """This shape with some fields replaced; None leaves a field as it is.

        `head_dim` follows hidden / heads where one of them is given and head_dim is not.
        """
        known = {field.name for field in fields(self)}
        given = {name: value for name, value in overrides.items() if value is not None}
        for name in given:
            if name not in known:
                raise JobError(f"model.{name} is not a size of a built-in decoder; they are {', '.join(sorted(known))}")
        if {"hidden", "heads"} & given.keys() and "head_dim" not in given:
            hidden, heads = (int(str(given.get(name, getattr(self, name)))) for name in ("hidden", "heads"))
            if heads < 1 or hidden % heads:
                raise JobError(f"model.heads={heads} does not divide model.hidden={hidden}; change one of them or give model.head_dim")
            given["head_dim"] = hidden // heads
        return replace(self, **given)  # type: ignore[arg-type]  # __post_init__ judges the values


DECODERS: Mapping[str, DecoderShape] = MappingProxyType(
    {
        # at this width 0.02 keeps the blocks silent for long: loss 2.1 after 300 steps, and 1.7 from 0.05
        "tiny": DecoderShape(hidden=128, blocks=8, heads=4, kv_heads=2, head_dim=32, ffn=384, vocab=256, init_std=0.05),
        "30m": DecoderShape(
            hidden=512, blocks=8, heads=8, kv_heads=8, head_dim=64, ffn=2048, vocab=8192, positions=256, position="learned", mlp="gelu"
        ),
        "120m": DecoderShape(
            hidden=896, blocks=12, heads=14, kv_heads=14, head_dim=64, ffn=3584, vocab=8192, positions=256, position="learned", mlp="gelu"
        ),
        "gpt2-small": DecoderShape(
            hidden=768, blocks=12, heads=12, kv_heads=12, head_dim=64, ffn=3072, vocab=50257, positions=1024,
            position="learned", norm="layer", mlp="gelu", bias=True, tied=True,
        ),
        "llama3-8b": DecoderShape(
            hidden=4096, blocks=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256, rope_theta=500_000.0
        ),
        "llama3-70b": DecoderShape(
            hidden=8192, blocks=80, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocab=128256, rope_theta=500_000.0
        ),
        "llama3-405b": DecoderShape(
            hidden=16384, blocks=126, heads=128, kv_heads=8, head_dim=128, ffn=53248, vocab=128256, rope_theta=500_000.0
        ),
        # of Llama 2 7B
        "6.7b": DecoderShape(hidden=4096, blocks=32, heads=32, kv_heads=32, head_dim=128, ffn=11008, vocab=32000),
        "mixtral-8x7b": DecoderShape(
            hidden=4096, blocks=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=32000, rope_theta=1_000_000.0,
            experts=8, chosen=2, expert_ffn=14336,
        ),
    }
)  # fmt: skip
