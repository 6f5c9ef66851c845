"""A job for torch's fully_shard (FSDP2), which has no configuration but its calls: a script that makes them.

Calls: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html (torch 2.13).
"""

from __future__ import annotations

from stretto.export.reading import Exported, File, Reading, comments
from stretto.export.script import script, take

VERSION = "torch 2.13"
RUN = "torchrun --nproc-per-node {ranks} train.py"
SHARDED = '''

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

DTYPES = {{"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}}


def sharded(model):
    """Each block a unit, the rest in the root."""
    mesh = init_device_mesh(job.device, {sizes}, mesh_dim_names={names})
    policy = MixedPrecisionPolicy(param_dtype=torch.{compute}, reduce_dtype=torch.{reduce})
    for block in block_list(model)[1]:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward={reshard})
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward={reshard})


def last_of_step(model, last):
    """Whether gradients are reduced now, or only added up."""
    model.set_requires_gradient_sync(last or {each})
    model.set_is_last_backward(last)
'''
COPIED = '''

from torch.nn.parallel import DistributedDataParallel


def sharded(model):
    """Nothing is cut: every rank keeps all of it."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def last_of_step(model, last):
    """Whether gradients are reduced now, or only added up."""
    model.require_backward_grad_sync = last
'''
LOOP = """

def main():
    dist.init_process_group("nccl" if job.device == "cuda" else "gloo")
    rank, shards = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if job.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = sharded(first_model().to(device{master}))
    keys = job.optimizer
    if keys.name == "sgd":
        optimizer = torch.optim.SGD(groups(model), lr=keys.lr, momentum=keys.momentum)
    else:
        optimizer = torch.optim.AdamW(groups(model), lr=keys.lr, betas=keys.betas, eps=keys.eps)
    rates = scheduler(optimizer)
    for step in range(steps):
        micro, count = rows_of(step, rank, shards, device)
        told = torch.zeros((), device=device)
        for i, rows in enumerate(micro):
            last_of_step(model, i == len(micro) - 1)
            with torch.autocast(device.type, torch.{compute}, enabled={autocast}):
                # gradients are averaged over ranks; the job's loss is one sum over one number of targets
                loss = loss_of(model, rows) * (shards / max(count, 1))
            told += loss.detach() / shards
            loss.backward()
        if job.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        tell(step, told)
    dist.destroy_process_group()


main()
"""
TORCH = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def export(asked: Reading) -> Exported:
    """The script of a resolved job."""
    mesh, stage, ranks = asked.mesh, asked("zero.stage"), asked.job.shards
    run = RUN.format(ranks=ranks)
    for axis, call in (("tp", "parallelize_module and a plan"), ("pp", "torch.distributed.pipelining")):
        asked.axis(axis, f"needs {call}, which this script does not use (torchtitan does); this runs on {ranks} ranks")
    compute, master, reduce = (asked(f"precision.{key}") for key in ("compute", "master", "reduce"))
    if stage == 1:
        asked.lacks("zero.stage", "parameters and gradients are cut with the optimizer's state; reshard_after_forward=False is nearest")
    asked.lacks_if("zero.granularity", "element", "each parameter is cut along its first dim")
    if compute == "fp16":
        asked.lacks("precision.compute", "needs a loss scaler, which this script does not have")
    asked.lacks_if("precision.max_skips", 20, "it never stops for steps that are skipped")
    cut = stage > 0
    sizes, names = ((mesh["dp_replicate"], mesh["dp"]), ("dp_replicate", "dp")) if mesh["dp_replicate"] > 1 else ((mesh["dp"],), ("dp",))
    if not cut:
        asked.lacks_if("precision.reduce", master, "DDP reduces gradients in the dtype of the weights")
    asked.lacks_if("zero.keep", (), "is a list of modules to leave out of the calls") if stage == 3 else asked("zero.keep")
    words = {
        "sizes": sizes,
        "names": names,
        "compute": TORCH[compute],
        "reduce": TORCH[reduce],
        "reshard": stage == 3 and asked("zero.params") == "microbatch",
        "each": asked("zero.gradients") == "each",
        "master": "" if master == "fp32" else f", torch.{TORCH[master]}",
        "autocast": not cut and compute in ("bf16", "fp16"),
    }
    asked.even_microbatches()
    for key in ("batch.size", "clip", "schedule.shape", "schedule.min_ratio", "device"):
        asked(key)
    for key in ("name", "lr", "betas", "eps", "weight_decay", "momentum"):
        asked(f"optimizer.{key}")
    take(asked)
    missing = asked.missing()
    body = (SHARDED.format(**words) if cut else COPIED) + LOOP.format(**words)
    head = comments(f"{asked.job.name} for FSDP2 of {VERSION}", missing, run)
    files = (
        File("train.py", head + script("FSDP2" if cut else "DDP", run, "import os\nfrom functools import partial", body)),
        File("job.toml", asked.job.to_toml(comments=False)),
    )
    return Exported("fsdp2", VERSION, files, missing, run)
