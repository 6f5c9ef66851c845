"""Each framework's own parser takes what is written, and runs it where a CPU is enough. Not part of `make test`: `make frameworks` installs
them; Megatron-LM's parser is in no package, so MEGATRON_LM names a checkout of it."""

import os
import shlex
import subprocess
import sys

import pytest
from exported import SMALL, losses_of

import stretto
from stretto.export.catalog import export, write
from stretto.job import Job
from stretto.launch.training import elsewhere

pytestmark = pytest.mark.frameworks
MESHES = (
    {"mesh": "dp=2"},
    {"mesh": "dp=4 tp=2"},
    {"mesh": "pp=2 dp=2"},
    {"mesh": "pp=2 dp=2", "pipeline": "interleaved"},
    {"mesh": "dp_replicate=2 dp=2"},
)


def exported(framework, folder, source="tiny", **keys):
    job = Job.load(source, **keys)
    return write(export(elsewhere(job), framework), folder)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """The losses of the small job."""
    trained = stretto.train(Job.load("tiny", **SMALL), tmp_path_factory.mktemp("ours") / "run")
    return trained.losses


@pytest.mark.parametrize("stage", range(4))
def test_deepspeed_trains_the_job_with_the_losses_of_stretto(stage, ours, tmp_path):
    exported("deepspeed", tmp_path, zero=stage, **SMALL)
    assert losses_of(tmp_path, "train.py") == pytest.approx(ours, rel=1e-4)


@pytest.mark.parametrize("stage", range(4))
def test_accelerate_trains_the_job_with_the_losses_of_stretto(stage, ours, tmp_path):
    """`accelerate launch` hands its configuration to ranks as variables; on CPUs it starts one rank alone, so they are started here."""
    from accelerate.commands import launch
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file

    (path, *_) = exported("accelerate", tmp_path, zero=stage, **SMALL)
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    args, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(["--config_file", str(path), "train.py"]))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(config.deepspeed_config)
        told = launch.prepare_deepspeed_cmd_env(args)[1]
    else:
        told = launch.prepare_multi_gpu_env(args) if args.use_fsdp else launch.prepare_simple_launcher_cmd_env(args)[1]
    own = {name: value for name, value in told.items() if os.environ.get(name) != value}
    assert losses_of(tmp_path, "train.py", **own | {"ACCELERATE_USE_CPU": "true"}) == pytest.approx(ours, rel=1e-4)


@pytest.mark.parametrize("keys", MESHES)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_torchtitan_reads_its_configuration_and_knows_the_model(keys, stage, tmp_path, monkeypatch):
    from torchtitan.config import ConfigManager

    path, _ = exported(
        "torchtitan", tmp_path, zero=stage, device="cuda", **{"batch.size": 16, "batch.micro_size": 2, "checkpoint.every": 5, **keys}
    )
    config = ConfigManager().parse_args(["--job.config_file", str(path)])
    assert config.training.global_batch_size == 16 and config.checkpoint.interval == 5
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("stretto_flavor", None)
    __import__(config.experimental.custom_import)
    import torch
    from torchtitan.models.llama3 import llama3_args
    from torchtitan.models.llama3.model.model import Transformer

    with torch.device("meta"):
        model = Transformer(llama3_args[config.model.flavor])
    assert model.layers["0"].feed_forward.w1.weight.shape == (384, 128) and len(model.layers) == 8


@pytest.mark.parametrize("keys", MESHES)
@pytest.mark.parametrize(
    "more", [{"zero": 1}, {"zero": 3, "precision": "bf16", "recompute": "full"}, {"zero": 0, "model": "30m", "optimizer": "sgd"}]
)
def test_megatrons_parser_accepts_its_arguments(keys, more, tmp_path):
    megatron = os.environ.get("MEGATRON_LM")
    assert megatron, "MEGATRON_LM=FOLDER of a checkout of Megatron-LM"
    (path,) = exported(
        "megatron", tmp_path, device="cuda", **{"batch.size": 16, "batch.micro_size": 2, "schedule.shape": "cosine", **keys, **more}
    )
    words = shlex.split(path.read_text(), comments=True)
    code = (
        "import sys, torch; torch.cuda.get_device_capability = lambda *a: (9, 0); torch.cuda.device_count = lambda: 8\n"
        "import types; torch.cuda.get_device_properties = lambda *a: types.SimpleNamespace(major=9, minor=0)\n"
        "from megatron.training.arguments import parse_args, validate_args\n"
        "args = validate_args(parse_args())\n"
        "print('accepted', args.data_parallel_size, args.micro_batch_size, args.global_batch_size)"
    )
    job = elsewhere(Job.load("tiny", device="cuda", **{"batch.size": 16, "batch.micro_size": 2, **keys}))
    ranks = job.derived()[0].value
    environment = {**os.environ, "PYTHONPATH": megatron, "WORLD_SIZE": str(ranks), "RANK": "0"}
    if keys["mesh"] == "dp=4 tp=2" and more["zero"] < 2:
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    run = subprocess.run([sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, timeout=100)
    assert f"accepted {job.shards} 2 16" in run.stdout, run.stderr[-2000:]
