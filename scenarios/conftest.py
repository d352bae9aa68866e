"""Options of the scenarios."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--swarm-seed", type=int, help="run this one seed of scenarios/test_swarm.py, twice"
    )
