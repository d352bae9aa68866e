"""What reuse a configuration gives, as the report of a timed run tells it.

Field reports V01 (a hit rate that is always 1), E09 (a lowest tier that stays empty), Y03 (a cache
that slows down what never repeats) and Y06 (hits that fall with the size of L2) are answered here.
"""

from __future__ import annotations

from typing import Any

import pytest

from refimpl.run.options import Options
from refimpl.run.record import Record, Row
from refimpl.run.report import by_turn, integers
from refimpl.run.setup import Simulation

L2 = {"enable_hierarchical_cache": True}
L3 = {**L2, "hicache_storage_backend": "memory"}


def ran(workload: str, **settings: Any) -> Record:
    return Simulation(Options(workload=workload, seed=1, **settings)).run().record


def mean_ttft_ns(record: Record) -> int:
    rows = list(record.rows.values())
    return sum(row.ttft_ns for row in rows) // len(rows)


def test_half_of_the_tokens_hit_when_every_prompt_comes_twice() -> None:
    # 50 cold and 50 warm requests of ten pages and one token, which is what rounds the half down.
    record = ran(
        "shared_prefix:groups=50,prompts_per_group=2,system_length=640,question_length=1,"
        "output_length=1,order=tile,rate=4"
    )
    figures = integers(record)
    assert figures["hit_tokens"] == {"device": 50 * 640, "host": 0, "storage": 0}
    assert figures["hit_rate_ppm"] == round(50 * 640 * 1_000_000 / (100 * 641))
    assert [row.hit_tokens for row in record.rows.values()] == [0] * 50 + [640] * 50


def test_one_prompt_sent_once_reaches_the_lowest_tier_with_default_settings() -> None:
    moved = integers(ran("all_unique:requests=1,request_length=2048", **L3))["pages_moved"]
    assert (moved["backup"], moved["store"]) == (32, 32)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective"])
@pytest.mark.parametrize("eviction", ["lru", "lfu", "slru"])
def test_prompts_that_never_repeat_are_no_slower_with_a_cache(policy: str, eviction: str) -> None:
    unique = "all_unique:requests=200,request_length=2048,rate=8"
    without = ran(unique, max_total_tokens=60_000, disable_radix_cache=True)
    with_all = ran(
        unique,
        max_total_tokens=60_000,
        hicache_write_policy=policy,
        radix_eviction_policy=eviction,
        **L3,
    )
    assert integers(with_all)["hit_rate_ppm"] == 0
    assert mean_ttft_ns(with_all) * 100 <= mean_ttft_ns(without) * 105
    assert with_all.now_ns * 100 <= without.now_ns * 105


def test_hits_in_late_rounds_do_not_depend_on_the_size_of_l2() -> None:
    # An L2 that holds what is in flight suffices, because L3 holds everything.
    chats = (
        "multi_turn:clients=20,rounds=10,request_length=2048,rate=0.5,think_ms=8000,max_parallel=4"
    )
    rates = [hit_rates_by_round(chats, ratio) for ratio in ("1.2", "1.6", "2")]
    assert rates[0] == rates[1] == rates[2]
    assert rates[0] == sorted(rates[0])
    assert rates[0][-1] > 850


def hit_rates_by_round(workload: str, ratio: str) -> list[int]:
    """Hit tokens per thousand prompt tokens, round by round."""
    record = ran(
        workload,
        max_total_tokens=100_000,
        hicache_ratio=ratio,
        hicache_storage_prefetch_policy="wait_complete",
        **L3,
    )
    rows: list[Row] = list(record.rows.values())
    return [
        1000 * (tokens["device"] + tokens["host"] + tokens["storage"]) // tokens["prompt"]
        for _, _, tokens, _ in by_turn(rows)
    ]
