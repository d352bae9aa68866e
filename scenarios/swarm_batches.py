"""Seeds of a swarm as parameters of tests: some in each, so that workers share them without much overhead."""

from __future__ import annotations

from typing import Final

import pytest

BATCH: Final = 10  # seeds in one test


def parametrize_seeds(metafunc: pytest.Metafunc, seeds: int, slow_seeds: int) -> None:
    """``seeds`` of the first ones run by default, ``slow_seeds`` more with the slow ones.

    ``--swarm-seed N`` shows one of them again.
    """
    if "seeds" not in metafunc.fixturenames:
        return
    seed = metafunc.config.getoption("--swarm-seed")
    if seed is not None:
        metafunc.parametrize("seeds", [pytest.param(range(seed, seed + 1), id=f"seed{seed}")])
        return
    batches = [
        pytest.param(
            range(first, first + BATCH),
            id=f"{first}to{first + BATCH - 1}",
            marks=[] if first < seeds else [pytest.mark.slow],
        )
        for first in range(0, seeds + slow_seeds, BATCH)
    ]
    metafunc.parametrize("seeds", batches)
