"""One thread for torch: the scenarios share the cores among themselves already."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    if find_spec("torch") is None:
        return
    import torch

    torch.set_num_threads(1)
