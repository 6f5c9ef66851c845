"""A machine that was measured is planned by its own times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stretto.anatomy import DECODERS, Anatomy
from stretto.errors import JobError
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.plan.asking import read_cluster
from stretto.plan.clusters import cluster_of
from stretto.plan.measured import Copy, DeviceFacts, LinkTime, Measured, Product
from stretto.plan.planning import plan_job
from stretto.plan.predict import predict
from stretto.plan.setting import Setting
from stretto.plan.traffic import Seats, collective_seconds

#: 50 GFLOP/s, 8 GB/s of copies, 4 GB of memory for two ranks, and collectives of 10 us and 1 GB/s.
FACTS = DeviceFacts(
    "a machine", "cpu", 2, 1, 2, 8 * 10**9, 1e-5,
    tuple(Product("fp32", rows, 512, 512, 2 * rows * 512 * 512 / 50e9) for rows in (128, 1024)),
    (Copy(2**20, 2**20 / 20e9), Copy(2**28, 2**28 / 8e9)),
)  # fmt: skip
TIMES = tuple(
    LinkTime("shm", 2, collective, size, True, 1e-5 + size / 1e9)
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "send", "all_to_all")
    for size in (2**12, 2**20, 2**26)
)
MACHINE = Measured(FACTS, TIMES, {"when": "once"})


def test_the_device_has_the_rates_that_were_measured() -> None:
    device = cluster_of(MACHINE).device
    assert device.flops == {"fp32": pytest.approx(50e9)}
    assert (device.bandwidth, device.memory, device.gap) == (pytest.approx(16e9), 4e9, 1e-5)  # a copy reads and writes


def test_a_collective_takes_what_it_took() -> None:
    cluster = cluster_of(MACHINE)
    for size in (2**12, 2**20, 2**26):
        assert collective_seconds(cluster, Seats(2, 2, 1), "all_gather", size) == pytest.approx(1e-5 + size / 1e9)
    assert collective_seconds(cluster, Seats(4, 4, 1), "all_reduce", 2**26) == pytest.approx(1.5 * (1e-5 + 2**26 / 1e9))  # 2 (n - 1) / n


def test_a_collective_that_was_not_measured_is_named() -> None:
    some = replace(MACHINE, links=tuple(one for one in TIMES if one.collective != "all_gather"))
    with pytest.raises(JobError, match="no all_gather"):
        collective_seconds(cluster_of(some), Seats(2, 2, 1), "all_gather", 1e6)


def test_a_step_takes_at_least_its_flops_at_the_measured_rate() -> None:
    anatomy = Anatomy.of_decoder(DECODERS["30m"])
    setting = Setting(Mesh.of(dp=2), 4, 2, 256, compute="fp32")
    seconds = predict(anatomy, setting, cluster_of(MACHINE)).seconds
    least = anatomy.flops_per_token(256) * 2 * 256 / 50e9
    assert least < seconds < 2 * least


def test_a_cluster_file_is_planned_from(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(MACHINE.text())
    cluster = read_cluster(str(file))
    assert cluster.devices == 2
    planned = plan_job(Job.load("tiny"), cluster)
    assert {str(row.plan.setting.mesh) for row in planned.rows if row.runs} == {"dp=2", "tp=2", "pp=2"}
    assert all(row.plan.setting.compute == "fp32" and row.job.compile.mode == "none" for row in planned.rows)
