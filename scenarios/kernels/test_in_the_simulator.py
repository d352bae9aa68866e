"""Runs simulated_kernels.py where the simulator was chosen before numba was imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("numba", reason="the kernels are not installed: pip install -e '.[kernels]'")
pytest.importorskip(
    "numba_cuda", reason="the simulator is not installed: pip install -e '.[kernels]'"
)

from scenarios.tidy import ROOT

SECONDS_MAX = 110


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**inherited, "SCENARIOS_SIMULATE": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def test_the_kernels_equal_the_oracle_in_the_simulator() -> None:
    done = simulate("scenarios/kernels/simulated_kernels.py")
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.findall(r"(\d+) passed", done.stdout)
    assert len(passed) == 1, done.stdout
    assert int(passed[0]) >= 60, done.stdout
    assert "skipped" not in done.stdout
