"""Hit counts that were computed without this project: a public trace, and traces made by hand.

The rule: one page is one block of the trace; only full pages are cached; at least one prompt token
is left to compute; a request's pages are touched leaf first; requests come one after another.
Field reports X01 (which hit rate?) and X04 (a cyclic scan) are answered here.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from refimpl.run.options import Options
from refimpl.run.report import integers
from refimpl.run.setup import Simulation
from refimpl.workload.request import Workload
from refimpl.workload.trace import read_trace
from scenarios.tidy import ROOT

BLOCK = 512  # tokens
PLACES = (os.environ.get("HICACHE_TRACES", ""), ROOT / "traces", ROOT.parent / "shared" / "traces")
TRACES = [Path(place) / "conversation_trace.jsonl" for place in PLACES if place]
TRACE = next((path for path in TRACES if path.is_file()), None)
needs_trace = pytest.mark.skipif(
    TRACE is None, reason="conversation_trace.jsonl is not in the folder HICACHE_TRACES names"
)

PROMPT_TOKENS = 144_793_823
HITS = {  # pages of capacity, None for no limit: hit tokens of a page-granular LRU
    1_000: 6_650_880,
    3_000: 9_934_848,
    10_000: 31_746_560,
    30_000: 48_812_544,
    50_000: 52_594_688,
    100_000: 53_722_112,
    None: 54_063_104,
}
QUICK = (1_000, 10_000, None)
ROWS = [
    pytest.param(pages, id=str(pages), marks=() if pages in QUICK else pytest.mark.slow)
    for pages in HITS
]


@cache
def conversations() -> Workload:
    assert TRACE is not None
    return read_trace(TRACE, "mooncake")


def figures(workload: Workload, l1_pages: int | None, **settings: Any) -> dict[str, Any]:
    """The report of a replay, one request after another."""
    l1_tokens = None if l1_pages is None else l1_pages * BLOCK
    options = Options(cache_only=True, page_size=BLOCK, max_total_tokens=l1_tokens, **settings)
    return integers(Simulation(options, workload).run().record)


def hits(workload: Workload, l1_pages: int | None, **settings: Any) -> dict[str, int]:
    """Its hit tokens by tier."""
    found: dict[str, int] = figures(workload, l1_pages, **settings)["hit_tokens"]
    return found


# ---- the public trace ---------------------------------------------------------------------------


@needs_trace
@pytest.mark.parametrize("pages", ROWS)
def test_l1_alone_hits_what_an_independent_lru_hits(pages: int | None) -> None:
    found = figures(conversations(), pages)
    assert found["prompt_tokens"] == PROMPT_TOKENS
    assert found["hit_tokens"] == {"device": HITS[pages], "host": 0, "storage": 0}


@needs_trace
@pytest.mark.parametrize(
    "pages", [1_000, pytest.param(10_000, marks=pytest.mark.slow)], ids=["1000", "10000"]
)
def test_each_tier_adds_what_a_cache_of_its_size_would_hit(pages: int) -> None:
    """L1 as if alone, L1 and L2 as one of L2's size, three tiers as one without a limit."""
    tiers = hits(
        conversations(),
        pages,
        enable_hierarchical_cache=True,
        hicache_ratio="3",
        hicache_storage_backend="memory",
    )
    assert tiers["device"] == HITS[pages]
    assert tiers["device"] + tiers["host"] == HITS[3 * pages]
    assert sum(tiers.values()) == HITS[None]


@needs_trace
@pytest.mark.slow
@pytest.mark.parametrize(("pages", "ratio"), [(1_000, 3), (1_000, 10), (3_000, 10), (10_000, 10)])
def test_l2_is_worth_a_cache_of_its_size(pages: int, ratio: int) -> None:
    tiers = hits(conversations(), pages, enable_hierarchical_cache=True, hicache_ratio=str(ratio))
    assert tiers["device"] == HITS[pages]
    assert tiers["device"] + tiers["host"] == HITS[pages * ratio]


# ---- a trace made by hand (X01) -----------------------------------------------------------------

