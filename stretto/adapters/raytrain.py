"""Ray Train: its TorchTrainer starts the workers and joins them; in them runs torch's loop, or stretto's own engine."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from stretto.adapters.loop import Loop, dtype_of, optimizer_of, prepared
from stretto.adapters.runner import Setting, real
from stretto.adapters.summary import Effort, RankTurn
from stretto.errors import RunError
from stretto.job import Job
from stretto.layout.mesh import Mesh

OBJECTS = 128 << 20  # bytes of Ray's object store, of which nothing is used here
#: Where workers of this machine leave what they found; given to them by the driver.
CONFIG = ("build", "job", "effort", "folder")


def drive(job: Job, rank: int, effort: Effort) -> Sequence[RankTurn]:
    """A turn of Ray Train with torch's loop in its workers: prepare_model wraps the model."""
    return _run("stretto.adapters.raytrain:build", job, effort)


def drive_stretto(job: Job, rank: int, effort: Effort) -> Sequence[RankTurn]:
    """A turn of stretto's engine in Ray Train's workers."""
    return _run("stretto.adapters.own:build", job, effort)


def _run(build: str, job: Job, effort: Effort) -> list[RankTurn]:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ranks = Mesh.parse(job.mesh).size
    given = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "")}
    threads = os.cpu_count() or 1
    given["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] if "OMP_NUM_THREADS" in os.environ else str(max(1, threads // ranks))
    on_gpu = job.device == "cuda"
    ray.init(
        num_cpus=max(ranks + 1, threads),
        include_dashboard=False,
        object_store_memory=OBJECTS,
        log_to_driver=True,
        runtime_env={"env_vars": {name: value for name, value in given.items() if value}},
    )
    with tempfile.TemporaryDirectory(prefix="stretto-ray-") as folder, contextlib.ExitStack() as ending:
        ending.callback(ray.shutdown)
        trainer = TorchTrainer(
            in_worker,
            train_loop_config=dict(zip(CONFIG, (build, job, effort, folder), strict=True)),
            torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
            scaling_config=ScalingConfig(num_workers=ranks, use_gpu=on_gpu),
            run_config=RunConfig(storage_path=folder, name="turn"),
        )
        try:
            trainer.fit()
        except Exception as error:
            raise RunError(_own_error(error)) from error
        return [RankTurn(*pickle.loads((Path(folder) / f"rank-{rank}").read_bytes())) for rank in range(ranks)]


def in_worker(config: Mapping[str, Any]) -> None:
    """A rank of a turn, in a worker that Ray Train has joined with the others. What it found goes into a file: all is on one machine."""
    import torch
    import torch.distributed as dist
    from ray.train.torch import get_device

    from stretto.adapters.turn import take_turn

    build, job, effort, folder = (config[name] for name in CONFIG)
    device: torch.device = get_device()
    setting = Setting(job, dist.get_rank(), dist.get_world_size(), device)
    told = take_turn(build, setting, Effort(*effort))
    (Path(folder) / f"rank-{setting.rank}").write_bytes(pickle.dumps(tuple(told)))


def build(setting: Setting) -> Loop:
    """See Build. The model is wrapped by Ray Train, in DDP."""
    from ray.train.torch import prepare_model

    loaded, job = setting.loaded(), setting.job
    model = prepared(real(loaded, job.seed, setting.device, dtype_of(job)), job)
    wrapped: Any = prepare_model(model, parallel_strategy_kwargs={"gradient_as_bucket_view": True})

    def around(last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if last or not isinstance(wrapped, DistributedDataParallel) else wrapped.no_sync()

    return Loop(setting, wrapped, optimizer_of(wrapped.parameters(), job), loaded, around=around)


def _own_error(error: BaseException) -> str:
    """The worker's own error, out of what Ray wraps around it."""
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", None) or {}
    if failures:
        rank, first = min(failures.items())
        cause = getattr(first, "cause", None) or first
        return f"worker {rank}: {type(cause).__name__}: {cause}"
    cause = error.__cause__ or getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().splitlines()[-1] if str(cause).strip() else cause!r}"
