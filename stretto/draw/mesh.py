"""A mesh as a picture: the ranks node by node, once for each axis, with a colour for each group that talks along it."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path

from stretto.draw.files import page, save
from stretto.errors import JobError
from stretto.layout.mesh import MEANING, Mesh

WIDTH, GAP, PAD = 1080, 14, 8  # pixels: of the picture, between nodes, and inside one
CELL, HIGH = 56, 40  # pixels: a rank, at most so wide
HEAD = 46  # pixels above the nodes of a panel
MOST_NODES = 16
COLOURS = ("#3f72c0", "#e58d4f", "#318d73", "#8b64bd", "#b8942a", "#b3372c", "#4a9bb0", "#8a6a4f")
STYLE = """
.mesh { font:11px system-ui,sans-serif; font-variant-numeric:tabular-nums } .mesh text { fill:#5d6168 }
.mesh .title { font-size:14px; font-weight:600; fill:#22252b } .mesh .node { fill:#efece4; stroke:#d9d5ca }
.mesh .rank { fill:#fff; text-anchor:middle; font-size:12px; font-weight:600 } .mesh .at { fill:#fff; text-anchor:middle; font-size:9px }
@media (prefers-color-scheme: dark) {
  .mesh text { fill:#9aa0a8 } .mesh .title { fill:#e6e6e3 } .mesh .node { fill:#262a31; stroke:#343941 }
  .mesh .rank, .mesh .at { fill:#fff }
}
"""


def draw_mesh(name: str, mesh: Mesh, per_node: int, out: Path) -> Path:
    """The panels as a picture alone (.svg) or in a page (.html). Raises JobError for a node without ranks."""
    if per_node < 1:
        raise JobError(f"--per-node {per_node} is not possible; write --per-node 8, or how many ranks share a machine")
    nodes = -(-mesh.size // per_node)
    said = f"{mesh}: {mesh.size} rank{'s' * (mesh.size > 1)} on {nodes} node{'s' * (nodes > 1)} of {per_node}"
    picture = mesh_picture(mesh, per_node)
    body = f'<h1>{html.escape(name)}</h1><p class="sub">{html.escape(said)}</p><div class="panel">{picture}</div>'
    return save(out, {".html": lambda: page(f"{name}, mesh", body), ".svg": lambda: picture})


def mesh_picture(mesh: Mesh, per_node: int) -> str:
    """One <svg> that needs no other file: a panel for each axis of more than one rank; the first nodes, where there are many."""
    parts, y = list[str](), 0.0
    for axis in [axis for axis, size in mesh.axes if size > 1] or ["dp"]:
        panel, high = _panel(mesh, axis, per_node, y)
        parts += panel
        y += high
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="mesh" viewBox="0 0 {WIDTH} {y:.0f}" role="img"'
    return f"{head}><style>{STYLE}</style><title>{html.escape(str(mesh))}</title>{''.join(parts)}</svg>"


def groups(mesh: Mesh, axis: str) -> list[tuple[int, ...]]:
    """All groups along one axis, in the order of their first ranks."""
    return sorted({mesh.group(rank, axis) for rank in range(mesh.size)})


def crossing(mesh: Mesh, axis: str, per_node: int) -> str:
    """Whether groups along an axis stay inside nodes of so many ranks, in words."""
    spans = {len({rank // per_node for rank in group}) for group in groups(mesh, axis)}
    if spans == {1}:
        return "inside a node"
    return "across nodes" if 1 not in spans else "some of them across nodes"


def _panel(mesh: Mesh, axis: str, per_node: int, y: float) -> tuple[list[str], float]:
    found = groups(mesh, axis)
    where = "" if mesh.size == 1 else f", {crossing(mesh, axis, per_node)}"
    count = f"{len(found)} group{'s' * (len(found) > 1)} of {mesh[axis]}{where}"
    parts = [f'<text class="title" x="0" y="{y + 18:.0f}">{axis}={mesh[axis]}: {MEANING[axis]}</text>']
    number = {rank: i for i, group in enumerate(found) for rank in group}
    all_nodes = -(-mesh.size // per_node)
    nodes = min(all_nodes, MOST_NODES)
    if nodes < all_nodes:
        count += f"; the first {nodes} of {all_nodes} nodes"
    parts.append(f'<text x="0" y="{y + 36:.0f}">{count}; ranks of one colour talk to each other</text>')
    columns = min(per_node, (WIDTH - 2 * PAD) // CELL)  # of ranks in a node
    rows = -(-per_node // columns)
    wide, high = columns * CELL + 2 * PAD, rows * HIGH + 2 * PAD
    beside = max(1, (WIDTH + GAP) // (wide + GAP))
    for node in range(nodes):
        left, top = (node % beside) * (wide + GAP), y + HEAD + (node // beside) * (high + GAP)
        parts.append(f'<rect class="node" x="{left}" y="{top:.0f}" width="{wide}" height="{high}" rx="6"><title>node {node}</title></rect>')
        for spot, rank in enumerate(range(node * per_node, min((node + 1) * per_node, mesh.size))):
            parts += _cell(mesh, axis, rank, number[rank], left + PAD + spot % columns * CELL, top + PAD + spot // columns * HIGH)
    return parts, HEAD + -(-nodes // beside) * (high + GAP) + GAP


def _cell(mesh: Mesh, axis: str, rank: int, group: int, x: float, y: float) -> Iterator[str]:
    at = {name: place for name, place in mesh.at(rank).items() if mesh[name] > 1}
    members = mesh.group(rank, axis)
    with_ = ", ".join(map(str, members[:16])) + (" ..." if len(members) > 16 else "")
    tip = f"rank {rank}: {' '.join(f'{name} {place}' for name, place in at.items())}; along {axis} with {with_}"
    yield f'<rect fill="{COLOURS[group % len(COLOURS)]}" x="{x + 1:.0f}" y="{y + 1:.0f}" width="{CELL - 2}" height="{HIGH - 2}" rx="4">'
    yield f"<title>{tip}</title></rect>"
    yield f'<text class="rank" x="{x + CELL / 2:.0f}" y="{y + 17:.0f}">{rank}</text>'
    yield f'<text class="at" x="{x + CELL / 2:.0f}" y="{y + 31:.0f}">{" ".join(str(place) for place in at.values())}</text>'
