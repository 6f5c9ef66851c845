"""Folders in the layout that DeepSpeed documents, built here from a model that is known: every value comes back, and no mesh matters."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
from truth import small

from stretto.checkpoint.convert import convert
from stretto.checkpoint.deepspeed import read_deepspeed
from stretto.checkpoint.kinds import find, inspect
from stretto.checkpoint.load import whole
from stretto.checkpoint.store import LocalStore
from stretto.comm.threads import run_threads
from stretto.engine.engine import Engine
from stretto.errors import Damaged, JobError
from stretto.job import Job


class fragment_address(SimpleNamespace):
    """Stands for deepspeed.utils.tensor_fragment.fragment_address: nothing of it is loaded."""


class ZeroStageEnum:
    """Pickled as their enumeration is: a call of the class with its number."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return ZeroStageEnum, (self.number,)


def model():
    made = small(tied=True)
    made.register_buffer("seen", torch.full((3, 5), 2.0))
    for name, param in made.named_parameters():
        param.requires_grad = "layers.1" not in name
    return made


def truth():
    """(groups of trained parameters, frozen ones, buffer) by name, and a moment of each kind: seeded numbers of the same shapes."""
    draw = torch.Generator().manual_seed(3)
    net = model()
    kinds = {key: {n: torch.randn(p.shape, generator=draw) for n, p in net.named_parameters()} for key in ("", "exp_avg", "exp_avg_sq")}
    trained = [n for n, p in net.named_parameters() if p.requires_grad]
    groups = [[n for n in trained if net.get_parameter(n).ndim > 1], [n for n in trained if net.get_parameter(n).ndim < 2]]
    frozen = {n: kinds[""][n].bfloat16() for n, p in net.named_parameters() if not p.requires_grad}
    return groups, kinds, frozen, {"seen": torch.full((3, 5), 7.0)}


def padded(flat, multiple):
    return torch.cat([flat, flat.new_zeros(-len(flat) % multiple)])


