"""The swarm: whatever is configured, sent, broken or changed on the way, the invariants hold.

One seed is one world: see ``swarm.py`` for what is checked in it, ``swarm_draws.py`` for what is
drawn. ``pytest scenarios/test_swarm.py --swarm-seed N`` shows one of them again.
"""

from __future__ import annotations

from typing import Final

import pytest

from scenarios.swarm import Outcome, run_seed

BATCH: Final = 10  # seeds in one test, so that workers share them without much overhead
SEEDS: Final = 200
SLOW_SEEDS: Final = 1000
TWICE: Final = 5  # every so many seeds are run again and must decide the same


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
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
            marks=[] if first < SEEDS else [pytest.mark.slow],
        )
        for first in range(0, SEEDS + SLOW_SEEDS, BATCH)
    ]
    metafunc.parametrize("seeds", batches)


def test_a_world_survives_what_a_seed_does_to_it(seeds: range) -> None:
    for seed in seeds:
        outcome = run_seed(seed)
        if seed % TWICE == 0 or len(seeds) == 1:
            assert run_seed(seed).digest == outcome.digest, f"seed {seed} decides differently"


def test_the_swarm_goes_where_things_can_go_wrong() -> None:
    """Seeds that never retract, time out or lose a page would prove little."""
    seen = [run_seed(seed) for seed in range(60)]
    reached = {name for outcome in seen for name, count in outcome.counts.items() if count}
    assert {"Retracted", "LoadedBack", "Demoted", "Evicted", "Dropped", "Readmitted"} <= reached
    assert {"joined", "started", "landed", "completed", "stopped", "timed_out"} <= reached
    assert {"revoked", "StorageChanged"} <= reached
    assert sum(map(_hit_tokens, seen)) > 0
    assert any(outcome.record.counts["lost_host"] for outcome in seen)
    assert any(outcome.record.counts["lost_storage"] for outcome in seen)
    assert any(outcome.record.finished["abort"] for outcome in seen)


def _hit_tokens(outcome: Outcome) -> int:
    return sum(row.hit_tokens for row in outcome.rows)
