"""Names become models; what is half there or unknown is refused in one line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stretto.anatomy import DECODERS, Anatomy
from stretto.errors import JobError
from stretto.models.library import Task, load


def order_run(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Which of the named modules ran in one forward, once for each time, in order."""
    ran: list[str] = []
    for name, module in model.named_modules():
        if name in names:
            module.register_forward_pre_hook(lambda m, x, name=name: ran.append(name))
    model(torch.zeros(1, 4, dtype=torch.long))
    return tuple(ran)


# --- built-in -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(name for name, shape in DECODERS.items() if not shape.planned_only))
def test_every_built_in_decoder_comes_without_memory_and_fills_itself(name: str) -> None:
    loaded = load(name)
    assert all(parameter.is_meta for parameter in loaded.model.parameters())
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == Anatomy.of_decoder(DECODERS[name]).parameters()
    assert loaded.initial is not None
    out = torch.empty(5)
    loaded.initial(loaded.model, "norm.weight", out, 0, 0)
    assert out.tolist() == [1.0] * 5
    assert loaded.vocab == DECODERS[name].vocab and loaded.positions == (DECODERS[name].positions or None)


def test_the_description_says_how_large_and_where_values_come_from() -> None:
    assert load("llama3-8b", seed=3).describe == "llama3-8b: decoder, 8.0B parameters, seeded random values (seed 3)"


def test_regular_modules_are_named_in_the_order_in_which_they_run() -> None:
    for name in ("tiny", "30m"):
        loaded = load(name, overrides={"blocks": 1, "hidden": 32, "vocab": 8})
        model = loaded.model.to_empty(device="cpu")
        assert order_run(model, loaded.regular) == loaded.regular
        outside = {name.split(".")[0] for name, _ in model.named_parameters()} - {"layers"}
        assert outside == set(loaded.regular)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("tinny", {}, "did you mean tiny?"),
        ("bert", {}, "built in are tiny, 30m, 120m, gpt2-small, llama3-8b"),
        ("s3:bucket", {}, "s3: is no source of models"),
        ("tiny", {"weights": "pretrained"}, "tiny has none"),
        ("tiny", {"weights": "yes"}, "use auto, pretrained or random"),
        ("hf:x", {"overrides": {"blocks": 2}}, "model.blocks changes built-in decoders only"),
        ("python:os:getcwd", {"weights": "random"}, "leave model.weights=auto"),
    ],
)
def test_a_wrong_name_or_option_is_one_clear_line(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError) as problem:
        load(name, **options)
    assert words in str(problem.value) and "\n" not in str(problem.value)


# --- transformers ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that holds only the config.json of a very small Llama."""
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, vocab_size=11,
        max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    ).save_pretrained(tmp_path)  # fmt: skip
    return tmp_path


