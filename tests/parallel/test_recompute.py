"""Recompute changes what is kept, to the byte, and nothing else."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from stretto.anatomy import DECODERS, Anatomy, DecoderShape, Recompute
from stretto.models.decoder import Decoder, fill
from stretto.parallel import recompute

LLAMA = DECODERS["tiny"].with_({"hidden": 32, "ffn": 48, "vocab": 24, "blocks": 3})
GPT = LLAMA.with_({"kv_heads": 4, "positions": 16, "position": "learned", "norm": "layer", "mlp": "gelu", "bias": True})
MODES: tuple[Recompute, ...] = ("none", "selective", "full")
SHAPES = pytest.mark.parametrize("shape", [LLAMA, GPT], ids=["llama", "gpt"])
TOKENS = torch.arange(2 * 16).view(2, 16) % LLAMA.vocab


class Alive(TorchDispatchMode):
    """Every storage that an operator made and that is still held: a truth that does not ask who holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.made = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for x in tree_iter(output):
            if isinstance(x, Tensor):
                self.made[x.untyped_storage()] = True
        return output

    def bytes_(self, without: nn.Module) -> int:
        own = {parameter.untyped_storage().data_ptr() for parameter in without.parameters()}
        return sum(storage.nbytes() for storage in self.made if storage.data_ptr() not in own)


def decoder(shape: DecoderShape, dtype: torch.dtype = torch.float32) -> Decoder:
    return fill(Decoder(shape), 0).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).float().log_softmax(-1)[..., 3].sum()
    return out


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    loss_of(model, x).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


# not GPT in 16 bits: torch's layer norm keeps its statistics in 16 bits too on a CPU, in 32 on a GPU
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (LLAMA, torch.float32),
        (LLAMA, torch.float64),
        (LLAMA, torch.bfloat16),
        (LLAMA, torch.float16),
        (GPT, torch.float32),
        (GPT, torch.float64),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_block_keeps_the_bytes_of_its_anatomy_to_the_byte(shape: DecoderShape, dtype: torch.dtype, mode: Recompute) -> None:
    """One block more keeps exactly one block's bytes more; what the ends keep drops out of the difference."""
    kept = []
    for blocks in (2, 3):
        model = decoder(shape.with_({"blocks": blocks}), dtype)
        recompute.apply(list(model.layers), mode, preserve_rng=True)
        with Alive() as alive:
            logits = model(TOKENS)
        kept.append(alive.bytes_(model))
        del logits
    block = Anatomy.of_decoder(shape).blocks[0]
    assert kept[1] - kept[0] == TOKENS.numel() * block.saved_bytes_per_token(mode, dtype.itemsize)


