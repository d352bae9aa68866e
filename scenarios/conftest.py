"""Options of the scenarios."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("certify", "a storage backend, by scenarios/test_backends.py")
    group.addoption("--backend", metavar="NAME|MODULE:CLASS", help="certify this one alone")
    group.addoption("--backend-extra-config", metavar="JSON", help="its keys, or @FILE")
    group.addoption("--backend-lifetime", help="how long its values live: object, process, store")
    parser.addoption(
        "--rewrite-stories",
        action="store_true",
        help="write what the stories print into scenarios/cases; read the diff before committing",
    )
    parser.addoption(
        "--swarm-seed", type=int, help="run this one seed of scenarios/test_swarm.py, twice"
    )
