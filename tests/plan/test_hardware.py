"""Clusters are read from words, and whatever is not known is refused with what is."""

from __future__ import annotations

import pytest

from stretto.errors import JobError
from stretto.plan.devices import DEVICES, device_of
from stretto.plan.hardware import LINKS, Cluster


def test_a_cluster_is_machines_times_devices_of_a_kind() -> None:
    cluster = Cluster.of("64x8 h100")
    assert (cluster.devices, cluster.nodes, cluster.per_node) == (512, 64, 8)
    assert (cluster.device.name, cluster.inside.name, cluster.across.name) == ("h100", "nvlink4", "ndr")
    assert Cluster.of("2x4 A100-SXM pcie4 hdr").inside.name == "pcie4"
    assert Cluster.of("gb200").devices == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nosuchcluster", "no device 'nosuchcluster'"),
        ("1x8 h10", "h100"),
        ("0x8 h100", "no devices"),
        ("8x0 h100", "no devices"),
        ("x h100 h100 h100 h100", "is not machines x devices"),
        ("1x8 h100 nvlnk4", "write nvlink4"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_with_what_to_write(text: str, words: str) -> None:
    with pytest.raises(JobError, match=words):
        Cluster.of(text)


def test_fewer_devices_are_whole_machines_or_part_of_one() -> None:
    cluster = Cluster.of("4x8 h100")
    assert [cluster.resized(n).devices for n in (1, 8, 16)] == [1, 8, 16]
    with pytest.raises(JobError, match="do not fill machines of 8"):
        cluster.resized(12)


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_every_device_names_its_source_and_links_and_reaches_less_than_its_peak(device) -> None:
    assert device.source and device.inside in LINKS and device.across in LINKS
    speeds = device.speeds
    assert 0 < speeds.sustained <= speeds.best < 1 and 0 < speeds.streamed < 1
    assert all(0 < share < 1 for share in (*speeds.attention, *speeds.portable))
    assert device.peak("fp16") > device.peak("fp32")


def test_a_dtype_without_units_is_refused() -> None:
    with pytest.raises(JobError, match="a100 has no fp8 units"):
        device_of("a100").peak("fp8")
