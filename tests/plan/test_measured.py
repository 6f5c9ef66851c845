"""The file that `stretto measure` writes: nothing of it is lost on the way back, and what is fitted says how far it is off."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import JobError
from stretto.plan.measured import CROSSES, Copy, DeviceFacts, LinkTime, Measured, Product, Way, fit

DEVICE = DeviceFacts("Some CPU", "cpu", 2, 1, 2, 2**34, 1e-6, (Product("fp32", 8, 16, 4, 1e-6),), (Copy(100, 1e-6),))
WAY = Way("gloo", 2, "all_reduce", True)


def times(way: Way, *points: tuple[int, float]) -> tuple[LinkTime, ...]:
    return tuple(LinkTime(way.transport, way.ranks, way.collective, bytes_, way.private, seconds) for bytes_, seconds in points)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("broadcast", 1), ("send", 1)],
)
def test_bus_bandwidth_is_that_of_nccl_tests(collective: str, factor: float) -> None:
    one = LinkTime("gloo", 4, collective, 4000, True, 0.5)
    assert one.algbw == 8000 and one.busbw == 8000 * factor


def test_rates_follow_from_times() -> None:
    assert Product("fp32", 8, 16, 4, 1e-6).flops_per_second == pytest.approx(2 * 8 * 16 * 4 * 1e6)
    assert Copy(100, 1e-6).bytes_per_second == pytest.approx(1e8)


@given(st.floats(1e-7, 1e-2), st.floats(1e6, 1e12), st.sampled_from(sorted(CROSSES)), st.integers(2, 9))
def test_times_on_a_line_give_the_line(latency: float, bandwidth: float, collective: str, ranks: int) -> None:
    crossing = CROSSES[collective](ranks)
    sizes = [4096 * 8**k for k in range(6)]
    found = fit(times(Way("shm", ranks, collective, True), *((size, latency + crossing * size / bandwidth) for size in sizes)))
    for size in sizes:
        assert found.latency + crossing * size / found.bandwidth == pytest.approx(latency + crossing * size / bandwidth, rel=1e-3)
    assert found.off < 1e-3


def test_what_is_off_the_line_is_said() -> None:
    found = fit(times(WAY, (1000, 1e-3), (2000, 1e-3), (1_000_000, 1.0), (2_000_000, 4.0)))
    errors = [abs((found.latency + size / found.bandwidth) / t - 1) for size, t in ((1000, 1e-3), (2000, 1e-3), (1e6, 1.0), (2e6, 4.0))]
    assert found.off == pytest.approx(max(errors)) and found.off > 0.2


def test_times_that_do_not_grow_are_all_latency_and_those_that_grow_too_fast_all_bandwidth() -> None:
    for points in ([(1000, 2e-3)], [(1000, 2e-3), (2000, 2e-3), (4000, 1e-3)]):
        found = fit(times(WAY, *points))
        assert found.bandwidth == math.inf and 1e-3 <= found.latency <= 2e-3
    found = fit(times(WAY, (1000, 1e-6), (2000, 4e-6), (4000, 16e-6)))
    assert found.latency == 0 and found.bandwidth > 0


NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
SECONDS = st.floats(1e-9, 1e3).map(lambda x: float(f"{x:.6g}"))
LINKS = st.builds(LinkTime, NAMES, st.integers(2, 64), st.sampled_from(sorted(CROSSES)), st.integers(1, 2**40), st.booleans(), SECONDS)
DEVICES = st.builds(
    DeviceFacts,
    NAMES,
    st.sampled_from(["cpu", "cuda"]),
    st.integers(1, 200),
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(1, 2**45),
    SECONDS,
    st.lists(st.builds(Product, st.sampled_from(["fp32", "bf16"]), *[st.integers(1, 9999)] * 3, SECONDS), max_size=3).map(tuple),
    st.lists(st.builds(Copy, st.integers(1, 2**40), SECONDS), max_size=3).map(tuple),
)


@settings(max_examples=25, deadline=None)
@given(DEVICES, st.lists(LINKS, max_size=5).map(tuple), st.dictionaries(st.sampled_from(["time", "command"]), NAMES))
def test_a_file_is_read_as_it_was_written(device: DeviceFacts, links: tuple[LinkTime, ...], about: dict[str, str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cluster.toml")
        path.write_text(Measured(device, links, about).text(), encoding="utf-8")
        assert Measured.read(path) == Measured(device, links, about)


def test_a_name_may_hold_any_character(tmp_path: Path) -> None:
    odd = "".join(map(chr, [*range(0x20), *range(0x7E, 0xA0), 0x2028])) + "\"\\'"
    path = tmp_path / "cluster.toml"
    path.write_text(Measured(replace(DEVICE, name=odd), ()).text(), encoding="utf-8")
    assert Measured.read(path).device.name == odd


def test_the_file_holds_the_fitted_lines_too() -> None:
    measured = Measured(DEVICE, times(WAY, (1000, 2e-3), (101_000, 12e-3)))
    (line,) = tomllib.loads(measured.text())["links"]["fitted"]
    assert line == {"transport": "gloo", "ranks": 2, "collective": "all_reduce", "private": True, **line}
    assert (line["latency"], line["bandwidth"]) == (pytest.approx(1.9e-3), pytest.approx(1e7)) and line["off"] < 1e-6


def test_as_json_it_has_what_the_contract_says() -> None:
    plain = Measured(DEVICE, times(WAY, (1000, 2e-3)), {"time": "now"}).plain()
    assert plain["device"]["name"] == "Some CPU" and plain["device"]["products"][0]["flops_per_second"] == pytest.approx(1.024e9)
    link = plain["links"][0]
    assert {name: link[name] for name in ("transport", "ranks", "collective", "bytes", "private", "seconds")} == {
        "transport": "gloo", "ranks": 2, "collective": "all_reduce", "bytes": 1000, "private": True, "seconds": 2e-3
    }  # fmt: skip
    assert link["busbw"] == 5e5


def test_seconds_of_sizes_between_lie_between() -> None:
    measured = Measured(DEVICE, times(WAY, (1000, 1e-3), (100_000, 1e-1), (400_000, 1e-1)))
    assert measured.seconds(WAY, 10) == 1e-3
    assert measured.seconds(WAY, 10_000) == pytest.approx(1e-2)
    assert measured.seconds(WAY, 200_000) == pytest.approx(1e-1)
    assert measured.seconds(WAY, 4_000_000) == pytest.approx(1.0)
    with pytest.raises(JobError, match="send over gloo on 2 ranks was not measured; there is all_reduce over gloo on 2 ranks; write"):
        measured.seconds(WAY._replace(collective="send"), 10)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read (No such file or directory)"),
        ("a = [", "is no TOML"),
        ("a = 1", "has version none, and this stretto reads 1"),
        ("version = 7", "has version 7"),
        ("version = 1", "is not what stretto measure writes ('device')"),
        ("version = 1\n[device]\nproducts = []\ncopies = []\nspeed = 3\n[links]\ntimes = []", "is not what stretto measure writes"),
    ],
)
def test_another_file_is_refused_with_what_to_write(text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(JobError, match=re.escape(says)) as caught:
        Measured.read(path)
    assert "write one with stretto measure" in str(caught.value)
