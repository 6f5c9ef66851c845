"""A model as its parts, and the parts of a decoder at any shape, without building it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from stretto.anatomy.part import ALWAYS, ONLY_NONE, UNLESS_FULL, Matmul, Part, Pass, Recompute, Saved, Scores, Weight
from stretto.anatomy.shape import DecoderShape


@dataclass(frozen=True)
class Anatomy:
    """A model as its parts, in the order in which a forward runs them. A shared weight is listed where it runs first."""

    parts: tuple[Part, ...]

    @property
    def blocks(self) -> tuple[Part, ...]:
        return tuple(part for part in self.parts if part.is_block)

    @cached_property
    def like(self) -> Mapping[str, Part]:
        """Name of each part -> the first part that takes equal time and memory; the ends of a model are each their own kind."""
        first: dict[object, Part] = {}
        return {part.name: first.setdefault(part.price_key if part.is_block else part.name, part) for part in self.parts}

    def weights(self) -> Iterator[Weight]:
        for part in self.parts:
            yield from part.weights

    def parameters(self) -> int:
        """Elements of all parameters, shared ones once."""
        return sum(part.parameters for part in self.parts)

    def flops_per_token(self, seq_len: int, recompute: Recompute = "none") -> int:
        """Training flops of one token; with recompute="none" these are the model flops that MFU counts."""
        return sum(part.flops_per_token(seq_len, recompute) for part in self.parts)

    def work(self, seq_len: int, recompute: Recompute = "none", bytes_per_element: int = 4) -> list[tuple[str, int, bool, int, int]]:
        """(name, training flops of a token, whether it is a block, elements of its weights, bytes that a token's forward keeps until
        backward) of each part: what pipeline stages are balanced by. The last keeps the logarithms of probabilities too."""
        found = []
        for part in self.parts:
            saved = part.saved_bytes_per_token(recompute if part.is_block else "none", bytes_per_element)
            if part is self.parts[-1] and part.matmuls:
                saved += part.matmuls[-1].outputs * max(4, bytes_per_element)
            found.append((part.name, part.flops_per_token(seq_len, recompute), part.is_block, part.parameters, saved))
        return found

    def saved_bytes(self, recompute: Recompute, bytes_per_element: int, rows: int, seq_len: int) -> int:
        """Bytes kept between forward and backward of `rows` sequences; logits and what the loss keeps are not in it."""
        return rows * seq_len * sum(part.saved_bytes_per_token(recompute, bytes_per_element) for part in self.parts)

    @staticmethod
    def of_decoder(shape: DecoderShape) -> Anatomy:
        """The anatomy of models/decoder.py at this shape, without building it; names and shapes are the module's own."""
        hidden, vocab = shape.hidden, shape.vocab
        statistics = NORM_STATISTICS[shape.norm]
        ids = (Saved("token ids", 1, ALWAYS, "index"),)
        positions = Part("positions", (Weight("positions.weight", (shape.positions, hidden)),), passes=(_residual(hidden),))
        return Anatomy(
            (
                Part(
                    "embed",
                    (Weight("embed.weight", (vocab, hidden)),),
                    passes=(Pass("gather", 2 * hidden, 3 * hidden, 5 * hidden),),
                    saved=ids,
                ),
                *((positions,) if shape.position == "learned" else ()),
                *(_block(shape, n) for n in range(shape.blocks)),
                Part(
                    "norm",
                    _norm(shape, "norm", None),
                    passes=(_normed(hidden, shape.norm),),
                    saved=(Saved("input", hidden, ALWAYS), Saved("norm statistics", statistics, ALWAYS, "statistic")),
                ),
                Part(
                    "head",
                    () if shape.tied else (Weight("head.weight", (vocab, hidden)),),
                    matmuls=(Matmul("head", hidden, vocab, "columns"),),
                    saved=(Saved("input", hidden, ALWAYS),),
                ),
            )
        )


# --- one block of a decoder -----------------------------------------------------------------------

