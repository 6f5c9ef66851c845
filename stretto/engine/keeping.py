"""Keeper: when a run saves, what it keeps, and from where it goes on."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from stretto.checkpoint.peers import Peers
from stretto.checkpoint.rescue import rescue
from stretto.checkpoint.shelf import Keep, Shelf, name_of
from stretto.checkpoint.store import open_store
from stretto.checkpoint.vault import Address
from stretto.data.feed import Feed
from stretto.errors import Damaged, JobError, RunError, StrettoError
from stretto.models.pretrained import config_of

if TYPE_CHECKING:
    from stretto.engine.engine import Engine
    from stretto.engine.saving import Writing


class Keeper:
    """The checkpoints of the run of one engine. Every rank has one and calls it alike."""

    def __init__(self, engine: Engine, feed: Feed, keep: Keep, emit: Callable[[dict[str, Any]], None]) -> None:
        self.engine, self.feed, self.keep, self.emit = engine, feed, keep, emit
        self.keys = engine.job.checkpoint
        self.shelf = Shelf(open_store(keep.place)) if keep.place is not None else None
        self.best: tuple[int, float] | None = None  # step and evaluation loss; with checkpoint.best it is one that is saved
        self.saved = 0  # the step last saved, or gone on from
        self.failures = 0
        self.writing: Writing | None = None
        self.writing_best: tuple[int, float] | None = None
        self.peers = Peers.of(engine.world) if self.keys.memory and self.shelf is not None and engine.world.size > 1 else None
        self.vaults: list[Address] = []
        self.let_go: Callable[[], None] = lambda: None  # of the place where checkpoints lie
        self.keeping: Writing | None = None  # a copy that is on its way to a neighbour's memory

    # -- going on --------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Go on from the newest checkpoint that is whole; what crashes have left is removed. Collective.

        A damaged one is set aside with a line that says so, and the one before it is taken. Raises JobError if there is none.
        """
        if self.shelf is None:
            return
        steps = self._of_rank_0(self._look)
        if self.keep.resume == "no":
            if steps:  # they would count as newer than those of this run, which would be removed in their place
                raise JobError(
                    f"{self.shelf.store.where} holds checkpoints of a run already, up to step {steps[0]}; write another checkpoint.folder, "
                    "--resume to go on with that run, or remove them"
                )
            return
        for step in steps:
            try:
                notes = self.engine.load(self.shelf.path(step), self.keep.allow)
            except Damaged as error:
                self._of_rank_0(functools.partial(self.shelf.set_aside, step))
                self.emit({"kind": "note", "text": f"the checkpoint of step {step} cannot be used: {error}"})
                continue
            self.saved = step
            self.best = tuple(notes["best"]) if notes.get("best") else None
            self.feed.go_on(self.engine.steps, notes["samples"])
            self._tell_other_data(notes)
            self._of_rank_0(functools.partial(self._retire, self.best))  # only now: this one is known to be whole
            self.emit({"kind": "resumed", "step": step, "path": self.shelf.path(step)})
            return
        if self.keep.resume == "yes":
            raise JobError(f"{self.shelf.store.where} has no checkpoint to go on from; write --resume=auto to start at step 1 then")
        self.emit({"kind": "note", "text": f"no checkpoint in {self.shelf.store.where} to go on from: starting at step 1"})
        self.emit({"kind": "resumed", "step": 0})

    def _tell_other_data(self, notes: Mapping[str, Any]) -> None:
        """Say it where a sample's number means another sample than it did: nothing is wrong then, but some may come twice or never."""
        was, now = notes.get("data") or {}, self._data()
        changed = [f"{key} was {was[key]} and is {now[key]}" for key in now if key in was and was[key] != now[key]]
        if changed:
            self.emit({"kind": "note", "text": f"the data is not as it was: {'; '.join(changed)}; it goes on at sample {notes['samples']}"})

    def _data(self) -> dict[str, Any]:
        """What decides which sample has which number."""
        job = self.engine.job
        keys = ("source", "split", "column", "tokenizer")
        told = {f"data.{key}": getattr(job.data, key) for key in keys}
        return {**told, "seed of the data": job.seed if job.data.seed is None else job.data.seed, "batch.seq_len": job.batch.seq_len}

    def _retire(self, best: tuple[int, float] | None) -> None:
        """Remove the checkpoints that need not be kept; a crash may have come between a save and this."""
        assert self.shelf is not None
        self.shelf.retire(self.keys.keep, self.keys.keep_every, best[0] if best and self.keys.best else None)

    def _look(self) -> list[int]:
        """The steps that there are, once the place is this run's alone and what crashes have left is gone. On rank 0."""
        assert self.shelf is not None
        if self.keys.every or self.shelf.store.folders():
            try:
                self.let_go = self.shelf.store.claim()
            except OSError as error:
                raise JobError(
                    f"{self.shelf.store.where} cannot be written ({error.strerror or error}); write checkpoint.folder=DIR with one that can"
                ) from None
        self.shelf.sweep()
        return self.shelf.steps()

    def _of_rank_0(self, work: Callable[[], Any]) -> Any:
        """What `work` gives on rank 0, on every rank; its error is everybody's. Collective."""
        found: Any = None
        if self.engine.world.rank == 0:
            try:
                found = work()
            except StrettoError as error:
                found = error
            except OSError as error:
                found = RunError(f"{self.shelf.store.where if self.shelf else ''}: {error.strerror or error}")
        found = self.engine.everybody.objects(found, reason="checkpoints")[0]
        if isinstance(found, StrettoError):
            raise found
        return found

    # -- saving ----------------------------------------------------------------------------------------------------

    def after(self, step: int, eval_loss: float | None, last: bool) -> None:
        """Step `step` (from 1) is done, and perhaps evaluated: save if it is time. last: no step follows. Collective."""
        if self.shelf is None:
            return
        self._settle(wait=False)
        known = self.best if self.writing is None else self.writing_best
        best = known if eval_loss is None or (known and known[1] <= eval_loss) else (step, eval_loss)
        better = best != known and self.keys.best
        due = bool(self.keys.every) and (step % self.keys.every == 0 or last)
        ending = self.engine.stopping or (last and self.keep.last)
        if not (due or ending or better) or step == self.saved:
            return
        if self.writing is not None and self.keys.busy == "skip" and not (last or ending or better) and self._still_writing():
            self.emit({"kind": "note", "text": f"step {step} is not saved: the last checkpoint is still being written"})
            return
        self._settle(wait=True)
        self._begin(step, best, background=self.keys.background and not (last or ending))

    # -- copies in memory ------------------------------------------------------------------------------------------

    def remember(self, step: int) -> None:
        """Step `step` is done: keep it in memory, if it is time. Raises PeerLost where the neighbour that keeps the last one is gone."""
        if self.peers is None or step % self.keys.memory:
            return
        if not self.vaults:  # known beforehand: when they are needed, the store may be gone
            world = self.engine.world
            self.engine.everybody.objects(None, reason="vaults")
            self.vaults = self.peers.addresses(range(world.size))
            self.emit({"kind": "holds"})
        if self.keeping is not None:
            self.keeping.wait()
        self.keeping = self.engine.saver.keep(self.peers, self._notes(step, self.best))

    def rescue(self) -> None:
        """A rank is lost: what memory holds of the newest step becomes a checkpoint, if there is no newer one. Every rank that is left
        calls it, once."""
        if self.peers is None or self.shelf is None or not self.vaults:
            return
        step = rescue(self.peers.vault, self.engine.world.rank, self.vaults, self.shelf)
        if step is not None:
            self.emit({"kind": "note", "text": f"a rank is lost; step {step} was in memory and is saved in {self.shelf.path(step)}"})

    # -- at the end ------------------------------------------------------------------------------------------------

    def export(self) -> None:
        """After the last step: the model as a folder of its own, named by the step; one that is there already is not written again."""
        if self.keys.export == "none" or self.keep.export is None or self.keep.last or self.engine.stopping:
            return
        place, name = self.keep.export, name_of(self.engine.steps)
        if self._of_rank_0(lambda: self._exported(place, name)):
            return
        self.engine.save_pretrained(f"{place}/{name}")
        self.emit({"kind": "note", "text": f"the model is in {place}/{name}, as a Hugging Face folder"})

    def _exported(self, place: str, name: str) -> bool:
        """Whether the folder is there; what a crash has left of an earlier one is removed."""
        store = open_store(place)
        for folder in store.folders():
            if folder.startswith(".") and folder.endswith(".tmp"):
                store.remove(folder)
        return name in store.folders()

    def check_export(self) -> None:
        """JobError before the first step for a model that cannot be exported as asked."""
        if self.keys.export != "none":
            config_of(self.engine.model)

    def close(self) -> None:
        """Wait until the last save is done, and report it."""
        self._settle(wait=True)
        if self.keeping is not None:
            self.keeping.wait()
        if self.peers is not None:
            self.engine.everybody.objects(None, reason="vaults")  # before anybody leaves: nobody sends to a vault that is closed

    def leave(self) -> None:
        """However the run ends: give up the place, and what is held in memory. Not collective."""
        self.let_go()
        if self.peers is not None:
            self.peers.close()

    def _begin(self, step: int, best: tuple[int, float] | None, background: bool) -> None:
        assert self.shelf is not None
        self.emit({"kind": "at", "step": step, "action": "saving"})
        started = time.perf_counter()
        notes = self._notes(step, best)
        patience = self.engine.job.comm.step_timeout
        self.saved = step
        try:
            self.writing = self.engine.saver.save(
                self.shelf.store,
                name_of(step),
                notes,
                patience,
                background=background,
                then=functools.partial(self._retire, best),
            )
        except RunError as error:
            self._failed(step, error, final=not background)
            return
        self.writing.step, self.writing.stall = step, time.perf_counter() - started
        self.writing_best = best
        self._settle(wait=not background)

    def _notes(self, step: int, best: tuple[int, float] | None) -> dict[str, Any]:
        """What resume wants back."""
        return {"samples": self.feed.position(step), "best": best, "data": self._data()}

    def _still_writing(self) -> bool:
        """Whether any rank is. Collective: all ranks come to the same answer."""
        mine = self.writing is not None and not self.writing.done
        return any(self.engine.everybody.objects(mine, reason="checkpoints"))

    def _settle(self, wait: bool) -> None:
        """Report the save that was under way, if it is done."""
        writing = self.writing
        if writing is None or not (wait or writing.done) or self.shelf is None:
            return
        self.writing = None
        try:
            writing.wait()
        except RunError as error:
            self._failed(writing.step, error, final=writing.final)
            return
        self.failures, self.best = 0, self.writing_best
        self.emit(
            {
                "kind": "saved",
                "step": writing.step,
                "path": self.shelf.path(writing.step),
                "seconds": writing.seconds,
                "stall_seconds": writing.stall,
                "bytes": writing.bytes_,
            }
        )

    def _failed(self, step: int, error: RunError, final: bool) -> None:
        """Tell it at once; go on, unless too many failed in a row, or this was the last chance."""
        self.failures += 1
        limit = self.keys.max_failures
        if final or self.failures > limit:
            raise error
        self.emit({"kind": "note", "text": f"{error} (failure {self.failures}; after {limit} in a row the run stops)"})
