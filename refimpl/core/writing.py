"""Writing to the next tier: L1 -> L2 and L2 -> L3, by one policy for both.

Through: as soon as a page was made or hit often enough. Back: L1 -> L2 when the page must leave
L1; L2 -> L3 while L2 runs full, coldest first, so that what leaves it has been written.
Parents are written before children: what L2 and L3 hold is a usable prefix.
Must not know: requests, batches, time. Called by: cache, scheduler, engine.
"""

from __future__ import annotations

from typing import Final

from refimpl.config import CacheConfig
from refimpl.core.ops import BACK_UP, STORE, WRITE_BACK, Op, OpTable
from refimpl.core.outbox import Outbox
from refimpl.core.page import READY, Node, Page
from refimpl.core.policy import write_hits
from refimpl.core.tiers import HostTier
from refimpl.core.tree import Tree
from refimpl.facts import Skipped, Wrote
from refimpl.keys import PageKey
from refimpl.messages import BackUp, Store

# write_back starts storing when less than 1/16 of L2 is free, and goes on until 1/8 of it is
# free, clean or being stored. Assumed: a share small enough to keep L2 useful, large enough to
# outlast a storage batch.
_LOW_WATER: Final = 16
_HIGH_WATER: Final = 8


class Writer:
    """Opens and closes the ops that write."""

    __slots__ = ("_config", "_hits", "_host", "_ops", "_out", "_tree")

    def __init__(
        self, config: CacheConfig, tree: Tree, host: HostTier, ops: OpTable, out: Outbox
    ) -> None:
        self._config = config
        self._tree = tree
        self._host = host
        self._ops = ops
        self._out = out
        self._hits = write_hits(config)

    def set_policy(self, config: CacheConfig) -> None:
        """Follow another write policy from now on."""
        self._config = config
        self._hits = write_hits(config)

    def write_through(self, node: Node, fresh: int = 0) -> None:
        """``node`` was made or hit: write of it and its ancestors what the policy now allows.

        ``fresh`` of its pages have just been made; those that the policy holds back are reported.
        """
        if not self._config.has_l2:
            return
        if fresh and (self._hits is None or node.hits < self._hits):
            reason = "until_evicted" if self._hits is None else "few_hits"
            self._out.facts.append(Skipped(0, "back_up", fresh, reason))
        if self._hits is None:
            return
        self._back_up_path(node, self._hits)
        if self._host.generation:
            self._store_path(node, self._hits)

    def _back_up_path(self, node: Node | None, hits: int) -> None:
        pages: list[Page] = []
        while node is not None:
            if node.hits >= hits and node.l2_count < len(node.pages):
                pages[:0] = _without_l2(node)
            node = node.parent
        if not pages:
            return
        room = self._host.make_room(len(pages))
        if room < len(pages):
            self._out.facts.append(Skipped(0, "back_up", len(pages) - room, "host_capacity"))
        if room:
            self._open_back_up(BACK_UP, pages[:room])

    def write_back(self, pages: list[Page]) -> int:
        """Begin writing pages that must leave L1, one chain; returns how many L2 has room for."""
        if not self._config.has_l2:
            return 0
        room = self._host.make_room(len(pages))
        if room:
            self._open_back_up(WRITE_BACK, pages[-room:])
        return room

    def _open_back_up(self, kind: str, pages: list[Page]) -> None:
        slots = self._host.pool.take(len(pages))
        self._tree.residency.fill_l2(pages, slots)
        self._count_l2(pages, 1)
        op = Op(self._ops.next_id(), kind, 0, pages, pages[-1])
        self._ops.open(op)
        self._out.commands.append(BackUp(op.id, [page.l1_slot for page in pages], slots))

    def backed_up(self, op_id: int, done: int) -> None:
        """A ``BackUp`` has ended; the leading ``done`` pages arrived."""
        op = self._ops.get(op_id)
        assert op.kind in (BACK_UP, WRITE_BACK)
        arrived, lost = op.pages[:done], op.pages[done:]
        self._tree.residency.filled_l2(arrived)
        self._tree.residency.unfilled_l2(lost)
        self._host.pool.give_back([page.l2_slot for page in lost])
        self._count_l2(lost, -1)
        self._ops.finish(op)
        if op.kind == WRITE_BACK and not arrived:
            lost[-1].node.copy_failed = True
        self._out.facts.append(Wrote("host", len(op.pages), done))
        if not self._host.generation or not arrived:
            return
        if self._hits is None:
            self._write_behind()
        else:
            self._store_path(arrived[-1].node, self._hits)

    def _count_l2(self, pages: list[Page], sign: int) -> None:
        first = 0
        for at in range(1, len(pages) + 1):
            if at == len(pages) or pages[at].node is not pages[first].node:
                self._tree.add_l2(pages[first].node, sign * (at - first))
                first = at

    # ---- L2 -> L3 -------------------------------------------------------------------------------

    def _store_path(self, node: Node, hits: int) -> None:
        """Offer to L3 what of this path is in L2 and was not offered in this generation."""
        pages: list[Page] = []
        while node.parent is not None:
            first = self._stored_end(node)
            if first < len(node.pages) and node.l2_count and node.hits >= hits:
                pages[:0] = node.pages[first:]
            node = node.parent
        if pages:
            self._store(pages)

    def _store(self, pages: list[Page]) -> int:
        """Open one op for those of ``pages``, one chain, that L3 was not offered yet."""
        generation = self._host.generation
        fresh = [p for p in pages if p.l2_state == READY and p.offered != generation]
        if not fresh:
            return 0
        room = self._store_room()
        if len(fresh) > room:
            self._out.facts.append(Skipped(0, "store", len(fresh) - room, "backlog"))
            fresh = fresh[:room]
            if not fresh:
                return 0
        for page in fresh:
            page.offered = generation
        op = Op(self._ops.next_id(), STORE, 0, fresh, fresh[-1])
        self._ops.open(op)
        self._note_stored(fresh)
        keys = [page.key for page in fresh]
        self._out.commands.append(Store(op.id, keys, [page.l2_slot for page in fresh]))
        return len(fresh)

    def _stored_end(self, node: Node) -> int:
        if node.stored != self._host.generation:
            node.stored, node.stored_end = self._host.generation, 0
        return node.stored_end

    def _note_stored(self, pages: list[Page]) -> None:
        generation = self._host.generation
        node = None
        for page in pages:
            if page.node is not node:
                node = page.node
                end = self._stored_end(node)
                while end < len(node.pages) and node.pages[end].offered == generation:
                    end += 1
                node.stored_end = end

    def _store_room(self) -> int:
        """Pages that may join the backlog: writes to L3 pin no more than a set share of L2."""
        capacity = self._host.pool.capacity
        if capacity is None:
            return self._host.pool.free
        limit = max(capacity * self._config.store_percent // 100, 1)
        return max(limit - self._ops.pages_of(STORE), 0)

    def stored(self, op_id: int, done: int) -> list[PageKey]:
        """A ``Store`` has ended; the leading ``done`` pages are in L3. Returns their keys."""
        op = self._ops.get(op_id)
        assert op.kind == STORE
        for page in op.pages[done:]:
            page.offered = 0
            node = page.node
            node.stored_end = min(node.stored_end, page.depth - node.start)
        self._ops.finish(op)
        self._out.facts.append(Wrote("storage", len(op.pages), done))
        return [page.key for page in op.pages[:done]]

    def _write_behind(self) -> None:
        capacity, free = self._host.pool.capacity, self._host.pool.free
        if capacity is None or free * _LOW_WATER >= capacity:
            return
        goal = max(capacity // _HIGH_WATER, 1)
        ready = free + self._ops.pages_of(STORE)
        queue, passed = self._tree.l2_queue, []
        while ready < goal and self._store_room() and (node := queue.peek()) is not None:
            ready += node.l2_count
            # Being stored locks the node, so either way the next peek sees the one after it.
            if not self._store(node.pages):
                queue.set_aside()
                passed.append(node)
        for node in passed:
            queue.offer(node)


def _without_l2(node: Node) -> list[Page]:
    """The pages of ``node`` that have no L2 copy; mostly they are its last ones."""
    first = node.l2_count
    pages = [page for page in node.pages[first:] if not page.l2_state]
    if len(pages) == len(node.pages) - first:
        return pages
    return [page for page in node.pages if not page.l2_state]
