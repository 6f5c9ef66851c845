"""Vault: states of ranks in this process's memory, which others may fill and read over a socket. Each rank's newest two steps stay.

What is said: the token that the vault has told its friends, then any number of requests, each one line of JSON, answered by one line and,
for "get", by bytes; "put" is followed by its bytes. "rescued" is answered once `tell` is called (see rescue.py).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from stretto.errors import PeerLost

#: Steps of a rank that stay: while one arrives, the one before it is whole.
KEPT = 2
TOKEN = 32
#: Seconds in which a machine that is up answers a call.
REACH = 3.0


class Address(NamedTuple):
    """Where a vault listens, and the word that opens it."""

    host: str
    port: int
    token: str


class Held(NamedTuple):
    """What a vault has of a rank at a step: about: a manifest of that rank's part alone (JSON); pieces: its file, in order."""

    about: str
    pieces: Sequence[memoryview]

    @property
    def bytes_(self) -> int:
        return sum(len(piece) for piece in self.pieces)

    def cut(self, start: int, stop: int) -> list[memoryview]:
        """Bytes [start, stop) of the file."""
        found, at = [], 0
        for piece in self.pieces:
            low, high = max(start - at, 0), min(stop - at, len(piece))
            if low < high:
                found.append(piece[low:high])
            at += len(piece)
        return found


class Vault:
    """host: the address at which others reach this machine; it listens at nothing else. Threads end with the process, or at `close`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.held: dict[tuple[int, int], Held] = {}
        self._lock = threading.Lock()
        self._told: list[int | None] = []
        self._telling = threading.Event()
        self._listener = socket.create_server((host, 0))
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_hex(TOKEN // 2))
        threading.Thread(target=self._serve, name="stretto-vault", daemon=True).start()

    def put(self, rank: int, step: int, held: Held) -> None:
        """Keep it; of this rank the older ones but for the newest before it go."""
        with self._lock:
            self.held[rank, step] = held
            steps = sorted((s for r, s in self.held if r == rank), reverse=True)
            for old in steps[KEPT:]:
                del self.held[rank, old]

    def forget(self, rank: int, step: int) -> None:
        """What this was is to be written over."""
        with self._lock:
            self.held.pop((rank, step), None)

    def tell(self, step: int | None) -> None:
        """Answer those who ask which step was rescued."""
        self._told.append(step)
        self._telling.set()

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(line,), name="stretto-vault", daemon=True).start()

    def _talk(self, line: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError, KeyError), line, line.makefile("rb") as incoming:
            if not hmac.compare_digest(incoming.read(TOKEN), self.address.token.encode()):
                return
            while text := incoming.readline():
                asked = json.loads(text)
                if asked["what"] == "put":
                    content = bytearray(asked["bytes"])
                    _fill(incoming, memoryview(content))
                    self.put(asked["rank"], asked["step"], Held(asked["about"], [memoryview(content)]))
                    _answer(line, True)
                elif asked["what"] == "rescued":
                    self._telling.wait()
                    _answer(line, self._told[0])
                elif asked["what"] == "list":
                    with self._lock:
                        _answer(line, [[rank, step, held.bytes_] for (rank, step), held in self.held.items()])
                else:
                    with self._lock:
                        held = self.held.get((asked["rank"], asked["step"]))
                    if asked["what"] == "about" or held is None:
                        _answer(line, held.about if held else None)
                        continue
                    cut = held.cut(asked["start"], asked["stop"])
                    _answer(line, sum(len(piece) for piece in cut))
                    for piece in cut:
                        line.sendall(piece)


class Line:
    """A line to a vault. Raises PeerLost where it is gone. patience: seconds for each answer."""

    def __init__(self, address: Address, patience: float) -> None:
        self.address = address
        try:
            self._socket = socket.create_connection((address.host, address.port), timeout=min(patience, REACH))
            self._socket.settimeout(patience)
            self._socket.sendall(address.token.encode())
        except OSError as error:
            raise self._lost(error) from None
        self._incoming = self._socket.makefile("rb")
        self._lock = threading.Lock()

    def ask(self, pieces: Sequence[memoryview] = (), into: memoryview | None = None, **request: Any) -> Any:
        """Ask, with bytes or for bytes; the answer."""
        with self._lock:
            try:
                self._socket.sendall(json.dumps(request).encode() + b"\n")
                for piece in pieces:
                    self._socket.sendall(piece)
                text = self._incoming.readline()
                if not text:
                    raise EOFError("it has hung up")
                answer = json.loads(text)
                if into is not None:
                    if answer != len(into):
                        raise EOFError(f"it has {answer} of {len(into)} bytes")
                    _fill(self._incoming, into)
                return answer
            except (OSError, EOFError) as error:
                raise self._lost(error) from None

    def close(self) -> None:
        self._incoming.close()
        self._socket.close()

    def _lost(self, error: Exception) -> PeerLost:
        return PeerLost(f"the copy in memory at {self.address.host}:{self.address.port} is out of reach: {error}")


def _answer(line: socket.socket, value: Any) -> None:
    line.sendall(json.dumps(value).encode() + b"\n")


def _fill(incoming: Any, view: memoryview) -> None:
    at = 0
    while at < len(view):
        n = incoming.readinto(view[at:])
        if not n:
            raise EOFError("it has hung up")
        at += n
