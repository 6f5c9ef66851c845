"""Engine.save and Engine.load: any mesh to any mesh, with nothing half done."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from stretto.checkpoint.kinds import FACT, manifest_at
from stretto.checkpoint.load import fetch, prints
from stretto.checkpoint.manifest import Manifest, Scalar
from stretto.checkpoint.meeting import Meeting
from stretto.checkpoint.names import COMPUTES, compare, compare_computing, suited
from stretto.checkpoint.parts import HostCopy, Part
from stretto.checkpoint.peers import Peers
from stretto.checkpoint.save import Content, Save
from stretto.checkpoint.store import Store
from stretto.engine.frozen import FACT as FROZEN
from stretto.engine.frozen import check_same, fact, is_frozen, left_out
from stretto.engine.state import EngineState, States
from stretto.errors import JobError, RunError, StrettoError
from stretto.models.pretrained import computes, config_of

if TYPE_CHECKING:
    from stretto.engine.engine import Engine

T = TypeVar("T")
#: Seconds that the first rank to call waits for the others.
PATIENCE = 8.0


class Writing:
    """A save whose state is copied: it is being written, here or in a thread of its own. bytes_: of this rank."""

    def __init__(self, work: Callable[[], object], bytes_: int, background: bool) -> None:
        self.bytes_, self.final = bytes_, not background
        self.step, self.stall, self.seconds = 0, 0.0, 0.0
        self._work = work
        self._error: BaseException | None = None
        self._started = time.perf_counter()
        self._thread = threading.Thread(target=self._run, name="stretto-save", daemon=True)
        if background:
            self._thread.start()
        else:
            self._run()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._error = error
        self.seconds = time.perf_counter() - self._started

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def join(self) -> None:
        """Until it is done, well or not."""
        if self._thread.ident is not None:
            self._thread.join()

    def wait(self) -> None:
        """Until it is done; raises what went wrong: RunError."""
        self.join()
        if self._error is not None:
            raise self._error


class Saver:
    """Saves and loads one engine. Collective, as Engine.save and Engine.load are."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.world = engine, engine.world
        self.state = EngineState(engine)
        self.host: HostCopy | None = None
        self.writing: Writing | None = None
        self._fact: dict[str, list[Any]] | None = None

    def save(
        self,
        store: Store,
        name: str,
        notes: Mapping[str, Any],
        patience: float | None = None,
        *,
        background: bool = False,
        then: Callable[[], object] = lambda: None,
    ) -> Writing:
        """See Engine.save; the checkpoint will be the folder `name` of the store. Returns when this rank's state is copied, and the
        writing goes on in a thread or, if not in the background, when all is written. then: runs on rank 0 after that."""
        self.wait()
        meeting = Meeting(self.world.store, self.world.rank, self.world.size, "engine.save")
        ready, error = _tried(lambda: (self._host(self._parts()), self.state.scalars(self.state.states())), "engine.save")
        content = self._content(ready[0][1] if ready else {}, notes)
        saving = Save(meeting, store, name, content)
        saving.begin(ready[0][0].written if ready else 0, PATIENCE if patience is None else patience, error)
        host = ready[0][0]
        if self.trained_only:
            saving.content = replace(content, facts={**content.facts, FROZEN: self._frozen()})
        host.take()

        def finish() -> None:
            saving.finish(host, self.engine.job.comm.step_timeout)
            if self.world.rank == 0:
                then()

        self.writing = Writing(finish, host.written, background)
        return self.writing

    def keep(self, peers: Peers, notes: Mapping[str, Any] | None = None) -> Writing:
        """Keep the state in memory, here and with a neighbour, as a checkpoint of this step. Returns when it is copied; the rest goes
        on in a thread, and its error is told where it is waited for. All ranks call it after the same steps."""
        content = self._content(self.state.scalars(self.state.states()), notes or {})
        host = peers.take(content.step, self.state.parts(), pinned=self.world.device.type == "cuda")
        return Writing(lambda: peers.keep(host, content), host.written, background=True)

    @property
    def trained_only(self) -> bool:
        return self.engine.job.checkpoint.weights == "trained"

    def _parts(self) -> list[Part]:
        """What goes to a file."""
        return [part for part in self.state.parts() if not (self.trained_only and is_frozen(part))]

    def _frozen(self) -> dict[str, list[Any]]:
        """What is said of frozen parameters that are left out; they do not change, so it is found once. Collective."""
        if self._fact is None:
            self._fact = fact([part for part in self.state.model_parts() if is_frozen(part)], self._join)
        return self._fact

    def _join(self, mine: Any) -> list[Any]:
        return self.engine.everybody.objects(mine, reason="frozen")

    def _content(self, scalars: Mapping[str, Scalar], notes: Mapping[str, Any]) -> Content:
        """What there is to tell beside tensors."""
        engine = self.engine
        facts = {"torch": torch.__version__, "time": time.time(), "own optimizer": engine.own_optimizer}
        facts |= {FACT: _config(engine.model), COMPUTES: computes(engine.model)}
        job = engine.job.model_dump(mode="json")
        return Content(engine.steps, str(engine.mesh), self.world.size, scalars, self.state.counters(), notes, job, facts)

    def wait(self) -> None:
        """Until nothing is being written; whoever began it hears of its error."""
        if self.writing is not None:
            self.writing.join()
            self.writing = None

    def _host(self, parts: list[Part]) -> HostCopy:
        """The host copy for these parts: the one there is, or one of their shapes."""
        if self.host is None or not self.host.fits(parts):
            self.host = None  # before the next is allocated
            self.host = HostCopy(parts, pinned=self.world.device.type == "cuda")
        self.host.renew(parts)
        return self.host

    def load(self, store: Store, name: str, allow: Iterable[str]) -> Mapping[str, Any]:
        """See Engine.load. Nothing of the engine is touched before all ranks have read, and checked, all they need."""
        self.wait()
        meeting = Meeting(self.world.store, self.world.rank, self.world.size, "engine.load")
        path = store.path(name)
        for rank, other in enumerate(meeting.call(path, PATIENCE)):
            if other != path:
                raise JobError(f"rank {self.world.rank} loads {path} and rank {rank} {other}; give every rank one folder")
        named = self.state.named()

        def look() -> Manifest:
            found = manifest_at(store, name)
            return suited(found, path, {key: one.aliases for key, one in named.items()}, lambda key: prints(store, name, found, key))

        manifest = self._from_rank_0(look, f"{path} cannot be read")
        shapes = {key: (one.shape, one.trained or key.startswith("buffer/")) for key, one in named.items()}
        absent = left_out(manifest, shapes)
        wanted = {key: shape for key, shape in self.state.wanted(manifest, named).items() if key not in absent}

        def read() -> tuple[HostCopy, States]:
            compare(manifest, path, wanted, allow)
            compare_computing(manifest, path, computes(self.engine.model), allow)
            self._check_optimizer(manifest, path)
            states = self.state.fresh_states(manifest)
            parts = self.state.model_parts() + self.state.optimizer_parts(states) + self.state.kept_streams(manifest)
            host = self.host if self.host and self.host.fits(parts) else HostCopy(parts, pinned=False)
            host.renew(parts)
            fetch(store, name, manifest, host)
            return host, states

        host, states = self._agreed(read, f"{path} cannot be read")
        if absent:
            check_same(manifest, path, self.state.model_parts(), absent, self._join)
        self._fact = None
        self.state.put(manifest, host, states)
        self.state.put_counters(manifest.state)
        return manifest.notes

    def _agreed(self, work: Callable[[], T], what: str) -> T:
        """What `work` gives, on every rank its own. An error on any rank is everybody's. Collective."""
        found, error = _tried(work, what)
        for failure in self.engine.everybody.objects(error, reason="load"):
            if failure is not None:
                raise failure
        return found[0]

    def _from_rank_0(self, work: Callable[[], T], what: str) -> T:
        """What `work` gives on rank 0, on all ranks. Collective."""
        mine: tuple[list[T], StrettoError | None] = _tried(work, what) if self.world.rank == 0 else ([], None)
        found, error = self.engine.everybody.objects(mine, reason="load")[0]
        if error is not None:
            raise error
        value: T = found[0]
        return value

    def _check_optimizer(self, manifest: Manifest, path: str) -> None:
        was, now = manifest.state["optimizer"], self.state.counters()["optimizer"]
        has_state = any(name.startswith("optimizer/") for name in (*manifest.tensors, *manifest.scalars))
        if has_state and was != now and now is not None:
            raise JobError(f"{path} has the state of {was}, and this engine has {now}; write the optimizer that it was saved with")


def _config(model: nn.Module) -> dict[str, Any] | str:
    """The config.json of the model, or why there is none."""
    try:
        return config_of(model)
    except JobError as error:
        return str(error)


def _tried(work: Callable[[], T], what: str) -> tuple[list[T], StrettoError | None]:
    """([what `work` gives], None), or ([], its error in words)."""
    try:
        return [work()], None
    except StrettoError as error:
        return [], error
    except Exception as error:
        return [], RunError(f"{what}: {type(error).__name__}: {error}")