def test_a_config_alone_starts_from_seeded_values_and_leaves_the_generator_as_it_was(folder: Path) -> None:
    before = torch.get_rng_state()
    one, same, other = (load(f"hf:{folder}", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert "seeded random values (seed 1)" in one.describe and "LlamaForCausalLM" in one.describe
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(one.model.get_parameter(name), same.model.get_parameter(name))
    assert not torch.equal(one.model.get_parameter(name), other.model.get_parameter(name))
    assert (one.vocab, one.positions, one.initial) == (11, 16, None)
    assert one.model.training and not one.model.config.use_cache  # type: ignore[union-attr]


def test_a_model_whose_values_are_stored_comes_without_memory_and_says_where_they_are(folder: Path) -> None:
    load(f"hf:{folder}", seed=5).model.bfloat16().save_pretrained(folder)  # type: ignore[operator]
    loaded = load(f"hf:{folder}")
    assert "LlamaForCausalLM" in loaded.describe and loaded.describe.endswith("pretrained values")
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in loaded.model.parameters())
    assert not any(buffer.is_meta for buffer in loaded.model.buffers())
    assert loaded.stored is not None and loaded.stored.folder == str(folder)
    assert loaded.stored.names == {name: name for name, _ in loaded.model.named_parameters()}
    assert "random values" in load(f"hf:{folder}", weights="random").describe


def test_values_in_another_format_are_read_whole_in_fp32(folder: Path) -> None:
    stored = load(f"hf:{folder}", seed=5).model.bfloat16()
    torch.save(stored.state_dict(), folder / "pytorch_model.bin")
    loaded = load(f"hf:{folder}")
    assert "pretrained values, read whole" in loaded.describe and loaded.stored is None
    for name, parameter in loaded.model.named_parameters():
        assert parameter.dtype == torch.float32 and torch.equal(parameter, stored.get_parameter(name).float())


@pytest.mark.parametrize("sign", ["tokenizer.json", "tokenizer_config.json", "vocab.json"])
def test_a_folder_with_a_tokenizer_but_no_values_is_refused_until_random_is_written(folder: Path, sign: str) -> None:
    (folder / sign).write_text("{}")
    with pytest.raises(JobError, match=rf"{sign} but no .*model.weights=random"):
        load(f"hf:{folder}")
    assert load(f"hf:{folder}", weights="random").initial is None


def test_an_index_whose_files_are_absent_is_refused(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(JobError, match=r"model-00001-of-00002\.safetensors is named by the index but absent"):
        load(f"hf:{folder}")


def test_values_that_leave_a_parameter_out_are_refused_by_its_name(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    load(f"hf:{folder}").model.save_pretrained(folder)  # type: ignore[operator]
    values = load_file(folder / "model.safetensors")
    del values["model.layers.1.mlp.up_proj.weight"]
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(JobError, match=r"no values for model.layers.1.mlp.up_proj.weight"):
        load(f"hf:{folder}")


def test_a_wrong_folder_is_one_clear_line(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    for spec, weights, words in [
        (folder / "nowhere", "auto", "no such folder"),
        (folder / "empty", "auto", "no config.json"),
        (folder / "broken", "auto", "cannot be loaded"),
        (folder, "pretrained", "model.weights=pretrained"),
    ]:
        with pytest.raises(JobError) as problem:
            load(f"hf:{spec}", weights=weights)
        assert words in str(problem.value) and "\n" not in str(problem.value)


def test_an_id_that_cannot_be_reached_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(JobError) as problem:
        load("hf:nobody/nothing-at-all")
    assert "cannot be loaded" in str(problem.value) and "\n" not in str(problem.value)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_the_regular_modules_of_a_transformers_model_run_once_in_that_order(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    gpt2: dict[str, Any] = dict(n_embd=8, n_layer=2, n_head=2, n_positions=16)
    config = transformers.AutoConfig.for_model(
        family, vocab_size=11, bos_token_id=0, eos_token_id=1, **(gpt2 if family == "gpt2" else sizes)
    )
    config.save_pretrained(tmp_path)
    loaded = load(f"hf:{tmp_path}")
    assert order_run(loaded.model, loaded.regular) == loaded.regular
    blocks = "transformer.h." if family == "gpt2" else "model.layers."
    outside = {name.rsplit(".", 1)[0] for name, _ in loaded.model.named_parameters(remove_duplicate=False) if not name.startswith(blocks)}
    assert outside == set(loaded.regular)


# --- your own -------------------------------------------------------------------------------------

OWN = """
import torch
from stretto.models.library import Task

def plain():
    return torch.nn.Linear(3, 2)

def task():
    return Task(torch.nn.Linear(3, 2), loss=abs, forward=divmod)

def meta():
    return torch.nn.Linear(3, 2, device="meta")

def wrong():
    return 7

def broken():
    return 1 / 0
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_model.py").write_text(OWN)
    (tmp_path / "needs_more.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    return "python:own_model"


def test_a_function_gives_a_module_or_a_task_seeded(own: str) -> None:
    before = torch.get_rng_state()
    loaded, again = load(f"{own}:plain", seed=4), load(f"{own}:plain", seed=4)
    assert isinstance(loaded.model, nn.Linear) and loaded.initial is None and loaded.loss is None
    assert torch.equal(loaded.model.weight, again.model.weight)  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)
    task = load(f"{own}:task")
    assert task.loss is abs and task.forward is divmod and task.batches is None
    assert Task(loaded.model).loss is None


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        (":wrong", "returned int; return a torch.nn.Module or a stretto.Task"),
        (":nosuch", "own_model has no function nosuch"),
        (":meta", "weight is on the meta device"),
        ("", "write python:package.module:function"),
        ("x:plain", "there is no module own_modelx"),
    ],
)
def test_a_wrong_function_is_one_clear_line(own: str, tail: str, words: str) -> None:
    with pytest.raises(JobError) as problem:
        load(own + tail)
    assert words in str(problem.value) and "\n" not in str(problem.value)


def test_what_goes_wrong_inside_your_code_is_shown_as_it_is(own: str) -> None:
    with pytest.raises(ZeroDivisionError):
        load(f"{own}:broken")
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        load("python:needs_more:f")
