"""Pages about pipelines: a schedule as it is foretold, and a run's timeline as it was measured, beside what was foretold of it."""

from __future__ import annotations

import html
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from stretto.draw.files import save
from stretto.draw.numbers import measure
from stretto.draw.report import STYLE as PAGE_STYLE
from stretto.draw.timeline import picture, rows_of
from stretto.errors import JobError
from stretto.job import Job
from stretto.layout.mesh import Mesh
from stretto.schedule.action import Action, Schedule
from stretto.schedule.pipelines import FILE, PIPELINES, pipeline
from stretto.schedule.step import training_step, unit_cost
from stretto.schedule.timeline import Timeline, chrome_trace, read_chrome_trace, simulate

STYLE = """
main { max-width:1140px } .panel svg { display:block; width:100%; height:auto }
p.note { color:var(--soft); margin:8px 0 0; max-width:760px }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums } tr+tr td { border-top:1px solid var(--line) }
td,th { text-align:right; padding:4px 10px; white-space:nowrap } td:first-child,th:first-child { text-align:left }
th { color:var(--soft); font-weight:400; font-size:13px } tr.this td { font-weight:600 }
td.why { text-align:left; color:var(--soft); white-space:normal }
"""

SCRIPT = """
for (const svg of document.querySelectorAll('svg.pipe')) {
  const boxes = svg.querySelectorAll('.box[data-m]');
  svg.addEventListener('mouseover', event => {
    const m = event.target.dataset && event.target.dataset.m;
    svg.classList.toggle('chosen', m !== undefined);
    for (const box of boxes) box.classList.toggle('same', box.dataset.m === m);
  });
  svg.addEventListener('mouseleave', () => svg.classList.remove('chosen'));
}
"""


def step_of(job: Job) -> Schedule:
    """The training step that a job runs on its pipeline ranks. Raises JobError where there can be none."""
    mesh = Mesh.parse(job.mesh or "dp=1")
    return training_step(pipeline(job.pipeline.schedule, mesh["pp"], job.microbatches, job.pipeline.chunks))


def draw_schedule(job: Job, out: Path) -> Path:
    """The job's schedule as it goes where each action takes its unit cost: a page, a picture alone (.svg) or a Chrome trace (.json), in
    which a unit is a second."""
    job = job.with_(mesh=job.mesh or "dp=1")
    schedule = step_of(job)
    timeline = simulate(schedule, unit_cost)
    title = f"{schedule.name}: {_several(schedule.ranks, 'pipeline rank')}, {_several(schedule.microbatches, 'microbatch')}"
    svg = picture(rows_of(timeline), schedule, title=title, unit="stage forwards", show=lambda at: f"{at:g}")
    return save(
        out,
        {
            ".html": lambda: _page(title, _about(job, schedule, timeline, title, svg)),
            ".svg": lambda: svg,
            ".json": lambda: chrome_trace({1: timeline}),
        },
    )


def _about(job: Job, schedule: Schedule, timeline: Timeline, title: str, svg: str) -> list[str]:
    """What a page says of a schedule."""
    share = schedule.stages / schedule.ranks
    idle = timeline.bubble(0)
    return [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="sub">{html.escape(job.name)}: {_several(schedule.stages, "stage")} on {html.escape(job.mesh)}, '
        "a backward as long as two forwards, messages in no time</p>",
        _cards(
            (f"{100 * idle / timeline.seconds:.1f}%", "bubble: of the step, a rank is idle"),
            (f"{timeline.seconds / (3 * schedule.microbatches * share):.2f} x", "the step, of one without bubble"),
            (f"{schedule.peak(0) / share:g}", "microbatches whose activations the first rank holds at most"),
            (str(_messages(schedule)), "messages that a rank sends a step, at most"),
        ),
        f'<h2>The step</h2><div class="panel">{svg}</div>',
        '<p class="note">A box is the computation of one microbatch, whose number it bears; a darker shade is a later stage of the same '
        "rank. Point at a box to follow its microbatch. The strip below a row is the activations that the rank holds.</p>",
        f'<h2>The same step in other orders</h2><div class="panel">{_others(job, schedule)}</div>',
        '<p class="note">Activations are counted in microbatches of a rank\'s share of the model; until the weight gradient is made, '
        "where a backward is split.</p>",
        _orders(schedule),
    ]


