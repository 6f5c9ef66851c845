"""How far a run is: one live line on a terminal, a plain line every few steps elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from stretto.draw.numbers import bytes_, count, duration, measure

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

Event = Mapping[str, Any]
REDRAW = 0.1  # seconds at least between two pictures of the live line


class Progress(Protocol):
    """Shows steps as they come, and lines between them."""

    def expect(self, steps: int | None) -> None:
        """How many steps there will be; None: not known. From here on something is shown."""

    def step(self, event: Event) -> None:
        """A step is done; an event of kind "step"."""

    def note(self, text: str) -> None:
        """Print a line of its own."""

    def close(self) -> None:
        """The last state stays on the screen."""


def progress_on(stream: TextIO, every: int) -> Progress:
    """A live line if the stream is a terminal, else a line every `every` steps."""
    return Live(stream) if stream.isatty() else Lines(stream, every)


class Clock:
    """Time left, from the steps since the first: the first carries start-up and compilation."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.first: tuple[int, float] | None = None

    def left(self, step: int, total: int | None) -> float | None:
        """Seconds until `total`, at the pace so far; None while that is not known."""
        moment = self.now()
        if self.first is None:
            self.first = (step, moment)
        done = step - self.first[0]
        if not done or total is None:
            return None
        return (moment - self.first[1]) / done * max(total - step, 0)


def facts(event: Event) -> dict[str, str]:
    """What a line says of a step, in words; a value that a step does not have is left out."""
    peak = event.get("peak_bytes")
    peak = max(peak, default=None) if isinstance(peak, list | tuple) else peak
    said = {
        "loss": _said(event.get("loss"), lambda value: f"loss {value:.4f}"),
        "norm": _said(event.get("grad_norm"), lambda value: f"grad norm {measure(value)}"),
        "lr": _said(event.get("lr"), lambda value: f"lr {measure(value)}"),
        "rate": _said(event.get("tokens_per_second"), lambda value: f"{count(value)} tokens/s"),
        "memory": _said(peak, lambda value: f"{bytes_(value)} a rank"),
        "skipped": "" if event.get("committed", True) else f"skipped: {event.get('why') or 'not finite'}",
    }
    return {name: text for name, text in said.items() if text}


class Lines:
    """For files, pipes and notebooks."""

    def __init__(self, stream: TextIO, every: int, clock: Clock | None = None) -> None:
        self.stream = stream
        self.every = every
        self.clock = clock or Clock()
        self.total: int | None = None

    def expect(self, steps: int | None) -> None:
        self.total = steps

    def step(self, event: Event) -> None:
        step, left = event["step"], self.clock.left(event["step"], self.total)
        if step % self.every and step not in (1, self.total) and event.get("committed", True):
            return
        words = [f"step {step}" + (f"/{self.total}" if self.total else ""), *facts(event).values()]
        self.note("  ".join(words + ([f"{duration(left)} left"] if left else [])))

    def note(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def close(self) -> None:
        self.stream.flush()


class Live:
    """For a terminal: a bar that is drawn anew in place, with lines scrolling by above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        self.clock = Clock()
        self.total: int | None = None
        console = Console(file=stream, highlight=False)
        texts = [TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[words]")]
        # drawn when there is news, not by a thread of its own: the ranks want the cores
        self.bar: Bar = Bar(texts[0], BarColumn(bar_width=24), texts[1], console=console, auto_refresh=False)
        self.drawn = 0.0
        self.task = self.bar.add_task("starting", total=None, words="")

    def expect(self, steps: int | None) -> None:
        self.total = steps
        self.bar.update(self.task, total=steps)
        self.bar.start()

    def step(self, event: Event) -> None:
        step, left = event["step"], self.clock.left(event["step"], self.total)
        said = facts(event)
        words = [said[name] for name in ("loss", "rate", "memory", "skipped") if name in said]
        words += [f"{duration(left)} left"] if left else []
        described = f"step {step}" + (f"/{self.total}" if self.total else "")
        now = self.clock.now()
        self.bar.update(self.task, completed=step, description=described, words="  ".join(words), refresh=now - self.drawn > REDRAW)
        self.drawn = now if now - self.drawn > REDRAW else self.drawn

    def note(self, text: str) -> None:
        self.bar.console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.bar.refresh()
        self.bar.stop()


def _said(value: float | None, words: Callable[[float], str]) -> str:
    return "" if value is None else words(value)
