"""What an eviction costs: nodes it looks at, however large the tree (field report Y04); and what it keeps."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import pytest

from refimpl.config import CacheConfig, EvictionConfig
from refimpl.core import evict
from refimpl.core.cache import HiCache
from refimpl.core.check import walk
from refimpl.core.evict import ORDERS
from refimpl.core.outbox import Outbox
from refimpl.core.page import Node
from refimpl.keys import TokenPrompt
from refimpl.messages import Step
from refimpl.run.replay import CacheReplay
from refimpl.units import Random
from refimpl.workload.request import RequestSpec

EVICTIONS = 1000
POLICIES = (*ORDERS, "slru", "tlru")
SPARE = 64  # entries, far fewer than the server's, so that queues are tidied often


def full_cache(nodes: int) -> HiCache:
    """As many nodes of one page, all in L1, none of them pinned."""
    cache = HiCache(CacheConfig(page_size=1, l1_pages=nodes, l2_pages=0), Outbox())
    for number in range(nodes):
        key = number.to_bytes(32, "big")
        cache.insert(None, [key], 0, cache.device.pool.take(1), None)
    return cache


@pytest.mark.parametrize("nodes", [2_000, 100_000])
def test_an_eviction_looks_at_few_nodes_of_a_large_tree(
    nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = full_cache(nodes)
    looked = 0
    is_leaf = evict.is_l1_leaf

    def counted(node: Node) -> bool:
        nonlocal looked
        looked += 1
        return is_leaf(node)

    monkeypatch.setattr(evict, "is_l1_leaf", counted)
    left = [int.from_bytes(node.keys[0], "big") for node in cache.tree.root.children.values()]
    for _ in range(EVICTIONS):
        assert cache.make_room(cache.device.pool.free + 1)
    assert looked <= 3 * EVICTIONS
    now = [int.from_bytes(node.keys[0], "big") for node in cache.tree.root.children.values()]
    assert now == left[EVICTIONS:]  # the oldest have gone, as a walk over all would have chosen


def policy_of(name: str) -> EvictionConfig:
    if name == "tlru":
        return EvictionConfig(name, threshold=200, next_prompt_estimate=100)
    return EvictionConfig(name)


def requests(count: int) -> Iterator[RequestSpec]:
    """A few beginnings that come again and again, and ends of their own."""
    random = Random(1)
    for rid in range(count):
        begin = [random.below(12)] * (16 * (1 + random.below(12)))
        tokens = begin + [random.below(250) for _ in range(1 + random.below(40))]
        yield RequestSpec(rid, TokenPrompt(array("I", tokens)), 4, priority=random.below(3))


def replayed(policy: str, count: int) -> tuple[HiCache, list[Step]]:
    config = CacheConfig(page_size=16, l1_pages=128, l2_pages=512, eviction=policy_of(policy))
    replay = CacheReplay(config)
    return replay.cache, list(replay.steps(requests(count)))


@pytest.mark.parametrize("policy", ["lru", "mru", "filo", "tlru"])
def test_eviction_queues_stay_as_small_as_the_tree_however_many_requests_come(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evict, "SPARE_ENTRIES", SPARE)
    cache, _ = replayed(policy, 4500)
    nodes = len(list(walk(cache)))
    for queue in (cache.tree.l1_queue, cache.tree.l2_queue):
        assert len(queue) <= 2 * nodes + SPARE


@pytest.mark.parametrize("policy", POLICIES)
def test_tidying_an_eviction_queue_changes_no_decision(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evict, "SPARE_ENTRIES", 1 << 30)
    _, lazy = replayed(policy, 1500)
    monkeypatch.setattr(evict, "SPARE_ENTRIES", 0)
    _, tidied = replayed(policy, 1500)
    assert tidied == lazy
