"""The machines (nodes) of a job: which ranks are on each, by which address they reach each other, and which of them still answer.

A message that does not come tells nothing of why. So each rank of a job on several nodes answers calls at a port of its own, from a
thread that sleeps otherwise. Whoever has lost a peer calls one rank of each node, and can say which nodes are gone.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol, TypeVar

Result = TypeVar("Result")

#: Seconds that a call may take to be answered, and the store to be read or written: a network that is up answers in milliseconds.
PATIENCE = 3.0
HERE = b"stretto"
#: An address that belongs to nobody (RFC 5737): asking the system how it would be reached sends nothing.
ELSEWHERE = "192.0.2.1"


class Store(Protocol):
    """As torch's: names and values that all ranks see."""

    def set(self, name: str, value: str, /) -> object: ...

    def get(self, name: str, /) -> bytes: ...


class Post(NamedTuple):
    """Where a rank is: the number and name of its node, and where it answers calls."""

    node: int
    host: str
    address: str
    port: int


class Nodes:
    """All ranks by node, and this rank's answering thread. `posts`: one a rank."""

    def __init__(self, rank: int, posts: Sequence[Post], listener: socket.socket | None = None) -> None:
        self.rank, self.posts, self._listener = rank, tuple(posts), listener
        self.lost: frozenset[int] = frozenset()  # nodes that did not answer when they were last called
        if listener is not None:
            threading.Thread(target=_answer, args=(listener,), daemon=True, name="stretto-node").start()

    @staticmethod
    def meet(rank: int, size: int, node: int, address: str | None, store: Store) -> Nodes:
        """Tell where I am, and learn where all others are. address: of this node, as others reach it. Collective."""
        listener = socket.create_server(("", 0), backlog=128)
        mine = Post(node, socket.gethostname(), address or socket.gethostname(), listener.getsockname()[1])
        store.set(f"nodes/{rank}", json.dumps(mine))
        return Nodes(rank, [Post(*json.loads(store.get(f"nodes/{peer}"))) for peer in range(size)], listener)

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.posts[self.rank].node

    def ranks(self, node: int) -> list[int]:
        """The ranks on a node."""
        return [rank for rank, post in enumerate(self.posts) if post.node == node]

    def gone(self) -> list[str]:
        """What can be said of each other node that does not answer now: its number, name and ranks, and in what way. Takes PATIENCE."""
        others = sorted({post.node for post in self.posts} - {self.node})
        with ThreadPoolExecutor(min(len(others), 64) or 1) as pool:
            troubles = list(pool.map(lambda node: _call(self.posts[self.ranks(node)[0]]), others))
        found = {node: trouble for node, trouble in zip(others, troubles, strict=True) if trouble}
        self.lost = frozenset(found)
        return [f"{self.name(node)} {trouble}" for node, trouble in found.items()]

    @property
    def store_lost(self) -> bool:
        """Whether the store is out of reach, as far as is known: it is kept on the node of rank 0, by that rank or its launcher."""
        return self.posts[0].node in self.lost

    def name(self, node: int) -> str:
        """As 'node 1 (gpu17: ranks 8 to 15)'."""
        ranks = self.ranks(node)
        span = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        return f"node {node} ({self.posts[ranks[0]].host}: {span})"

    def close(self) -> None:
        """Answer no more."""
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
            self._listener.close()


def _answer(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed
        while True:
            caller, _ = listener.accept()
            with caller, contextlib.suppress(OSError):
                caller.sendall(HERE)


def _call(post: Post) -> str:
    """Why a rank does not answer; "" if it does. A frozen process is told from a living one by its word, which only it can say."""
    try:
        with socket.create_connection((post.address, post.port), PATIENCE) as line:
            line.settimeout(PATIENCE)
            return "" if line.recv(len(HERE)) else "ends its ranks"
    except ConnectionError:
        return "answers, but its ranks have ended"
    except OSError:
        return f"cannot be reached at {post.address}"


def within(seconds: float, work: Callable[[], Result]) -> Result:
    """work(), or TimeoutError: for calls that may wait for ever, as those to a store whose node is gone. Its thread is left behind."""
    found: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return found[0]


def address_towards(host: str) -> str | None:
    """This machine's own address on the way to `host`; of a host that is itself, where others reach it; None where that is not known.

    Many systems know their own name as 127.0.1.1, where no other machine finds them.
    """
    for target in (host, ELSEWHERE):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((target, 9))
            address: str = way.getsockname()[0]
            if not address.startswith("127."):
                return address
    return None


def interface_of(address: str) -> str | None:
    """The network interface that has an address of this machine, as GLOO_SOCKET_IFNAME names it; None where the system does not say."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                asked = struct.pack("256s", name.encode()[:15])
                told = fcntl.ioctl(any_socket.fileno(), 0x8915, asked)  # SIOCGIFADDR
                if socket.inet_ntoa(told[20:24]) == address:
                    return name
    return None
