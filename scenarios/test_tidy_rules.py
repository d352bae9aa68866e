"""Each rule of test_tidy.py, shown to find a bad example and to let a good one pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from scenarios import tidy, tidy_docs, tidy_imports
from scenarios.tidy import ROOT, Source, sources

CORE = "refimpl/core/example.py"
TRACE = "refimpl/workload/trace.py"
TEST = "scenarios/test_example.py"


@pytest.mark.parametrize(
    ("path", "text", "named"),
    [
        (CORE, "import torch", "torch"),
        (CORE, "import msgspec", "msgspec"),
        (CORE, "from refimpl.cluster import router", "cluster"),
        (CORE, "from refimpl import storage", "refimpl"),
        ("refimpl/units.py", "from refimpl.core import page", "core"),
        ("refimpl/storage/file.py", "import torch", "torch"),
        ("refimpl/memory/pools.py", "from refimpl.core.page import Page", "core"),
        ("refimpl/run/live.py", "import zmq", "zmq"),
        ("refimpl/run/live.py", "from refimpl.serve import app", "serve"),
        ("cuda_numba/pages.py", "from refimpl.units import GB", "refimpl"),
        ("perf/locustfile.py", "from refimpl.core import page", "core"),
        ("refimpl/elsewhere/page.py", "", "no row"),
        ("refimpl/elsewhere.py", "", "no row"),
    ],
)
def test_an_import_outside_the_table_is_found(path: str, text: str, named: str) -> None:
    (problem,) = tidy_imports.forbidden_imports(Source(path, text))
    assert named in problem


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (CORE, "from refimpl.core.page import Page\nfrom refimpl.units import GB\nimport bisect"),
        (CORE, "from refimpl import units"),
        ("refimpl/messages.py", "import msgspec\nfrom refimpl.keys import PageKey"),
        ("refimpl/storage/nixl.py", "import nixl"),
        ("refimpl/memory/transfer.py", "import torch\nfrom cuda_numba import pages"),
        ("refimpl/run/world.py", "from refimpl.core import engine\nimport torch"),
        ("refimpl/__main__.py", "import typer\nfrom refimpl.cli.run import run"),
        ("refimpl/cli/run.py", "import typer\nfrom refimpl.serve import app"),
        ("perf/locustfile.py", "import locust\nfrom refimpl.workload import scenario"),
    ],
)
def test_imports_that_the_table_grants_pass(path: str, text: str) -> None:
    assert tidy_imports.forbidden_imports(Source(path, text)) == []


@pytest.mark.parametrize(
    "text", ["page.l1_state = READY", "a.page.l2_slot += 1", "del page.l2_state"]
)
def test_a_copy_that_changes_behind_the_watcher_s_back_is_found(text: str) -> None:
    assert len(tidy.copies_changed_elsewhere(Source(CORE, text))) == 1
    assert tidy.copies_changed_elsewhere(Source("refimpl/core/residency.py", text)) == []
    assert tidy.copies_changed_elsewhere(Source(CORE, "x = page.l1_state")) == []


def test_tensors_outside_the_packages_of_bytes_are_found() -> None:
    (problem,) = tidy_imports.heavy_imports(Source("refimpl/run/world.py", "from torch import nn"))
    assert "torch belongs into" in problem
    for path in ("refimpl/run/hands.py", "refimpl/model/fast.py", "refimpl/memory/pools.py"):
        assert tidy_imports.heavy_imports(Source(path, "import torch")) == []


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "from os import path",
        "import threading as t",
        "open('x')",
        "print(1)",
        "hash('x')",
        "x = 0.5",
        "x = float(1)",
        "def f(x: float): ...",
        "x = a / b",
        "x /= 2",
        "for x in {1, 2}: ...",
        "y = [x for x in set(a)]",
        "y = list({x for x in a})",
        "seen = set()\nfor x in seen: ...",
        "def f(seen: set[int]): return [*seen]",
        "class A:\n    def f(self):\n        self.a: set[int] = set()\n        return self.a.pop()",
    ],
)
def test_an_impurity_in_the_core_is_found(text: str) -> None:
    assert len(tidy_imports.impurities(Source(CORE, text))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (CORE, "x = 7 // 2\nfor y in sorted({1, 2}): ...\nassert x in {1, 2}"),
        (CORE, "assert not isinstance(x, float)"),
        (TRACE, "with open(folder / 'trace.csv') as file: ..."),
        ("refimpl/run/cost.py", "import time\nx = 1 / 2"),
    ],
)
def test_what_is_pure_or_need_not_be_passes(path: str, text: str) -> None:
    assert tidy_imports.impurities(Source(path, text)) == []


def test_a_trace_reader_may_join_paths_but_not_divide_numbers() -> None:
    assert len(tidy_imports.impurities(Source(TRACE, "half = count / 2"))) == 1


def test_an_import_inside_a_function_is_found() -> None:
    source = Source(CORE, "def f():\n    import json\n    import nixl")
    (problem,) = tidy_imports.local_imports(source)
    assert "json" in problem


def test_a_backend_whose_client_takes_tensors_names_torch_in_functions_alone() -> None:
    inside, outside = "def f():\n    import torch", "import torch"
    rules = (tidy_imports.heavy_imports, tidy_imports.forbidden_imports, tidy_imports.local_imports)
    for path in tidy_imports.TENSOR_CLIENTS:
        assert [problem for rule in rules for problem in rule(Source(path, inside))] == []
        assert tidy_imports.heavy_imports(Source(path, outside))
        assert tidy_imports.forbidden_imports(Source(path, outside))
    for rule in rules:
        assert rule(Source("refimpl/storage/file.py", inside))


def test_only_the_command_line_loads_our_own_modules_late() -> None:
    text = "def f():\n    from refimpl.serve import app"
    assert tidy_imports.local_imports(Source("refimpl/cli/run.py", text)) == []
    assert len(tidy_imports.local_imports(Source("refimpl/run/loop.py", text))) == 1


@pytest.mark.parametrize(
    "text", ["from typing import TYPE_CHECKING", "import typing\nif typing.TYPE_CHECKING: ..."]
)
def test_an_import_for_types_alone_is_found(text: str) -> None:
    assert len(tidy_imports.hidden_imports(Source(CORE, text))) == 1


def test_a_circle_of_imports_is_found() -> None:
    cycle = tidy_imports.import_cycle(
        [
            Source("refimpl/core/a.py", "from refimpl.core import b"),
            Source("refimpl/core/b.py", "import refimpl.core.c"),
            Source("refimpl/core/c.py", "from refimpl.core.a import name"),
        ]
    )
    assert cycle[0] == cycle[-1]
    assert set(cycle) == {"refimpl.core.a", "refimpl.core.b", "refimpl.core.c"}


def test_a_file_over_the_limit_is_found() -> None:
    assert tidy.long_files(Source(CORE, "x = 1\n" * tidy.FILE_LINES_MAX)) == []
    assert len(tidy.long_files(Source(CORE, "x = 1\n" * (tidy.FILE_LINES_MAX + 1)))) == 1


def test_a_function_over_one_screen_is_found() -> None:
    body = "    x = 1\n" * tidy.FUNCTION_LINES_MAX
    assert len(tidy.long_functions(Source(CORE, "def f():\n" + body))) == 1


def test_a_function_that_nests_too_deep_is_found() -> None:
    fits = "def f():\n if a: pass\n elif b:\n  for c in d:\n   if e: pass\n elif g: pass\n"
    assert tidy.deep_functions(Source(CORE, fits)) == []
    deep = "def f():\n while a:\n  if b:\n   for c in d:\n    if e: pass\n"
    assert len(tidy.deep_functions(Source(CORE, deep))) == 1


@pytest.mark.parametrize("path", ["refimpl/core/utils.py", "refimpl/common/page.py"])
def test_a_module_that_names_no_subject_is_found(path: str) -> None:
    assert len(tidy.banned_names(Source(path, ""))) == 1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("x = 1", "module"),
        ('"""."""\ndef f(): ...', "f"),
        ('"""."""\nclass A: ...', "A"),
        ('"""."""\nclass A:\n    """."""\n    def f(self): ...', "f"),
    ],
)
def test_a_public_name_without_docstring_is_found(text: str, name: str) -> None:
    (problem,) = tidy.missing_docstrings(Source(CORE, text))
    assert f": {name} has no docstring" in problem


def test_properties_dunders_and_private_names_need_no_docstring() -> None:
    text = (
        '"""."""\ndef _f(): ...\n'
        'class A:\n    """."""\n    def __len__(self): ...\n    @property\n    def a(self): ...\n'
    )
    assert tidy.missing_docstrings(Source(CORE, text)) == []


def test_a_test_name_that_states_no_fact_is_found() -> None:
    assert len(tidy.vague_test_names(Source(TEST, "def test_the_split(): ..."))) == 1
    assert tidy.vague_test_names(Source(TEST, "def test_nothing_costs_nothing(): ...")) == []


def test_a_test_that_hides_another_of_its_name_is_found() -> None:
    text = "def test_a(): ...\ndef test_b(): ...\ndef test_a(): ..."
    assert len(tidy.repeated_test_names(Source(TEST, text))) == 1


@pytest.mark.parametrize("text", ["import time\ntime.sleep(1)", "from time import sleep"])
def test_a_sleep_in_a_scenario_is_found(text: str) -> None:
    assert len(tidy.sleeps(Source(TEST, text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "pytest.skip()",
        "pytest.skip(reason='')",
        "@pytest.mark.skip\ndef test_x(): ...",
        "@pytest.mark.skipif(True)\ndef test_x(): ...",
        "x = pytest.param(1, marks=pytest.mark.xfail)",
    ],
)
def test_a_skip_without_a_reason_is_found(text: str) -> None:
    assert len(tidy.unexplained_skips(Source(TEST, text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "pytest.skip('no device')",
        "@pytest.mark.skipif(True, reason='no device')\ndef test_x(): ...",
        "@pytest.mark.xfail(reason=NO_DEVICE)\ndef test_x(): ...",
    ],
)
def test_a_skip_with_its_reason_passes(text: str) -> None:
    assert tidy.unexplained_skips(Source(TEST, text)) == []


def test_commands_below_the_first_screen_are_found() -> None:
    lines = [*tidy_docs.FIRST_COMMANDS]
    assert tidy_docs.missing_first_commands("\n".join(lines)) == []
    late = "\n" * tidy_docs.FIRST_SCREEN_LINES + "\n".join(lines)
    assert tidy_docs.missing_first_commands(late) == lines


def test_commands_are_read_from_bash_blocks_alone() -> None:
    text = (
        "```bash\npip install -e . && refimpl run\nrefimpl simulate \\\n  --seed 1\nrefimpl serve\n"
        "X=1 python -m refimpl golden check\npytest -n auto scenarios/\n```\n"
        "```text\nrefimpl bench\n```\n"
    )
    simulate, check = tidy_docs.commands(text)
    assert simulate.split() == ["refimpl", "simulate", "--seed", "1"]
    assert check == "X=1 python -m refimpl golden check"


def test_a_command_that_fails_is_found(tmp_path: Path) -> None:
    assert tidy_docs.run_command("python -c 'import refimpl.units'", tmp_path).returncode == 0
    assert tidy_docs.run_command("refimpl no-such-command", tmp_path).returncode != 0
    assert tidy_docs.run_command("false | true", tmp_path).returncode != 0


def test_a_file_list_that_differs_from_the_tree_is_found() -> None:
    files = [
        Source("refimpl/core/__init__.py", '"""Bare."""'),
        Source("refimpl/core/page.py", ""),
        Source("refimpl/core/tree.py", ""),
    ]
    text = (
        "- `refimpl/core/page.py`: a page\n- `refimpl/core/page.py`: a page\n- `refimpl/gone.py`: x"
    )
    assert tidy_docs.wrong_file_list(text, files) == [
        "refimpl/core/tree.py has no line",
        "refimpl/gone.py does not exist",
        "refimpl/core/page.py has two lines",
    ]


def test_a_documented_table_that_differs_is_found() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert "| core | vocabulary |" in text
    wrong = text.replace("| core | vocabulary |", "| core | vocabulary, storage |")
    assert tidy_docs.wrong_import_table(wrong) == ["core: ['storage'] differ from TABLE"]


@pytest.mark.parametrize("word", tidy_docs.FOREIGN)
def test_a_word_from_outside_the_project_is_found(word: str, tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text(f"see {word}", encoding="utf-8")
    assert tidy_docs.foreign_words(tmp_path) == [f"notes.md: {word}"]


def test_environments_and_build_outputs_are_not_walked(tmp_path: Path) -> None:
    for name in (".git/a.py", "build/a.py", "mine/pyvenv.cfg", "mine/a.py", "refimpl/a.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
    assert [source.path for source in sources("", root=tmp_path)] == ["refimpl/a.py"]
