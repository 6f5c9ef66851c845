"""Where ranks meet: the late are waited for, the missing are named, and an address that cannot be had is told at once."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping

import pytest

from stretto.comm.environment import Seat, check_interfaces, meeting_point, seat
from stretto.comm.meeting import check_name, meet_in_store
from stretto.errors import JobError, PeerLost


@pytest.fixture
def point() -> Iterator[tuple[Mapping[str, str], tuple[str, int]]]:
    """Rank 0's environment, and an address at which it listens already."""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        yield {"STRETTO_LISTEN_FD": str(os.dup(listener.fileno()))}, listener.getsockname()


def test_a_rank_that_is_late_is_waited_for(point: tuple[Mapping[str, str], tuple[str, int]]) -> None:
    environment, address = point
    came: dict[int, bytes] = {}

    def rank(number: int) -> None:
        time.sleep(0.5 * (number == 1))
        store = meet_in_store(environment if number == 0 else {}, Seat(number, 3, number), address, 20)
        store.set(f"hello/{number}", str(number))
        came[number] = b"".join(store.get(f"hello/{peer}") for peer in range(3))

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert came == dict.fromkeys(range(3), b"012")


def test_those_that_do_not_come_are_named(point: tuple[Mapping[str, str], tuple[str, int]]) -> None:
    environment, address = point
    with pytest.raises(PeerLost, match=r"4 ranks did not meet at 127\.0\.0\.1:\d+ within 0\.3 s: 3 did not come, ranks 1, 2, 3$"):
        meet_in_store(environment, Seat(0, 4, 0), address, 0.3)


def test_a_port_that_another_program_has_is_named() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(JobError, match=f"port {port} is taken on this machine .*set MASTER_PORT to a free one"):
            meet_in_store({}, Seat(0, 2, 0), ("127.0.0.1", port), 5)


def test_a_name_that_nobody_knows_is_refused_before_anybody_waits() -> None:
    with pytest.raises(JobError, match=r"MASTER_ADDR=no-such-host\.invalid: .* knows no machine"):
        meet_in_store({}, Seat(1, 2, 1), ("no-such-host.invalid", 1), 0.1)
    check_name("127.0.0.1", 0.0)


HAVE = ("lo", "eth0", "ib0")


@pytest.mark.parametrize(
    ("backend", "asked", "fits"),
    [
        ("gloo", "", True),
        ("gloo", "eth0", True),
        ("gloo", "eth0,ib0", True),
        ("gloo", "eth", False),
        ("gloo", "eth0,ib7", False),
        ("nccl", "eth", True),
        ("nccl", "eno,ib", True),
        ("nccl", "=eth", False),
        ("nccl", "=eth0", True),
        ("nccl", "^lo", True),
        ("nccl", "^lo,eth,ib", False),
        ("nccl", "eno", False),
    ],
)
def test_an_interface_that_is_not_there_is_refused_with_those_that_are(backend: str, asked: str, fits: bool) -> None:
    environment = {f"{backend.upper()}_SOCKET_IFNAME": asked, "GLOO_SOCKET_IFNAME" if backend == "nccl" else "NCCL_SOCKET_IFNAME": "wrong"}
    if fits:
        check_interfaces(environment, HAVE, backend)
        return
    with pytest.raises(JobError, match=r"_SOCKET_IFNAME=.*: this machine has lo, eth0, ib0; write one of these"):
        check_interfaces(environment, HAVE, backend)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "two", "WORLD_SIZE": "4"}, "RANK=two is not a number"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 is none of WORLD_SIZE=4 ranks"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": ""}, "LOCAL_RANK= is not a number"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "http"}, "MASTER_PORT=http is not a number"),
    ],
)
def test_variables_that_make_no_sense_are_told_in_words(environment: dict[str, str], says: str) -> None:
    with pytest.raises(JobError, match=says):
        seat(environment)
        meeting_point(environment)
