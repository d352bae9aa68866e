"""What an eviction costs: nodes it looks at, however large the tree (field report Y04)."""

from __future__ import annotations

import pytest

from refimpl.config import CacheConfig
from refimpl.core import evict
from refimpl.core.cache import HiCache
from refimpl.core.outbox import Outbox
from refimpl.core.page import Node

EVICTIONS = 1000


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
