"""The decoder against an independent Llama and against its definition, written out in plain torch."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stretto.anatomy import DECODERS, DecoderShape
from stretto.models.decoder import Decoder, RMSNorm, fill, initial

SMALL = DECODERS["tiny"].with_({"hidden": 16, "ffn": 24, "vocab": 31, "blocks": 2})
GPT = SMALL.with_(
    {"kv_heads": 4, "positions": 12, "position": "learned", "norm": "layer", "mlp": "gelu", "bias": True, "tied": True, "init_std": 0.3}
)
LLAMA = SMALL.with_({"init_std": 0.3})


def ids(shape: DecoderShape, rows: int = 2, tokens: int = 9) -> Tensor:
    return torch.randint(0, shape.vocab, (rows, tokens), generator=torch.Generator().manual_seed(1))


def jittered(shape: DecoderShape, dtype: torch.dtype = torch.float64) -> Decoder:
    """A decoder whose norms and biases have values that matter."""
    model = fill(Decoder(shape), 0).to(dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return model


def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)[..., 3].sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


# --- truth, written out ---------------------------------------------------------------------------


def written_out(shape: DecoderShape, w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """The forward of a decoder from its definition, with the T x T scores and complex rotations."""
    length = tokens.shape[1]

    def norm(x: Tensor, name: str) -> Tensor:
        if shape.norm == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt() * w[f"{name}.weight"]
        return x + w[f"{name}.bias"] if f"{name}.bias" in w else x

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    def heads(x: Tensor, turn: bool) -> Tensor:
        x = x.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2)
        if turn and shape.position == "rope":
            half = shape.head_dim // 2
            phase = torch.arange(length)[:, None] * shape.rope_theta ** (-torch.arange(half, dtype=x.dtype) / half)
            pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(phase), phase)
            x = torch.cat((pairs.real, pairs.imag), -1)
        return x.repeat_interleave(shape.heads // x.shape[1], 1)

    def gelu(x: Tensor) -> Tensor:
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))

    x = w["embed.weight"][tokens]
    if shape.position == "learned":
        x = x + w["positions.weight"][:length]
    for n in range(shape.blocks):
        at = f"layers.{n}"
        y = norm(x, f"{at}.norm1")
        q, k, v = heads(linear(y, f"{at}.attn.q"), True), heads(linear(y, f"{at}.attn.k"), True), heads(linear(y, f"{at}.attn.v"), False)
        scores = (q @ k.transpose(2, 3) / shape.head_dim**0.5).masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        x = x + linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), f"{at}.attn.o")
        y = norm(x, f"{at}.norm2")
        up = linear(y, f"{at}.mlp.up")
        if shape.mlp == "swiglu":
            gate = linear(y, f"{at}.mlp.gate")
            y = gate * gate.sigmoid() * up
        else:
            y = gelu(up)
        x = x + linear(y, f"{at}.mlp.down")
    return norm(x, "norm") @ w["embed.weight" if shape.tied else "head.weight"].T


PARTS = product(("rope", "learned"), ("rms", "layer"), ("swiglu", "gelu"))
FLAGS = [(False, False), (True, True), (False, True), (True, False)] * 2
CHOICES = [
    SMALL.with_({"position": position, "positions": 12, "norm": norm, "mlp": mlp, "bias": bias, "tied": tied, "init_std": 0.3})
    for (position, norm, mlp), (bias, tied) in zip(PARTS, FLAGS, strict=True)
]


@pytest.mark.parametrize("shape", CHOICES, ids=lambda s: f"{s.position}-{s.norm}-{s.mlp}-{'bias' * s.bias}-{'tied' * s.tied}")
def test_every_choice_of_parts_equals_its_definition(shape: DecoderShape) -> None:
    model, tokens = jittered(shape), ids(shape)
    w = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    wanted = written_out(shape, w, tokens)
    logits = model(tokens)
    torch.testing.assert_close(logits, wanted, rtol=1e-11, atol=1e-11)
    wanted.log_softmax(-1)[..., 3].sum().backward()
    for name, gradient in gradients(model, logits).items():
        torch.testing.assert_close(gradient, w[name].grad, rtol=1e-9, atol=1e-10)


def test_the_decoder_equals_an_independent_llama() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4, vocab_size=31,
        rms_norm_eps=LLAMA.norm_eps, rope_theta=LLAMA.rope_theta, tie_word_embeddings=False, use_cache=False,
        bos_token_id=0, eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    model, llama = jittered(LLAMA, torch.float32), transformers.LlamaForCausalLM(config)
    ends = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    inner = {"attn": "self_attn", "norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    inner |= {x: f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")}

    def named(name: str) -> str:
        if not name.startswith("layers."):
            return ends[name.removesuffix(".weight")] + ".weight"
        return "model." + ".".join(inner.get(word, word) for word in name.split("."))

    llama.load_state_dict({named(name): value for name, value in model.state_dict().items()})
    tokens = ids(LLAMA)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 8, 9, 10, 11]])
    logits, other = model(tokens, position_ids=positions), llama(tokens, position_ids=positions).logits
    torch.testing.assert_close(logits, other, rtol=1e-5, atol=1e-5)
    ours, wanted = gradients(model, logits), gradients(llama, other)
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, wanted[named(name)], rtol=1e-4, atol=1e-4)


# --- pieces ---------------------------------------------------------------------------------------


def test_rms_norm_has_the_value_and_gradient_of_torchs_own() -> None:
    ours, torchs = RMSNorm(6, 1e-5).double(), nn.RMSNorm(6, 1e-5).double()
    with torch.no_grad():
        torchs.weight.copy_(ours.weight.copy_(torch.randn(6)))
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(ours(x), torchs(x), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x, w: torch.func.functional_call(ours, {"weight": w}, x), (x, ours.weight))


@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06), (torch.float16, 0.01)])
def test_each_dtype_computes_the_same_model_as_float64_to_its_rounding(shape: DecoderShape, dtype: torch.dtype, near: float) -> None:
    model = fill(Decoder(shape), 0).to(dtype)
    exact = copy.deepcopy(model).double()
    logits, wanted = model(ids(shape)), exact(ids(shape))
    assert logits.dtype == dtype
    ours, theirs = gradients(model, logits), gradients(exact, wanted)
    assert (logits.double() - wanted).norm() <= near * wanted.norm()
    whole = torch.cat([gradient.flatten() for gradient in theirs.values()]).norm()
    for name, gradient in ours.items():  # a bias of keys has no gradient at all, by symmetry: measure against the whole
        assert (gradient.double() - theirs[name]).norm() <= near * max(theirs[name].norm(), whole / 10), name


@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_a_token_sees_no_later_token(shape: DecoderShape) -> None:
    model, tokens = jittered(shape), ids(shape)
    changed = tokens.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % shape.vocab
    torch.testing.assert_close(model(tokens)[:, :5], model(changed)[:, :5], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
def test_no_rows_are_a_batch_too_and_give_zero_gradients(shape: DecoderShape) -> None:
    model = jittered(shape)
    logits = model(ids(shape, rows=0))
    assert logits.shape == (0, 9, shape.vocab)
    assert all(gradient.abs().max() == 0 for gradient in gradients(model, logits).values())


def test_the_decoder_has_no_buffers_that_a_cast_or_the_meta_device_could_spoil() -> None:
    assert not list(Decoder(LLAMA, device="meta").buffers())


# --- first values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SMALL, GPT], ids=["llama", "gpt"])
def test_first_values_are_ones_zeros_and_normals_and_any_range_of_them_can_be_had(shape: DecoderShape) -> None:
    meta, whole = Decoder(shape, device="meta"), fill(Decoder(shape), 7)
    for name, parameter in whole.named_parameters():
        part = torch.full((parameter.numel() // 2,), float("nan"))
        initial(meta, name, part, parameter.numel() // 3, seed=7)
        start = parameter.numel() // 3
        assert torch.equal(part, parameter.detach().flatten()[start : start + len(part)])
        kind = 0.0 if name.endswith("bias") else 1.0 if parameter.dim() == 1 else None
        assert parameter.std() > 0.5 * shape.init_std if kind is None else bool((parameter == kind).all())


def test_a_tied_head_is_the_embedding() -> None:
    model = Decoder(GPT, device="meta")
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())


# --- compiled -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [LLAMA.with_({"blocks": 12}), GPT], ids=["llama", "gpt"])
def test_blocks_compile_once_for_all_and_compute_the_same(shape: DecoderShape) -> None:
    torch._dynamo.reset()
    graphs: list[object] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    model = jittered(shape)
    compiled = copy.deepcopy(model)
    for layer in compiled.layers:
        layer.forward = torch.compile(layer.forward, backend=counting, fullgraph=True)
    logits, wanted = compiled(ids(shape)), model(ids(shape))
    assert len(graphs) == 1
    torch.testing.assert_close(logits, wanted, rtol=1e-12, atol=1e-12)
    ours, theirs = gradients(compiled, logits), gradients(model, wanted)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-10, atol=1e-12)


def test_a_cross_entropy_step_lowers_the_loss() -> None:
    model, tokens = fill(Decoder(SMALL), 0), ids(SMALL, rows=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
