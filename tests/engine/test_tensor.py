"""Tensor and sequence parallelism: the step of one process, in the bytes and crossings that the formulas promise."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary
from truth import VOCAB, Small, apart, small, token_loss, tokens, train

from stretto.anatomy import DecoderShape
from stretto.comm.threads import run_threads
from stretto.engine import check
from stretto.engine.engine import Engine
from stretto.errors import JobError
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.models import library
from stretto.models.decoder import Decoder, fill

EXACT = 1e-10
SIZES = {"name": "tiny", "blocks": 2, "hidden": 24, "heads": 4, "kv_heads": 2, "ffn": 37, "vocab": 51}
GPT = DecoderShape(
    hidden=20, blocks=2, heads=4, kv_heads=4, head_dim=5, ffn=31, vocab=37, positions=32, position="learned", norm="layer", mlp="gelu",
    bias=True,
)  # fmt: skip
RULES = {
    "embed": "embedding_rowwise",
    "layers.*.norm": "replicated",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "norm": "replicated",
    "head": "colwise_gather_output",
}


def job(mesh: str, **keys) -> Job:
    usual = {"model": SIZES, "batch.size": 4, "batch.seq_len": 7, "optimizer.lr": 3e-3, "schedule": "constant", "clip": 0.5}
    return Job.load({**usual, "mesh": mesh}, **keys)


def agrees(mesh: str, own=None, dtype="fp64", steps=2, **keys) -> None:
    """`check`, whose one-process side is a plain loop of torch, finds no difference."""
    ranks, told = Mesh.parse(mesh).size, {}
    asked = job(mesh, **keys).resolve(ranks, "cpu", 0)

    def rank(world):
        check.run(asked, world, lambda e: told.update(e) if world.rank == 0 else None, dtype=dtype, steps=steps, model=copy.deepcopy(own))

    run_threads(rank, ranks)
    assert told["ok"], told
    if dtype == "fp64":
        assert max(value for key, value in told.items() if key.endswith("_error")) <= EXACT


# tp, dp, zero, sequence, tied, kv_heads
AXES = ((1, 2, 4), (1, 2), (0, 1, 2, 3), (True, False), (False, True), (1, 2, 4))
CELLS = list(itertools.product(*AXES))


def pairwise(cells: list[tuple]) -> list[tuple]:
    """Some of the cells, such that any two values of any two axes meet in one of them."""
    pairs = lambda cell: set(itertools.combinations(enumerate(cell), 2))
    missing, chosen = set().union(*map(pairs, cells)), []
    while missing:
        chosen.append(max(cells, key=lambda cell: len(pairs(cell) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


def decoder_agrees(tp, dp, zero, sequence, tied, kv_heads):
    model = {**SIZES, "tied": tied, "kv_heads": kv_heads}
    agrees(f"dp={dp} tp={tp}", zero=zero, tensor=sequence, model=model, **{"batch.micro_size": 1 if zero % 2 else None})


@pytest.mark.parametrize("cell", pairwise(CELLS), ids=str)
def test_our_decoder_takes_the_step_of_one_process(cell):
    decoder_agrees(*cell)


@pytest.mark.grid
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_our_decoder_takes_the_step_of_one_process_everywhere(cell):
    decoder_agrees(*cell)


@pytest.mark.parametrize(
    ("sequence", "recompute", "zero"), [(True, "none", 3), (True, "selective", 1), (True, "full", 3), (False, "full", 0)]
)
@pytest.mark.parametrize("tied", [False, True])
def test_learned_positions_layer_norms_and_biases_too(sequence, recompute, zero, tied):
    """By SGD: the gradient of a key's bias is zero but for rounding, and AdamW would make a step of it."""
    own = fill(Decoder(GPT.with_({"tied": tied})), 3)
    agrees("dp=2 tp=2", own, zero=zero, tensor=sequence, recompute=recompute, optimizer="sgd", **{"batch.micro_size": 1})


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence", [True, False])
def test_sixteen_bits_agree_to_their_rounding(sequence, recompute):
    agrees("tp=2", dtype="job", precision="bf16", zero=1, tensor=sequence, recompute=recompute)


def test_compiled_blocks_cross_too():
    agrees("tp=2", zero=1, steps=1, compile={"mode": "block", "backend": "aot_eager"}, model={**SIZES, "blocks": 1})


