"""The table of capabilities: each cell stands in a file of the version it names, and the page shows the table as it is."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from stretto.adapters.capabilities import FOLDERS, TABLE, VERSIONS, markdown, sources
from stretto.limits import LATER

ROOT = Path(__file__).parents[2]


def test_every_feature_has_a_cell_for_every_framework_and_every_yes_a_source() -> None:
    for feature, cells in TABLE.items():
        assert list(cells) == list(VERSIONS), feature
        assert all(cell.file for cell in cells.values() if cell.can != "no"), feature
        assert all(cell.words and "|" not in cell.words for cell in cells.values()), feature


def check(framework: str, folder: Path) -> None:
    for feature, cells in TABLE.items():
        cell = cells[framework]
        if not cell.file:
            continue
        path = folder / FOLDERS[framework] / cell.file
        assert path.exists(), (feature, cell.file)
        assert not cell.text or cell.text in path.read_text(encoding="utf-8"), (feature, cell.text)


def test_what_is_said_of_torch_and_stretto_stands_in_them() -> None:
    import torch

    assert version("torch").startswith(VERSIONS["torch"][1])
    check("torch", Path(torch.__file__).parents[1])
    check("stretto", ROOT)


def test_axes_that_stretto_does_not_run_yet_are_a_no() -> None:
    for axis, feature in (("cp", "context parallelism"), ("ep", "expert parallelism")):
        assert (TABLE[feature]["stretto"].can == "no") == (axis in LATER)


@pytest.mark.frameworks
@pytest.mark.parametrize("framework", [name for name in VERSIONS if name not in ("stretto", "torch")])
def test_what_is_said_of_other_frameworks_stands_in_the_versions_named(framework: str) -> None:
    from importlib.metadata import distribution

    package, read = VERSIONS[framework]
    found = distribution(package)
    assert found.version.startswith(read), "another version: read it anew"
    check(framework, Path(str(found.locate_file(""))))


def test_the_page_shows_the_table_as_it_is() -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    assert markdown() in page and sources() in page
