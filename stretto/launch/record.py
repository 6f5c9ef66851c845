"""What becomes of a run's events: rows on disk, the line on the screen, and what is told at the end."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.draw.numbers import bytes_
from stretto.launch.progress import Progress
from stretto.launch.runfolder import RunFolder, Status
from stretto.launch.worker import Event

STATUS_EVERY = 1.0  # seconds between two writings of status.json while steps go by


@dataclass(frozen=True)
class Trained:
    """How a training run ended. losses: one a step that counted. peak_bytes: one a rank. seconds: in steps."""

    status: Status
    steps: int
    final_loss: float | None
    losses: tuple[float, ...]
    tokens_per_second: float | None
    peak_bytes: tuple[int, ...]
    mesh: str
    out: str
    seconds: float
    eval_loss: float | None = None
    entropy: float | None = None  # bigram entropy of the text, nats a token
    saved: str | None = None  # the newest checkpoint
    texts: dict[str, str] = field(default_factory=dict)  # what the model wrote "before" and "after"


class Recorder:
    """Hears the events of a run: in the parent of its ranks, or in rank 0 where somebody else started them."""

    def __init__(self, folder: RunFolder, progress: Progress, mesh: str, total: int | None) -> None:
        self.folder = folder
        self.progress = progress
        self.mesh = mesh
        self.total = total
        self.step = 0
        self.losses: list[tuple[int, float]] = []
        self.earlier: tuple[float, ...] = ()  # losses of the steps before those of this process
        self.facts: dict[str, Any] = {}  # entropy, eval_loss, and what the last event said
        self.texts: dict[str, str] = {}
        self.peaks: list[int] = []
        self.tokens = 0
        self.seconds = 0.0
        self.stop_asked = ""
        self.written = time.monotonic()
        self.ears = {
            "resumed": self._resumed,
            "saved": self._saved,
            "start": self._start,
            "step": self._step,
            "eval": self._eval,
            "text": self._text,
            "entropy": self._entropy,
            "note": self._note,
            "timeline": self._timeline,
            "stop": self._stop,
            "done": self._done,
        }
        progress.expect(total)

    def __call__(self, event: Event) -> None:
        """Take one event; kinds that nobody here knows are left to others."""
        if event["kind"] in self.ears:
            self.ears[event["kind"]](event)

    def _resumed(self, event: Event) -> None:
        rows = self.folder.go_on_from(event["step"])
        self.step = event["step"]
        self.earlier = tuple(row["loss"] for row in rows if row.get("loss") is not None)
        self.facts["eval_loss"] = next((row["eval_loss"] for row in reversed(rows) if "eval_loss" in row), None)
        if event["step"]:
            self.facts["saved"] = event["path"]
            self.progress.note(f"going on from {event['path']}: the next step is {event['step'] + 1}")

    def _saved(self, event: Event) -> None:
        self.facts["saved"] = event["path"]
        cost = f"{bytes_(event['bytes'])} a rank, {event['seconds']:.2f} s; training waited {event['stall_seconds']:.2f} s"
        self.progress.note(f"step {event['step']} saved in {event['path']} ({cost})")

    def _start(self, event: Event) -> None:
        self.total = event.get("steps", self.total)
        self.progress.expect(self.total)
        for line in event.get("lines", ()):
            self.progress.note(line)

    def _step(self, event: Event) -> None:
        self.step = event["step"]
        if event.get("loss") is not None:
            self.losses.append((self.step, event["loss"]))
        self.tokens += event.get("tokens") or 0
        self.seconds += (event.get("seconds") or 0.0) + (event.get("data_seconds") or 0.0)
        peak = event.get("peak_bytes")
        self.peaks = list(peak) if isinstance(peak, list) else [peak] if peak else self.peaks
        self.folder.add_row(_without_kind(event))
        self.progress.step(event)
        if time.monotonic() - self.written > STATUS_EVERY:
            self.written = time.monotonic()
            self.folder.set_status("running", self.step, "", mesh=self.mesh)

    def _eval(self, event: Event) -> None:
        self.facts["eval_loss"] = event.get("eval_loss")
        self.folder.add_row(_without_kind(event))
        self.progress.note(f"step {event['step']}  evaluation loss {event['eval_loss']:.4f}")

    def _text(self, event: Event) -> None:
        self.texts[event["when"]] = event["text"]

    def _entropy(self, event: Event) -> None:
        self.facts["entropy"] = event["nats"]

    def _note(self, event: Event) -> None:
        self.progress.note(event["text"])

    def _timeline(self, event: Event) -> None:
        self.folder.write("timeline.json", joined_traces(self.folder.path / "timeline.json", event["trace"], event.get("first", 0)))
        self.progress.note(f"timeline of the steps of profile.steps: {self.folder.path / 'timeline.json'}")

    def _stop(self, event: Event) -> None:
        self.stop_asked = event["signal"]
        again = " (Ctrl-C again: at once)" if event["signal"] == "SIGINT" else ""
        self.progress.note(f"{event['signal']}: the step is finished, then the run stops{again}")

    def _done(self, event: Event) -> None:
        self.facts["done"] = _without_kind(event)
        self.step = event.get("steps", self.step)

    def trained(self, status: Status) -> Trained:
        """The run as its events tell it; what the "done" event says itself comes first."""
        done = self.facts.get("done", {})
        losses = [*self.earlier, *(done.get("losses") or [loss for _, loss in self.losses])]
        rate = self.tokens / self.seconds if self.seconds else None
        return Trained(
            status,
            self.step,
            losses[-1] if losses else None,
            tuple(losses),
            done.get("tokens_per_second", rate),
            tuple(done.get("peak_bytes") or self.peaks),
            self.mesh,
            str(self.folder.path),
            self.seconds,
            self.facts.get("eval_loss"),
            self.facts.get("entropy"),
            self.facts.get("saved"),
            dict(self.texts),
        )

    def finish(self, status: Status, why: str) -> Trained:
        """Write how it ended into the folder, draw report.html, and leave the screen."""
        from stretto.draw.report import write_report

        self.progress.close()
        trained = self.trained(status)
        told = ("mesh", "final_loss", "eval_loss", "tokens_per_second", "peak_bytes", "entropy", "saved", "texts")
        self.folder.set_status(status, self.step, why, **{name: getattr(trained, name) for name in told})
        self.folder.close()
        write_report(self.folder.path)
        return trained


def joined_traces(path: Path, trace: str, first: int) -> str:
    """A trace, with what an earlier part of the run wrote in `path` of its first `first` steps: a run that goes on adds to it."""
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    except (OSError, ValueError, KeyError):
        return trace
    read = json.loads(trace)
    number, kept = 0, []
    for event in earlier:
        if event.get("cat") == "step":
            number = int(event["name"].removeprefix("step "))  # its actions stand after it
        if event.get("ph") != "M" and number <= first:
            kept.append(event)
    return json.dumps({**read, "traceEvents": [*kept, *read["traceEvents"]]})


def _without_kind(event: Event) -> Event:
    return {name: value for name, value in event.items() if name != "kind"}
