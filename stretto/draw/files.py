"""What is drawn becomes a file of the kind that its name ends in."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping
from pathlib import Path

from stretto.draw.report import STYLE
from stretto.errors import JobError

WIDE = "main { max-width:1140px } .panel svg { display:block; width:100%; height:auto }"


def save(path: Path, kinds: Mapping[str, Callable[[], str]]) -> Path:
    """Write what is made for the ending of the path; JobError for another ending, or where it cannot be written."""
    if path.suffix not in kinds:
        raise JobError(f"--out {path}: what is drawn ends in {' or '.join(kinds)}; write --out {path.stem or 'picture'}{next(iter(kinds))}")
    text = kinds[path.suffix]()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise JobError(f"--out {path} cannot be written ({error.strerror}); write --out FILE in a folder that you may write") from None
    return path


def page(title: str, body: str, style: str = "") -> str:
    """A page of pictures as one text that needs no other file. body: HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)} - stretto</title><style>{STYLE}{WIDE}{style}</style></head>"
        f"<body><main>{body}</main></body></html>"
    )
