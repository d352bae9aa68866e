"""Stores are opened in a folder of the test's own, whatever the environment says."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in os.environ:
        if key.startswith("SGLANG_HICACHE_FILE_BACKEND_"):
            monkeypatch.delenv(key)
