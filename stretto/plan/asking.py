"""A job on a cluster as a planner sees it: its model's anatomy, the layout that is asked for, and what of it a search may change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stretto.anatomy import DECODERS, Anatomy
from stretto.anatomy.config import shape_of_folder
from stretto.errors import JobError
from stretto.job import Job, parse_overrides
from stretto.layout.mesh import Mesh
from stretto.limits import check_heads, check_rows
from stretto.plan.clusters import cluster_of_file
from stretto.plan.hardware import Cluster
from stretto.plan.search import OURS
from stretto.plan.setting import Setting
from stretto.plan.software import Software
from stretto.plan.space import Limits, Space
from stretto.schedule.pipelines import FILE, PIPELINES, chunks_of
from stretto.schedule.request import requested


@dataclass(frozen=True)
class Asked:
    """What is to be planned. setting: the layout of the job as it is written; None where it cannot be on this cluster, and `why` says
    so. keep: the keys of which a search leaves the job's own value."""

    job: Job
    anatomy: Anatomy
    cluster: Cluster
    setting: Setting | None
    why: str
    space: Space
    compiled: bool

    @property
    def software(self) -> Software:
        """Our engine as the job runs it."""
        return OURS[self.compiled]


def read_cluster(text: str) -> Cluster:
    """A built-in name, machines x devices of a kind, or the path of a cluster file. Raises JobError."""
    if text.endswith(".toml") or Path(text).is_file():
        return cluster_of_file(Path(text))
    return Cluster.of(text)


def anatomy_of(job: Job) -> Anatomy:
    """Of a built-in model or of a config.json. Raises JobError for what cannot be known without building it."""
    name = job.model.name
    if name in DECODERS:
        return Anatomy.of_decoder(DECODERS[name].with_(job.model.sizes()))
    if name.startswith("hf:"):
        return Anatomy.of_decoder(shape_of_folder(name.removeprefix("hf:")))
    raise JobError(
        f'model="{name}" is built by its function, and a plan builds nothing; write a built-in model ({", ".join(DECODERS)}) with its '
        'shape keys, or model="hf:FOLDER" with a config.json'
    )


def ask(job: Job, cluster: Cluster, keep: Collection[str] = ()) -> Asked:
    """keep: full names of keys whose values are not to be changed. Raises JobError where those cannot be on this cluster."""
    anatomy = anatomy_of(job)
    compute = job.precision.compute or ("bf16" if "bf16" in cluster.device.flops else "fp32")
    cluster.device.peak(compute)  # refuses a dtype that the device has not
    master = job.precision.master or ("fp64" if compute == "fp64" else "fp32")
    compiled = job.compile.mode == "block"
    mesh, why = _mesh(job, cluster.devices, "mesh" in keep)
    base = Setting(
        mesh,
        job.batch.size,
        job.batch.micro_size or 1,
        job.batch.seq_len,
        job.zero.stage,
        job.zero.gradients,
        job.zero.params,
        job.pipeline.schedule,
        1,
        job.recompute,
        compute,
        job.precision.reduce or master,
        master,
        sequence=job.tensor.sequence is not False,
        optimizer=job.optimizer.name,
    )
    limits = Limits.of(anatomy)
    space = Space(
        base,
        limits,
        cluster.devices,
        cluster.per_node,
        meshes=(mesh,) if "mesh" in keep else (),
        zero=(job.zero.stage,) if "zero.stage" in keep else (),
        micro_sizes=(job.batch.micro_size,) if "batch.micro_size" in keep and job.batch.micro_size else (),
        recompute=(job.recompute,) if "recompute" in keep else (),
        compiled=(compiled,) if "compile.mode" in keep or not cluster.device.compiles else (False, True),
        schedules=(job.pipeline.schedule,) if "pipeline.schedule" in keep and not job.pipeline.schedule.startswith(FILE) else (),
        chunks=(job.pipeline.chunks,) if "pipeline.chunks" in keep and job.pipeline.chunks else (),
    )
    setting = None
    if not why:
        try:
            setting = _setting(job, base, limits, compiled)
        except JobError as error:
            if "mesh" in keep:
                raise
            why = str(error)
    return Asked(job, anatomy, cluster, setting, why, space, compiled)


def _mesh(job: Job, devices: int, kept: bool) -> tuple[Mesh, str]:
    """The job's mesh on so many devices, or all of them as dp and why its own cannot be."""
    whole = Mesh.of(dp=devices)
    if not job.mesh or job.mesh == "auto":
        return whole, "" if job.mesh == "" else "the job leaves its mesh to the plan"
    mesh = Mesh.parse(job.mesh, devices) if "auto" in job.mesh else Mesh.parse(job.mesh)
    if mesh.size == devices:
        return mesh, ""
    why = f'mesh="{mesh}" is of {mesh.size} ranks, and the cluster has {devices} devices'
    if kept:
        raise JobError(f'{why}; write a mesh of {devices}, as mesh="{mesh} dp=auto"' if mesh["dp"] == 1 else f"{why}; write dp=auto in it")
    return whole, why


def _setting(job: Job, base: Setting, limits: Limits, compiled: bool) -> Setting:
    """The job's own layout. Raises JobError where it cannot be."""
    mesh = base.mesh
    check_rows(job.batch, mesh)
    if mesh["tp"] > 1:
        check_heads(job.model.name, limits.heads, limits.kv_heads, mesh["tp"])
    rows = job.batch.size // mesh.extent("dp", "dp_replicate", "ep")
    if rows < 1 or job.batch.size % mesh.extent("dp", "dp_replicate", "ep"):
        raise JobError(f'batch.size={job.batch.size} cannot be shared evenly by mesh="{mesh}"; write a multiple of its dp and ep ranks')
    micro_size = job.batch.micro_size or rows
    chunks = 1 if job.pipeline.schedule.startswith(FILE) else chunks_of(job.pipeline.schedule, mesh["pp"], job.pipeline.chunks)
    enough = telling(job.pipeline.schedule, mesh["pp"], -(-rows // micro_size))
    step = requested(job.pipeline.schedule, mesh["pp"], enough, job.pipeline.chunks, compiled=compiled)
    if step.stages > limits.blocks:
        raise JobError(f"{step.stages} pipeline stages are more than the {limits.blocks} blocks of {job.model.name}; write a smaller pp")
    keys = job.pipeline
    return replace(base, micro_size=micro_size, chunks=chunks, split=keys.split, balance=keys.balance, measured=keys.measured)


def telling(schedule: str, ranks: int, microbatches: int) -> int:
    """Microbatches of a step that can be if, and only if, one of so many can: a known schedule that has enough of them takes any more.
    Steps of thousands take seconds to write down."""
    return microbatches if schedule.startswith(FILE) else min(microbatches, max(1, PIPELINES[schedule].least(ranks)))


def names_of(overrides: Mapping[str, object]) -> frozenset[str]:
    """Full names of the keys in what Job.load was given beside its file."""
    return frozenset(
        f"{key}.{leaf}" if isinstance(value, Mapping) else key
        for key, value in overrides.items()
        for leaf in (value if isinstance(value, Mapping) else ("",))
    )


def kept(job: Job, texts: Iterable[str]) -> frozenset[str]:
    """Full names of the keys that a user wrote as KEY=VALUE, which a search leaves as they are; a mesh=auto is left to it."""
    return names_of(parse_overrides(texts)) - ({"mesh"} if job.mesh == "auto" else set())


def sizes_of(text: str) -> list[int]:
    """'8,16,32' -> [8, 16, 32]; raises JobError."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise JobError(f"--gpus {text} is no list of numbers; write --gpus 8,16,32") from None
