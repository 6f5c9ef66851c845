"""What each pipeline rank holds as bars: its bytes by kind, one after the other, against the memory of its device."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from stretto.draw.files import page, save
from stretto.draw.numbers import bytes_, ticks
from stretto.plan.memory import Memory
from stretto.plan.view import KINDS, View

WIDTH, LEFT, RIGHT, TOP, FOOT = 1080, 62, 126, 34, 22  # pixels: of the picture, and around its bars
BAR, GAP = 22, 9  # pixels: how high a bar is, and the room to the next
MOST_BARS = 16
#: Pixels that a part of a bar must be wide to bear its size.
LABEL = 54

#: kind -> its colour, light and dark alike.
COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "parameters": "#3f72c0", "gradients": "#e58d4f", "optimizer": "#8b64bd", "activations": "#318d73", "buffers": "#b8942a",
        "context": "#8a8f97",
    }
)  # fmt: skip
STYLE = """
.memory { font:11px system-ui,sans-serif; font-variant-numeric:tabular-nums } .memory text { fill:#5d6168 }
.memory .name { font-size:12px; fill:#22252b } .memory .inside { fill:#fff; text-anchor:middle; pointer-events:none }
.memory .free { fill:#efece4 } .memory .tick { stroke:#d9d5ca } .memory .axis { text-anchor:middle }
.memory .room { stroke:#b3372c; stroke-dasharray:4 3 } .memory .device { stroke:#22252b } .memory .over { fill:#b3372c; font-weight:600 }
@media (prefers-color-scheme: dark) {
  .memory text { fill:#9aa0a8 } .memory .name { fill:#e6e6e3 } .memory .inside { fill:#fff } .memory .free { fill:#262a31 }
  .memory .tick { stroke:#343941 } .memory .room { stroke:#ff8a7a } .memory .device { stroke:#e6e6e3 } .memory .over { fill:#ff8a7a }
}
""" + "".join(f".memory .{kind} {{ fill:{colour} }} " for kind, colour in COLOURS.items())


def memory_picture(view: View) -> str:
    """One <svg> that needs no other file: a bar a pipeline rank, those between left out where they are many."""
    ranks, device = shown(len(view.memory), MOST_BARS, view.row.plan.fullest), view.asked.cluster.device.memory
    most = max(device, *(view.memory[rank].peak for rank in ranks)) * 1.02
    scale = (WIDTH - LEFT - RIGHT) / most
    foot = TOP + len(ranks) * (BAR + GAP)
    parts = [*_legend(), *_axis(most, scale, foot)]
    for number, rank in enumerate(ranks):
        parts += _bar(f"rank {rank}", view.memory[rank], TOP + number * (BAR + GAP), scale, view.room, device)
    parts += _limits(view.room, device, scale, foot)
    title = f"bytes of {len(view.memory)} pipeline rank{'s' if len(view.memory) > 1 else ''}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="memory" viewBox="0 0 {WIDTH} {foot + FOOT}" role="img"'
    return f"{head}><style>{STYLE}</style><title>{title}</title>{''.join(parts)}</svg>"


def draw_memory(seen: View, out: Path) -> Path:
    """The bars as a picture alone (.svg) or in a page (.html)."""
    said = f'<p class="sub">{html.escape(str(seen.row.plan.setting.mesh))} on {html.escape(seen.asked.cluster.name)}'
    said += f"{html.escape(f' does not fit: {seen.over}' if seen.over else ' fits')}</p>"
    body = f'<h1>{html.escape(seen.asked.job.name)}</h1>{said}<div class="panel">{memory_picture(seen)}</div>'
    return save(out, {".html": lambda: page(f"{seen.asked.job.name}, memory", body), ".svg": lambda: memory_picture(seen)})


def shown(ranks: int, most: int, *always: int) -> list[int]:
    """At most about `most` of so many ranks, evenly, the first, the last and those named among them."""
    if ranks <= most:
        return list(range(ranks))
    return sorted({round(i * (ranks - 1) / (most - 1)) for i in range(most)} | set(always))


def _legend() -> Iterator[str]:
    x = float(LEFT)
    for kind in KINDS:
        yield f'<rect class="{kind}" x="{x:.0f}" y="4" width="14" height="12" rx="2"/><text x="{x + 19:.0f}" y="14">{kind}</text>'
        x += 34 + 6.0 * len(kind)


def _axis(most: float, scale: float, foot: float) -> Iterator[str]:
    for at in ticks(0.0, most, 9):
        x = LEFT + at * scale
        yield f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{foot}"/>'
        yield f'<text class="axis" x="{x:.1f}" y="{foot + 15}">{bytes_(at) if at else 0}</text>'


def _bar(name: str, memory: Memory, y: int, scale: float, room: float, device: float) -> Iterator[str]:
    middle = y + BAR / 2 + 4
    yield f'<text class="name" x="{LEFT - 10}" y="{middle}" text-anchor="end">{html.escape(name)}</text>'
    yield f'<rect class="free" x="{LEFT}" y="{y}" width="{device * scale:.1f}" height="{BAR}" rx="3"/>'
    x = float(LEFT)
    for kind in KINDS:
        held = getattr(memory, kind)
        width = held * scale
        if width > 0:
            tip = f"{name}: {kind} {bytes_(held)}"
            yield f'<rect class="{kind}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}"><title>{tip}</title></rect>'
        if width >= LABEL:
            yield f'<text class="inside" x="{x + width / 2:.1f}" y="{middle}">{bytes_(held)}</text>'
        x += width
    style = "over" if memory.peak > room else "name"
    yield f'<text class="{style}" x="{WIDTH - RIGHT + 12}" y="{middle}">{bytes_(memory.peak)}, {memory.peak / device:.0%}</text>'


def _limits(room: float, device: float, scale: float, foot: float) -> Sequence[str]:
    lines = []
    for style, at, text, anchor in (("room", room, "usable", "end"), ("device", device, "device", "start")):
        x = LEFT + at * scale
        beside = x + (3 if anchor == "start" else -3)
        lines.append(f'<line class="{style}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{foot}"/>')
        lines.append(f'<text x="{beside:.1f}" y="{TOP - 10}" text-anchor="{anchor}">{text} {bytes_(at)}</text>')
    return lines
