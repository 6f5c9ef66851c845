"""Setting: one way to run a training step, as far as its cost depends on it. A Job says more; a search tries thousands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from stretto.anatomy import Recompute
from stretto.job import Job
from stretto.layout.balance import Balance, By, Held, Widths, element_bytes
from stretto.layout.mesh import Mesh
from stretto.layout.zero import ZeroPolicy
from stretto.schedule.pipelines import chunks_of
from stretto.sections import DTYPE_BYTES


@dataclass(frozen=True)
class Setting:
    """Sizes of one step. batch: rows of the whole job; micro_size: rows a forward of one dp rank; seq_len: tokens a row.

    sequence: with tp, what lies outside the cut matrices is cut by tokens (sequence parallelism). layers: blocks of each stage
    where they are not even; split: the first part of each later stage, where they are cut by hand; balance, measured: what cuts them
    else.
    """

    mesh: Mesh
    batch: int
    micro_size: int
    seq_len: int
    zero: int = 1
    gradients: Literal["each", "end"] | None = None
    params: Literal["microbatch", "step"] = "microbatch"
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: Recompute = "none"
    compute: str = "bf16"
    reduce: str = "fp32"
    master: str = "fp32"
    sequence: bool = True
    layers: tuple[int, ...] = ()
    split: tuple[str, ...] = ()
    balance: By = "work"
    measured: str = ""
    optimizer: str = "adamw"

    @staticmethod
    def of(job: Job) -> Setting:
        """The setting of a resolved job."""
        assert job.precision.compute and job.precision.reduce and job.precision.master
        return Setting(
            Mesh.parse(job.mesh),
            job.batch.size,
            job.batch.micro_size or job.rows_per_rank,
            job.batch.seq_len,
            job.zero.stage,
            job.zero.gradients,
            job.zero.params,
            job.pipeline.schedule,
            chunks_of(job.pipeline.schedule, Mesh.parse(job.mesh)["pp"], job.pipeline.chunks),
            job.recompute,
            job.precision.compute,
            job.precision.reduce,
            job.precision.master,
            sequence=job.tensor.sequence is not False,
            split=job.pipeline.split,
            balance=job.pipeline.balance,
            measured=job.pipeline.measured,
            optimizer=job.optimizer.name,
        )

    def balanced(self, held: Held) -> Balance:
        """What cuts the model in stages. held: of the schedule's ranks."""
        master = dtype_bytes(self.master)
        widths = Widths.of(dtype_bytes(self.compute, 2), dtype_bytes(self.reduce), master, {"adamw": 2, "sgd": 0}.get(self.optimizer, 1))
        return Balance(self.balance, self.measured, element_bytes(self.policy, self.shards, widths), self.tokens, held)

    @cached_property
    def policy(self) -> ZeroPolicy:
        return ZeroPolicy.of(self.zero, self.gradients, self.params)

    @cached_property
    def size(self) -> dict[str, int]:
        """Axis -> ranks along it."""
        return dict(self.mesh.axes)

    @property
    def replicas(self) -> int:
        """Ranks that share the rows of a batch; ep ranks have rows of their own, and send tokens to each other's experts."""
        return self.size["dp"] * self.size["dp_replicate"] * self.size["ep"]

    @property
    def shards(self) -> int:
        """Ranks among which ZeRO cuts what all of them use; experts have fewer copies."""
        return self.expert_shards * self.size["ep"]

    @property
    def expert_shards(self) -> int:
        """Ranks that hold the same experts, among which ZeRO cuts those."""
        return self.size["dp"] * self.size["cp"]

    @property
    def stages(self) -> int:
        return self.size["pp"] * self.chunks

    @property
    def microbatches(self) -> int:
        return max(1, -(-self.batch // (self.replicas * self.micro_size)))

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one rank."""
        return self.micro_size * self.seq_len // self.size["cp"]

    @property
    def bytes_(self) -> int:
        """Of one element of an activation."""
        return dtype_bytes(self.compute, 2)


def dtype_bytes(dtype: str, held: int | None = None) -> int:
    """Bytes of an element; 8- and 4-bit floats are held in 16 bits outside of the products (`held`)."""
    if dtype in DTYPE_BYTES:
        return DTYPE_BYTES[dtype]  # type: ignore[index]
    return held if held is not None else 1
