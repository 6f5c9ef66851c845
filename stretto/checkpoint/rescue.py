"""After the loss of a rank: what the memory of the others still holds becomes a checkpoint, from which any restart goes on.

No store and no collective is left then, since either may have gone with the rank. So all know each other's vaults from before, and the
first of them that still answers writes for all; the others stay, because it reads their memory, and hear from it when it is done.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import cast

from stretto.checkpoint.manifest import NAME
from stretto.checkpoint.peers import PeerStore
from stretto.checkpoint.shelf import Shelf, name_of
from stretto.checkpoint.store import CHUNK
from stretto.checkpoint.vault import Address, Line, Vault
from stretto.errors import PeerLost, StrettoError

#: Seconds that a rank waits for the one that writes.
PATIENCE = 60.0


def rescue(vault: Vault, rank: int, addresses: Sequence[Address], shelf: Shelf, patience: float = PATIENCE) -> int | None:
    """Write the newest step of which all is held, unless the shelf has it or a newer one; the step that was written, by whomever.

    addresses: of all ranks' vaults. Every rank that is left calls it. What cannot be written is not: None.
    """
    for other, address in enumerate(addresses):
        if other == rank:
            step = None
            try:
                step = _write(addresses, shelf)
            except (StrettoError, OSError):
                pass  # the run ends of the loss; a full disk on top of it changes nothing
            finally:
                vault.tell(step)
            return step
        try:
            line = Line(address, patience)
            step = cast(int | None, line.ask(what="rescued"))
            line.close()
            return step
        except PeerLost:
            continue
    return None


def _write(addresses: Sequence[Address], shelf: Shelf) -> int | None:
    memory = PeerStore(addresses)
    held = Shelf(memory).steps()
    newest = max(shelf.steps(), default=0)
    if not held or held[0] <= newest:
        memory.close()
        return None
    name = name_of(held[0])
    there = shelf.store
    temporary = there.temporary(name, uuid.uuid4().hex[:8])
    manifest = memory.read(f"{name}/{NAME}")
    for file in memory.files(name):
        there.write(f"{temporary}/{file}", _chunks(memory, f"{name}/{file}"))
    there.commit(temporary, name, manifest)
    memory.close()
    return held[0]


def _chunks(memory: PeerStore, file: str) -> Iterator[memoryview]:
    with memory.open(file) as opened:
        while piece := opened.read(CHUNK):
            yield memoryview(piece)
