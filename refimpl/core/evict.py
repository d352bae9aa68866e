"""Who goes first: the eviction orders, and a queue of the nodes that could give up a copy.

A smaller value leaves first; ties go to the older node (spec 2.9). A policy is one line in ORDERS.
Must not know: slots, copies, why room is needed. Called by: tree (offers), tiers (peek).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, TypeAlias

from refimpl.config import EvictionConfig
from refimpl.core.page import Node

Rank: TypeAlias = int | tuple[int, int]
Order: TypeAlias = Callable[[Node], Rank]
Entry: TypeAlias = tuple[Rank, int, Node]

SPARE_ENTRIES: Final = 1024  # beside twice the candidates, before the queue is tidied


def order_of(config: EvictionConfig, page_size: int) -> Order:
    """The order a configuration asks for."""
    if config.policy == "slru":
        protected = config.protected_threshold
        return lambda node: (int(node.hits >= protected), node.touched)
    if config.policy == "tlru":
        return _tail_order(config.next_prompt_estimate - config.threshold, page_size)
    return ORDERS[config.policy]


ORDERS: Final[dict[str, Order]] = {
    "lru": lambda node: node.touched,
    "lfu": lambda node: (node.hits, node.touched),
    "fifo": lambda node: node.created,
    "mru": lambda node: -node.touched,
    "filo": lambda node: -node.created,
    "priority": lambda node: (node.priority, node.touched),
}


def _tail_order(margin_tokens: int, page_size: int) -> Order:
    """Tail-optimised LRU: first go nodes whose loss keeps the next turn under the threshold."""

    def order(node: Node) -> Rank:
        budget_tokens = max(node.history * page_size + margin_tokens, 0)
        is_safe = node.start * page_size >= budget_tokens
        return (-1 if is_safe else 0, node.touched)

    return order


def is_l1_leaf(node: Node) -> bool:
    """Can ``node`` give up L1 copies: it has some, none below it, and nothing keeps them?"""
    return node.l1_end > 0 and node.l1_kids == 0 and node.locks == 0


def is_l2_leaf(node: Node) -> bool:
    """Can ``node`` give up L2 copies?"""
    return node.l2_count > 0 and node.l2_kids == 0 and not (node.locks or node.l2_locks)


class EvictionQueue:
    """Candidates of one tier, lowest rank first.

    Entries are checked when they come up, not when things change: a node that is no candidate any
    more is dropped (whatever makes it one again offers it again), one whose rank grew goes back
    in. Only ``mru`` ranks fall when a node is touched, so there a touch must offer the node anew.
    Where the newest leaves first, old entries never come up: they are dropped when they are many.
    """

    __slots__ = (
        "_heap",
        "_is_device",
        "_order",
        "_tidy_at",
        "falls",
        "needs_history",
    )

    def __init__(self, config: EvictionConfig, page_size: int, *, is_device: bool) -> None:
        self._order = order_of(config, page_size)
        self._is_device = is_device
        self._heap: list[Entry] = []
        self._tidy_at = SPARE_ENTRIES
        self.falls = config.policy in ("mru", "tlru")
        self.needs_history = config.policy == "tlru"

    def offer(self, node: Node) -> None:
        """``node`` may be able to give up a copy."""
        if (node.queued_l1 if self._is_device else node.queued_l2) and not self.falls:
            return
        if len(self._heap) >= self._tidy_at:
            self._tidy()
        self._mark(node, is_queued=True)
        heappush(self._heap, (self._order(node), node.id, node))

    def _tidy(self) -> None:
        """Leave one entry a candidate, with its rank of now: what ``peek`` would make of them all."""
        kept: dict[int, Entry] = {}
        is_candidate = is_l1_leaf if self._is_device else is_l2_leaf
        for _, node_id, node in self._heap:
            if is_candidate(node):
                kept[node_id] = (self._order(node), node_id, node)
            else:
                self._mark(node, is_queued=False)
        self._heap = list(kept.values())
        heapify(self._heap)
        self._tidy_at = 2 * len(kept) + SPARE_ENTRIES

    def __len__(self) -> int:
        """Entries, those of nodes that are no candidates any more included."""
        return len(self._heap)

    def peek(self) -> Node | None:
        """The node that should give up pages first, or None when no node can."""
        heap, order = self._heap, self._order
        is_candidate = is_l1_leaf if self._is_device else is_l2_leaf
        while heap:
            rank, _, node = heap[0]
            if not is_candidate(node):
                self.set_aside()
                continue
            current = order(node)
            if current == rank:
                return node
            heapreplace(heap, (current, node.id, node))
        return None

    def set_aside(self) -> None:
        """Take the node that was peeked out of the queue; the caller offers it again."""
        _, _, node = heappop(self._heap)
        self._mark(node, is_queued=False)

    def _mark(self, node: Node, *, is_queued: bool) -> None:
        if self._is_device:
            node.queued_l1 = is_queued
        else:
            node.queued_l2 = is_queued
