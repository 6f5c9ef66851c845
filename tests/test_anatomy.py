"""Anatomy against published counts, closed formulas, and the module itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.anatomy import DECODERS, Anatomy, DecoderShape
from stretto.errors import JobError


def shapes() -> st.SearchStrategy[DecoderShape]:
    """Any decoder, up to a few blocks; head_dim is not always hidden / heads."""

    def build(
        kv: int, group: int, pairs: int, hidden: int, ffn: int, blocks: int, position: str, norm: str, mlp: str, flags: int
    ) -> DecoderShape:
        return DecoderShape(
            hidden=hidden, blocks=blocks, heads=kv * group, kv_heads=kv, head_dim=2 * pairs, ffn=ffn, vocab=17, positions=9,
            position=position, norm=norm, mlp=mlp, bias=bool(flags & 1), tied=bool(flags & 2),  # type: ignore[arg-type]
        )  # fmt: skip

    small = st.integers(1, 4)
    return st.builds(
        build, small, small, small, st.integers(1, 20), st.integers(1, 30), small,
        st.sampled_from(["rope", "learned"]), st.sampled_from(["rms", "layer"]), st.sampled_from(["swiglu", "gelu"]), st.integers(0, 3),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mixtral-8x7b", 46_702_792_704),
        ("gpt2-small", 124_439_808),
        ("30m", 33_694_208),
        ("120m", 130_537_344),
    ],
)
def test_known_models_have_their_published_number_of_parameters(name: str, parameters: int) -> None:
    assert Anatomy.of_decoder(DECODERS[name]).parameters() == parameters


def test_a_token_visits_the_published_share_of_mixtral() -> None:
    """12,879,925,248 parameters a token: all but the experts that it does not visit."""
    anatomy = Anatomy.of_decoder(DECODERS["mixtral-8x7b"])
    idle = sum((m.experts - m.chosen) * m.inputs * m.outputs for part in anatomy.parts for m in part.matmuls)
    assert anatomy.parameters() - idle == 12_879_925_248


def test_a_window_bounds_what_a_query_meets() -> None:
    """w - w^2 / 2s keys on average (REFERENCE C1): all of them if the window is as long as the row."""
    plain, narrow = (Anatomy.of_decoder(replace(DECODERS["llama3-8b"], window=window)).blocks[0].scores for window in (0, 1024))
    assert plain is not None and narrow is not None
    assert (plain.keys(4096), narrow.keys(4096), narrow.keys(512)) == (2048, 1024 - 1024**2 / 8192, 256)
    mixed = Anatomy.of_decoder(replace(DECODERS["llama3-8b"], window=1024, full_every=4))
    assert [block.scores.window for block in mixed.blocks[:5]] == [1024, 1024, 1024, 0, 1024]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["mixtral-8x7b"])
def test_what_is_only_planned_is_not_built_as_something_else(name: str) -> None:
    from stretto.models.decoder import Decoder

    with pytest.raises(JobError, match="experts can be planned but not built"):
        Decoder(DECODERS[name], device="meta")


def test_a_llama3_8b_block_has_its_published_parts() -> None:
    block = Anatomy.of_decoder(DECODERS["llama3-8b"]).blocks[0]
    assert sum(weight.elements for weight in block.weights if ".attn." in weight.name) == 41_943_040
    assert sum(weight.elements for weight in block.weights if ".mlp." in weight.name) == 176_160_768
    assert block.parameters == 218_112_000


@pytest.mark.parametrize(("seq_len", "flops"), [(2048, 46_638_563_328), (8192, 51_470_401_536)])
def test_llama3_8b_trains_a_token_in_the_published_flops(seq_len: int, flops: int) -> None:
    assert Anatomy.of_decoder(DECODERS["llama3-8b"]).flops_per_token(seq_len) == flops


def test_full_recompute_adds_one_forward_of_the_blocks_and_not_of_the_head() -> None:
    anatomy = Anatomy.of_decoder(DECODERS["llama3-8b"])
    blocks = sum(part.flops_per_token(2048) for part in anatomy.blocks)
    assert anatomy.flops_per_token(2048, "full") - anatomy.flops_per_token(2048) == blocks // 3
    assert anatomy.flops_per_token(2048, "selective") == anatomy.flops_per_token(2048)


def test_a_llama3_8b_block_saves_the_published_bytes() -> None:
    """1312 MiB and 1 MiB of log-sum-exp for 8192 tokens in 16 bits; the statistics of two norms come on top."""
    block = Anatomy.of_decoder(DECODERS["llama3-8b"]).blocks[0]
    assert 8192 * block.saved_bytes_per_token("none", 2) == (1312 + 1) * 2**20 + 8192 * 2 * 4


@given(shape=shapes(), seq_len=st.integers(1, 64).map(lambda n: 2 * n), width=st.sampled_from([2, 4]))
def test_saved_bytes_are_the_closed_formulas(shape: DecoderShape, seq_len: int, width: int) -> None:
    """sbh(12 + 4g + 8r), selective sbh(8 + 4g + 4r), full 2sbh in 16 bits, log-sum-exp 4abs, where heads x head_dim = hidden."""
    shape = replace(shape, hidden=shape.heads * shape.head_dim)
    h, g, r = shape.hidden, shape.kv_heads / shape.heads, shape.ffn / shape.hidden
    inner = {"swiglu": 4 * r, "gelu": 2 * r}[shape.mlp]
    statistics = {"rms": 2, "layer": 4}[shape.norm] * 4
    lse = 4 * shape.heads
    block = Anatomy.of_decoder(shape).blocks[-1]
    scale = width / 2
    assert block.saved_bytes_per_token("none", width) == pytest.approx(scale * h * (12 + 4 * g + 2 * inner) + lse + statistics)
    assert block.saved_bytes_per_token("selective", width) == pytest.approx(scale * h * (8 + 4 * g + inner) + lse)
    assert block.saved_bytes_per_token("full", width) == pytest.approx(scale * 2 * h)
    whole = Anatomy.of_decoder(shape)
    per_token = sum(part.saved_bytes_per_token("none", width) for part in whole.parts)
    assert whole.saved_bytes("none", width, rows=3, seq_len=seq_len) == 3 * seq_len * per_token


@settings(deadline=None)  # the first example imports torch
@given(shape=shapes())
def test_the_anatomy_names_the_parameters_of_the_module_in_its_order_of_parts(shape: DecoderShape) -> None:
    from stretto.models.decoder import Decoder

    module = {name: tuple(parameter.shape) for name, parameter in Decoder(shape, device="meta").named_parameters()}
    anatomy = Anatomy.of_decoder(shape)
    assert {weight.name: weight.shape for weight in anatomy.weights()} == module
    assert anatomy.parameters() == sum(weight.elements for weight in anatomy.weights())
    first_of = [name.rsplit(".", 2 if name.endswith("head.weight") else 1)[0] for name in module]
    parts = [part.name for part in anatomy.parts if part.weights]
    assert sorted(parts, key=lambda part: min(n for n, name in enumerate(first_of) if f"{name}.".startswith(f"{part}."))) == parts


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"heads": 3}, "does not divide model.hidden=128"),
        ({"kv_heads": 3}, "kv_heads=3 does not divide model.heads=4; use one of {1, 2, 4}"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"blocks": 0}, "model.blocks=0"),
        ({"position": "learned"}, "model.positions=0"),
        ({"depth": 3}, "model.depth is not a size"),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_what_can(overrides: dict[str, object], words: str) -> None:
    with pytest.raises(JobError, match=words.replace("{", r"\{").replace("}", r"\}")):
        DECODERS["tiny"].with_(overrides)


def test_the_head_size_follows_hidden_and_heads_and_none_changes_nothing() -> None:
    assert DECODERS["tiny"].with_({"hidden": 256, "ffn": None}) == replace(DECODERS["tiny"], hidden=256, head_dim=64)


def test_the_anatomy_is_made_without_torch() -> None:
    blocked = "import sys; sys.modules['torch'] = None; import stretto.anatomy as a; a.Anatomy.of_decoder(a.DECODERS['tiny'])"
    subprocess.run([sys.executable, "-c", blocked], check=True)
