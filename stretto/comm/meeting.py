"""The place where ranks meet: a store at the address of rank 0. What keeps them from it is told in words, and so is who has not come."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from stretto.comm.environment import Seat
from stretto.errors import JobError, PeerLost

NAME_WAIT = 10.0  # seconds in which a name may become known: that of a pod that has just been started is not at once
NAMED = 8  # ranks that are missing, by name


def meet_in_store(environment: Mapping[str, str], here: Seat, point: tuple[str, int], seconds: float) -> Store:
    """The store that all ranks share, once all have come to it. Collective.

    environment: rank 0 keeps the store, on the socket that STRETTO_LISTEN_FD says if there is one; or torchrun's agent does.
    Raises JobError if the address cannot be had, PeerLost if somebody does not come within so many seconds.
    """
    host, port = point
    check_name(host, min(seconds, NAME_WAIT))
    listen = environment.get("STRETTO_LISTEN_FD") if here.rank == 0 else None
    keeps = here.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        kept = TCPStore(
            host,
            port,
            here.ranks,
            is_master=keeps,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=int(listen) if listen else None,
        )
        # an agent keeps one store through restarts: each start has names of its own
        store = PrefixStore(f"stretto/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}", kept)
        _wait_for_all(store, here, point, seconds)
    except (DistError, RuntimeError) as error:
        if "EADDRINUSE" in str(error):
            raise JobError(f"port {port} is taken on this machine ({socket.gethostname()}); set MASTER_PORT to a free one") from error
        raise PeerLost(f"{here.ranks} ranks did not meet at {host}:{port} within {seconds:g} s: {str(error).splitlines()[0]}") from error
    return store


def _wait_for_all(store: Store, here: Seat, point: tuple[str, int], seconds: float) -> None:
    """Until the last rank says that all are there. Two names a rank and a count: nobody asks for everybody."""
    store.set(f"came/{here.rank}", "")
    if store.add("came", 1) == here.ranks:
        store.set("all", "")
    try:
        store.wait(["all"], timedelta(seconds=seconds))
    except (DistError, RuntimeError) as error:
        missing = [rank for rank in range(here.ranks) if not store.check([f"came/{rank}"])]
        if not missing:
            raise
        named = ", ".join(map(str, missing[:NAMED])) + (", ..." if missing[NAMED:] else "")
        where = f"{here.ranks} ranks did not meet at {point[0]}:{point[1]} within {seconds:g} s"
        raise PeerLost(f"{where}: {len(missing)} did not come, rank{'s' if missing[1:] else ''} {named}") from error


def check_name(host: str, seconds: float) -> None:
    """JobError if nobody here knows the host, also not some seconds later."""
    limit = time.monotonic() + seconds
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() >= limit:
                words = f"{socket.gethostname()} knows no machine of the name {host} ({error.strerror or error})"
                raise JobError(f"MASTER_ADDR={host}: {words}; write the name or address by which it reaches rank 0") from error
        time.sleep(0.5)
