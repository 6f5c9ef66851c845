"""Cross-entropy over a cut vocabulary is torch's own of the whole logits, and no rank has those."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.comm.crossing import Bridge
from stretto.comm.group import Group, Ledger
from stretto.comm.threads import run_threads
from stretto.errors import JobError
from stretto.layout.mesh import Mesh
from stretto.parallel import vocab
from stretto.parallel.vocab import vocab_cross_entropy


def bridge_of(world, ledger=None):
    return Bridge.of(Group(world, Mesh.of(tp=world.size), ("tp",), Ledger() if ledger is None else ledger))


def case(tokens: int, size: int, dtype=torch.float64):
    draw = torch.Generator().manual_seed(tokens + size)
    logits = (4 * torch.randn(tokens, size, generator=draw, dtype=torch.float64)).to(dtype)
    targets = torch.randint(0, size, (tokens,), generator=draw)
    targets[::3] = -100
    return logits, targets


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("tokens", "size"), [(7, 16), (5, 151), (1, 3), (4, 2)])
def test_loss_and_gradient_are_those_of_the_whole(tokens, size, ranks):
    logits, targets = case(tokens, size)
    whole = logits.clone().requires_grad_()
    truth = F.cross_entropy(whole, targets, ignore_index=-100, reduction="sum")
    (truth * 0.25).backward()

    def rank(world):
        mine = logits.tensor_split(ranks, -1)[world.rank].clone().requires_grad_()
        loss = vocab_cross_entropy(mine, targets, bridge_of(world), size, -100)
        (loss * 0.25).backward()
        return loss.detach(), mine.grad

    losses, grads = zip(*run_threads(rank, ranks))
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert torch.allclose(losses[0], truth.detach(), rtol=1e-14, atol=1e-14)
    assert torch.allclose(torch.cat(grads, -1), whole.grad, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sixteen_bits_are_summed_in_thirty_two(dtype):
    logits, targets = case(64, 300, dtype)
    truth = F.cross_entropy(logits.double(), targets, ignore_index=-100, reduction="sum")

    def rank(world):
        mine = logits.tensor_split(2, -1)[world.rank].clone().requires_grad_()
        loss = vocab_cross_entropy(mine, targets, bridge_of(world), 300, -100)
        loss.backward()
        return loss.detach(), mine.grad.dtype

    loss, kept = run_threads(rank, 2)[0]
    assert (loss.dtype, kept) == (torch.float32, dtype)
    assert float((loss - truth).abs() / truth) < 1e-6


def test_logits_too_large_for_an_exponential_are_shifted_by_the_largest_of_all_ranks():
    def rank(world):
        logits = torch.tensor([[1000.0, -1000.0]] if world.rank else [[-1000.0, 0.0]])
        return float(vocab_cross_entropy(logits, torch.tensor([2]), bridge_of(world), 4, -100))

    assert run_threads(rank, 2) == [0.0, 0.0]


def test_three_numbers_a_token_cross_and_nothing_backward():
    def rank(world):
        ledger = Ledger()
        logits = torch.zeros(6, 50, requires_grad=True)
        vocab_cross_entropy(logits, torch.arange(6), bridge_of(world, ledger), 100, -100).backward()
        return [(entry.collective, entry.elements) for entry, _ in ledger]

    assert run_threads(rank, 2)[0] == [("all_reduce", 6), ("all_reduce", 12)]


def test_nothing_as_large_as_the_logits_is_made_but_their_gradient(monkeypatch):
    """512 tokens of 64 logits, in chunks of 1024 logits: in forward nothing larger than a chunk, in backward one gradient."""
    monkeypatch.setattr(vocab, "CHUNK", 1024)
    large: list[str] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.numel() > 4096 and out.data_ptr() not in seen:
                seen.add(out.data_ptr())
                large.append(str(func))
            return out

    def rank(world):
        logits = torch.randn(512, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        seen.add(logits.data_ptr())
        with Sizes():
            loss = vocab_cross_entropy(logits, torch.arange(512) % 64, bridge_of(world), 64, -100)
            made = len(large)
            loss.backward()
        return made, len(large)

    seen: set[int] = set()
    assert run_threads(rank, 1) == [(0, 1)]


def test_a_target_beyond_the_vocabulary_is_refused():
    def rank(world):
        return vocab_cross_entropy(torch.zeros(2, 3), torch.tensor([0, 6]), bridge_of(world), 6, -100)

    with pytest.raises(JobError, match="not below the vocabulary of 6"):
        run_threads(rank, 2)
