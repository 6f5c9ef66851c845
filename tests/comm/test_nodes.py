"""Nodes, with stores and sockets alone: who answers, who does not, and why."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from stretto.comm import nodes
from stretto.comm.nodes import Nodes, Post, address_towards, interface_of, within


class Shelf(dict):
    """A store of one process, that waits as torch's does."""

    def set(self, name, value):
        self[name] = value.encode()

    def get(self, name):
        while name not in self:
            time.sleep(0.001)
        return self[name]


def meeting(*places):
    """Nodes of each rank, on the given nodes."""
    shelf, found = Shelf(), {}
    join = lambda rank: found.__setitem__(rank, Nodes.meet(rank, len(places), places[rank], "127.0.0.1", shelf))
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(len(places))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [found[rank] for rank in range(len(places))]


def test_all_ranks_learn_who_is_where():
    met = meeting(0, 0, 1, 1, 2)
    assert [one.node for one in met] == [0, 0, 1, 1, 2] and len({one.posts for one in met}) == 1
    assert met[0].ranks(1) == [2, 3] and met[0].name(1).endswith(": ranks 2 to 3)") and met[0].name(2).endswith(": rank 4)")
    assert [one.gone() for one in met] == [[]] * 5
    for one in met:
        one.close()


def test_a_node_whose_ranks_have_ended_is_named_and_others_are_not():
    met = meeting(0, 1, 2)
    met[1].close()
    assert not met[0].store_lost
    (told,) = met[0].gone()
    assert told == f"node 1 ({socket.gethostname()}: rank 1) answers, but its ranks have ended"
    assert met[0].lost == {1} and not met[0].store_lost
    met[0].close()
    assert len(met[2].gone()) == 2 and met[2].store_lost
    met[2].close()


def test_a_frozen_process_does_not_answer_though_the_system_takes_the_call(monkeypatch):
    monkeypatch.setattr(nodes, "PATIENCE", 0.3)
    code = "import socket, sys, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); time.sleep(60)"
    frozen = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        port = int(frozen.stdout.readline())
        os.kill(frozen.pid, signal.SIGSTOP)
        here, there = Post(0, "a", "127.0.0.1", 1), Post(1, "b", "127.0.0.1", port)
        assert Nodes(0, [here, there]).gone() == ["node 1 (b: rank 1) cannot be reached at 127.0.0.1"]
    finally:
        frozen.kill()
        frozen.wait()
        frozen.stdout.close()


def test_what_waits_for_ever_is_given_up_and_what_fails_fails_as_it_is():
    assert within(5.0, lambda: 3) == 3
    with pytest.raises(TimeoutError, match="no answer within 0.05 s"):
        within(0.05, threading.Event().wait)
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 / 0)


def test_an_address_is_one_that_others_reach_and_belongs_to_an_interface():
    address = address_towards("127.0.1.1")  # as many systems call themselves
    assert address is None or not address.startswith("127.")
    if sys.platform == "linux":
        assert interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.9") is None
        assert address is None or interface_of(address) not in (None, "lo")
