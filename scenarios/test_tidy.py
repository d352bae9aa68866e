"""The habits of this repository, held by tests; test_tidy_rules.py shows that each can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from scenarios import tidy, tidy_docs, tidy_imports
from scenarios.tidy import CODE, ROOT, Source, sources

Rule = Callable[[Source], list[str]]

CODE_RULES: list[Rule] = [
    tidy.long_files,
    tidy.long_functions,
    tidy.deep_functions,
    tidy.banned_names,
    tidy.copies_changed_elsewhere,
    tidy_imports.forbidden_imports,
    tidy_imports.heavy_imports,
    tidy_imports.local_imports,
    tidy_imports.hidden_imports,
    tidy_imports.impurities,
]
SCENARIO_RULES: list[Rule] = [
    tidy.banned_names,
    tidy.vague_test_names,
    tidy.repeated_test_names,
    tidy.sleeps,
    tidy.unexplained_skips,
]
MAIN = ROOT / "refimpl" / "__main__.py"
needs_command_line = pytest.mark.skipif(
    not MAIN.exists(), reason="the command line does not exist in this tree"
)


def problems(rule: Rule, files: list[Source]) -> list[str]:
    return [problem for source in files for problem in rule(source)]


def document(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# ---- the tree as it is --------------------------------------------------------------------------


@pytest.mark.parametrize("rule", CODE_RULES, ids=lambda rule: rule.__name__)
def test_the_code_keeps_every_rule(rule: Rule) -> None:
    assert problems(rule, sources(*CODE)) == []


@pytest.mark.parametrize("rule", SCENARIO_RULES, ids=lambda rule: rule.__name__)
def test_the_scenarios_keep_every_rule(rule: Rule) -> None:
    assert problems(rule, sources("scenarios")) == []


def test_modules_and_public_names_of_engine_and_kernels_have_docstrings() -> None:
    assert problems(tidy.missing_docstrings, sources("refimpl", "cuda_numba")) == []


def test_no_modules_of_engine_and_kernels_import_each_other_in_a_circle() -> None:
    assert tidy_imports.import_cycle(sources("refimpl", "cuda_numba")) == []


def test_the_rules_see_the_files_they_are_about() -> None:
    paths = {source.path for source in sources(*CODE, "scenarios")}
    assert {"refimpl/units.py", "refimpl/core/__init__.py", "scenarios/test_tidy.py"} <= paths


def test_the_pure_packages_load_neither_tensors_nor_kernels_nor_tables() -> None:
    names = [tidy_imports.module_name(source.path) for source in sources("refimpl")]
    pure = [name for name in names if name.split(".")[1:2] in (["core"], ["cluster"], ["workload"])]
    assert loaded_by(pure) & {"torch", "numba", "numpy", "polars"} == set()


@needs_command_line
def test_the_command_line_starts_without_torch_and_numba() -> None:
    assert loaded_by(["refimpl.__main__"]) & {"torch", "numba"} == set()


@needs_command_line
def test_help_of_the_simulator_loads_neither_torch_nor_numba() -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv = ['refimpl', 'simulate', '--help']\n"
        "try:\n"
        "    runpy.run_module('refimpl', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "print('LOADED', *sys.modules)\n"
    )
    assert run_python(code) & {"torch", "numba"} == set()


def loaded_by(modules: list[str]) -> set[str]:
    return run_python(f"import sys, {', '.join(modules)}\nprint('LOADED', *sys.modules)")


def run_python(code: str) -> set[str]:
    """Run ``code``, which ends by printing the modules that are loaded by then."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    modules = done.stdout.rpartition("LOADED ")[2].split()
    assert "sys" in modules
    return set(modules)


# ---- documents ----------------------------------------------------------------------------------


def test_the_two_commands_stand_on_the_first_screen() -> None:
    assert tidy_docs.missing_first_commands(document("README.md")) == []


def test_the_architecture_lists_every_file_once() -> None:
    text = document("ARCHITECTURE.md")
    assert tidy_docs.wrong_file_list(text, sources("refimpl", "cuda_numba")) == []


def test_the_documented_import_table_is_the_enforced_one() -> None:
    assert tidy_docs.wrong_import_table(document("ARCHITECTURE.md")) == []


@pytest.mark.parametrize(
    "command",
    tidy_docs.commands(document("README.md"))
    or [pytest.param("", marks=pytest.mark.skip(reason="README.md shows no command to run"))],
)
def test_every_command_of_the_readme_succeeds(command: str, tmp_path: Path) -> None:
    # They are typed at the root, where the golden data lies. A copy, so that none can change it.
    if (ROOT / "golden").exists():
        shutil.copytree(ROOT / "golden", tmp_path / "golden")
    done = tidy_docs.run_command(command, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_repository_speaks_of_the_project_alone() -> None:
    assert tidy_docs.foreign_words() == []
