"""Two machines to run ranks on, and a link between them that can be cut.

Where the system lets us, each is a namespace of its own for network, processes and host name, joined by a virtual cable. Elsewhere both
are this machine, told apart by node number alone, and to cut the link is to freeze every process of the second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

NAMES = ("left", "right")


class Hosts:
    """Made by `two_hosts`. separate: whether they are namespaces. address: of the first, as both reach it."""

    def __init__(self, separate: bool) -> None:
        self.separate = separate
        self.address = "10.77.0.1" if separate else "127.0.0.1"
        self.started: list[list[subprocess.Popen[str]]] = [[], []]
        self._label = f"stretto{os.getpid()}"

    def names(self) -> tuple[str, str]:
        """Their host names."""
        return NAMES if self.separate else (socket.gethostname(),) * 2  # type: ignore[return-value]

    def free_port(self) -> int:
        if self.separate:
            return 29500  # nobody else is there
        with socket.socket() as any_socket:
            any_socket.bind(("127.0.0.1", 0))
            return int(any_socket.getsockname()[1])

    def start(self, host: int, command: Sequence[str], environment: Mapping[str, str], **more: Any) -> subprocess.Popen[str]:
        """A program on one of them; its output is text to be read."""
        inside = ["ip", "netns", "exec", self._space(host), "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
        named = ["sh", "-c", f'hostname {NAMES[host]}; exec "$@"', "sh"]
        words = [*inside, *named, *command] if self.separate else list(command)
        process = subprocess.Popen(
            words, env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **more
        )
        self.started[host].append(process)
        return process

    def cut(self) -> None:
        """Nothing goes over the link any more; nobody is told."""
        if self.separate:
            _ip("netns", "exec", self._space(1), "ip", "link", "set", "cable1", "down")
            return
        for process in self.started[1]:
            for pid in _family(process.pid):
                os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let frozen processes see what has become of the others."""
        for process in [] if self.separate else self.started[1]:
            for pid in _family(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def _space(self, host: int) -> str:
        return f"{self._label}-{NAMES[host]}"

    def lay(self) -> None:
        """Make the namespaces and the cable. Raises CalledProcessError or OSError where that is not allowed."""
        for host in (0, 1):
            _ip("netns", "add", self._space(host))
        _ip("link", "add", "cable0", "netns", self._space(0), "type", "veth", "peer", "name", "cable1", "netns", self._space(1))
        for host in (0, 1):
            run = ("netns", "exec", self._space(host), "ip")
            _ip(*run, "addr", "add", f"10.77.0.{host + 1}/24", "dev", f"cable{host}")
            for device in ("lo", f"cable{host}"):
                _ip(*run, "link", "set", device, "up")
        subprocess.run(
            ["ip", "netns", "exec", self._space(0), "unshare", "--pid", "--fork", "--mount-proc", "--uts", "hostname", "left"],
            check=True,
            capture_output=True,
        )

    def clear(self) -> None:
        """End what was started, and take the namespaces away."""
        for process in (process for group in self.started for process in group):
            for pid in _family(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        for host in (0, 1):
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                _ip("netns", "delete", self._space(host))


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Namespaces if we may make some, else two nodes of this machine."""
    hosts = Hosts(separate=True)
    try:
        hosts.lay()
    except (OSError, subprocess.CalledProcessError):
        hosts.clear()
        hosts = Hosts(separate=False)
    try:
        yield hosts
    finally:
        hosts.clear()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _family(pid: int) -> list[int]:
    """A process and all that it has started, by /proc; the first is first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            after = stat.read_text().rpartition(")")[2].split()
            children.setdefault(int(after[1]), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found
