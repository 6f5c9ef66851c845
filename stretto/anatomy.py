"""What a model is made of: its parts in the order they run, their weights, and what a token costs in each.

The planner prices these numbers and the engine is tested against them, so each formula stands here once.
No torch: a plan is made without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from types import MappingProxyType
from typing import Literal, NamedTuple

from stretto.errors import JobError

Recompute = Literal["none", "selective", "full"]
ALWAYS: frozenset[Recompute] = frozenset(("none", "selective", "full"))
UNLESS_FULL: frozenset[Recompute] = frozenset(("none", "selective"))
ONLY_NONE: frozenset[Recompute] = frozenset(("none",))


# --- the shape of our own decoder -----------------------------------------------------------------


@dataclass(frozen=True)
class DecoderShape:
    """The sizes and choices that make one decoder of models/decoder.py; wrong combinations raise JobError."""

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
    tied: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("hidden", "blocks", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            if getattr(self, name) < 1:
                raise JobError(f"model.{name}={getattr(self, name)}: a decoder needs at least 1")
        if self.heads % self.kv_heads:
            fits = ", ".join(str(n) for n in range(1, self.heads + 1) if self.heads % n == 0)
            raise JobError(f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}; use one of {{{fits}}}")
        if self.position == "rope" and self.head_dim % 2:
            raise JobError(
                f"model.head_dim={self.head_dim} is odd, but rope turns pairs; choose hidden and heads so that hidden / heads is even"
            )
        if self.position == "learned" and self.positions < 1:
            raise JobError(f"model.positions={self.positions}: learned positions need a longest sequence; write the number of tokens")

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
    }
)  # fmt: skip


# --- parts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """One parameter: its name in the model, its shape, and the part it lies in if that part is a block."""

    name: str
    shape: tuple[int, ...]
    block: str | None = None
    trainable: bool = True

    @property
    def elements(self) -> int:
        return prod(self.shape)


class Saved(NamedTuple):
    """One tensor that a forward keeps for its backward.

    width: "compute" as wide as the compute dtype; "statistic" fp32 (fp64 when computing in fp64); "index" int64.
    kept: the recompute modes under which it is kept; under the others it is computed again in backward.
    """

    what: str
    per_token: int  # elements
    kept: frozenset[Recompute]
    width: Literal["compute", "statistic", "index"] = "compute"

    def bytes_per_token(self, bytes_per_element: int) -> int:
        return self.per_token * {"compute": bytes_per_element, "statistic": max(4, bytes_per_element), "index": 8}[self.width]


@dataclass(frozen=True)
class Part:
    """One module that runs once in a forward: a block, or an end of the model."""

    name: str
    weights: tuple[Weight, ...]
    matmul_flops: int = 0  # one token's forward through the weights; a multiply-add is 2
    flops_per_key: int = 0  # one token's forward, for each key its query meets
    saved: tuple[Saved, ...] = ()
    is_block: bool = False

    @property
    def parameters(self) -> int:
        return sum(weight.elements for weight in self.weights)

    def flops_per_token(self, seq_len: int, recompute: Recompute = "none") -> int:
        """Training flops of one token: backward costs two forwards, full recompute of a block one more.

        Causal: a query meets half of the `seq_len` keys on average (Llama 3 and Megatron count it so).
        """
        forward = self.matmul_flops + self.flops_per_key * seq_len // 2
        return forward * (4 if recompute == "full" and self.is_block else 3)

    def saved_bytes_per_token(self, recompute: Recompute, bytes_per_element: int) -> int:
        """Bytes that one token's forward keeps until its backward."""
        return sum(saved.bytes_per_token(bytes_per_element) for saved in self.saved if recompute in saved.kept)


