"""The swarm of ranks: whatever ranks answer, when, and how much of it, one brain decides for all of them.

``pytest scenarios/test_rank_swarm.py --swarm-seed N`` shows one of them again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import pytest

from refimpl.cluster.ranks import RankLedger, Vector, minimum
from refimpl.messages import CloseStorage, StorageClosed, StorageOpened
from refimpl.run.faults import Faults
from scenarios.rank_swarm import Reduce, run_ranks
from scenarios.swarm_batches import parametrize_seeds

SEEDS: Final = 40
SLOW_SEEDS: Final = 500
TWICE: Final = 10


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_seeds(metafunc, SEEDS, SLOW_SEEDS)


def test_ranks_that_differ_are_one_instance(seeds: range) -> None:
    """Field reports A02, A03, A06: they agree on every op, and take part in the same agreements."""
    for seed in seeds:
        swarm, outcome = run_ranks(seed)
        for ranks in swarm.agreements():
            assert all(each == ranks[0] for each in ranks), f"seed {seed}: ranks went astray"
        if seed % TWICE == 0 or len(seeds) == 1:
            assert run_ranks(seed)[1].digest == outcome.digest, f"seed {seed} decides differently"


def test_the_swarm_has_ranks_that_differ_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sees fewer pages, has a slot less, answers late, answers short, dies."""
    struck: Counter[str] = Counter()
    strike = Faults.strike

    def counted(faults: Faults, kind: str) -> bool:
        has_struck = strike(faults, kind)
        struck[kind] += has_struck
        return has_struck

    monkeypatch.setattr(Faults, "strike", counted)
    swarms = [run_ranks(seed)[0] for seed in range(40)]
    short = {"fetch_short", "fetch_fail", "vanish", "backup_fail", "store_fail"}
    wanted = {"probe_short", "probe_fail", "slot_less", "delay", "die"} | short
    assert {kind for kind in wanted if not struck[kind]} == set()
    tallies = [engine.ranks.tally for swarm in swarms for engine in swarm.engines]  # type: ignore[attr-defined]
    lost = sum((tally.pages_lost for tally in tallies), Counter[str]())
    assert min(lost[op] for op in ("probe", "fetch", "backup", "store")) > 10
    stopped = [swarm for swarm in swarms if swarm.stopped()]
    assert stopped
    assert sum(ops for swarm in stopped for ops, _, _ in swarm.left.values()) > 0
    assert sum(swarm.failed.total() for swarm in stopped) > 0


def own_value(vectors: Sequence[Vector]) -> Vector:
    """What a rank would go by that asks nobody."""
    return vectors[0]


def own_pages(vectors: Sequence[Vector]) -> Vector:
    """Ranks wait for one another, and then each goes by the pages that it has itself."""
    agreed = minimum(vectors)
    return [own if at % 2 else agreed[at] for at, own in enumerate(vectors[0])]


@pytest.mark.parametrize("reduce", [own_value, own_pages])
def test_without_the_minimum_the_swarm_fails(reduce: Reduce) -> None:
    failures = 0
    for seed in range(30):
        try:
            run_ranks(seed, reduce)
        except AssertionError as error:
            failures += ": AssertionError:" in str(error)  # of a check, not of broken code
        if failures > 2:
            return
    pytest.fail(f"{failures} of 30 seeds failed")


def test_a_store_that_did_not_close_is_still_attached() -> None:
    """As the brain has it: else the next detach is skipped on every rank, and nobody answers it."""
    ledger = RankLedger(0)
    ledger.note(StorageOpened())
    ledger.note(StorageClosed("the store is busy"))
    assert not ledger.skips(CloseStorage())
    ledger.note(StorageClosed())
    assert ledger.skips(CloseStorage())
