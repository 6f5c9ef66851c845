"""stretto's own engine as a Runner."""

from __future__ import annotations

from stretto.adapters.runner import Setting, Told
from stretto.comm.transport import World
from stretto.data.batch import Batch
from stretto.engine.engine import Engine


class Own:
    """The engine on the ranks of the environment."""

    counts_bytes = True

    def __init__(self, setting: Setting) -> None:
        job = setting.job
        self.world = World.from_environment(job.device, job.comm.transport, job.comm.init_timeout, job.comm.step_timeout)
        self.engine = Engine(setting.loaded(), job, self.world)

    def step(self, batch: Batch) -> Told:
        """See Runner. The loss is the whole step's on every rank: rank 0 tells it."""
        report = self.engine.step(batch)
        sent = report.ledger.bytes_sent(self.engine.mesh)
        return Told(report.loss if self.world.rank == 0 else 0.0, report.grad_norm, sent)

    def close(self) -> None:
        """Leave the other ranks."""
        self.engine.close()
        self.world.close()


def build(setting: Setting) -> Own:
    """See Build."""
    return Own(setting)
