"""Style rules as functions: a source in, a list of problems out. The tests stand in test_tidy.py.

The rules that ruff and mypy can hold are theirs; here are those of this repository alone. Files
are found by walking, so that a source tree without version control is checked as well.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, TypeAlias

ROOT: Final = Path(__file__).resolve().parents[1]
CODE: Final = ("refimpl", "cuda_numba", "perf")

FILE_LINES_MAX: Final = 400
FUNCTION_LINES_MAX: Final = 60  # one screen
NESTING_MAX: Final = 3
TEST_NAME_WORDS_MIN: Final = 4  # with the word test; fewer can't state a fact
BANNED_NAMES: Final = frozenset({"utils", "util", "common", "helpers", "helper", "manager", "misc"})
HIDDEN_BUT_OURS: Final = frozenset({".ci", ".github"})
BUILT: Final = frozenset({"__pycache__", "build", "dist", "venv", "env", "node_modules"})

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTION: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_NESTS: Final = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.Match)


@dataclass(frozen=True)
class Source:
    """A Python file: its path from the root, with forward slashes, and its text."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, FUNCTION)]

    def problem(self, node: ast.AST | int, what: str) -> str:
        line = node if isinstance(node, int) else getattr(node, "lineno", 1)
        return f"{self.path}:{line}: {what}"


# ---- finding files ------------------------------------------------------------------------------


def walk(root: Path = ROOT) -> Iterator[Path]:
    """Files that belong to the project: no hidden folders, environments or build outputs."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if _is_ours(Path(folder, name)))
        # .git is a file where several working trees share one repository.
        yield from (Path(folder, name) for name in sorted(files) if name != ".git")


def _is_ours(folder: Path) -> bool:
    name = folder.name
    if name.startswith("."):
        return name in HIDDEN_BUT_OURS
    built = name in BUILT or name.endswith(".egg-info")
    return not built and not (folder / "pyvenv.cfg").exists()


def sources(*tops: str, root: Path = ROOT) -> list[Source]:
    """Python files below the named top-level folders; a folder that does not exist has none."""
    return [
        Source(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8"))
        for top in tops
        for path in walk(root / top)
        if path.suffix == ".py"
    ]


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a name or an attribute; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


# ---- sizes and names ----------------------------------------------------------------------------


def long_files(source: Source) -> list[str]:
    count = len(source.text.splitlines())
    if count <= FILE_LINES_MAX:
        return []
    return [source.problem(1, f"{count} lines, {FILE_LINES_MAX} at most: split it by subject")]


def long_functions(source: Source) -> list[str]:
    return [
        source.problem(function, f"{function.name} has {count} lines, {FUNCTION_LINES_MAX} at most")
        for function in source.functions
        if (count := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES_MAX
    ]


def deep_functions(source: Source) -> list[str]:
    return [
        source.problem(function, f"{function.name} nests {depth} deep, {NESTING_MAX} at most")
        for function in source.functions
        if (depth := max(map(_depth, function.body))) > NESTING_MAX
    ]


def _depth(node: ast.AST, *, is_elif: bool = False) -> int:
    """Branches and loops around the innermost statement. ``elif`` stands at the level of its if."""
    if isinstance(node, (*FUNCTION, ast.ClassDef)):
        return 0  # counted on its own
    own = int(isinstance(node, _NESTS) and not is_elif)
    below = 0
    for child in ast.iter_child_nodes(node):
        chained = isinstance(node, ast.If) and node.orelse == [child] and isinstance(child, ast.If)
        below = max(below, _depth(child, is_elif=chained))
    return own + below


def banned_names(source: Source) -> list[str]:
    parts = source.path.removesuffix(".py").split("/")
    return [
        source.problem(1, f"{part} names no subject: say what is in it")
        for part in parts
        if BANNED_NAMES & set(part.split("_"))
    ]


# ---- who writes what ----------------------------------------------------------------------------

COPY_STATES: Final = frozenset({"l1_state", "l2_state", "l1_slot", "l2_slot"})
COPY_WRITERS: Final = frozenset({"refimpl/core/page.py", "refimpl/core/residency.py"})


def copies_changed_elsewhere(source: Source) -> list[str]:
    """Assignments to the state of a copy outside the one file that tells who watches."""
    if source.path in COPY_WRITERS:
        return []
    return [
        source.problem(node, f"{node.attr} is changed in core/residency.py alone")
        for node in source.nodes
        if isinstance(node, ast.Attribute)
        and node.attr in COPY_STATES
        and not isinstance(node.ctx, ast.Load)
    ]


# ---- docstrings ---------------------------------------------------------------------------------


def missing_docstrings(source: Source) -> list[str]:
    """Modules, and the public classes, functions and methods in them."""
    found = [] if ast.get_docstring(source.tree) else [source.problem(1, "module has no docstring")]
    found += [
        source.problem(node, f"{node.name} has no docstring")
        for node in _public(source.tree)
        if not ast.get_docstring(node)
    ]
    return found


def _public(owner: ast.Module | ast.ClassDef) -> Iterator[Function | ast.ClassDef]:
    for node in owner.body:
        if not isinstance(node, (*FUNCTION, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if isinstance(node, ast.ClassDef):
            yield node
            yield from _public(node)
        elif not any(_documents_itself(decorator) for decorator in node.decorator_list):
            yield node


def _documents_itself(decorator: ast.expr) -> bool:
    """Properties read as nouns; overloads and overrides are described where they come from."""
    name = dotted(decorator).rpartition(".")[2]
    return name in {"property", "cached_property", "setter", "overload", "override"}


# ---- tests --------------------------------------------------------------------------------------


def _tests(source: Source) -> list[Function]:
    return [function for function in source.functions if function.name.startswith("test")]


def vague_test_names(source: Source) -> list[str]:
    return [
        source.problem(function, f"{function.name}: the name of a test is a fact, in words")
        for function in _tests(source)
        if len(list(filter(None, function.name.split("_")))) < TEST_NAME_WORDS_MIN
    ]


def repeated_test_names(source: Source) -> list[str]:
    seen: dict[str, int] = {}
    found = []
    for function in _tests(source):
        if function.name in seen:
            line = seen[function.name]
            found.append(source.problem(function, f"{function.name} stands in line {line} already"))
        seen[function.name] = function.lineno
    return found


def sleeps(source: Source) -> list[str]:
    found = [node for node in source.nodes if dotted(node) == "time.sleep"]
    found += [
        node
        for node in source.nodes
        if isinstance(node, ast.ImportFrom)
        and node.module == "time"
        and any(alias.name == "sleep" for alias in node.names)
    ]
    return [
        source.problem(node, "wait for the event itself, not for time to pass") for node in found
    ]


def unexplained_skips(source: Source) -> list[str]:
    """Skips and expected failures without a reason, as calls or as marks."""
    marks = {f"pytest.mark.{name}" for name in ("skip", "skipif", "xfail")}
    calls = {"pytest.skip", "pytest.xfail"}
    explained = {
        id(node.func)
        for node in source.nodes
        if isinstance(node, ast.Call)
        and (_has_reason(node) or (node.args and dotted(node.func) in calls | {"pytest.mark.skip"}))
    }
    return [
        source.problem(node, f"{dotted(node)} needs a reason")
        for node in source.nodes
        if dotted(node) in marks | calls and id(node) not in explained
    ]


def _has_reason(call: ast.Call) -> bool:
    return any(
        word.arg == "reason" and not (isinstance(word.value, ast.Constant) and not word.value.value)
        for word in call.keywords
    )
