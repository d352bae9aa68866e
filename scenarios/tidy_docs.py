"""What the documents say, compared with what is there."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from scenarios.tidy import ROOT, Source, walk
from scenarios.tidy_imports import TABLE

FIRST_SCREEN_LINES: Final = 20
FIRST_COMMANDS: Final = (
    "pip install -e . && refimpl run",
    "pip install -e '.[test]' && pytest -n auto scenarios/",
)
# These serve until they are stopped; scenarios marked `live` start them.
SERVERS: Final = frozenset({"serve", "route", "encode", "storage"})
COMMAND_SECONDS_MAX: Final = 100  # below the limit of the test that runs it

# Joined here, so that this file does not contain what it forbids. Where the work was done, and by
# whom, tells a reader nothing about the project.
FOREIGN: Final = ("/wor" + "k/", "sub" + "agent", "this " + "session", "DEVEL" + "OPERS.md")

_FENCED_BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(\w+=\S+ +)*(refimpl|python -m refimpl)( |$)")
_FILE_LINE = re.compile(r"^- `((?:refimpl|cuda_numba)/\S+\.py)`: \S", re.MULTILINE)
_ANY_FILE = re.compile(r"(?:refimpl|cuda_numba)/[\w/]+\.py")
_PREAMBLE = """set -euo pipefail
refimpl() { "$PYTHON" -m refimpl "$@"; }
python() { "$PYTHON" "$@"; }
"""


# ---- README -------------------------------------------------------------------------------------


def missing_first_commands(readme: str) -> list[str]:
    screen = readme.splitlines()[:FIRST_SCREEN_LINES]
    return [command for command in FIRST_COMMANDS if command not in map(str.strip, screen)]


def commands(text: str) -> list[str]:
    """Command lines of this project in fenced bash blocks, continued lines joined."""
    blocks = [block.replace("\\\n", " ") for block in _FENCED_BASH.findall(text)]
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if _COMMAND.match(line) and not _serves(line)]


def _serves(line: str) -> bool:
    words = line.partition("refimpl")[2].split()
    return bool(words) and words[0] in SERVERS


def run_command(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line of a document in ``folder``, with the sources of this tree."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["bash", "-c", _PREAMBLE + line],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS_MAX,
        check=False,
    )


# ---- ARCHITECTURE -------------------------------------------------------------------------------


def wrong_file_list(text: str, files: list[Source]) -> list[str]:
    """Differences between the file list and the files.

    A package's ``__init__.py`` that holds its docstring alone is described by its folder.
    """
    listed = _FILE_LINE.findall(text)
    present = {source.path for source in files if not _is_bare_package(source)}
    known = present | {source.path for source in files}
    return (
        [f"{path} has no line" for path in sorted(present - set(listed))]
        + [f"{path} does not exist" for path in sorted(set(_ANY_FILE.findall(text)) - known)]
        + [f"{path} has two lines" for path in sorted(set(listed)) if listed.count(path) > 1]
    )


def _is_bare_package(source: Source) -> bool:
    body = source.tree.body
    return source.path.endswith("/__init__.py") and all(isinstance(each, ast.Expr) for each in body)


def wrong_import_table(text: str) -> list[str]:
    """Differences between the table in the document and the one that is enforced."""
    found = []
    rows = {cells[0]: cells[1] for cells in map(_cells, text.splitlines()) if len(cells) == 3}
    for folder, allowed in TABLE.items():
        granted = set(re.findall(r"\w+", rows.get(folder, ""))) & TABLE.keys()
        if folder not in rows:
            found.append(f"{folder} has no row")
        elif differ := (granted ^ allowed.internal) - {folder}:
            found.append(f"{folder}: {sorted(differ)} differ from TABLE")
    return found


def _cells(line: str) -> list[str]:
    if not line.startswith("|"):
        return []
    return [cell.strip().replace("`", "") for cell in line.strip().strip("|").split("|")]


# ---- every file ---------------------------------------------------------------------------------


def foreign_words(root: Path = ROOT) -> list[str]:
    """Files that speak of something other than the project."""
    found = []
    for path in walk(root):
        if path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        if b"\0" in data:
            continue  # not a text
        name = path.relative_to(root)
        found += [f"{name}: {word}" for word in FOREIGN if word.encode() in data]
    return found
