"""Units: every parameter in one of them, freed early only where that is safe."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from stretto.comm.group import Ledger
from stretto.comm.threads import run_threads
from stretto.comm.transport import World
from stretto.errors import JobError
from stretto.layout.mesh import Mesh
from stretto.layout.zero import ZeroPolicy
from stretto.models.stages import block_list
from stretto.parallel.parallelize import Cut, parallelize
from stretto.parallel.precision import Precision
from stretto.parallel.units import Unit, units_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Model(nn.Module):
    """embed, positions, three blocks, norm, head; in the order in which they would run."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.positions = nn.Embedding(4, 3)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(len(ids)))
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x) * self.scale)


OUTSIDE = ("embed", "positions", "norm", "head")


def members(units: list[Unit]) -> dict[str, set[str]]:
    return {unit.name: {name for name, _ in unit.params} for unit in units}


def check_each_parameter_has_one_unit(model: nn.Module, units: list[Unit]) -> None:
    ids = [id(param) for unit in units for _, param in unit.params]
    assert sorted(ids) == sorted({id(param) for param in model.parameters()})
    names = dict(model.named_parameters())
    assert all(names[name] is param for unit in units for name, param in unit.params)
    assert all(unit.params and unit.modules for unit in units)


def test_blocks_are_units_and_the_rest_is_kept() -> None:
    model = Model()
    units = units_of(model)
    check_each_parameter_has_one_unit(model, units)
    assert [(unit.name, unit.regular) for unit in units] == [("rest", False), *((f"layers.{i}", True) for i in range(3))]
    assert members(units)["rest"] == {"embed.weight", "positions.weight", "norm.weight", "norm.bias", "head.weight", "scale"}
    assert [unit.modules for unit in units[1:]] == [(block,) for block in model.layers]


def test_neighbours_that_run_once_share_a_unit_before_and_after_the_blocks() -> None:
    model = Model()
    units = units_of(model, regular=OUTSIDE)
    check_each_parameter_has_one_unit(model, units)
    assert [(unit.name, unit.regular) for unit in units] == [
        ("rest", False), ("embed", True), ("layers.0", True), ("layers.1", True), ("layers.2", True), ("norm", True),
    ]  # fmt: skip
    assert members(units)["rest"] == {"scale"}
    assert units[1].modules == (model.embed, model.positions)
    assert units[-1].modules == (model.norm, model.head)


def test_without_blocks_or_known_modules_all_is_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    units = units_of(model)
    check_each_parameter_has_one_unit(model, units)
    assert [(unit.name, unit.regular) for unit in units] == [("rest", False)]
    assert [unit.name for unit in units_of(model, regular=("0", "1"))] == ["0"]


def test_a_model_without_parameters_has_no_units() -> None:
    assert units_of(nn.Sequential(nn.ReLU())) == []


def test_tied_weights_are_kept_and_have_one_name() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    units = units_of(model, regular=OUTSIDE)
    check_each_parameter_has_one_unit(model, units)
    assert members(units)["rest"] == {"embed.weight", "scale"}
    assert {model.embed, model.head} <= set(units[0].modules)


def test_a_weight_that_two_blocks_share_is_kept() -> None:
    model = Model()
    model.layers[2].mix.weight = model.layers[0].mix.weight
    units = units_of(model, regular=OUTSIDE)
    check_each_parameter_has_one_unit(model, units)
    assert members(units)["rest"] == {"layers.0.mix.weight", "scale"}
    assert members(units)["layers.2"] == {"layers.2.mix.bias", "layers.2.norm.weight", "layers.2.norm.bias"}


def test_a_module_that_two_blocks_share_is_kept() -> None:
    model = Model()
    model.layers[2].mix = model.layers[0].mix
    units = units_of(model, regular=OUTSIDE)
    check_each_parameter_has_one_unit(model, units)
    assert members(units)["rest"] == {"layers.0.mix.weight", "layers.0.mix.bias", "scale"}


def test_a_block_that_stands_several_times_in_the_list_is_kept() -> None:
    model = Model()
    model.layers = nn.ModuleList([model.layers[0]] * 3)
    units = units_of(model, regular=OUTSIDE)
    check_each_parameter_has_one_unit(model, units)
    assert [unit.name for unit in units] == ["rest", "embed", "norm"]