@dataclass(frozen=True)
class Anatomy:
    """A model as its parts, in the order in which a forward runs them. A shared weight is listed where it runs first."""

    parts: tuple[Part, ...]

    @property
    def blocks(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.is_block)

    def weights(self) -> Iterator[Weight]:
        for part in self.parts:
            yield from part.weights

    def parameters(self) -> int:
        """Elements of all parameters, shared ones once."""
        return sum(part.parameters for part in self.parts)

    def flops_per_token(self, seq_len: int, recompute: Recompute = "none") -> int:
        """Training flops of one token; with recompute="none" these are the model flops that MFU counts."""
        return sum(part.flops_per_token(seq_len, recompute) for part in self.parts)

    def work(self, seq_len: int, recompute: Recompute = "none") -> list[tuple[str, int, bool]]:
        """(name, training flops of a token, whether it is a block) of each part: what pipeline stages are balanced by."""
        return [(part.name, part.flops_per_token(seq_len, recompute), part.is_block) for part in self.parts]

    def saved_bytes(self, recompute: Recompute, bytes_per_element: int, rows: int, seq_len: int) -> int:
        """Bytes kept between forward and backward of `rows` sequences; logits and what the loss keeps are not in it."""
        return rows * seq_len * sum(part.saved_bytes_per_token(recompute, bytes_per_element) for part in self.parts)

    @staticmethod
    def of_decoder(shape: DecoderShape) -> Anatomy:
        """The anatomy of models/decoder.py at this shape, without building it; names and shapes are the module's own."""
        hidden, vocab = shape.hidden, shape.vocab
        statistics = NORM_STATISTICS[shape.norm]
        ids = (Saved("token ids", 1, ALWAYS, "index"),)
        positions = Part("positions", (Weight("positions.weight", (shape.positions, hidden)),))
        return Anatomy(
            (
                Part("embed", (Weight("embed.weight", (vocab, hidden)),), saved=ids),
                *((positions,) if shape.position == "learned" else ()),
                *(_block(shape, f"layers.{n}") for n in range(shape.blocks)),
                Part(
                    "norm",
                    _norm(shape, "norm", None),
                    saved=(Saved("input", hidden, ALWAYS), Saved("norm statistics", statistics, ALWAYS, "statistic")),
                ),
                Part(
                    "head",
                    () if shape.tied else (Weight("head.weight", (vocab, hidden)),),
                    matmul_flops=2 * hidden * vocab,
                    saved=(Saved("input", hidden, ALWAYS),),
                ),
            )
        )


# --- one block of our decoder ---------------------------------------------------------------------

NORM_STATISTICS: Mapping[str, int] = MappingProxyType({"rms": 1, "layer": 2})  # 1/rms; mean and 1/deviation
MLP_MATRICES: Mapping[str, tuple[str, ...]] = MappingProxyType({"swiglu": ("gate", "up"), "gelu": ("up",)})  # beside "down"


def _norm(shape: DecoderShape, name: str, block: str | None) -> tuple[Weight, ...]:
    weight = Weight(f"{name}.weight", (shape.hidden,), block)
    return (weight, Weight(f"{name}.bias", (shape.hidden,), block)) if shape.norm == "layer" and shape.bias else (weight,)


def _block(shape: DecoderShape, name: str) -> Part:
    """One block. Weights of the bias-free swiglu one: h(a + 2k)dh + a dh h + 3hf + 2h elements; gelu has 2hf.

    Saved, in units of tokens x hidden elements, with g = kv_heads / heads and r = ffn / hidden, 2 bytes an element:
    swiglu 12 + 4g + 8r, of which selective recompute keeps 8 + 4g + 4r and full recompute 2; beside them the
    log-sum-exp of each head (Korthikanti et al. 2022, redone for RMSNorm, grouped heads and flash attention).
    """
    hidden, ffn = shape.hidden, shape.ffn
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    inner = MLP_MATRICES[shape.mlp]
    linears = {
        "attn.q": (queries, hidden),
        "attn.k": (keys, hidden),
        "attn.v": (keys, hidden),
        "attn.o": (hidden, queries),
        **{f"mlp.{matrix}": (ffn, hidden) for matrix in inner},
        "mlp.down": (hidden, ffn),
    }
    weights = [*_norm(shape, f"{name}.norm1", name), *_norm(shape, f"{name}.norm2", name)]
    for linear, (outputs, inputs) in linears.items():
        weights.append(Weight(f"{name}.{linear}.weight", (outputs, inputs), name))
        if shape.bias:
            weights.append(Weight(f"{name}.{linear}.bias", (outputs,), name))
    return Part(
        name,
        tuple(weights),
        matmul_flops=sum(2 * outputs * inputs for outputs, inputs in linears.values()),
        flops_per_key=4 * queries,
        saved=(
            Saved("input", hidden, ALWAYS),
            Saved("norm1 output", hidden, ONLY_NONE),
            Saved("q", queries, UNLESS_FULL),
            Saved("k and v", 2 * keys, UNLESS_FULL),
            Saved("attention output", queries, UNLESS_FULL),
            Saved("log-sum-exp", shape.heads, UNLESS_FULL, "statistic"),
            Saved("sum after attention", hidden, UNLESS_FULL),  # selective keeps the projection, and adds again
            Saved("norm2 output", hidden, ONLY_NONE),
            Saved(" and ".join(inner), len(inner) * ffn, UNLESS_FULL),
            Saved("activation and product", len(inner) * ffn, ONLY_NONE),
            Saved("norm statistics", 2 * NORM_STATISTICS[shape.norm], ONLY_NONE, "statistic"),
        ),
        is_block=True,
    )