@SHAPES
def test_the_saved_tensors_of_a_whole_model_are_those_of_its_anatomy(shape: DecoderShape) -> None:
    """By autograd's own account, without recompute; cos and sin (or the position ids) are kept once for all blocks."""
    model = decoder(shape)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[Tensor, int]] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = (x, x.untyped_storage().nbytes())  # held: an address must not be used again
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logits = model(TOKENS)
    positions = 16 * (shape.head_dim + shape.head_dim // 2) * 4 if shape.position == "rope" else 16 * 8
    measured = sum(size for address, (_, size) in kept.items() if address not in own)
    assert measured == Anatomy.of_decoder(shape).saved_bytes("none", 4, rows=2, seq_len=16) + positions
    assert logits.requires_grad


@SHAPES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_are_those_of_keeping_all_bit_for_bit(shape: DecoderShape, dtype: torch.dtype, mode: Recompute) -> None:
    model, plain = decoder(shape, dtype), decoder(shape, dtype)
    recompute.apply(list(model.layers), mode, preserve_rng=True)
    for ours, wanted in zip(gradients(model, TOKENS), gradients(plain, TOKENS), strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_graph_kept_for_a_second_backward_gives_the_same_again(mode: Recompute) -> None:
    model = decoder(LLAMA)
    recompute.apply(list(model.layers), mode, preserve_rng=True)
    loss, weights = loss_of(model, TOKENS), list(model.parameters())
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    for ours, wanted in zip(torch.autograd.grad(loss, weights), first, strict=True):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_dropout_draws_the_same_mask_again(mode: Recompute) -> None:
    def grads(how: Recompute) -> list[Tensor]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
        recompute.apply([block], how, preserve_rng=True)
        return gradients(block, torch.randn(4, 8, requires_grad=True))

    for ours, wanted in zip(grads(mode), grads("none"), strict=True):
        assert torch.equal(ours, wanted)


class InPlace(nn.Module):
    """A block that spoils a product's output after it was kept, and whose last product is needed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        y = y.add_(x).mul_(0.5)
        out: Tensor = self.norm(self.two(torch.tanh(y)))
        return out


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_products_changed_in_place_are_not_trusted(mode: Recompute) -> None:
    torch.manual_seed(0)
    plain, x = InPlace(), torch.randn(3, 6, requires_grad=True)
    model = copy.deepcopy(plain)
    recompute.apply([model], mode, preserve_rng=True)
    for ours, wanted in zip(gradients(model, x), gradients(plain, x), strict=True):
        assert torch.equal(ours, wanted)


def test_selective_repeats_no_weight_product_and_no_attention() -> None:
    class Count(TorchDispatchMode):
        products = attentions = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.products += func in recompute.PRODUCTS
            self.attentions += func in recompute.ATTENTION
            return func(*args, **(kwargs or {}))

    def count(mode: Recompute) -> tuple[int, int]:
        model = decoder(LLAMA)
        recompute.apply(list(model.layers), mode, preserve_rng=True)
        loss = loss_of(model, TOKENS)
        with Count() as counted:
            loss.backward()
        return counted.products, counted.attentions

    assert count("selective") == count("none")
    blocks = LLAMA.blocks
    assert count("full") == (count("none")[0] + 6 * blocks, blocks)  # all but the last of seven: nothing needs its output


def test_hooks_of_a_block_run_once_a_step_and_the_last_mode_counts() -> None:
    model, calls = decoder(LLAMA), {"before": 0, "after": 0}
    plain = model.layers[0].forward

    def count(key: str) -> Any:
        def hook(*_: Any) -> None:
            calls[key] += 1

        return hook

    model.layers[0].register_forward_pre_hook(count("before"))
    for mode in ("selective", "full", "none", "full"):
        recompute.apply(list(model.layers), mode, preserve_rng=True)
    model.layers[0].register_forward_hook(count("after"))
    gradients(model, TOKENS)
    assert calls == {"before": 1, "after": 1}
    recompute.apply(list(model.layers), "none", preserve_rng=True)
    assert model.layers[0].forward == plain


def test_a_copy_of_a_recomputed_model_is_a_model_of_its_own() -> None:
    model = decoder(LLAMA)
    recompute.apply(list(model.layers), "full", preserve_rng=True)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.layers[0].attn.v.weight.zero_()
    assert not torch.equal(other(TOKENS), model(TOKENS))
    gradients(other, TOKENS)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_ranks_as_threads_recompute_each_their_own() -> None:
    wanted, found = gradients(decoder(LLAMA), TOKENS), {}

    def run(rank: int) -> None:
        model = decoder(LLAMA)
        recompute.apply(list(model.layers), "selective", preserve_rng=False)
        found[rank] = gradients(model, TOKENS)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(3):
        assert all(torch.equal(a, b) for a, b in zip(found[rank], wanted, strict=True))


def test_evaluation_without_gradients_needs_nothing() -> None:
    model = decoder(LLAMA)
    wanted = model(TOKENS)
    recompute.apply(list(model.layers), "selective", preserve_rng=True)
    with torch.no_grad(), Alive() as alive:
        logits = model(TOKENS)
    assert torch.equal(logits, wanted) and alive.bytes_(model) == logits.untyped_storage().nbytes()


@pytest.mark.parametrize("mode", MODES)
def test_a_compiled_block_keeps_what_its_mode_says_and_computes_the_same(mode: Recompute) -> None:
    torch._dynamo.reset()
    plain = decoder(LLAMA, torch.float64)
    model = copy.deepcopy(plain)
    recompute.apply(list(model.layers), mode, preserve_rng=False, compiled=True)
    for layer in model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
    own, kept = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}, {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(TOKENS).log_softmax(-1)[..., 3].sum()
    measured = sum(x.untyped_storage().nbytes() for address, x in kept.items() if address not in own)
    ends = TOKENS.numel() * LLAMA.vocab * 8 + 16 * (8 + 4) * 8  # the loss's own, and cos and sin
    generators = LLAMA.blocks * torch.get_rng_state().nbytes if mode == "full" else 0  # kept whatever preserve_rng says
    assert measured <= Anatomy.of_decoder(LLAMA).saved_bytes(mode, 8, rows=2, seq_len=16) + ends + generators
    loss.backward()
    plain(TOKENS).log_softmax(-1)[..., 3].sum().backward()
    for ours, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, wanted.grad, rtol=1e-10, atol=1e-12)
