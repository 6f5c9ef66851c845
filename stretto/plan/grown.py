"""How time and cost of a whole run grow with devices, and what a budget buys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.errors import JobError
from stretto.job import Job
from stretto.plan.hardware import Cluster
from stretto.plan.planning import Planned, Row, plan_job


@dataclass(frozen=True)
class Grown:
    """The best layout on so many devices, and the whole run with it. row: None where nothing fits, and `why` says so. cost: device-hours
    times the price of one, None without a price. why: what a budget says of it."""

    devices: int
    row: Row | None
    hours: float
    device_hours: float
    cost: float | None
    why: str

    def plain(self) -> dict[str, Any]:
        """As values of JSON."""
        found = {"devices": self.devices, "plan": None if self.row is None else self.row.plain(), "why": self.why}
        return found if self.row is None else {**found, "hours": self.hours, "device_hours": self.device_hours, "cost": self.cost}


def grow(
    job: Job, cluster: Cluster, sizes: Sequence[int], price: float | None, budget: float | None, keep: Collection[str] = ()
) -> list[Grown]:
    """On each number of devices. price: of a device-hour. budget: what the run may cost, in the same money, or in device-hours without
    a price. Raises JobError for a job that does not say how long it is."""
    steps = job.total_steps()
    if steps is None:
        raise JobError(f"epochs={job.epochs} does not say how many steps there are without the data; write steps=N or tokens=N")
    return [_on(job, cluster, size, steps, price, budget, keep) for size in sizes]


def _on(job: Job, cluster: Cluster, devices: int, steps: int, price: float | None, budget: float | None, keep: Collection[str]) -> Grown:
    try:
        planned: Planned = plan_job(job, cluster.resized(devices), keep, top=1)
    except JobError as error:
        return Grown(devices, None, 0.0, 0.0, None, str(error))
    row = planned.best
    assert row is not None
    hours = steps * row.plan.seconds / 3600
    cost = None if price is None else hours * devices * price
    return Grown(devices, row, hours, hours * devices, cost, _bought(budget, cost if cost is not None else hours * devices, steps))


def _bought(budget: float | None, cost: float, steps: int) -> str:
    if budget is None:
        return ""
    return "within the budget" if cost <= budget else f"the budget buys {int(steps * budget / cost):,} of {steps:,} steps"
