"""What a part costs: the flops and bytes of its anatomy are priced, no more and no less, and choices of a stack move them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto.anatomy import DECODERS, Anatomy
from stretto.layout.mesh import Mesh
from stretto.plan.cost import Costs, Work
from stretto.plan.hardware import Cluster
from stretto.plan.setting import Setting
from stretto.plan.software import STACKS, STRETTO, Software

LLAMA = Anatomy.of_decoder(DECODERS["llama3-8b"])
CLUSTER = Cluster.of("2x8 h100")
FREE = replace(STRETTO, host=0.0, regather="never")


def costs(software: Software = FREE, words: str = "", cluster: Cluster = CLUSTER, **sizes: object) -> Costs:
    given: dict[str, object] = {"batch": 8, "micro_size": 1, "seq_len": 4096, "mesh": Mesh.parse(words), **sizes}
    return Costs(Setting(**given), cluster, software)  # type: ignore[arg-type]


def test_a_block_takes_at_least_its_flops_at_peak_and_at_most_a_few_times_that() -> None:
    block = LLAMA.blocks[0]
    forward = block.flops_per_token(4096) / 3 * 4096 / CLUSTER.device.peak("bf16")
    priced = costs()
    assert forward < priced.forward(block).seconds < 4 * forward
    assert 2 * forward < priced.backward(block).seconds < 8 * forward


def test_full_recompute_adds_a_forward_to_a_blocks_backward_and_nothing_to_the_heads() -> None:
    plain, again = costs(), costs(recompute="full")
    block, head = LLAMA.blocks[0], LLAMA.parts[-1]
    assert again.backward(block) == plain.backward(block) + plain.forward(block)
    assert again.backward(head) == plain.backward(head)


def test_selective_recompute_lies_between() -> None:
    none, some, all_ = (costs(recompute=mode).backward(LLAMA.blocks[0]).seconds for mode in ("none", "selective", "full"))
    assert none < some < all_


def test_what_a_cut_layer_was_given_is_gathered_again_where_it_is_not_made_again() -> None:
    block = LLAMA.blocks[0]
    kept = replace(FREE, regather="kept")
    plain, again = (costs(software, "tp=8").backward(block).crossing for software in (FREE, kept))
    assert again == pytest.approx(1.5 * plain)  # one crossing more for each two
    full = [costs(software, "tp=8", recompute="full").backward(block).crossing for software in (FREE, kept)]
    assert full[0] == full[1]


@pytest.mark.parametrize("sequence", [True, False])
def test_tp_divides_the_products_and_adds_two_crossings_each_way(sequence: bool) -> None:
    one, eight = costs(sequence=sequence), costs(words="tp=8", sequence=sequence)
    block = LLAMA.blocks[0]
    assert one.forward(block).crossing == 0
    assert eight.forward(block).compute < one.forward(block).compute / 2
    assert eight.forward(block).crossing == pytest.approx(eight.backward(block).crossing, rel=1e-9)


def test_sequence_parallelism_moves_the_same_bytes_and_cuts_the_norms() -> None:
    """An all-reduce is a reduce-scatter and an all-gather (but starts once, and a switch may add on the way)."""
    with_, without = (costs(words="tp=4", sequence=sequence, seq_len=131072) for sequence in (True, False))
    block = LLAMA.blocks[0]
    assert with_.forward(block).crossing == pytest.approx(without.forward(block).crossing, rel=0.03)
    assert with_.forward(block).compute < without.forward(block).compute


def test_tp_across_machines_is_slower_than_inside_one() -> None:
    block = LLAMA.blocks[0]
    thin = Cluster.of("2x8 a100 nvlink3 hdr4")
    assert costs(words="tp=16", cluster=thin).forward(block).crossing > 2 * costs(words="tp=8", cluster=thin).forward(block).crossing


def test_experts_cost_what_a_token_visits() -> None:
    """Two of eight experts as wide as the dense MLP: twice its products and not eight times."""
    mixture = Anatomy.of_decoder(DECODERS["mixtral-8x7b"])
    one = sum(costs()._matmul(m)[0] for m in LLAMA.blocks[0].matmuls if m.name.startswith("mlp"))
    two = sum(costs()._matmul(m)[0] for m in mixture.blocks[0].matmuls if m.name.startswith("mlp"))
    assert two == pytest.approx(2 * one, rel=0.3)
    assert costs(words="ep=8").forward(mixture.blocks[0]).crossing > 0


def test_cp_shares_the_tokens_and_gathers_keys_and_values() -> None:
    one, four = costs(seq_len=32768), costs(words="cp=4", seq_len=32768)
    block = LLAMA.blocks[0]
    assert four.forward(block).compute == pytest.approx(one.forward(block).compute / 4, rel=0.05)
    assert four.forward(block).crossing > 0


def test_a_slow_host_is_seen_only_where_it_is_slower_than_the_device() -> None:
    assert Work(compute=1.0, host=0.1).seconds == pytest.approx(1.0)
    assert Work(compute=0.1, host=1.0).seconds == pytest.approx(1.0)
    assert 1.0 < Work(compute=1.0, host=1.0).seconds < 1.1


@pytest.mark.parametrize("software", STACKS.values(), ids=lambda s: s.name)
def test_every_stack_prices_every_part(software: Software) -> None:
    for part in LLAMA.parts:
        priced = costs(software, "tp=2 dp=2")
        assert priced.forward(part).seconds > 0 or part.name == "norm"
        assert priced.backward(part).seconds >= 0


def test_scores_in_memory_cost_more_than_a_flash_kernel() -> None:
    block = LLAMA.blocks[0]
    assert costs(replace(FREE, attention="scores")).forward(block).seconds > costs().forward(block).seconds


def test_8_bit_products_pay_for_their_casts() -> None:
    block = LLAMA.blocks[0]
    free = costs(replace(FREE, cast=0.0), compute="fp8").forward(block).seconds
    assert free < costs(FREE, compute="fp8").forward(block).seconds < costs().forward(block).seconds
