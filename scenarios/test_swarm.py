"""The swarm: whatever is configured, sent, broken or changed on the way, the invariants hold.

One seed is one world: see ``swarm.py`` for what is checked in it, ``swarm_draws.py`` for what is
drawn. ``pytest scenarios/test_swarm.py --swarm-seed N`` shows one of them again.
"""

from __future__ import annotations

from typing import Final

import pytest

from scenarios.swarm import Outcome, run_seed
from scenarios.swarm_batches import parametrize_seeds

SEEDS: Final = 200
SLOW_SEEDS: Final = 1000
TWICE: Final = 5  # every so many seeds are run again and must decide the same


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_seeds(metafunc, SEEDS, SLOW_SEEDS)


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