NORM_STATISTICS: Mapping[str, int] = MappingProxyType({"rms": 1, "layer": 2})  # 1/rms; mean and 1/deviation
MLP_MATRICES: Mapping[str, tuple[str, ...]] = MappingProxyType({"swiglu": ("gate", "up"), "gelu": ("up",)})  # beside "down"


def _norm(shape: DecoderShape, name: str, block: str | None) -> tuple[Weight, ...]:
    weight = Weight(f"{name}.weight", (shape.hidden,), block)
    return (weight, Weight(f"{name}.bias", (shape.hidden,), block)) if shape.norm == "layer" and shape.bias else (weight,)


def _normed(width: int, kind: str = "rms") -> Pass:
    """Reads x and writes it normed; backward reads x and the gradient twice (for x and for the weight) and writes one.

    torch has a kernel for LayerNorm; RMSNorm in steps squares, averages, scales and casts.
    """
    return Pass("norm", 2 * width, 5 * width, (7 if kind == "layer" else 20) * width)


def _residual(width: int) -> Pass:
    """x + y; the gradients of the two branches are added in backward."""
    return Pass("residual", 3 * width, 3 * width, 6 * width)


def _mlp(shape: DecoderShape, ffn: int, *, prefix: str = "mlp", experts: int = 1, chosen: int = 1) -> tuple[list[Matmul], Pass]:
    """The matrices of an MLP, and what its activation moves: silu(gate) * up in one kernel reads two and writes one."""
    inner = MLP_MATRICES[shape.mlp]
    matmuls = [Matmul(f"{prefix}.{matrix}", shape.hidden, ffn, "columns", experts, chosen) for matrix in inner]
    matmuls.append(Matmul(f"{prefix}.down", ffn, shape.hidden, "rows", experts, chosen))
    width = ffn * chosen
    moved = (
        Pass("activation", 3 * width, 5 * width, 14 * width, True)
        if len(inner) == 2
        else Pass("activation", 2 * width, 3 * width, 5 * width, True)
    )
    return matmuls, moved


def _attention(shape: DecoderShape) -> tuple[list[Matmul], Scores]:
    hidden, heads, kv_heads, dim = shape.hidden, shape.heads, shape.kv_heads, shape.head_dim
    if shape.latent is None:
        queries, keys = heads * dim, kv_heads * dim
        matmuls = [Matmul(f"attn.{name}", hidden, size, "columns") for name, size in (("q", queries), ("k", keys), ("v", keys))]
        return [*matmuls, Matmul("attn.o", queries, hidden, "rows")], Scores(heads, kv_heads, dim, dim)
    query_rank, kv_rank, plain, turned, value = shape.latent
    into = [Matmul("attn.q_a", hidden, query_rank)] if query_rank else []
    matmuls = [
        *into,
        Matmul("attn.q", query_rank or hidden, heads * (plain + turned), "columns"),
        Matmul("attn.kv_a", hidden, kv_rank + turned),
        Matmul("attn.kv", kv_rank, heads * (plain + value), "columns"),
        Matmul("attn.o", heads * value, hidden, "rows"),
    ]
    return matmuls, Scores(heads, heads, plain + turned, value)


