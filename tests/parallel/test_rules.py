"""Rules say for every parameter how it lies, and refuse what they cannot know."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from truth import Small

from stretto.anatomy import DECODERS
from stretto.errors import JobError
from stretto.layout.layout import Layout
from stretto.models.decoder import Decoder
from stretto.models.plans import decoder_plan
from stretto.parallel.rules import STYLES, resolve

ROWS, COLUMNS = Layout((("tp",), ())), Layout(((), ("tp",)))
SMALL = {
    "embed": "embedding_rowwise",
    "layers.*.norm": "replicated",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "norm": "replicated",
    "head": "colwise_gather_output",
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(4))  # one number a head
        self.q_norm = nn.LayerNorm(2)


class Own(nn.Module):
    """A block with a layer that can be entered as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"norm": nn.LayerNorm(8), "attn": Attention()}) for _ in range(2)])


OWN = {
    "layers.*.norm": "replicated",
    "layers.*.attn.q": "colwise:4",
    "layers.*.attn.k": "shared_colwise:2",
    "layers.*.attn.o": "rowwise",
    "layers.*.attn.q_norm": "replicated_with_grad_allreduce",
    "layers.*.attn.scale": "colwise",
}


def test_our_decoder_brings_a_plan_for_every_parameter():
    for name, shape in DECODERS.items():
        if shape.planned_only:
            continue
        small = shape.with_({"blocks": 2})
        model = Decoder(small, device="meta")
        rules = resolve(model, decoder_plan(small), 2, None)
        assert rules.sequence and rules.begins == rules.ends == ""
        assert {path for path, rule in rules.modules.items() if rule.style == "entered"} == {
            f"layers.{n}.{part}" for n in range(2) for part in ("attn", "mlp")
        }, name


def test_a_layer_between_whose_first_and_last_all_is_cut_is_entered_as_a_whole():
    rules = resolve(Own(), OWN, 2, None)
    attn = rules.modules["layers.0.attn"]
    assert (attn.style, attn.enters) == ("entered", "stream")
    assert rules.modules["layers.0.attn.q"].enters == "" and rules.modules["layers.0.attn.o"].leaves == "stream"
    assert rules.modules["layers.0.attn.q"].params == {"weight": ROWS, "bias": Layout((("tp",),))}
    assert rules.modules["layers.0.attn.o"].params == {"weight": COLUMNS}
    assert rules.params["layers.1.attn.scale"].params == {"layers.1.attn.scale": Layout((("tp",),))}
    assert (rules.sequence, rules.begins, rules.ends) == (True, "layers.0", "layers.1")


@pytest.mark.parametrize("sequence", [True, False])
def test_gradients_that_see_part_of_the_tokens_or_heads_are_summed(sequence):
    rules = resolve(Own(), OWN, 2, sequence)
    on_stream = "tp" if sequence else ""
    assert rules.modules["layers.0.norm"].summed == rules.modules["layers.0.attn.o"].summed == on_stream
    assert rules.modules["layers.0.attn.q_norm"].summed == "tp"


def test_fewer_kv_heads_than_ranks_are_shared_by_neighbours():
    assert resolve(Own(), OWN, 4, None).modules["layers.0.attn.k"].params["weight"] == Layout((("tp/2",), ()))


def test_where_a_block_itself_holds_the_cut_layers_each_is_entered_and_tokens_stay_whole():
    """The block's own code would see a cut stream, and could read its shape."""
    rules = resolve(Small(), SMALL, 2, None)
    assert not rules.sequence and rules.modules["layers.0.up"].enters == "stream"
    assert rules.modules["head"].enters == "alike" and rules.modules["embed"].leaves == "sum"
    assert resolve(Small(), SMALL, 2, True).sequence


def test_all_that_has_no_rule_is_listed_with_what_to_write():
    plan = {pattern: style for pattern, style in SMALL.items() if "norm" not in pattern}
    with pytest.raises(JobError, match=r"tp=2: no rule says how to cut layers\.\*\.norm, norm; write rules={\"layers\.\*\.norm\": "):
        resolve(Small(), plan, 2, None)


def test_a_parameter_that_no_rule_places_is_refused_by_name():  # CASES C07
    plan = {pattern: style for pattern, style in OWN.items() if not pattern.endswith("scale")}
    with pytest.raises(JobError, match=r"no rule says how to cut layers\.\*\.attn;"):
        resolve(Own(), plan, 2, None)


@pytest.mark.parametrize(
    ("plan", "tp", "words"),
    [
        (OWN | {"layers.*.attn.q": "columns"}, 2, f'"columns" of layers.*.attn.q is not a style; they are {", ".join(STYLES)}'),
        (OWN | {"layers.*.attn.v": "colwise"}, 2, '"layers.*.attn.v" matches no module or parameter'),
        (OWN | {"layers.*.attn.q": "colwise:four"}, 2, "behind the colon stand whole numbers"),
        (OWN, 3, "tp=3 cannot cut layers.0.attn.q between its 4 heads; use tp in {1, 2, 4}"),
        (OWN | {"layers.*.attn.k": "shared_colwise"}, 2, 'write "shared_colwise:2" for 2'),
        (OWN | {"layers.*.attn.q": "packed_colwise:3,4"}, 2, "blocks [3, 4] do not add up to its 8 outputs"),
        (OWN | {"layers.*.attn.scale": "head"}, 2, 'layers.0.attn.scale is a parameter; "head" is for modules'),
    ],
)
def test_a_rule_that_cannot_be_is_one_line_with_what_to_write(plan, tp, words):
    with pytest.raises(JobError) as refusal:
        resolve(Own(), plan, tp, None)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_cut_stream_needs_blocks():
    with pytest.raises(JobError, match=r"tensor\.sequence=true needs a list of blocks"):
        resolve(nn.Sequential(nn.Linear(2, 2)), {"0": "colwise"}, 2, True)


def test_fused_heads_are_cut_between_heads_or_not_at_all():
    """q of 4 heads of 2, k and v of 2: cut in three, a rank would get parts of heads."""
    model = nn.ModuleDict({"qkv": nn.Linear(8, 16), "o": nn.Linear(8, 8)})
    plan = {"qkv": "packed_colwise:4*2,2*2,2*2", "o": "rowwise"}
    cut = resolve(model, plan, 2, False).modules["qkv"].params["weight"]
    assert cut == Layout((("tp",), ()), packed=((8, 4, 4), ()))
    with pytest.raises(JobError, match=r"tp=4 cannot cut qkv between its 2 heads; use tp in \{1, 2\}"):
        resolve(model, plan, 4, False)


def test_what_a_module_remembers_of_its_size_is_told_apart_from_its_styles():
    rules = resolve(Own(), {**OWN, "layers.*.attn": "local:heads,groups=1"}, 2, None)
    assert rules.local == {f"layers.{n}.attn": ("heads", "groups=1") for n in range(2)}
    assert rules.modules["layers.0.attn"].style == "entered"  # as without it


def test_what_is_whole_and_alike_lies_inside_a_layer_that_is_entered():
    rules = resolve(Own(), {**OWN, "layers.*.attn.q_norm": "alike"}, 2, None)
    assert rules.sequence and rules.modules["layers.0.attn"].style == "entered"
    assert rules.modules["layers.0.attn.q_norm"].summed == ""
