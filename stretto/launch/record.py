"""What becomes of a run's events: rows on disk, the line on the screen, and what is told at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

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
        self.facts: dict[str, Any] = {}  # entropy, eval_loss, and what the last event said
        self.texts: dict[str, str] = {}
        self.peaks: list[int] = []
        self.tokens = 0
        self.seconds = 0.0
        self.stop_asked = ""
        self.written = time.monotonic()
        self.ears = {
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
        self.folder.write("timeline.json", event["trace"])
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
        losses = done.get("losses") or [loss for _, loss in self.losses]
        rate = self.tokens / self.seconds if self.seconds else None
        return Trained(
            status,
            self.step,
            done.get("final_loss", losses[-1] if losses else None),
            tuple(losses),
            done.get("tokens_per_second", rate),
            tuple(done.get("peak_bytes") or self.peaks),
            self.mesh,
            str(self.folder.path),
            self.seconds,
            self.facts.get("eval_loss"),
            self.facts.get("entropy"),
            dict(self.texts),
        )

    def finish(self, status: Status, why: str) -> Trained:
        """Write how it ended into the folder, draw report.html, and leave the screen."""
        from stretto.draw.report import write_report

        self.progress.close()
        trained = self.trained(status)
        told = ("mesh", "final_loss", "eval_loss", "tokens_per_second", "peak_bytes", "entropy", "texts")
        self.folder.set_status(status, self.step, why, **{name: getattr(trained, name) for name in told})
        self.folder.close()
        write_report(self.folder.path)
        return trained


def _without_kind(event: Event) -> Event:
    return {name: value for name, value in event.items() if name != "kind"}
