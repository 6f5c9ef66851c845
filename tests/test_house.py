"""The house stands: every part imports only what lies below it; the ground and the left wing live without torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: From the lowest. A part may import parts of lower floors, and itself.
FLOORS = (
    {"errors"},
    {"layout", "anatomy"},
    {"schedule", "data", "models"},
    {"job", "comm"},
    {"parallel", "checkpoint", "plan"},
    {"engine", "fault", "draw"},
    {"adapters", "export"},
    {"launch"},
    {"verbs"},
    {"cli"},
    {"__main__"},
)
GROUND = {"errors", "layout", "anatomy", "schedule", "job"}
RIGHT = {"comm", "parallel", "data", "checkpoint", "engine", "fault", "models"}
LEFT = {"plan", "draw"}
#: (who, whom): though whom lies lower.
NEVER = ((GROUND, RIGHT | LEFT), (LEFT, RIGHT), (RIGHT, LEFT), ({"job"}, {"schedule"}))  # the last: a Job knows nothing that it configures
#: Files beside job.py that belong to it.
JOB = {"keys", "sections", "limits", "refusal"}
NO_TORCH = GROUND | LEFT | {"export"}
#: A path of one machine, not the end of a longer one or of an address.
MACHINE = re.compile(r"(?<![\w.~-])/((work|home|root|Users|mnt)/|tmp/(v|design)\b)")


def part_of(module: str) -> str:
    """'stretto.layout.mesh' -> 'layout'; of 'stretto' itself ''."""
    part = module.partition(".")[2].split(".")[0]
    return "job" if part in JOB else part


def imports(tree: ast.AST) -> Iterator[str]:
    """Modules imported anywhere in the tree, in functions too; what only type checkers see does not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from imports(ast.Module(node.orelse, []))
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "imports name the whole path"
            yield from (f"stretto.{alias.name}" for alias in node.names) if node.module == "stretto" else [node.module]
        yield from imports(node)


def imported_by(file: Path) -> set[str]:
    return set(imports(ast.parse(file.read_text(encoding="utf-8"))))


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module_of(file): file for file in sorted((ROOT / "stretto").rglob("*.py"))}
PACKAGE = FILES.pop("stretto")


@pytest.mark.parametrize("module", FILES)
def test_a_module_imports_only_what_lies_below_it(module: str) -> None:
    part = part_of(module)
    floor = next(i for i, parts in enumerate(FLOORS) if part in parts)
    below = {part}.union(*FLOORS[:floor]).difference(*(whom for who, whom in NEVER if part in who))
    found = imported_by(FILES[module])
    assert {part_of(name) for name in found if name.split(".")[0] == "stretto"} - below == set()
    assert part not in NO_TORCH or "torch" not in {name.split(".")[0] for name in found}


def test_imports_are_seen_wherever_they_stand() -> None:
    text = """
import stretto.cli
from stretto import errors
if TYPE_CHECKING:
    from stretto.hidden import Name
else:
    import torch.nn
class A:
    def f(self):
        try:
            from stretto.engine.engine import Engine
        except ImportError: ...
"""
    assert set(imports(ast.parse(text))) == {"stretto.cli", "stretto.errors", "torch.nn", "stretto.engine.engine"}
    assert [part_of(f"stretto{name}") for name in ("", ".errors", ".engine.loop", ".keys")] == ["", "errors", "engine", "job"]


def test_the_package_imports_nothing_before_it_is_asked_to() -> None:
    assert imported_by(PACKAGE) <= {"__future__", "importlib", "typing"}


def test_the_ground_the_left_wing_and_the_command_line_load_with_torch_blocked() -> None:
    names = ["stretto", "stretto.cli", "stretto.launch", *(name for name in FILES if part_of(name) in NO_TORCH)]
    code = f"import sys, importlib; sys.modules['torch'] = None; [importlib.import_module(name) for name in {names}]"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False).stderr == ""


def test_no_line_holds_a_path_of_one_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout: what belongs to the repository is not known")
    files = [file for name in listed.stdout.split("\0") if name and (file := ROOT / name).is_file()]
    lines = [(file, line) for file in files for line in file.read_text(encoding="utf-8", errors="ignore").splitlines()]
    assert [f"{file.relative_to(ROOT)}: {line.strip()[:100]}" for file, line in lines if MACHINE.search(line)] == []


@pytest.mark.parametrize(("line", "guilty"), [("at -work-main", True), ("x=-tmp-v", True), ("framework-main", False), ("a-work-b", False)])
def test_a_path_of_one_machine_is_told_from_others(line: str, guilty: bool) -> None:
    assert bool(MACHINE.search(line.replace("-", "/"))) is guilty