SIX = (  # input length, blocks, tokens that hit in a cache without a limit
    (1024, (1, 2), 0),
    (1536, (1, 2, 3), 1024),
    (1500, (1, 2, 3), 1024),  # the third block is not full, so it is no page
    (1024, (1, 2), 512),  # all of it is known, and one token is always left to compute
    (700, (4, 5), 0),
    (1024, (4, 6), 512),
)


@pytest.fixture
def six(tmp_path: Path) -> Workload:
    line = '{{"timestamp": {}, "input_length": {}, "output_length": 1, "hash_ids": {}}}\n'
    path = tmp_path / "six.jsonl"
    path.write_text(
        "".join(
            line.format(1000 * index, length, list(blocks))
            for index, (length, blocks, _) in enumerate(SIX)
        )
    )
    return read_trace(path, "mooncake")


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "mru", "filo", "slru", "priority"])
def test_a_cache_without_a_limit_hits_the_same_under_every_policy(
    six: Workload, policy: str
) -> None:
    simulation = Simulation(
        Options(cache_only=True, page_size=BLOCK, radix_eviction_policy=policy), six
    )
    rows = simulation.run().record.rows.values()
    assert [row.hit_tokens for row in rows] == [wanted for *_, wanted in SIX]


def test_hits_of_a_small_lru_are_those_worked_out_by_hand(six: Workload) -> None:
    # One page: the root of the first chain hits for requests 2, 3 and 4, that of the second for 6.
    assert hits(six, 1) == {"device": 4 * 512, "host": 0, "storage": 0}
    # Two pages hold every chain as far as it hits again.
    assert hits(six, 2) == {"device": 3072, "host": 0, "storage": 0}


def test_the_hit_rate_counts_all_prompt_tokens_partial_pages_included(six: Workload) -> None:
    found = figures(six, None)
    tokens = sum(length for length, *_ in SIX)
    assert found["prompt_tokens"] == tokens
    assert found["hit_rate_ppm"] == round(3072 * 1_000_000 / tokens)


def test_timed_requests_far_apart_hit_what_the_replay_hits(six: Workload) -> None:
    timed = Simulation(Options(page_size=BLOCK), six).run().record
    assert [row.hit_tokens for row in timed.rows.values()] == [wanted for *_, wanted in SIX]


# ---- a cyclic scan (X04) ------------------------------------------------------------------------

DOCUMENTS, DOCUMENT_PAGES, PASSES = 12, 20, 3
SCAN = (
    f"long_document:documents={DOCUMENTS},document_length={64 * DOCUMENT_PAGES},questions={PASSES},"
    "question_length=1,output_length=1,order=tile,rate=1"
)
SCAN_PAGES = DOCUMENTS * DOCUMENT_PAGES * 5 // 6  # the scan is 1.2 times as large


def scan_rate(policy: str, *, cache_only: bool) -> int:
    """Hit tokens per thousand prompt tokens."""
    options = Options(
        workload=SCAN,
        cache_only=cache_only,
        max_total_tokens=64 * SCAN_PAGES,
        radix_eviction_policy=policy,
        num_reserved_decode_tokens=0,
    )
    found = integers(Simulation(options).run().record)
    return round(found["hit_rate_ppm"] / 1000)


@pytest.mark.parametrize("cache_only", [True, False])
def test_a_cyclic_scan_beyond_the_capacity_defeats_lru_and_not_mru(cache_only: bool) -> None:
    assert scan_rate("lru", cache_only=cache_only) == 0
    assert scan_rate("mru", cache_only=cache_only) > 250


@pytest.mark.parametrize("policy", ["lru", "mru", "fifo", "filo", "lfu", "slru"])
def test_replay_and_timed_run_agree_on_a_scan(policy: str) -> None:
    replayed, timed = (scan_rate(policy, cache_only=only) for only in (True, False))
    assert abs(replayed - timed) <= 10  # one point


def test_an_l2_that_holds_the_scan_turns_misses_into_hits() -> None:
    options = Options(
        workload=SCAN, max_total_tokens=64 * SCAN_PAGES, enable_hierarchical_cache=True
    )
    found = integers(Simulation(options).run().record)
    assert found["hit_tokens"]["host"] == (PASSES - 1) * DOCUMENTS * DOCUMENT_PAGES * 64
