"""Options of the scenarios, and which mode of numba.cuda they run in.

Simulator and device can't share a process. This one is the device's where there is one, and only
compiles kernels where there is none; the simulator always runs in a process of its own, which
kernels/test_in_the_simulator.py starts with SCENARIOS_SIMULATE=1. What numba's own variable says in
the caller's shell does not matter.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

if os.environ.get("SCENARIOS_SIMULATE"):
    # Numba reads it at its first import, which comes later.
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
else:
    os.environ.pop("NUMBA_ENABLE_CUDASIM", None)


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker of pytest-xdist runs all that needs the device: `--dist loadgroup` keeps it so."""
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.xdist_group("gpu"))


# A deadline for each example says how busy the machine is; pytest-timeout ends what hangs.
settings.register_profile("scenarios", deadline=None)
settings.load_profile("scenarios")
