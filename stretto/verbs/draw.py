"""`stretto draw`: a mesh, a schedule, a timeline, memory, a plan or a collective as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from stretto.verbs.words import Verb, anything, load, print_json


def _drawings() -> Mapping[str, Verb]:
    """What `stretto draw` can draw, as verbs of their own."""
    from stretto.launch.drawing import DRAWINGS, Drawing

    def verb(drawing: Drawing) -> Verb:
        def options(parser: argparse.ArgumentParser) -> None:
            drawing.options(parser)
            parser.add_argument("--out", metavar="FILE", help=f"{drawing.files} (default: a page named by what it shows)")
            parser.add_argument("--json", action="store_true", help="one JSON object on stdout: the file")

        def run(asked: argparse.Namespace) -> int:
            file = str(drawing.draw(asked, load))
            print_json({"file": file}) if asked.json else print(file)
            return 0

        return Verb(drawing.summary, drawing.example, options, run)

    return {kind: verb(drawing) for kind, drawing in DRAWINGS.items()}


DRAW = Verb(
    "a mesh, a schedule, a timeline, memory, a plan or a collective as a picture",
    "stretto draw collective --out ring.svg",
    anything,
    None,
    _drawings,
)
