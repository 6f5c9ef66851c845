"""What is written means in each framework what the job says, by that framework's own rules of arithmetic."""

import json
import math
import shlex
import tomllib

import pytest
import yaml

from stretto.engine.optimizer import lr_factor
from stretto.errors import JobError
from stretto.export import torchtitan
from stretto.export.accelerate import yaml as as_yaml
from stretto.export.catalog import export
from stretto.job import Job
from stretto.launch.training import elsewhere

JOBS = (
    {"mesh": "dp=2", "batch.size": 16, "batch.micro_size": 2},
    {"mesh": "dp_replicate=2 dp=2", "batch.size": 16, "batch.micro_size": 2, "zero": 3},
    {"mesh": "dp=4 tp=2", "batch.size": 32, "batch.micro_size": 2, "zero": 0},
    {"mesh": "pp=2 dp=2", "batch.size": 32, "batch.micro_size": 4, "zero": 2},
    {"mesh": "dp=1", "batch.size": 8, "batch.micro_size": 1, "zero": 3},
)


def made(framework, source="tiny", **keys):
    return export(elsewhere(Job.load(source, **{"device": "cpu", **keys})), framework)


def options(**keys):
    """Megatron's arguments, as a shell would hand them over."""
    words = shlex.split(made("megatron", **keys).files[0].text, comments=True)
    found = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            found[word[2:]] = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else True
    return found


def lacking(exported):
    return {one.key for one in exported.missing}


@pytest.mark.parametrize("keys", JOBS)
def test_deepspeed_accepts_the_batch_its_ranks_times_rows_times_accumulation(keys):
    exported = made("deepspeed", **keys)
    config, ranks = json.loads(exported.files[0].text), int(exported.run.split()[2])
    rows, times = config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    assert config["train_batch_size"] == keys["batch.size"] == rows * times * ranks
    assert config["zero_optimization"]["stage"] == keys.get("zero", 1)
    assert ("mics_shard_size" in config["zero_optimization"]) == ("dp_replicate" in keys["mesh"])
    assert {f"mesh.{axis}" for axis in ("tp", "pp") if axis in keys["mesh"]} == {key for key in lacking(exported) if key.startswith("mesh")}


def test_deepspeed_is_told_that_nothing_is_clipped_since_its_own_default_clips():
    assert json.loads(made("deepspeed", clip=0).files[0].text)["gradient_clipping"] == 0


@pytest.mark.parametrize("keys", JOBS)
def test_torchtitan_has_the_jobs_batch_and_ranks(keys):
    exported = made("torchtitan", **keys)
    config, job = tomllib.loads(exported.files[0].text), elsewhere(Job.load("tiny", device="cpu", **keys))
    mesh, training = config["parallelism"], config["training"]
    shards = mesh["data_parallel_replicate_degree"] * mesh["data_parallel_shard_degree"]
    ranks = shards * mesh["tensor_parallel_degree"] * mesh["pipeline_parallel_degree"] * mesh["context_parallel_degree"]
    assert shards == job.shards and ranks == math.prod(int(word.partition("=")[2]) for word in keys["mesh"].split())
    assert (
        training["global_batch_size"] == keys["batch.size"] and training["global_batch_size"] % (training["local_batch_size"] * shards) == 0
    )
    forwards = training["global_batch_size"] // (training["local_batch_size"] * shards)
    if mesh["pipeline_parallel_degree"] > 1:
        forwards *= training["local_batch_size"] // mesh["pipeline_parallel_microbatch_size"]
    assert forwards == job.microbatches
    assert (mesh["data_parallel_shard_degree"] == 1) == (keys.get("zero", 1) == 0 or keys["mesh"] == "dp=1")


def test_torchtitan_with_no_clipping_does_not_scale_gradients_to_nothing():
    assert tomllib.loads(made("torchtitan", clip=0).files[0].text)["training"]["max_norm"] == math.inf