def _block(shape: DecoderShape, n: int) -> Part:
    """Block n. Weights of the bias-free swiglu one: h(a + 2k)dh + a dh h + 3hf + 2h elements; gelu has 2hf.

    Saved, in units of tokens x hidden elements, with g = kv_heads / heads and r = ffn / hidden, 2 bytes an element:
    swiglu 12 + 4g + 8r, of which selective recompute keeps 8 + 4g + 4r and full recompute 2; beside them the
    log-sum-exp of each head (Korthikanti et al. 2022, redone for RMSNorm, grouped heads and flash attention). With experts
    r counts the widths that one token visits, and the tokens handed to and got back from them are kept too (REFERENCE B5).
    """
    name, hidden = f"layers.{n}", shape.hidden
    full = not shape.window or (shape.full_every and (n + 1) % shape.full_every == 0)
    attention, scores = _attention(shape)
    scores = scores._replace(window=0 if full else shape.window)
    queries, keys, values = scores.heads * scores.key_dim, scores.kv_heads * scores.key_dim, scores.kv_heads * scores.value_dim
    mixed = scores.heads * scores.value_dim
    routed = bool(shape.experts) and n >= shape.dense_blocks
    matmuls, passes, ffn = (
        list(attention),
        [*(_normed(hidden, shape.norm) for _ in range(shape.norms)), _residual(hidden), _residual(hidden)],
        0,
    )
    if shape.position == "rope":
        passes.append(Pass("rope", 2 * (queries + keys), 2 * (queries + keys), 16 * (queries + keys), True))
    if shape.head_norm or shape.width_norm:
        passes.append(_normed(queries + keys)._replace(cut=True))
    if not routed:
        more, moved = _mlp(shape, shape.ffn)
        matmuls, passes, ffn = matmuls + more, [*passes, moved], shape.ffn
    else:
        matmuls.append(Matmul("mlp.router", hidden, shape.experts))
        more, moved = _mlp(shape, shape.expert_ffn, prefix="mlp.experts", experts=shape.experts, chosen=shape.chosen)
        matmuls, passes, ffn = matmuls + more, [*passes, moved], shape.expert_ffn * shape.chosen
        passes.append(Pass("route", 5 * hidden * shape.chosen, 5 * hidden * shape.chosen, 14 * hidden * shape.chosen))
        if shape.shared_ffn:
            more, moved = _mlp(shape, shape.shared_ffn, prefix="mlp.shared")
            matmuls, passes, ffn = matmuls + more, [*passes, moved], ffn + shape.shared_ffn
    weights = [weight for i in range(shape.norms) for weight in _norm(shape, f"{name}.norm{i + 1}", name)]
    for matmul in matmuls:
        copies = (matmul.experts,) if matmul.experts > 1 else ()
        weights.append(Weight(f"{name}.{matmul.name}.weight", (*copies, matmul.outputs, matmul.inputs), name))
        if shape.bias or matmul.name in shape.biased:
            weights.append(Weight(f"{name}.{matmul.name}.bias", (*copies, matmul.outputs), name))
    if shape.head_norm:
        weights += [Weight(f"{name}.attn.{side}_norm.weight", (shape.head_dim,), name) for side in ("q", "k")]
    if shape.width_norm:
        weights += [Weight(f"{name}.attn.{side}_norm.weight", (width,), name) for side, width in (("q", queries), ("k", keys))]
    if shape.latent:
        ranks = {"q_a": shape.latent.query_rank, "kv_a": shape.latent.kv_rank}
        weights += [Weight(f"{name}.attn.{side}_norm.weight", (rank,), name) for side, rank in ranks.items() if rank]
    inner = MLP_MATRICES[shape.mlp]
    visits = shape.chosen * hidden
    return Part(
        name,
        tuple(weights),
        matmuls=tuple(matmuls),
        scores=scores,
        passes=tuple(passes),
        saved=(
            Saved("input", hidden, ALWAYS),
            Saved("norm1 output", hidden, ONLY_NONE),
            Saved("q", queries, UNLESS_FULL, cut=True),
            Saved("k and v", keys + values, UNLESS_FULL, cut=True),
            Saved("attention output", mixed, UNLESS_FULL, cut=True),
            Saved("log-sum-exp", shape.heads, UNLESS_FULL, "statistic", cut=True),
            Saved("sum after attention", hidden, UNLESS_FULL),  # selective keeps the projection, and adds again
            Saved("norm2 output", hidden, ONLY_NONE),
            Saved(" and ".join(inner), len(inner) * ffn, UNLESS_FULL, cut=True),
            Saved("activation and product", len(inner) * ffn, ONLY_NONE, cut=True),
            Saved("norm statistics", 2 * NORM_STATISTICS[shape.norm], ONLY_NONE, "statistic"),
            *((Saved("router", 2 * shape.experts, UNLESS_FULL, "statistic"), Saved("visits", 2 * visits, UNLESS_FULL)) if routed else ()),
        ),
        is_block=True,
    )
