"""The pages are true: their Python runs as it stands and prints what they say, their jobs load, their commands end as shown."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import warm

from stretto.cli import main
from stretto.job import Job

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
#: Seconds for the Python of one page, and for one command; this machine may be busy.
PAGE_SECONDS, COMMAND_SECONDS = 240, 240
#: Printed where a block of Python ends, to tell its output from the next one's.
END = "\x1e"
#: What differs from machine to machine in the table of a check: rounding errors, and on which tensor the largest is.
VARIES = re.compile(r"\d\.\de[+-]\d+|(?<=largest on )\S+(?=;)")


class Block(NamedTuple):
    """A fenced block of a page. line: of its opening fence, from 1."""

    page: Path
    kind: str
    line: int
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


class Command(NamedTuple):
    """`$ words` of a console block, the lines shown after it, and the exit code that an `$ echo $?` after it shows."""

    words: str
    output: tuple[str, ...]
    code: int


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    kind, start, inside = "", 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = line.startswith("```")
        if fence and not start:
            kind, start, inside = line[3:].strip(), number, []
        elif fence:
            yield Block(page, kind, start, tuple(inside))
            start = 0
        elif start:
            inside.append(line)
    assert not start, f"{page.name}:{start}: this block never ends"


BLOCKS = tuple(block for page in PAGES for block in blocks(page))


def of_kind(*kinds: str) -> list[Block]:
    return [block for block in BLOCKS if block.kind in kinds]


def script(page: Path) -> str:
    """The Python of a page, each line at its number in the page, so that a traceback points into it."""
    lines = [""] * len(page.read_text(encoding="utf-8").splitlines())
    for block in of_kind("python"):
        if block.page == page:
            lines[block.line : block.line + len(block.lines)] = block.lines
            lines[block.line + len(block.lines)] = f"print({END!r})"
    return "\n".join(lines) + "\n"


def shown(page: Path) -> list[str | None]:
    """For each block of Python, the output that the page shows right after it: a block of kind `text`."""
    mine = [block for block in BLOCKS if block.page == page]
    following = [*mine[1:], None]
    return [
        after.text if after and after.kind == "text" and after.line <= block.line + len(block.lines) + 3 else None
        for block, after in zip(mine, following)
        if block.kind == "python"
    ]


def commands(block: Block) -> Iterator[Command]:
    entries: list[tuple[str, list[str]]] = []
    for line in block.lines:
        if line.startswith("$ "):
            entries.append((line[2:], []))
        elif entries:
            entries[-1][1].append(line)
    for (words, output), after in zip(entries, [*entries[1:], ("", [])]):
        if words != "echo $?":
            yield Command(words, tuple(output), int(after[1][0]) if after[0] == "echo $?" else 0)


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder in which what lies in the repository is found by the same names, and what a command writes stays."""
    folder = tmp_path / "desk"
    folder.mkdir()
    for name in ("benchmarks", "docs", "examples", "stretto", "tests"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.mark.parametrize("page", sorted({block.page for block in of_kind("python")}), ids=lambda page: page.name)
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(page: Path, tmp_path: Path) -> None:
    file = tmp_path / f"{page.stem}.py"
    file.write_text(script(page), encoding="utf-8")
    # a process of its own: what a script calls travels to its ranks as from a script
    done = subprocess.run([sys.executable, file], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=PAGE_SECONDS)
    assert done.returncode == 0, done.stderr[-3000:]
    printed, said = done.stdout.split(f"{END}\n")[:-1], shown(page)
    assert [text for text, line in zip(printed, said, strict=True) if line is not None] == [line for line in said if line is not None]


@pytest.mark.parametrize("block", of_kind("toml"), ids=str)
def test_a_toml_block_is_a_job(block: Block) -> None:
    Job.of(tomllib.loads(block.text))


COMMANDS = [(block, command) for block in of_kind("console") for command in commands(block)]


@pytest.mark.parametrize(("block", "command"), COMMANDS, ids=[f"{block}-{command.words}" for block, command in COMMANDS])
def test_a_command_ends_and_answers_as_shown(block: Block, command: Command, desk: Path, tmp_path: Path) -> None:
    first, *words = shlex.split(command.words)
    assert first == "stretto", "a console block runs stretto; write other commands in a block of kind sh"
    done = warm.run(["-m", "stretto", *words], desk, ENVIRONMENT, tmp_path / "told", COMMAND_SECONDS)
    assert done.returncode == command.code, done.stderr[-3000:]
    if command.output:
        said = [VARIES.sub("*", line) for line in (done.stdout + done.stderr).splitlines()]
        assert said == [VARIES.sub("*", line) for line in command.output]


def test_every_link_to_a_file_of_the_repository_leads_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_every_block_says_what_it_is() -> None:
    kinds = {"python", "toml", "console", "text", "sh"}
    assert [f"{block}: {block.kind!r}" for block in BLOCKS if block.kind not in kinds] == []


@pytest.mark.parametrize("picture", sorted((ROOT / "docs" / "pictures").glob("*.svg")), ids=lambda picture: picture.stem)
def test_a_picture_is_the_one_that_stretto_draws_now(picture: Path, tmp_path: Path) -> None:
    """Its name says which: collective, algorithm, ranks, and nodes where it has any; or a schedule with ranks and microbatches."""
    said = re.fullmatch(r"schedule-([a-z0-9-]+)-(\d+)-(\d+)", picture.stem)
    if said:
        words = ["schedule", "tiny", f"pipeline={said[1]}", f"mesh=pp={said[2]}", f"batch.size={said[3]}", "batch.micro_size=1"]
    else:
        said = re.fullmatch(r"([a-z_]+)-([a-z-]+)-(\d+)(?:-nodes-(\d+))?", picture.stem)
        assert said, "a picture is named by what it shows"
        words = ["collective", "--collective", said[1], "--algorithm", said[2], "--ranks", said[3]]
        words += ["--nodes", said[4]] if said[4] else []
    assert main(["draw", *words, "--out", str(tmp_path / "now.svg")]) == 0
    assert (tmp_path / "now.svg").read_text(encoding="utf-8") == picture.read_text(encoding="utf-8")
    assert any(f"pictures/{picture.name})" in page.read_text(encoding="utf-8") for page in PAGES), "no page shows it"
