"""The load generator as its users start it, in a process of its own: it patches what it runs in."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars

from scenarios.tidy import ROOT

SECONDS_MAX = 60
# These machines are shared and busy: how late they are is no subject but where it is.
PATIENT = ("--lag-limit-ms", "5000")


@dataclass(frozen=True)
class Load:
    """How a run ended. ``rows`` are in the order in which they were due."""

    code: int
    out: str
    rows: list[dict[str, Any]]

    def errors(self) -> list[str]:
        return [row["error"] for row in self.rows]


def locust(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "locust", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
    )


def load(folder: Path, *words: str, limit: str = "20s") -> Load:
    """A headless run of ``perf/``; it ends when all is sent, or after ``limit``."""
    results = folder / "results.parquet"
    done = locust(
        "-f", "perf/", "--headless", "--only-summary", "-u", "1", "-t", limit,
        "--results", str(results), *PATIENT, *words,
    )  # fmt: skip
    rows = polars.read_parquet(results).to_dicts() if results.exists() else []
    return Load(done.returncode, done.stdout, rows)


def chats(count: int, rate: int = 0, rounds: int = 1, more: str = "") -> tuple[str, str]:
    """An option: so many conversations of a few tokens, begun ``rate`` a second; 0: all at once."""
    sizes = "request_length=8,output_length=3"
    return ("--scenario", f"multi_turn:clients={count},rounds={rounds},rate={rate},{sizes}{more}")