def write(folder, stage, ranks, shuffled=False, prefix="", step_in="state"):
    """A folder of that stage, saved after 7 updates and 8 steps."""
    groups, kinds, frozen, buffers = truth()
    folder.mkdir(parents=True)
    shapes = [OrderedDict((n, kinds[""][n].shape) for n in group) for group in groups]
    common = {
        "module": OrderedDict({**{n: kinds[""][n].bfloat16() for g in groups for n in g if stage < 3}, **frozen, **buffers}),
        "buffer_names": list(buffers),
        "param_shapes": shapes,
        "frozen_param_shapes": {n: x.shape for n, x in frozen.items()} if not prefix else None,
        "shared_params": {"head.weight": "embed.weight"},
        "global_steps": 8,
        "global_samples": 96,
        "skipped_steps": 1,
        "ds_version": "0.17",
        "own": fragment_address(anything=1),
    }
    if shuffled:  # as round_robin_gradients lays them out
        groups = [list(reversed(group)) for group in groups]
        common["param_shapes"] = [OrderedDict((n, kinds[""][n].shape) for n in group) for group in groups]
    step = {"step": 7} if step_in == "state" else {}
    for rank in range(ranks):
        head = {"zero_stage": ZeroStageEnum(stage), "loss_scaler": None, "overflow": False}
        param_groups = [{"lr": 1e-2, "params": [i], **({"step": 7} if step_in == "groups" else {})} for i in range(2)]
        if stage < 3:
            whole = {k: [padded(torch.cat([kinds[k][n].flatten() for n in g]), 2 * ranks) for g in groups] for k in kinds}
            part = {k: [x.chunk(ranks)[rank].clone() for x in flat] for k, flat in whole.items()}
            state = {i: {**step, "exp_avg": part["exp_avg"][i], "exp_avg_sq": part["exp_avg_sq"][i]} for i in range(2)}
            saved = {**head, "base_optimizer_state": {"state": state, "param_groups": param_groups}}
            saved |= {"single_partition_of_fp32_groups": part[""], "partition_count": [ranks, ranks], "group_paddings": [0, 0]}
            saved["param_slice_mappings"] = [OrderedDict(x=fragment_address(numel=3, start=1))] * 2  # not to be believed
        else:
            cut = lambda x, rank=rank: padded(x.flatten(), ranks).chunk(ranks)[rank]
            part = {k: [torch.cat([cut(kinds[k][n]) for n in group]) for group in groups] for k in kinds}
            state = {i: {**step, "exp_avg": part["exp_avg"][i], "exp_avg_sq": part["exp_avg_sq"][i]} for i in range(2)}
            saved = {**head, "partition_count": ranks, "fp32_flat_groups": part[""]}
            saved["optimizer_state_dict"] = {"state": state, "param_groups": param_groups}
            fragments = {n: cut(x) for n, x in frozen.items()}
            torch.save({**common, "frozen_param_fragments": fragments}, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save({"optimizer_state_dict": saved, "ds_config": {}}, folder / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    if stage < 3:
        torch.save({**common, "frozen_param_fragments": frozen}, folder / "mp_rank_00_model_states.pt")
    (folder.parent / "latest").write_text(folder.name)


CASES = [
    (1, 2, {}),
    (2, 3, {}),
    (2, 3, {"shuffled": True}),
    (2, 4, {"step_in": "groups"}),
    (1, 1, {"prefix": "bf16_", "step_in": "nowhere"}),
    (3, 2, {}),
    (3, 5, {"step_in": "groups"}),
]


@pytest.mark.parametrize(("stage", "ranks", "how"), CASES)
def test_every_tensor_of_every_stage_is_put_together(stage, ranks, how, tmp_path):
    write(tmp_path / "global_step8", stage, ranks, **how)
    groups, kinds, frozen, buffers = truth()
    store = LocalStore(tmp_path)
    manifest = read_deepspeed(store, "global_step8")
    expected = {f"buffer/{n}": x for n, x in buffers.items()} | {f"model/{n}": x for n, x in frozen.items()}
    for group in groups:
        for name in group:
            expected |= {f"model/{name}" if not k else f"optimizer/{name}/{k}": x[name] for k, x in kinds.items()}
    assert manifest.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(whole(store, "global_step8", manifest, name), tensor), name
    assert {scalar.value for scalar in manifest.scalars.values()} == {7.0}
    assert (manifest.step, manifest.state["updates"], manifest.notes["samples"]) == (8, 7, 96)
    assert {n for n, e in manifest.tensors.items() if n.startswith("model/") and not e.trainable} == {f"model/{n}" for n in frozen}


@pytest.mark.parametrize(("stage", "mesh"), [(2, "dp=2"), (3, "dp=3")])
def test_any_mesh_goes_on_from_it_itself_or_converted(stage, mesh, tmp_path):
    write(tmp_path / "ds/global_step8", stage, 4)
    groups, kinds, frozen, buffers = truth()
    convert(str(tmp_path / "ds"), str(tmp_path / "c"))  # the folder that `latest` names
    told = inspect(str(tmp_path / "ds"))
    assert told.kind == "deepspeed" and told.about["step"] == 8 and find(str(tmp_path / "ds")).name == "global_step8"
    asked = Job.load(mesh=mesh, zero=3, precision="fp32", batch=6, schedule="constant")
    for place in ("ds/global_step8", "c"):

        def work(world, place=place):
            with Engine(model(), asked, world, forward=lambda m, b: m(b["input_ids"])) as engine:
                engine.load(tmp_path / place)
                ids = torch.arange(36).view(6, 6) % 17
                return dict(engine.full_state()), (engine.steps, engine.updates), engine.step({"input_ids": ids, "labels": ids}).committed

        state, counts, committed = run_threads(work, int(mesh[-1]))[0]
        assert counts == (8, 7) and committed
        for name, tensor in ({n: kinds[""][n] for group in groups for n in group} | frozen | buffers).items():
            assert torch.equal(state[name], tensor.float()), name
        assert torch.equal(state["head.weight"], kinds[""]["embed.weight"])


def test_a_flipped_bit_a_missing_rank_and_a_cut_file_are_errors(tmp_path):
    write(tmp_path / "ds/x", 2, 2)
    file = tmp_path / "ds/x/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    clean = file.read_bytes()
    groups, kinds, _, _ = truth()
    inside = torch.cat([kinds["exp_avg"][n].flatten() for n in groups[0]])[-5:].numpy().tobytes()
    broken = bytearray(clean)
    broken[clean.index(inside) + 3] ^= 1
    for content, words in (
        (bytes(broken), "do not have their archive's checksum"),
        (clean[: len(clean) // 2], "damaged or cut short"),
        (None, "is missing"),
    ):
        file.unlink() if content is None else file.write_bytes(content)
        with pytest.raises(Damaged, match=rf"zero_pp_rank_1_mp_rank_00_optim_states\.pt.*{words}"):
            convert(str(tmp_path / "ds"), str(tmp_path / "c"))
    assert [path.name for path in tmp_path.iterdir()] == ["ds"]


@pytest.mark.parametrize(
    ("harm", "match"),
    [
        (lambda f: (f / "mp_rank_01_model_states.pt").write_bytes(b""), "tensor or pipeline parallelism, which is not understood"),
        (lambda f: change(f, "mp_rank_00_model_states.pt", lambda d: d.pop("param_shapes")), "does not tell param_shapes"),
        (lambda f: (f / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink(), "it was not saved with ZeRO"),
        (lambda f: change_optimizer(f, partition_count=[2, 1]), r"has experts \(groups of \[2, 1\] ranks\)"),
        (
            lambda f: change(f, "mp_rank_00_model_states.pt", exchange),
            "values of layers.2.down.weight are not those of the module: their order is not",
        ),
        (lambda f: change_optimizer(f, zero_stage=0), "of ZeRO stage 0, which is not understood"),
    ],
)
def test_what_is_not_understood_is_refused(harm, match, tmp_path):
    write(tmp_path / "x", 2, 2)
    harm(tmp_path / "x")
    with pytest.raises(JobError, match=match):
        convert(str(tmp_path / "x"), str(tmp_path / "c"))


def change(folder, name, how):
    content = torch.load(folder / name, weights_only=False)
    how(content)
    torch.save(content, folder / name)


def exchange(content):
    """As if the partitions lay in another order."""
    content["param_shapes"][0] = OrderedDict(reversed(content["param_shapes"][0].items()))


def change_optimizer(folder, **values):
    change(folder, "zero_pp_rank_0_mp_rank_00_optim_states.pt", lambda content: content["optimizer_state_dict"].update(values))


def test_partitions_that_do_not_hold_a_parameter_whole_are_an_error(tmp_path):
    write(tmp_path / "x", 3, 2)
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    change(tmp_path / "x", name, lambda d: d["optimizer_state_dict"]["fp32_flat_groups"].__setitem__(1, torch.zeros(3)))
    with pytest.raises(Damaged, match=r"\d+ of its \d+ elements are in the partitions"):
        convert(str(tmp_path / "x"), str(tmp_path / "c"))