@pytest.mark.parametrize("zero", [0, 3])
def test_ranks_that_are_processes_take_the_step_of_one_process(pool, zero):
    asked = job("dp=2 tp=2", zero=zero).resolve(4, "cpu", 0)

    def rank(world):
        told = []
        check.run(asked, world, told.append, steps=2)
        return told

    (found,) = pool.run(rank, ranks=4)[0]
    assert found["ok"] and max(value for key, value in found.items() if key.endswith("_error")) <= EXACT


# -- a module of one's own -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mesh", "zero"), [("tp=2", 0), ("dp=2 tp=2", 3), ("tp=3", 1)])
@pytest.mark.parametrize("sequence", [None, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_module_of_ones_own_is_cut_by_rules(mesh, zero, sequence, tied):
    """The truth is a loop of the tests' own. Widths of 10 and 20 and 17 ids are cut unevenly in three."""
    batches = tokens(2, 6)
    asked = Job.load({"batch.size": 6, "batch.seq_len": 6, "precision": "fp64", "optimizer.lr": 1e-2, "schedule": "constant"},
                     mesh=mesh, zero=zero, tensor={"sequence": sequence})  # fmt: skip

    def rank(world):
        engine = Engine(small(tied=tied), asked, world, rules=RULES)
        return [engine.step(batch) for batch in batches], dict(engine.full_state())

    reports, state = run_threads(rank, Mesh.parse(mesh).size)[0]
    truth, parameters = train(small(tied=tied), batches)
    for report, (loss, norm) in zip(reports, truth):
        assert report.loss == pytest.approx(loss, rel=EXACT) and report.grad_norm == pytest.approx(norm, rel=EXACT)
    assert apart({name: state[name] for name in parameters}, parameters) <= EXACT


def test_without_rules_a_module_of_ones_own_is_refused():
    with pytest.raises(JobError, match=r"tp=2: no rule says how to cut embed, layers\.\*\.norm"):
        run_threads(lambda world: Engine(Small(), job("tp=2"), world), 2)


class Counting(nn.Module):
    """Attention that remembers how many heads it has, and whose config is everybody's."""

    def __init__(self, config) -> None:
        super().__init__()
        self.config, self.heads = config, 4
        self.q, self.o = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        q = self.q(x).view(*x.shape[:-1], self.heads, 8 // self.config.heads)
        return self.o((q * q.mean(-1, keepdim=True)).flatten(-2))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(heads=4)
        self.embed, self.layers = nn.Embedding(11, 8), nn.ModuleList([Counting(self.config), Counting(self.config)])
        self.head = nn.Linear(8, 11)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


COUNTED = {"embed": "embedding_rowwise", "layers.*.q": "colwise:4", "layers.*.o": "rowwise", "head": "head"}


@pytest.mark.parametrize("tp", [2, 4])
def test_what_a_module_remembers_of_its_size_becomes_that_of_its_part(tp):
    torch.manual_seed(0)
    own, batch = Counted(), {"input_ids": torch.arange(12).view(4, 3) % 11, "labels": torch.arange(12).view(4, 3) % 11}

    def rank(world):
        engine = Engine(copy.deepcopy(own), job(f"tp={tp}", precision="fp64"), world, rules={**COUNTED, "layers.*": "local:heads"})
        return engine.step(batch).loss, engine.model.config.heads

    (loss, heads) = run_threads(rank, tp)[0]
    assert loss == pytest.approx(float(token_loss(own.double(), batch)[0].detach()) / 8, rel=EXACT)
    assert heads == 4  # nobody else's config has changed


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("local:config.heads,head", 'local:head" of layers.0: Counting has no whole number head'),
        ("local:odd", "tp=2 does not divide odd=3 of layers.0"),
    ],
)
def test_what_a_module_cannot_remember_so_is_refused(said, words):
    own = Counted()
    own.layers[0].odd = own.layers[1].odd = 3
    with pytest.raises(JobError, match=words):
        run_threads(lambda world: Engine(copy.deepcopy(own), job("tp=2"), world, rules={**COUNTED, "layers.*": said}), 2)


# -- who looks at logits -------------------------------------------------------------------------------------------------------


def test_whoever_looks_at_logits_gets_those_of_the_whole_vocabulary():
    """A loss of one's own, metrics of an evaluation, and a forward through engine.model."""
    asked = job("tp=2", precision="fp64")
    batch = {"input_ids": torch.arange(28).view(4, 7), "labels": torch.arange(28).view(4, 7)}
    loss = lambda output, b: (output[..., 3].sum(), 28)
    right = lambda output, b: {"top": (output.argmax(-1).sum(), 1)}

    def rank(world):
        model = library.load("tiny", overrides={k: v for k, v in SIZES.items() if k != "name"})
        engine = Engine(model, asked, world)
        evaluated = engine.evaluate([batch], right)
        logits = engine.model(batch["input_ids"])
        own = Engine(copy.deepcopy(fresh), asked, world, loss=loss, initial=None).step(batch)
        return evaluated["top"], evaluated["loss"], logits.detach(), own.loss, own.grad_norm

    shape = library.load("tiny", overrides={k: v for k, v in SIZES.items() if k != "name"}).model.shape
    fresh = fill(Decoder(shape), 0)
    whole = copy.deepcopy(fresh).double()
    logits = whole(batch["input_ids"])
    top, evaluated, joined, value, norm = run_threads(rank, 2)[0]
    assert torch.allclose(joined, logits, rtol=1e-12, atol=1e-14)
    assert top == float(logits.argmax(-1).sum())
    assert evaluated == pytest.approx(float(token_loss(lambda ids: logits, batch)[0].detach()) / 24, rel=EXACT)
    mean, count = loss(logits, batch)
    (mean / count).backward()
    assert value == pytest.approx(float(mean.detach() / count), rel=EXACT)
    assert norm == pytest.approx(float(torch.sqrt(sum((p.grad**2).sum() for p in whole.parameters() if p.grad is not None))), rel=EXACT)


# -- crossings -----------------------------------------------------------------------------------------------------------------


def crossings(blocks: int, **keys) -> Counter:
    """Collectives over tp of one step, by (collective, elements); its last act, the sum of norms' gradients, left out."""

    def rank(world):
        engine = Engine(library.load("tiny", overrides={**sizes, "blocks": blocks}), job("tp=2", **keys), world)
        ledger = engine.step(tokens(1, 4, 7)[0]).ledger
        return sum(
            (Counter({(e.collective, e.elements): n}) for e, n in ledger if e.axes == ("tp",) and e.reason != "sum over tp"), Counter()
        )

    sizes = {k: v for k, v in SIZES.items() if k != "name"}
    return run_threads(rank, 2)[0]


@pytest.mark.parametrize(
    ("sequence", "recompute", "expected"),
    [
        (False, "none", {"all_reduce": 4}),  # two forward, two backward, though five layers are column-parallel
        (True, "none", {"reduce_scatter": 4, "all_gather": 4 + 2}),  # and the inputs of the column layers once more
        (False, "selective", {"all_reduce": 4}),
        (True, "selective", {"reduce_scatter": 4, "all_gather": 4 + 2}),
        (False, "full", {"all_reduce": 4 + 1}),  # one less than D8: a repetition ends before the block's last sum
        (True, "full", {"reduce_scatter": 4 + 1, "all_gather": 4 + 2}),
    ],
)
def test_a_block_crosses_as_often_as_reference_d_says(sequence, recompute, expected):
    difference = crossings(3, tensor=sequence, recompute=recompute) - crossings(2, tensor=sequence, recompute=recompute)
    assert difference == {(collective, 4 * 7 * 24): times for collective, times in expected.items()}


@pytest.mark.parametrize("sequence", [True, False])
def test_what_is_left_to_be_summed_crosses_once_a_step(sequence):
    """Norms where the stream is cut; kv weights that two ranks share, in any case."""

    def rank(world):
        sizes = {k: v for k, v in SIZES.items() if k != "name"}
        engine = Engine(library.load("tiny", overrides=sizes), job("tp=4", tensor=sequence, **{"batch.micro_size": 1}), world)
        ledger = engine.step(tokens(1, 4, 7)[0]).ledger
        return [(e.axes, e.elements, n) for e, n in ledger if e.reason == "sum over tp"]

    kv = 2 * 2 * 24 * 6  # of 2 blocks k and v, [6, 24] each
    norms = [(("tp",), 5 * 24, 1)] if sequence else []
    found = run_threads(rank, 4)[0]
    assert [(axes, size) for axes, size, _ in found] >= [(axes, size) for axes, size, _ in norms]
    assert (("tp%2",), kv, 1) in found and len(found) == 1 + len(norms)


# -- bytes ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("zero", [0, 3])
def test_a_rank_holds_its_share_of_what_is_cut(tp, zero):
    def rank(world):
        engine = Engine(library.load("tiny", overrides={"blocks": 2}), job(f"tp={tp}", zero=zero, model="tiny"), world)
        held = engine.bytes_held()["parameters"]
        whole = {name: p.shape for name, p in library.load("tiny", overrides={"blocks": 2}).model.named_parameters()}
        axis = {name: place.axis for name, place in engine.tensors.places.items()}
        return held, [4 * shape.numel() / (world.size if axis[n] == "tp" else 2 if axis[n] else 1) for n, shape in whole.items()]

    for held, shares in run_threads(rank, tp):
        assert sum(shares) <= held <= 1.02 * sum(shares)


class Alive(TorchDispatchMode):
    """Every storage that an operator of this rank made and that is still held."""

    def __init__(self) -> None:
        super().__init__()
        self.made = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for x in tree_iter(output):
            if isinstance(x, torch.Tensor):
                self.made[x.untyped_storage()] = True
        return output


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("tp", "sequence"), [(2, True), (2, False), (4, True), (4, False)])
def test_a_block_keeps_the_activations_that_reference_b_says(tp, sequence, recompute):
    """REFERENCE B4 in elements: with the stream cut all of sh(6 + 2g + 4r) over tp, else sh(4 + (2 + 2g + 4r) / tp); selective keeps
    2 of the stream's 4 and 2r, full 1 and nothing else. Where kv heads are shared, g counts the copies. Beside them statistics: a
    number a token for each norm, and one a token and head."""
    rows, length, hidden, heads, kv_heads, ffn = 2, 16, 64, 4, 2, 96

    def kept(blocks: int):
        def rank(world):
            sizes = {"blocks": blocks, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "ffn": ffn, "vocab": 32}
            engine = Engine(library.load("tiny", overrides=sizes), job(f"tp={tp}", tensor=sequence, recompute=recompute), world)
            engine.parallel.stages[0].walk.begin_forward()
            with Alive() as alive:
                logits = engine.model(torch.arange(rows * length).view(rows, length))
            engine.tensors.stream.forget()
            assert logits.requires_grad
            own = {param.untyped_storage().data_ptr() for param in engine.model.parameters()}
            return sum(storage.nbytes() for storage in alive.made if storage.data_ptr() not in own)

        return run_threads(rank, tp)[0]

    s, g, r = rows * length, max(kv_heads, tp) / heads, ffn / hidden
    on_stream, cut, norms = {"none": (4, 2 + 2 * g + 4 * r, 2), "selective": (2, 2 + 2 * g + 2 * r, 0), "full": (1, 0, 0)}[recompute]
    of_heads = heads if recompute != "full" else 0
    per_token = (on_stream * hidden + norms) / (tp if sequence else 1) + (cut * hidden + of_heads) / tp
    assert kept(3) - kept(2) == pytest.approx(4 * s * per_token, rel=0.02)


