"""Who goes first: the eviction orders, and a queue of the nodes that could give up a copy.

A smaller value leaves first; ties go to the older node (spec 2.9). A policy is one line in ORDERS.
Must not know: slots, copies, why room is needed. Called by: tree (offers), tiers (peek).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from typing import Final, TypeAlias

from refimpl.config import EvictionConfig
from refimpl.core.page import Node

Rank: TypeAlias = int | tuple[int, int]
Order: TypeAlias = Callable[[Node], Rank]


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
    """

    __slots__ = ("_heap", "_is_device", "_order", "falls", "needs_history")

    def __init__(self, config: EvictionConfig, page_size: int, *, is_device: bool) -> None:
        self._order = order_of(config, page_size)
        self._is_device = is_device
        self._heap: list[tuple[Rank, int, Node]] = []
        self.falls = config.policy == "mru"
        self.needs_history = config.policy == "tlru"

    def offer(self, node: Node) -> None:
        """``node`` may be able to give up a copy."""
        if self._is_device:
            if node.queued_l1 and not self.falls:
                return
            node.queued_l1 = True
        else:
            if node.queued_l2 and not self.falls:
                return
            node.queued_l2 = True
        heappush(self._heap, (self._order(node), node.id, node))

    def peek(self) -> Node | None:
        """The node that should give up pages first, or None when no node can."""
        heap = self._heap
        while heap:
            rank, _, node = heap[0]
            if not self._is_candidate(node):
                self.set_aside()
                continue
            current = self._order(node)
            if current == rank:
                return node
            heapreplace(heap, (current, node.id, node))
        return None

    def set_aside(self) -> None:
        """Take the node that was peeked out of the queue; the caller offers it again."""
        _, _, node = heappop(self._heap)
        if self._is_device:
            node.queued_l1 = False
        else:
            node.queued_l2 = False

    def _is_candidate(self, node: Node) -> bool:
        return is_l1_leaf(node) if self._is_device else is_l2_leaf(node)
