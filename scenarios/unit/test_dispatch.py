"""Data-parallel ranks in the simulator: who gets a request, and what caches of their own cost."""

from __future__ import annotations

import pytest

from refimpl.cluster.dispatch import RankRouter, dispatch_config
from refimpl.cluster.router import Router, RouterConfig
from refimpl.config import ConfigError
from refimpl.run.options import Options
from refimpl.run.record import Record
from refimpl.run.setup import Simulation

# Long prefixes that many share, and an L1 that holds some of them.
LOAD = Options(
    workload="shared_prefix",
    max_total_tokens=40_000,
    enable_hierarchical_cache=True,
    hicache_ratio="1.5",
    seed=3,
)


def run(**changes: object) -> Record:
    fields = {name: getattr(LOAD, name) for name in LOAD.__dataclass_fields__} | changes
    return Simulation(Options(**fields)).run().record  # type: ignore[arg-type]


def hit_tokens(record: Record) -> int:
    return sum(row.hit_tokens for row in record.rows.values())


def test_round_robin_spreads_requests_over_ranks_evenly() -> None:
    counts = [0] * 4
    for row in run(dp_size=4).rows.values():
        counts[row.instance] += 1
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_cache_aware_dispatch_hits_no_less_than_round_robin(ranks: int) -> None:
    blind = hit_tokens(run(dp_size=ranks, load_balance_method="round_robin"))
    aware = hit_tokens(run(dp_size=ranks, load_balance_method="cache_aware"))
    assert aware >= blind
    if ranks == 1:
        assert aware == blind
    if ranks == 4:
        assert aware > blind


def test_what_one_rank_stores_another_reads() -> None:
    """Turns of a chat take turns on the ranks, and no other chat has their prefix."""
    chats = "multi_turn:clients=6,rounds=3"
    rows = run(workload=chats, dp_size=4, hicache_storage_backend="memory").rows.values()
    at = {(row.session, row.turn): row.instance for row in rows}
    moved = [row for row in rows if row.turn == 1 and at[row.session, 0] != row.instance]
    assert any(row.storage_tokens for row in moved)
    assert not any(row.device_tokens + row.host_tokens for row in moved)


def test_ranks_multiply_instances_and_the_same_run_gives_the_same_decisions() -> None:
    first, second = (run(instances=2, dp_size=3, hicache_storage_backend="memory") for _ in "ab")
    assert {row.instance for row in first.rows.values()} == set(range(6))
    assert first.rows == second.rows


def test_an_instance_is_chosen_first_and_then_one_of_its_ranks() -> None:
    router = RankRouter(Router(2, RouterConfig("shortest_queue")), 2, dispatch_config("auto"))
    sent = []
    for _ in range(4):
        sent.append(router.choose([]))
        router.started(sent[-1])
    assert sent == [0, 2, 1, 3]
    router.finished(2)  # now the second instance is the less loaded, and it is rank 0's turn there
    assert router.choose([]) == 2


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dp_size": 0}, "--dp-size 0 must be 1 to"),
        ({"load_balance_method": "minimum_tokens"}, "--load-balance-method"),
        ({"dp_size": 2, "cache_only": True}, "leave --dp-size at 1"),
    ],
)
def test_what_can_not_be_is_refused(changes: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        run(**changes)
