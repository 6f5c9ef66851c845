"""Shelf: the checkpoints of one run, side by side, and which of them are kept."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from stretto.checkpoint.store import Store

Resume = Literal["no", "yes", "auto"]
NAME = re.compile(r"step-(\d{8,})")


def name_of(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Keep:
    """What a run is told about its checkpoints.

    place: the folder or URL that holds them; None: nothing is saved. resume: go on from the newest; auto: if there is one.
    last: also save after the last step, whatever checkpoint.every says. allow: patterns of names that may be missing on going on.
    export: where checkpoint.export writes the final model.
    """

    place: str | None = None
    resume: Resume = "no"
    last: bool = False
    allow: tuple[str, ...] = ()
    export: str | None = None


class Shelf:
    """Checkpoints named by their step in one store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def path(self, step: int) -> str:
        """How a user would name the checkpoint of a step."""
        return self.store.path(name_of(step))

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, newest first."""
        found = [int(match[1]) for folder in self.store.folders() if (match := NAME.fullmatch(folder)) and self.store.complete(folder)]
        return sorted(found, reverse=True)

    def sweep(self) -> list[str]:
        """Remove what crashes have left: folders that never got their name, or were on their way out. Returns what it was.

        Only while no rank of the run is saving.
        """
        left = [
            folder
            for folder in self.store.folders()
            if (folder.startswith(".") and folder.endswith(".tmp")) or (NAME.fullmatch(folder) and not self.store.complete(folder))
        ]
        for folder in left:
            self.store.remove(folder)
        return left

    def set_aside(self, step: int) -> str:
        """Give a damaged checkpoint another name, so that the run can save this step again; returns its path."""
        taken, number = set(self.store.folders()), 1
        while (name := f"damaged-{name_of(step)}" + (f"-{number}" if number > 1 else "")) in taken:
            number += 1
        self.store.rename(name_of(step), name)
        return self.store.path(name)

    def retire(self, keep: int, every: int, best: int | None) -> list[int]:
        """Remove all but the newest `keep`, those of steps that `every` divides (0: none) and the best; returns the steps removed."""
        old = [step for step in self.steps()[keep:] if not (every and step % every == 0) and step != best]
        for step in old:
            self.store.remove(name_of(step))
        return old
