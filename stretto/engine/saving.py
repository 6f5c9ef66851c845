"""Engine.save and Engine.load: any mesh to any mesh, with nothing half done."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

import stretto
from stretto.checkpoint.load import compare, fetch, read_manifest
from stretto.checkpoint.manifest import Manifest
from stretto.checkpoint.meeting import Meeting
from stretto.checkpoint.parts import HostCopy, Part
from stretto.checkpoint.save import Content, Save
from stretto.checkpoint.store import Store
from stretto.engine.state import EngineState
from stretto.errors import Damaged, JobError, RunError, StrettoError

if TYPE_CHECKING:
    from stretto.engine.engine import Engine

#: Seconds that the first rank to call waits for the others.
PATIENCE = 8.0


class Saver:
    """Saves and loads one engine. Collective, as Engine.save and Engine.load are."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.world = engine, engine.world
        self.state = EngineState(engine)
        self.host: HostCopy | None = None

    def save(self, store: Store, name: str, notes: Mapping[str, Any], patience: float) -> None:
        """See Engine.save; the checkpoint will be the folder `name` of the store."""
        meeting = Meeting(self.world.store, self.world.rank, self.world.size, "engine.save")
        parts, states = self.state.parts(), self.state.states()
        job = self.engine.job
        content = Content(
            self.engine.steps,
            str(self.engine.mesh),
            self.world.size,
            self.state.scalars(states),
            self.state.counters(),
            notes,
            job.model_dump(mode="json"),
            {"stretto": stretto.__version__, "torch": torch.__version__, "time": time.time()},
        )
        saving = Save(meeting, store, name, content)
        host = self._host(parts)
        saving.begin(host.written, patience)
        host.take()
        saving.finish(host, job.comm.step_timeout)

    def _host(self, parts: list[Part]) -> HostCopy:
        """The host copy for these parts: the one there is, or one of their shapes."""
        if self.host is None or not self.host.fits(parts):
            self.host = None  # before the next is allocated
            self.host = HostCopy(parts, pinned=self.world.device.type == "cuda")
        self.host.renew(parts)
        return self.host

    def load(self, store: Store, name: str, allow: Iterable[str], patience: float) -> Mapping[str, Any]:
        """See Engine.load. Nothing of the engine is touched before all ranks have read, and checked, all they need."""
        meeting = Meeting(self.world.store, self.world.rank, self.world.size, "engine.load")
        path = store.path(name)
        for rank, other in enumerate(meeting.call(path, patience)):
            if other != path:
                raise JobError(f"rank {self.world.rank} loads {path} and rank {rank} {other}; give every rank one folder")
        manifest = self._manifest(store, name)
        compare(manifest, path, self.state.wanted(manifest), allow)
        self._check_optimizer(manifest, path)
        states = self.state.fresh_states(manifest)
        parts = self.state.model_parts() + self.state.optimizer_parts(states) + self.state.kept_streams(manifest)
        failure: Exception | None = None
        try:
            host = self.host if self.host and self.host.fits(parts) else HostCopy(parts, pinned=False)
            host.renew(parts)
            fetch(store, name, manifest, host)
        except Exception as error:
            failure = error
        told = None if failure is None else str(failure) if isinstance(failure, StrettoError) else f"{type(failure).__name__}: {failure}"
        self._agree(told, failure)
        self.state.put(manifest, host, states)
        self.state.put_counters(manifest.state)
        return manifest.notes

    def _manifest(self, store: Store, name: str) -> Manifest:
        """As rank 0 reads it; its error is everybody's."""
        found: Manifest | StrettoError | None = None
        if self.world.rank == 0:
            try:
                found = read_manifest(store, name)
            except StrettoError as error:
                found = error
            except Exception as error:
                found = RunError(f"{store.path(name)} cannot be read: {type(error).__name__}: {error}")
        found = self.engine.everybody.objects(found, reason="load")[0]
        if isinstance(found, StrettoError):
            raise found
        assert found is not None
        return found

    def _agree(self, told: str | None, failure: Exception | None) -> None:
        """Go on only if no rank failed to read its part; every rank raises the first one's error."""
        for error in self.engine.everybody.objects(told, reason="load"):
            if error is not None:
                raise Damaged(error) from failure

    def _check_optimizer(self, manifest: Manifest, path: str) -> None:
        was, now = manifest.state["optimizer"], self.state.counters()["optimizer"]
        has_state = any(name.startswith("optimizer/") for name in (*manifest.tensors, *manifest.scalars))
        if has_state and was != now and now is not None:
            raise JobError(f"{path} has the state of {was}, and this engine has {now}; write the optimizer that it was saved with")