def draw_timeline(folder: Path, out: Path) -> Path:
    """The last step of a run that was timed, as measured and as foretold from the seconds that each action took."""
    trace, toml = folder / "timeline.json", folder / "job.toml"
    if not toml.is_file():
        raise JobError(f"{folder} is no run folder: it has no job.toml; write the folder that a run named, as runs/tiny-...")
    job = Job.load(toml)
    if not trace.is_file():
        raise JobError(f"{folder} has no timeline.json: none of its steps were timed; run it with profile.steps=[{min(job.steps or 3, 3)}]")
    steps = read_chrome_trace(trace.read_text(encoding="utf-8"))
    number, measured = max(steps.items())
    schedule, mesh = step_of(job), Mesh.parse(job.mesh)
    foretold = simulate(schedule, seconds_of(list(steps.values()), schedule))
    title = f"{folder.name}, step {number}: {schedule.name} on {mesh}"
    longest = max(measured.seconds, foretold.seconds)
    unit, factor = ("ms", 1e3) if longest < 1.0 else ("s", 1.0)

    def show(at: float) -> str:
        return f"{factor * at:.4g}"

    def drawn(timeline: Timeline, places: Callable[[int], int]) -> str:
        return picture(rows_of(timeline, places=places), schedule, title=title, unit=unit, show=show, until=longest)

    svg = drawn(measured, lambda rank: mesh.at(rank)["pp"])
    ranks = sorted({span.rank for span in measured.spans})
    timed = {mesh.at(rank)["pp"] for rank in ranks}
    body = [
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="sub">{_several(schedule.stages, "stage")}, {_several(schedule.microbatches, "microbatch")}</p>',
        _cards(
            (f"{show(measured.seconds)} {unit}", "the step, measured"),
            (f"{show(foretold.seconds)} {unit}", f"foretold: measured is {measured.seconds / foretold.seconds:.2f} x of it"),
            (_share(measured, ranks), "bubble measured: idle ranks, on average"),
            (_share(foretold, range(schedule.ranks)), "bubble foretold"),
        ),
        f'<h2>Measured</h2><div class="panel">{svg}</div>',
        f'<h2>Foretold</h2><div class="panel">{drawn(foretold, lambda rank: rank)}</div>',
        '<p class="note">Foretold is the same schedule, each action taking the median of the seconds it was measured to take, messages '
        "in no time. Rows there are pipeline ranks.</p>",
    ]
    if len(timed) < schedule.ranks:
        wanted = [mesh.rank(pp=pp) for pp in range(schedule.ranks)]
        body.append(f'<p class="note">Only ranks {ranks} were timed; stages of others count as theirs. Write profile.ranks={wanted}.</p>')
    return save(out, {".html": lambda: _page(title, body), ".svg": lambda: svg})


def seconds_of(steps: Sequence[Timeline], schedule: Schedule) -> Callable[[Action], float]:
    """What each action took: the median over microbatches and steps of its kind and stage; a stage that was not timed counts as the
    others. Messages take no time, and in the vote ranks wait for each other, so the shortest is its own length."""
    known: dict[tuple[str, int], list[float]] = {}
    by_kind: dict[str, list[float]] = {}
    for timeline in steps:
        for span in timeline.spans:
            known.setdefault((span.action.kind, span.action.stage), []).append(span.stop - span.start)
            by_kind.setdefault(span.action.kind, []).append(span.stop - span.start)

    def seconds(action: Action) -> float:
        if action.kind in ("VOTE", "UPDATE"):
            return min(by_kind.get(action.kind, [0.0]))
        if action.kind not in ("F", "B", "I", "W"):
            return 0.0
        return statistics.median(known.get((action.kind, action.stage)) or by_kind.get(action.kind) or [0.0])

    return seconds


def _share(timeline: Timeline, ranks: Sequence[int]) -> str:
    return f"{100 * statistics.mean(timeline.bubble(rank) for rank in ranks) / timeline.seconds:.1f}%"


def _messages(schedule: Schedule) -> int:
    return max(sum(action.kind in ("SEND_F", "SEND_B") for action in actions) for actions in schedule.order)


def _others(job: Job, chosen: Schedule) -> str:
    """Every known schedule of the same ranks and microbatches, in numbers."""
    titles = ("pipeline", "stages a rank", "bubble", "step, of one without", "activations held", "messages")
    rows = [f"<tr>{''.join(f'<th>{title}</th>' for title in titles)}</tr>"]
    names = [*PIPELINES, *([chosen.name] if chosen.name.startswith(FILE) else [])]
    for name in names:
        mark = ' class="this"' if name == chosen.name else ""
        try:
            chunks = job.pipeline.chunks if name == chosen.name else None
            schedule = chosen if name == chosen.name else training_step(pipeline(name, chosen.ranks, chosen.microbatches, chunks))
        except JobError as refusal:
            why = html.escape(str(refusal).partition(";")[0].partition(": ")[2] or str(refusal).partition(";")[0])
            rows.append(f'<tr{mark}><td>{html.escape(name)}</td><td class="why" colspan="5">{why}</td></tr>')
            continue
        timeline, share = simulate(schedule, unit_cost), schedule.stages / schedule.ranks
        held = max(schedule.peak(rank) for rank in range(schedule.ranks)) / share
        cells = (
            f"{share:g}",
            f"{100 * timeline.bubble(0) / timeline.seconds:.1f}%",
            f"{timeline.seconds / (3 * schedule.microbatches * share):.2f} x",
            measure(held),
            str(_messages(schedule)),
        )
        rows.append(f"<tr{mark}><td>{html.escape(name)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _orders(schedule: Schedule) -> str:
    text = "\n\n".join(f"rank {rank}: {' '.join(map(str, order))}" for rank, order in enumerate(schedule.order))
    summary = "<summary>What each rank issues, messages included</summary>"
    return f'<details>{summary}<div class="panel"><pre>{html.escape(text)}</pre></div></details>'


def _cards(*cards: tuple[str, str]) -> str:
    inside = "".join(f'<div class="card"><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>' for value, label in cards)
    return f'<div class="cards">{inside}</div>'


def _several(number: int, what: str) -> str:
    plural = "" if number == 1 else "es" if what.endswith("ch") else "s"
    return f"{number} {what}{plural}"


def _page(title: str, body: Sequence[str]) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)} - stretto</title><style>{PAGE_STYLE}{STYLE}</style></head><body><main>{''.join(body)}</main>"
        f"<script>{SCRIPT}</script></body></html>"
    )
