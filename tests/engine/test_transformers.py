"""transformers models, unmodified, under tensor parallelism: the step of one process."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from families import FAMILIES, SIZES, agrees, model_of, pairwise
from transformers import AutoConfig, LlamaForCausalLM

from stretto.comm.threads import run_threads
from stretto.engine import twin
from stretto.engine.engine import Engine
from stretto.errors import JobError
from stretto.job import Job
from stretto.models.plans import PROVED

AXES = (tuple(FAMILIES), ("tp=2", "dp=2 tp=2", "tp=4"), (0, 1, 2, 3), (True, False), (False, True))
CELLS = list(itertools.product(*AXES))


@pytest.mark.parametrize(("family", "mesh", "zero", "sequence", "tied"), pairwise(CELLS))
def test_a_transformers_model_takes_the_step_of_one_process(family, mesh, zero, sequence, tied):
    agrees(model_of(family, tied), mesh, zero=zero, tensor=sequence)


@pytest.mark.grid
@pytest.mark.parametrize(("family", "mesh", "zero", "sequence", "tied"), CELLS)
def test_a_transformers_model_takes_the_step_of_one_process_everywhere(family, mesh, zero, sequence, tied):
    agrees(model_of(family, tied), mesh, zero=zero, tensor=sequence)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("family", ["gemma3_text", "phi3", "gpt2"])
def test_blocks_that_run_again_cross_again(family, recompute):
    agrees(model_of(family), "dp=2 tp=2", zero=3, recompute=recompute, **{"batch.micro_size": 1})


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize(("sequence", "expected"), [(False, {"all_reduce": 4}), (True, {"reduce_scatter": 4, "all_gather": 4 + 2})])
def test_a_block_crosses_four_times_and_its_weights_are_cut(family, sequence, expected):
    """Two forward, two backward, though the published plans cut up to seven layers of it; the inputs of the column layers once more
    where tokens are cut. A rank holds half of what is cut."""

    def step(blocks: int):
        def rank(world):
            job = Job.load({"batch.size": 4, "batch.seq_len": 6, "mesh": "tp=2", "zero": 0, "tensor": sequence})
            engine = Engine(model_of(family, num_hidden_layers=blocks), job, world)
            ids = torch.arange(24).view(4, 6)
            ledger = engine.step({"input_ids": ids, "labels": ids}).ledger
            crossed = Counter()
            for entry, times in ledger:
                if entry.axes == ("tp",) and entry.reason != "sum over tp":
                    crossed[entry.collective, entry.elements] += times
            return crossed, engine.bytes_held()["parameters"]

        return run_threads(rank, 2)[0]

    (many, more), (few, less) = step(3), step(2)
    assert many - few == {(collective, 4 * 6 * 32): times for collective, times in expected.items()}
    block = model_of(family).get_submodule({"gpt2": "transformer.h.0", "gpt_neox": "gpt_neox.layers.0"}.get(family, "model.layers.0"))
    whole = sum(4 * p.numel() / (2 if p.ndim > 1 else 1) for p in block.parameters())
    assert 0.9 * whole <= more - less <= 1.05 * whole


# -- classes that are not proved -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["cohere", "granite", "qwen3_moe"])
def test_a_class_that_no_test_has_proved_is_proved_by_a_tiny_twin(family):
    """Logit scales and experts; then the model itself, which takes the step of one process."""
    model = model_of(family, **({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12} if "moe" in family else {}))
    assert type(model).__name__ not in PROVED
    assert twin.difference(model, 2, None) == ""
    agrees(model, "tp=2", zero=1)


class Reads(LlamaForCausalLM):
    """Adds up what a cut changes: the number of a layer's outputs."""

    def forward(self, input_ids, **given):
        output = super().forward(input_ids, **given)
        output.logits = output.logits * (1 + self.model.layers[0].mlp.up_proj.weight.shape[0])
        return output


class Mixes(LlamaForCausalLM):
    """Between its layers tokens meet: each block ends with the mean over its tokens so far."""

    def __init__(self, config):
        super().__init__(config)
        for block in self.model.layers:
            block.register_forward_hook(lambda module, given, out: out.cumsum(1) / (1 + torch.arange(out.shape[1])).view(1, -1, 1))


def of_class(kind):
    return kind(AutoConfig.for_model("llama", **SIZES, use_cache=False)).float()


def test_a_forward_that_reads_what_is_cut_is_refused_with_one_line():
    with pytest.raises(JobError, match=r"tp=2: Reads is not proved, .* has a loss of .* hand rules=... to Engine"):
        agrees(of_class(Reads), "tp=2")


def test_a_forward_in_which_tokens_meet_between_layers_is_run_without_cutting_them():
    model = of_class(Mixes)
    agrees(model, "tp=2")
    with pytest.raises(JobError, match="Mixes is not proved"):
        agrees(model, "tp=2", tensor=True)