# -- what goes wrong -----------------------------------------------------------------------------------------------------------


def test_ranks_of_one_dp_coordinate_with_other_rows_are_named():  # CASES C16
    """A loader that shards by global rank."""
    batch = tokens(1, 8, 7)[0]

    def rank(world):
        engine = Engine(library.load("tiny", overrides={"blocks": 1}), job("dp=2 tp=2"), world)
        engine.step({key: value[2 * world.rank : 2 * world.rank + 2] for key, value in batch.items()}, local=True)

    with pytest.raises(JobError, match=r"rank 1 was given other rows than rank 0, and both stand at dp=0"):
        run_threads(rank, 4)


def test_a_loader_gives_the_same_rows_inside_tp_and_others_over_dp():  # CASES C16
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return {"input_ids": torch.full((4,), i), "labels": torch.full((4,), i)}

    def rank(world):
        engine = Engine(library.load("tiny", overrides={"blocks": 1}), job("dp=2 tp=2"), world)
        seen = []
        for batch in engine.loader(Rows()):
            seen += batch["input_ids"][:, 0].tolist()
            engine.step(batch)
        engine.close()
        return seen

    a, b, c, d = run_threads(rank, 4)
    assert a == b and c == d and sorted(a + c) == list(range(8))


@pytest.mark.parametrize("sequence", [True, False])
def test_replicas_stay_bitwise_equal(sequence):  # CASES C10
    """After 50 steps every tp rank has the same norms, row biases and positions, to the bit."""

    def rank(world):
        engine = Engine(fill(Decoder(GPT), 1), job("tp=2", tensor=sequence, **{"batch.seq_len": 5}), world)
        for batch in tokens(50, 4, 5):
            engine.step(batch)
        names = [n for n, place in engine.tensors.places.items() if not place.axis]
        return {name: param.detach().clone() for name, param in engine.model.named_parameters() if name in names}

    one, two = run_threads(rank, 2)
    assert len(one) > 10 and all(torch.equal(one[name], two[name]) for name in one)


def test_vocabulary_of_the_tests_fits_the_models():
    assert min(SIZES["vocab"], GPT.vocab) >= VOCAB
