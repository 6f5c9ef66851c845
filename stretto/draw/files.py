"""What is drawn becomes a file of the kind that its name ends in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from stretto.errors import JobError


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
