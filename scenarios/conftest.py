"""Options of the scenarios."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-stories",
        action="store_true",
        help="write what the stories print into scenarios/cases; read the diff before committing",
    )
    parser.addoption(
        "--swarm-seed", type=int, help="run this one seed of scenarios/test_swarm.py, twice"
    )
