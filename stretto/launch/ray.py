"""Training on a Ray cluster: one actor a rank, placed by a placement group; what ranks say comes back here, a failure restarts them all.

[Note: actors, not Ray Train] Ray places the actors and keeps them alive or tells of their death. Its trainer would do so too, but
starts ten seconds later, and hands on the error of a worker as text of its own; the run folder, checkpoints and the order of samples
are ours in any case. So restarting is the few lines at the end of `start`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from stretto.checkpoint.shelf import Keep
from stretto.errors import JobError
from stretto.job import Job
from stretto.launch.board import Board, Place
from stretto.launch.devices import Devices
from stretto.launch.elastic import Workers, job_on
from stretto.launch.failure import Failure, RankFailed, first
from stretto.launch.local import ECHO_WAIT, RESCUE_WAIT, ROOT_WAIT, stop_signals
from stretto.launch.payload import pack, unpack
from stretto.launch.training import Ready, fitting, train_rank
from stretto.launch.worker import Event, Rank
from stretto.layout.mesh import Mesh
from stretto.plan.hardware import Cluster

TICK = 0.2  # seconds between looks at who has something to say
PLACED = 60.0  # seconds that the cluster may take to find room, which it may first have to make
INSTALL = "pip install 'stretto[ray]'"


class Spot(NamedTuple):
    """Where Ray has put an actor."""

    node: str
    host: str
    address: str
    gpus: tuple[str, ...]


class RayRank:
    """One rank, in a worker process of Ray. Its `run` is a stream of what it has to say."""

    def __init__(self) -> None:
        self.board = Board.private(1)

    def spot(self) -> Spot:
        import socket

        import ray

        context = ray.get_runtime_context()
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        return Spot(context.get_node_id(), socket.gethostname(), ray.util.get_node_ip_address(), gpus)

    def listen(self) -> int:
        """Open the port at which all ranks meet: that of rank 0, which keeps it open, so that nobody can take it between."""
        import socket

        self.listener = socket.create_server(("", 0), backlog=2048)
        os.environ["STRETTO_LISTEN_FD"] = str(self.listener.fileno())
        return int(self.listener.getsockname()[1])

    def ask_to_stop(self) -> None:
        """End after the step that is under way."""
        self.board.ask_to_stop()

    def run(self, variables: Mapping[str, str], folder: str, payload: bytes) -> Iterator[tuple[str, Any]]:
        """Run the payload as a rank: ("event", ...), ("line", ...), at last ("failure", ...) or ("finished", None).

        folder: where the driver stands; paths in the job begin there, on machines that have it.
        """
        os.environ.update(variables)
        with contextlib.suppress(OSError):
            os.chdir(folder)
        said: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(payload, said), daemon=True).start()
        while True:
            kind, what = said.get()
            yield kind, what
            if kind in ("failure", "finished"):
                return

    def _work(self, payload: bytes, said: queue.SimpleQueue[tuple[str, Any]]) -> None:
        here = Rank(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), _OwnBoard(self.board), lambda event: said.put(("event", event)))
        lines = _Lines(lambda line: said.put(("line", line)))
        with contextlib.redirect_stdout(lines), contextlib.redirect_stderr(lines):
            try:
                function, args = unpack(payload)
                function(here, *args)
            except BaseException as exception:
                said.put(("failure", here.failure(exception).to_event()))
            else:
                said.put(("finished", None))


class _OwnBoard(Board):
    """A board with one slot, that of the rank in this process, whatever its number."""

    def __init__(self, board: Board) -> None:
        super().__init__(board.page)

    def write(self, rank: int, step: int | None, action: str) -> None:
        super().write(0, step, action)

    def read(self, rank: int) -> Place:
        return super().read(0)


class _Lines:
    """A stream that hands on whole lines."""

    encoding = "utf-8"

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell, self.rest = tell, ""

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.tell(line)
        return len(text)

    def flush(self) -> None:
        """Half a line waits for its other half."""

    def isatty(self) -> bool:
        return False


class RayCluster:
    """A connection to a cluster, or to one that is started on this machine for as long as it lasts. Used as a context.

    address: as ray.init takes it; None: RAY_ADDRESS, else a local one. max_failures: times that a run may be started again.
    workers: how many ranks it may have, each time as many as there is room for; None: those of the job's mesh. devices: what the
    nodes are made of, for the choice of a mesh; None: as Ray names their GPUs.
    """

    again = " --on ray"

    def __init__(
        self,
        address: str | None,
        max_failures: int,
        tell: Callable[[str], None],
        workers: Workers | None = None,
        devices: Cluster | None = None,
    ) -> None:
        self.address, self.max_failures, self.tell = address or os.environ.get("RAY_ADDRESS"), max_failures, tell
        self.workers, self.devices = workers, devices

    def __enter__(self) -> RayCluster:
        try:
            import ray
        except ImportError as error:
            raise JobError(f"--on ray needs Ray ({error}); {INSTALL}") from None
        package = Path(__file__).parents[1]
        shared: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": {"py_modules": [str(package)]}}
        local = {} if self.address else {"num_cpus": max(os.cpu_count() or 1, 64), "include_dashboard": False}
        try:
            ray.init(address=self.address, **local, **shared)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = f"--address {self.address}" if self.address else "a Ray cluster on this machine"
            raise JobError(f"{where}: {' '.join(str(error).split())[:200]}; write --address HOST:PORT of a running head node") from None
        return self

    def __exit__(self, *exception: type[BaseException] | BaseException | TracebackType | None) -> None:
        import ray

        ray.shutdown()

    def prepare(self, job: Job) -> Ready:
        """The job on the cluster: GPUs if each rank can have one of its own."""
        import ray

        self.asked = job
        gpus = int(ray.cluster_resources().get("GPU", 0))
        found = Devices("cuda" if gpus else "cpu", gpus)
        return fitting(job if self.workers is None else self._as_there_is_room(job, found), None, found)

    def start(self, prepared: Ready, job: Job, keep: Keep, logs: Path | None, on_event: Callable[[Event], None]) -> None:
        """Run it to its end. Ranks that fail are all started again, at most max_failures times, from the newest checkpoint.

        What no other attempt would do otherwise (a wrong request, a failed check) is not tried again.
        """
        keep = replace(keep, place=_absolute(keep.place), export=_absolute(keep.export))
        left, room = self.max_failures, _room(job.device == "cuda")
        while True:
            try:
                with Actors(Mesh.parse(job.mesh), job.device == "cuda", logs, rescues=job.checkpoint.memory > 0) as actors:
                    return actors.run(pack(train_rank, (job, keep), train_rank), on_event)
            except RankFailed as error:
                if not left:
                    raise
                left -= 1
                self.tell(f"{error.failure.headline}; all ranks are started again ({left} more times after this)")
                keep = replace(keep, resume="auto")
            except NoRoom:  # a node that was lost may have been counted still
                if self.workers is None or _room(job.device == "cuda") == room:
                    raise
            if self.workers is not None:
                room = _room(job.device == "cuda")
                found = fitting(self._as_there_is_room(self.asked, prepared.devices), None, prepared.devices).job
                self.tell(f'there is room for {room} ranks: mesh="{found.mesh}"')
                job = found.with_(steps=job.steps, **{"schedule.steps": job.schedule.steps, "profile.steps": job.profile.steps})

    def _as_there_is_room(self, job: Job, found: Devices) -> Job:
        """The job with a mesh for the nodes that are there now."""
        import ray

        assert self.workers is not None
        on_gpus = found.kind == "cuda" and job.device != "cpu"
        devices = self.devices or _devices(ray.cluster_resources())
        return job_on(job, _room(on_gpus), "cuda" if on_gpus else "cpu", self.workers, devices)


class NoRoom(JobError):
    """The cluster has no place for the ranks."""


def _room(gpus: bool) -> int:
    """Ranks that the nodes have a place for which are alive, as far as Ray knows."""
    import ray

    return sum(int(node["Resources"].get("GPU" if gpus else "CPU", 0)) for node in ray.nodes() if node["Alive"])


def _devices(resources: Mapping[str, float]) -> Cluster | None:
    """A machine with the GPUs that Ray names among its resources, as accelerator_type:H100; None if it names none that is known."""
    for name in resources:
        with contextlib.suppress(JobError):
            if name.startswith("accelerator_type:"):
                return Cluster.of(name.partition(":")[2])
    return None


@dataclass
class Actors:
    """The actors of one attempt. Used as a context: they are gone at its end. rescues: if one is lost, others have something to save."""

    mesh: Mesh
    gpus: bool
    logs: Path | None
    rescues: bool = False
    actors: list[Any] = field(default_factory=list)
    group: Any = None
    asked: bool = False
    step: int = 0  # the last that rank 0 told of

    def __enter__(self) -> Actors:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        tp = self.mesh["tp"]
        # a bundle lies on one node: so tp neighbours, which talk most, share one
        bundle = {"CPU": tp, **({"GPU": tp} if self.gpus else {})}
        self.group = placement_group([bundle] * (self.mesh.size // tp), strategy="PACK")
        if not ray.wait([self.group.ready()], timeout=PLACED)[0]:
            self._remove()
            has = {kind: ray.cluster_resources().get(kind, 0) for kind in bundle}
            needs = f'mesh="{self.mesh}" needs {self.mesh.size // tp} times {_resources(bundle)} on one node each'
            raise NoRoom(f"--on ray: {needs}, and the cluster has {_resources(has)} in all; write a smaller mesh, or add nodes")
        made = ray.remote(RayRank)
        for index in range(self.mesh.size // tp):
            where = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
            options = {"num_cpus": 1, "num_gpus": int(self.gpus), "max_concurrency": 3, "scheduling_strategy": where}
            self.actors += [made.options(**options).remote() for _ in range(tp)]
        return self

    def __exit__(self, *exception: object) -> None:
        import ray

        for actor in self.actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        self._remove()

    def _remove(self) -> None:
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(Exception):
            remove_placement_group(self.group)

    # what local.stop_signals asks of a group of ranks
    @property
    def board(self) -> Actors:
        return self

    def ask_to_stop(self) -> None:
        """Only noted: Ray is not to be called from a signal's handler."""
        self.asked = True

    def run(self, payload: bytes, on_event: Callable[[Event], None]) -> None:
        """Until every rank has finished; raises the failure to report."""
        import ray

        seated, variables = self._seat(ray)
        said = [
            actor.run.options(num_returns="streaming").remote(own, os.getcwd(), payload)
            for actor, own in zip(seated, variables, strict=True)
        ]
        live, failures, trouble, told = {stream: rank for rank, stream in enumerate(said)}, {}, 0.0, 0
        with stop_signals(self, True) as signals, contextlib.ExitStack() as opened:
            files = [opened.enter_context(_log(self.logs, rank)) for rank in range(len(seated))]
            while live:
                for stream in ray.wait(list(live), num_returns=1, timeout=TICK)[0]:
                    rank = live[stream]
                    kind, what = self._hear(ray, stream, rank)
                    if kind == "event":
                        self.step = what.get("step", self.step) if what["kind"] == "step" else self.step
                        on_event(what)
                    elif kind == "line":
                        files[rank](what)
                    else:
                        del live[stream]
                        if kind == "failure":
                            failures[rank] = what
                            files[rank](what.traceback)
                            trouble = trouble or time.monotonic()
                if len(signals) > told:
                    told = len(signals)
                    on_event({"kind": "stop", "signal": signals[-1]})
                    ray.get([actor.ask_to_stop.remote() for actor in seated])
                known = any(not failure.consequence for failure in failures.values())
                patience = RESCUE_WAIT if self.rescues else ROOT_WAIT if known else ECHO_WAIT
                if trouble and time.monotonic() - trouble > patience:
                    break
        if failures:
            failure = first(failures.values())
            failure.throw(str(self.logs / f"rank-{failure.rank:05d}.log") if self.logs else None)

    def _seat(self, ray: Any) -> tuple[list[Any], list[dict[str, str]]]:
        """The actors in the order of ranks, and what the environment of each says: neighbours share a node."""
        spots: Sequence[Spot] = ray.get([actor.spot.remote() for actor in self.actors])
        nodes = list(dict.fromkeys(spot.node for spot in spots))
        order = sorted(range(len(spots)), key=lambda i: (nodes.index(spots[i].node), i))
        seated, placed = [self.actors[i] for i in order], [spots[i] for i in order]
        port = ray.get(seated[0].listen.remote())
        variables = []
        for rank, spot in enumerate(placed):
            here = [peer for peer, other in enumerate(placed) if other.node == spot.node]
            own: dict[str, object] = {
                "RANK": rank, "WORLD_SIZE": len(placed), "LOCAL_RANK": here.index(rank), "LOCAL_WORLD_SIZE": len(here),
                "GROUP_RANK": nodes.index(spot.node), "GROUP_WORLD_SIZE": len(nodes), "MASTER_ADDR": placed[0].address, "MASTER_PORT": port,
            }  # fmt: skip
            if self.gpus:  # Ray shows an actor its own GPU alone, and ranks take theirs by their number on the node
                own["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for peer in here for gpu in placed[peer].gpus)
            variables.append({name: str(value) for name, value in own.items()})
        return seated, variables

    def _hear(self, ray: Any, stream: Any, rank: int) -> tuple[str, Any]:
        """The next that a rank says; its death is a failure like another."""
        try:
            kind, what = ray.get(next(stream))
        except StopIteration:
            return "finished", None
        except ray.exceptions.RayError as error:
            words = next((line.strip() for line in str(error).splitlines() if "exit" in line.lower()), str(error).splitlines()[0])
            where = f"after step {self.step}" if self.step else "before its first step"
            return "failure", Failure(rank, None, where, "", f"its process died: {words}", "", time.time(), False)
        return kind, Failure.from_event(what) if kind == "failure" else what


@contextlib.contextmanager
def _log(folder: Path | None, rank: int) -> Iterator[Callable[[str], None]]:
    """Where a rank's lines go: its log in the run folder, else here."""
    if folder is None:
        yield lambda line: print(f"[{rank}] {line}", file=sys.stderr, flush=True)
        return
    with (folder / f"rank-{rank:05d}.log").open("a", encoding="utf-8", buffering=1) as file:
        yield lambda line: print(line, file=file)


def _absolute(place: str | None) -> str | None:
    """A folder by its whole path: a worker of Ray stands somewhere else. A URL is whole."""
    return place if place is None or "://" in place else str(Path(place).resolve())


def _resources(amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {kind}s" for kind, amount in amounts.items())
