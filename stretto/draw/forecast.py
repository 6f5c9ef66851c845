"""What the planner foretells of each framework on a cluster, as text and as a part of the page of `stretto compare`."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stretto.draw.numbers import bytes_, count

Row = Mapping[str, Any]  # one of compare.json's "foretold"


def _chunks(row: Row) -> str:
    return f" {row['chunks']}" if row["chunks"] > 1 else ""


#: Heading, what of a row stands there, whether it is a number.
COLUMNS: tuple[tuple[str, Callable[[Row], str], bool], ...] = (
    ("runner", lambda row: f"{row['runner']}", False),
    ("best layout", lambda row: str(row["mesh"]), False),
    ("zero", lambda row: str(row["zero"]), False),
    ("pipeline", lambda row: f"{row['pipeline'] or '-'}{_chunks(row)}", False),
    ("recompute", lambda row: str(row["recompute"]), False),
    ("s/step", lambda row: f"{row['step_seconds']:.4g}", True),
    ("tok/s/dev", lambda row: count(row["tokens_per_second"]), True),
    ("MFU", lambda row: f"{row['mfu']:.1%}", True),
    ("ratio", lambda row: f"{row['ratio']:.3f}", True),
    ("exposed", lambda row: f"{row['exposed_seconds'] / row['step_seconds']:.0%}", True),
    ("kept", lambda row: bytes_(row["kept_bytes"]), True),
    ("peak", lambda row: bytes_(row["peak_bytes"]), True),
)
LEGEND = (
    "exposed: share of a step that waits for messages; kept: parameters, gradients and optimizer of the fullest device; peak: all it holds"
)


def forecast_text(cluster: str, rows: Sequence[Row], said: Sequence[str]) -> str:
    """The table, each row's reason, what is not foretold, and the verdict."""
    fits = [row for row in rows if row["status"] == "fits"]
    cells = [[title for title, _, _ in COLUMNS], *([show(row) for _, show, _ in COLUMNS] for row in fits)]
    wide = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    lines = [f"foretold for {cluster}: each framework with the best layout that it can run", ""]
    for line in cells:
        padded = (cell.rjust(wide[i]) if COLUMNS[i][2] else cell.ljust(wide[i]) for i, cell in enumerate(line))
        lines.append("  ".join(padded).rstrip())
    lines += ["", *(f"{row['runner']}: {_reason(row)}" for row in rows)]
    lines += [f"{row['runner']}: not foretold: {row['not_priced']}" for row in rows if row["not_priced"]]
    return "\n".join([*lines, "", *said, "", LEGEND])


def _reason(row: Row) -> str:
    lacks = "".join(f"; no {one}" for one in row["lacks"])
    return f"{row['way']}: {row['why']}{lacks}" if row["status"] == "fits" else f"{row['status']}: {row['why']}{lacks}"


def forecast_html(cluster: str, rows: Sequence[Row], said: Sequence[str], pictures: str = "") -> str:
    """The same as a part of a page, with pictures between the verdict and the table."""
    fits = [row for row in rows if row["status"] == "fits"]
    head = "".join(f"<th>{_e(title)}</th>" for title, _, _ in COLUMNS)
    lines = "".join("<tr>" + "".join(f"<td>{_e(show(row))}</td>" for _, show, _ in COLUMNS) + "</tr>" for row in fits)
    reasons = [f"{row['runner']}: {_reason(row)}" for row in rows]
    reasons += [f"{row['runner']}: not foretold: {row['not_priced']}" for row in rows if row["not_priced"]]
    return (
        f"<h2>Foretold for {_e(cluster)}</h2>"
        f'<div class="panel"><ul class="say">{"".join(f"<li>{_e(line)}</li>" for line in said)}</ul></div>{pictures}'
        f'<div class="panel wide"><table><tr>{head}</tr>{lines}</table><p class="sub">{_e(LEGEND)}</p></div>'
        f'<div class="panel"><ul class="say">{"".join(f"<li>{_e(line)}</li>" for line in reasons)}</ul></div>'
    )


def _e(text: object) -> str:
    return html.escape(str(text))
