"""A plan as one HTML file, or a part of it as a picture: the frontier, and of the best layout the bars of memory and the foretold step."""

from __future__ import annotations

import html
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from stretto.draw.files import page, save
from stretto.draw.foretold import cards, foretold_picture, seconds_bars, wires_table
from stretto.draw.frontier import frontier_picture, growth_picture
from stretto.draw.memory import memory_picture
from stretto.draw.planner import head, verdict, why
from stretto.draw.plans import grown_text, plan_text
from stretto.errors import JobError
from stretto.job import Job
from stretto.plan.asking import ask
from stretto.plan.frontier import frontier
from stretto.plan.grown import Grown, grow
from stretto.plan.hardware import Cluster
from stretto.plan.planning import plan_job
from stretto.plan.view import View, view

STYLE = """
.cards { grid-template-columns:repeat(auto-fit,minmax(130px,1fr)) }
.panel { overflow-x:auto } .panel pre { white-space:pre }
p.note { color:var(--soft); margin:8px 0 0 } ul.say { margin:0; padding-left:18px }
.where { display:grid; grid-template-columns:max-content 1fr max-content max-content; gap:6px 12px; align-items:center; font-size:14px }
.where div { background:var(--line); border-radius:4px; height:12px; overflow:hidden }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums; font-size:14px } th { color:var(--soft); font-weight:400 }
td,th { padding:5px 9px; text-align:left } td { border-top:1px solid var(--line) } .n { text-align:right }
.where i { display:block; height:100%; background:var(--main) }
.where b { font-weight:400; text-align:right; font-variant-numeric:tabular-nums }
"""


class PlanDrawing:
    """A plan of a job on a cluster, of which only what is drawn is worked out. sizes: numbers of devices to compare; price: of a
    device-hour, for those."""

    def __init__(self, job: Job, cluster: Cluster, keep: Collection[str], sizes: Sequence[int] = (), price: float | None = None) -> None:
        self.job, self.cluster, self.keep, self.sizes, self.price = job, cluster, keep, sizes, price
        self.planned = plan_job(job, cluster, keep)
        best = self.planned.best
        assert best is not None  # else it has raised
        self.best: View = view(ask(best.job, cluster, {"mesh"}))

    def parts(self) -> Mapping[str, Callable[[], str]]:
        """What can be drawn alone: name -> its <svg>."""
        found: dict[str, Callable[[], str]] = {
            "frontier": lambda: frontier_picture(frontier(self.job, self.cluster, self.keep), self.cluster.device.memory, self.best.row),
            "memory": lambda: memory_picture(self.best),
            "timeline": lambda: foretold_picture(self.best.predictor).svg,
        }
        if self.sizes:
            found["growth"] = lambda: growth_picture(self.grown)
        return found

    def save(self, out: Path, part: str | None) -> Path:
        """A page (.html), or one part alone (.svg). Raises JobError for another ending or part."""
        parts = self.parts()
        if part is not None and part not in parts:
            more = "; growth needs --gpus 8,16,32" if part == "growth" else ""
            raise JobError(f"--part {part}: a plan has {', '.join(parts)}{more}; write --part {next(iter(parts))}")
        if out.suffix == ".svg" and part is None:
            raise JobError(f"--out {out}: a picture holds one part of a plan; write --part {next(iter(parts))}, or a name in .html")
        return save(out, {".html": lambda: self._page(part), ".svg": lambda: parts[part or ""]()})

    @cached_property
    def grown(self) -> Sequence[Grown]:
        """The best layout on each of the sizes."""
        return grow(self.job, self.cluster, self.sizes, self.price, None, self.keep)

    def _page(self, part: str | None) -> str:
        parts, best = self.parts(), self.best
        step = foretold_picture(best.predictor)
        shown = [
            ("frontier", "The fastest layout within each amount of memory", ""),
            ("memory", "What a device holds", ""),
            ("timeline", "The foretold step", step.note),
            ("growth", "Speed against devices", ""),
        ]
        body = [f"<h1>{html.escape(self.job.name)}, foretold</h1>", f'<p class="sub">{html.escape(head(best))}</p>']
        if part is None:
            told = (f'<div class="card"><b>{_e(figure)}</b><span>{_e(what)}</span></div>' for _, figure, what in cards(best))
            body.append(f'<div class="cards">{"".join(told)}</div><p class="note">The best that runs: {_e(verdict(best))}.</p>')
        for name, title, note in shown:
            if name in parts and part in (None, name):
                body.append(f'<h2>{title}</h2><div class="panel">{parts[name]()}</div>')
                body += [f'<p class="note">{_e(note)}</p>'] if note else []
        if part is None:
            reasons = "".join(f"<li>{_e(line)}</li>" for line in why(best))
            text = plan_text(self.planned) + (f"\n\n{grown_text(self.grown)}" if self.sizes else "")
            body += [
                f'<h2>Where its seconds go</h2><div class="panel">{seconds_bars(best)}</div>',
                f'<h2>What a device sends in a step</h2><div class="panel">{wires_table(best)}</div>',
                f'<h2>Why</h2><div class="panel"><ul class="say">{reasons}</ul></div>',
                f'<h2>The plan</h2><div class="panel"><pre>{_e(text)}</pre></div>',
            ]
        return page(f"{self.job.name} planned", "".join(body), STYLE)


def _e(text: object) -> str:
    return html.escape(str(text))