@pytest.mark.parametrize(("hidden", "ffn"), [(128, 384), (4096, 14336), (4096, 11008), (64, 37), (512, 8192)])
def test_torchtitans_mlp_is_exactly_as_wide_as_asked(hidden, ffn):
    flavor = made("torchtitan", **{"model.hidden": hidden, "model.ffn": ffn}).files[1].text
    held = {}
    exec(
        flavor.replace("from torchtitan.models.llama3 import TransformerModelArgs, llama3_args", ""),
        {"TransformerModelArgs": dict, "llama3_args": held},
    )
    args = held["tiny"]
    # its FeedForward: two thirds of 4 dim, times the multiplier, rounded up to a multiple
    width = int(args["ffn_dim_multiplier"] * int(2 * 4 * args["dim"] / 3))
    assert -(-width // args["multiple_of"]) * args["multiple_of"] == ffn


def test_torchtitans_learning_rate_is_ours_at_every_update():
    for shape in ("constant", "linear", "cosine"):
        keys = {"schedule.shape": shape, "schedule.warmup": 3, "steps": 12}
        config = tomllib.loads(made("torchtitan", **keys).files[0].text)["lr_scheduler"]
        total, warmup = config["total_steps"], config["warmup_steps"]
        decay = round(total * config["decay_ratio"]) if "decay_ratio" in config else total - warmup
        flat = total + 1 - warmup - decay  # it adds a step, so that the rate does not end at its lowest
        for update in range(12):
            expected = lr_factor(Job.load("tiny", **keys).schedule, update, 12)
            if update < warmup:
                rate = (update + 1) / warmup
            elif update < warmup + flat:
                rate = 1.0
            else:
                done = (update + 1 - warmup - flat) / decay
                fall = 1 - done if config["decay_type"] == "linear" else 0.5 * (1 + math.cos(math.pi * done))
                rate = config["min_lr_factor"] + (1 - config["min_lr_factor"]) * fall
            assert rate == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("keys", JOBS)
def test_megatron_has_the_jobs_batch_and_axes(keys):
    found, job = options(**keys), elsewhere(Job.load("tiny", device="cpu", **keys))
    assert int(found["global-batch-size"]) == keys["batch.size"]
    assert int(found["global-batch-size"]) == int(found["micro-batch-size"]) * job.microbatches * job.shards
    assert (f"tp={found['tensor-model-parallel-size']}" in keys["mesh"]) == ("tp" in keys["mesh"])
    assert (found.get("use-distributed-optimizer") is True) == (keys.get("zero", 1) == 1)
    assert (found.get("data-parallel-sharding-strategy") == "optim_grads_params") == (keys.get("zero") == 3)


def test_megatrons_vocabulary_and_sizes_are_the_models():
    found = options(mesh="dp=2", **{"batch.size": 4})
    # its null tokenizer adds the end of a document, and the table is padded to a multiple of the divisor
    assert int(found["vocab-size"]) + 1 == 256 and found["make-vocab-size-divisible-by"] == "1"
    assert (found["num-layers"], found["hidden-size"], found["ffn-hidden-size"], found["num-query-groups"]) == ("8", "128", "384", "2")
    assert found["swiglu"] is True and found["position-embedding-type"] == "rope" and found["normalization"] == "RMSNorm"
    assert found["lr"] == "0.002" == found["min-lr"] and "warmup" not in found


KINDS = {0: ("MULTI_CPU", "MULTI_GPU"), 1: ("DEEPSPEED", "DEEPSPEED"), 2: ("DEEPSPEED", "DEEPSPEED"), 3: ("DEEPSPEED", "FSDP")}


@pytest.mark.parametrize("stage", KINDS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_accelerate_takes_the_plugin_that_does_what_the_stage_says(stage, device):
    keys = {"zero": stage, "device": device, "precision": "fp32", "batch.size": 8, "batch.micro_size": 2}
    exported = made("accelerate", mesh="dp=2", **keys)
    config, kind = yaml.safe_load(exported.files[0].text), KINDS[stage][device == "cuda"]
    assert config["distributed_type"] == kind and config["num_processes"] == 2 and config["use_cpu"] is (device == "cpu")
    assert config.get("deepspeed_config", {}).get("zero_stage") == (stage if kind == "DEEPSPEED" else None)
    assert config.get("fsdp_config", {}).get("fsdp_reshard_after_forward") == (True if kind == "FSDP" else None)
    assert (
        config["mixed_precision"] == "no"
        and yaml.safe_load(made("accelerate", precision="bf16").files[0].text)["mixed_precision"] == "bf16"
    )


def test_hybrid_sharding_is_a_mesh_of_accelerates_own():
    config = yaml.safe_load(made("accelerate", mesh="dp_replicate=2 dp=3", zero=3, device="cuda", **{"batch.size": 12}).files[0].text)
    axes = config["parallelism_config"]
    assert (axes["parallelism_config_dp_replicate_size"], axes["parallelism_config_dp_shard_size"], config["num_processes"]) == (2, 3, 6)


def test_yaml_reads_back_as_it_was():
    table = {"a": "no", "b": True, "c": None, "d": 1e-8, "e": {"f": "x: # y", "g": [1, 2]}, "h": "2"}
    assert yaml.safe_load(as_yaml(table)) == table


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 5e5},
}  # fmt: skip


def test_a_llama_of_a_folder_is_told_by_its_sizes_and_other_models_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = options(model=f"hf:{tmp_path}", **{"model.weights": "random"})
    assert (found["num-layers"], found["ffn-hidden-size"], found["rotary-base"], found["norm-epsilon"]) == ("2", "172", "500000", "1e-06")
    assert "untie-embeddings-and-output-weights" not in found
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "mamba"}))
    for framework in ("megatron", "torchtitan"):
        with pytest.raises(JobError, match="builds its model itself, from sizes"):
            made(framework, model=f"hf:{tmp_path}")
    assert "fsdp_transformer_layer_cls_to_wrap" not in made("accelerate", model=f"hf:{tmp_path}", zero=3).files[0].text


def test_a_model_that_torchtitans_llama_is_not_is_listed():
    assert "model.name" not in lacking(made("torchtitan"))
    assert "model.name" in lacking(made("torchtitan", "30m"))
    assert torchtitan.VERSION in made("torchtitan").files[0].text
