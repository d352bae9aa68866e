"""COVERAGE.md names every fault report once, and every test it names exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
ROW = re.compile(r"^\| ([A-Z]+\d+) \| (.+) \| (.+) \|$")
# The reports there are, by class.
REPORTS = {
    "A": "02 03 05 06 07",
    "B": "01 05 06 07 09 11 12 13 14 15",
    "C": "01 02 07 08 09 10",
    "D": "01 02 04 05 06 07",
    "E": "01 04 05 06 08 09",
    "EV": "1 2 4",
    "F": "01 05 06 07 08 09 10 12 14 15 17 18 20 21 23",
    "G": "01 02 03 04 06 07 09 12",
    "I": "01 02 05 09 10 11 12 15 16 17 18 19 20",
    "J": "01 03 05 06 07 08 10",
    "K": "01 02 03 06",
    "L": "04 05 06 07 08",
    "M": "01 02 04 06",
    "N": "01 02 03",
    "O": "02 03 04",
    "P": "02 04 05 06 07 09 10",
    "Q": "02 04 05 06 08 11 12 13 14 15",
    "R": "01 02 03 05",
    "S": "01 02 04",
    "T": "01 02 04 06 07 09 10 11 13 15",
    "U": "03 04 05 07 08 10",
    "V": "01 03 04 05 07 09 10",
    "W": "02 03 05 06 07 08 09",
    "X": "01 04",
    "Y": "02 03 04 05 06 07",
    "Z": "01 03 04",
}
AREAS = ("later: ", "does not apply: ")


def rows(text: str) -> list[tuple[str, str]]:
    """(id, what stands in the last column) of each row."""
    found = [ROW.match(line) for line in text.splitlines()]
    return [(match[1], match[3]) for match in found if match]


def broken(here: str) -> list[str]:
    """What is wrong with the last column of a row: a test that does not exist, or nothing said."""
    if here.startswith(AREAS):
        return []
    names = re.findall(r"`([^`]+)`", here)
    return [name for name in names if not exists(name)] if names else ["names no test"]


def exists(name: str) -> bool:
    """Is there such a file below scenarios, and such a test in it?"""
    path, _, test = name.partition("::")
    file = HERE / path
    if not file.is_file():
        return False
    if not test:
        return True
    return any(
        isinstance(node, ast.FunctionDef) and node.name == test
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    )


def test_every_report_has_one_row_in_order() -> None:
    reports = [f"{group}{number}" for group, all_ in REPORTS.items() for number in all_.split()]
    listed = [report for report, _ in rows((HERE / "COVERAGE.md").read_text(encoding="utf-8"))]
    assert listed == reports


def test_every_test_that_is_named_exists() -> None:
    text = (HERE / "COVERAGE.md").read_text(encoding="utf-8")
    assert {report: wrong for report, here in rows(text) if (wrong := broken(here))} == {}


def test_a_row_without_a_test_that_exists_is_found() -> None:
    assert broken("`cases/no/such/story.txt`") == ["cases/no/such/story.txt"]
    assert broken("`test_coverage.py::test_that_is_not_there`") != []
    assert broken("") == ["names no test"]
    assert broken("`test_coverage.py::test_every_test_that_is_named_exists`") == []