def test_a_weight_that_a_block_uses_twice_stays_with_the_block() -> None:
    model = Model()
    model.layers[1].again = nn.Linear(3, 3)
    model.layers[1].again.weight = model.layers[1].mix.weight
    units = units_of(model, regular=OUTSIDE)
    check_each_parameter_has_one_unit(model, units)
    assert members(units)["rest"] == {"scale"}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("layers.1", {"layers.1.mix.weight", "layers.1.mix.bias", "layers.1.norm.weight", "layers.1.norm.bias"}),  # with all inside
        ("layers.1.mix", {"layers.1.mix.weight", "layers.1.mix.bias"}),
        ("layers.*.norm", {f"layers.{i}.norm.{leaf}" for i in range(3) for leaf in ("weight", "bias")}),
        ("layers.0.mix.weight", {"layers.0.mix.weight"}),
        ("embed", {"embed.weight"}),
        ("head", {"head.weight"}),
    ],
)
def test_what_the_user_asks_to_keep_is_kept(keep: str, kept: set[str]) -> None:
    model = Model()
    units = units_of(model, regular=OUTSIDE, keep=[keep])
    check_each_parameter_has_one_unit(model, units)
    assert members(units)["rest"] == kept | {"scale"}


def test_a_pattern_for_everything_keeps_everything() -> None:
    assert [unit.name for unit in units_of(Model(), regular=OUTSIDE, keep=["*"])] == ["rest"]


def test_the_blocks_are_the_list_with_most_parameters_and_of_nested_lists_the_outer() -> None:
    model = Model()
    model.small = nn.ModuleList([nn.Linear(1, 1)])
    model.layers[0].experts = nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)])
    assert block_list(model) == ("layers", list(model.layers))
    assert block_list(nn.Sequential(nn.Linear(2, 2))) == ("", [])
    assert block_list(nn.ModuleDict({"none": nn.ModuleList([nn.ReLU()]), "empty": nn.ModuleList()})) == ("", [])


def test_blocks_deep_inside_are_found_and_named_by_their_path() -> None:
    model = nn.ModuleDict({"model": Model(2), "lm_head": nn.Linear(3, 5)})
    units = units_of(model, regular=("model.embed", "model.norm", "lm_head"))
    check_each_parameter_has_one_unit(model, units)
    assert [unit.name for unit in units] == ["rest", "model.embed", "model.layers.0", "model.layers.1", "model.norm"]
    assert members(units)["model.norm"] == {"model.norm.weight", "model.norm.bias", "lm_head.weight", "lm_head.bias"}


def tie_the_head(model: Model) -> None:
    model.head.weight = model.embed.weight


def share_a_module(model: Model) -> None:
    model.layers[2].mix = model.layers[0].mix


def share_a_weight(model: Model) -> None:
    model.layers[2].mix.weight = model.layers[0].mix.weight


def repeat_a_block(model: Model) -> None:
    model.layers = nn.ModuleList([model.layers[0]] * 3)


@pytest.mark.parametrize("change", [lambda model: None, tie_the_head, share_a_module, share_a_weight, repeat_a_block])
@pytest.mark.parametrize("keep", [(), ("layers.1",)])
def test_whatever_modules_share_is_there_when_it_is_used(change: Callable[[Model], None], keep: tuple[str, ...]) -> None:
    """Two ranks that cut parameters compute what the plain model computes; with the same rows on both, twice its gradient."""

    def make() -> Model:
        generator, model = torch.Generator().manual_seed(0), Model().double()
        change(model)
        for param in model.parameters():
            param.data = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        return model

    ids, plain = torch.tensor([3, 1, 4, 1]), make()
    expected = plain(ids)
    expected.square().sum().backward()
    squares = sum(float((2 * param.grad).square().sum()) for param in plain.parameters() if param.grad is not None)

    def rank(world: World) -> tuple[Tensor, float]:
        cut = Cut(ZeroPolicy.of(3), Precision.of("fp64", "fp64", "fp64"), keep=keep, regular=OUTSIDE)
        model = models[world.rank]
        parallel = parallelize(model, cut, Mesh.of(dp=2), world, Ledger(), None)
        out = model(ids)
        walk = parallel.stages[0].walk
        walk.begin_backward(last=True)
        out.square().sum().backward()
        walk.end_backward()
        for group in parallel.groups:
            group.wait_reduced()
        return out.detach(), sum(float(group.my_gradient().square().sum()) for group in parallel.groups)

    models = [make(), make()]
    results = run_threads(rank, 2)
    assert all(torch.equal(out, expected) for out, _ in results)
    assert sum(mine for _, mine in results) == pytest.approx(squares, rel=1e-12)


def test_a_pattern_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(JobError, match=r'zero.keep="nosuch" matches no module'):
        units_of(nn.Sequential(nn.Linear(2, 2)), keep=["nosuch"])
