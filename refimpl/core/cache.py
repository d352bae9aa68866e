"""HiCache: one tree, two local tiers and the copies between them, in the right order.

It only sequences. What is worth doing stands in ``policy``, who leaves first in ``evict``, how a
tier makes room in ``tiers``, writing to the next tier in ``writing``.
Must not know: requests, batches, time, what L3 is. Called by: scheduler, prefetch, engine, replay.
"""

from __future__ import annotations

from collections.abc import Sequence

from refimpl.config import CacheConfig
from refimpl.core.evict import EvictionQueue
from refimpl.core.ops import WRITE_BACK, OpTable
from refimpl.core.outbox import Outbox
from refimpl.core.page import ABSENT, Node, Page
from refimpl.core.policy import write_hits
from refimpl.core.tiers import DeviceTier, HostTier
from refimpl.core.tree import Match, Tree
from refimpl.core.writing import Writer
from refimpl.keys import PageKey


class Insertion:
    """What became of inserted pages: the node of the last, and how many were new to L1.

    ``moved`` lists (depth, slots) where the tree's slots took the place of those computed into.
    """

    __slots__ = ("moved", "new", "node")

    def __init__(self, node: Node, new: int) -> None:
        self.node = node
        self.new = new
        self.moved: list[tuple[int, list[int]]] = []


class HiCache:
    """The cache of one instance."""

    __slots__ = ("config", "device", "host", "ops", "tree", "writer")

    def __init__(self, config: CacheConfig, out: Outbox) -> None:
        self.config = config
        self.tree = Tree(
            EvictionQueue(config.eviction, config.page_size, is_device=True),
            EvictionQueue(config.eviction, config.page_size, is_device=False),
        )
        writes_back = config.has_l2 and write_hits(config) is None
        self.device = DeviceTier(self.tree, config.l1_pages, out, writes_back=writes_back)
        self.host = HostTier(self.tree, config.l2_pages, out)
        self.ops = OpTable(self.tree)
        self.writer = Writer(config, self.tree, self.host, self.ops, out)

    def set_policies(self, config: CacheConfig) -> None:
        """Follow other write and prefetch policies from now on; sizes and orders stay."""
        self.config = config
        self.device.writes_back = config.has_l2 and write_hits(config) is None
        self.writer.set_policy(config)

    # ---- room -----------------------------------------------------------------------------------

    def make_room(self, wanted: int) -> bool:
        """Evict until ``wanted`` L1 slots are free. False: not now.

        Under write_back pages are written before they go, so room may come only when those copies
        are done; pages already on their way out count, so that asking again starts no more. Where a
        copy brought nothing its pages go without one: else L1 would stay full for as long as copies fail.
        """
        pool = self.device.pool
        coming = self.ops.pages_of(WRITE_BACK) if pool.free < wanted else 0
        while (node := self.device.evict(wanted)) is not None:
            short = wanted - pool.free - coming
            if short <= 0:
                break
            tail = self.device.unwritten_tail(node, short)
            written = 0 if node.copy_failed else self.writer.write_back(tail)
            coming += written
            if written:
                continue
            if node.l2_locks:  # what hangs below is being stored: room comes when that is done
                break
            self.host.drop_below(node)  # L2 can't take them: they go, with what hangs below
            self.device.drop_tail(
                node, len(tail), "copy_failed" if node.copy_failed else "host_pressure"
            )
            node.copy_failed = False  # what is left of it is tried
        return pool.free >= wanted

    # ---- copies in ------------------------------------------------------------------------------

    def begin_load(self, match: Match, pages: int) -> list[Page]:
        """Give L1 slots to the first ``pages`` matched pages that are only in L2; they are FILLING.

        The caller has made room and pinned the match. Returns the pages, in order.
        """
        loading = match.slice(match.l1, match.l1 + pages)
        self.tree.residency.fill_l1(loading, self.device.pool.take(pages))
        for node in match.path:
            end = min(match.l1 + pages, node.end) - node.start
            if end > node.l1_end:
                self.tree.set_l1_end(node, end)
        return loading

    def fail_load(self, pages: Sequence[Page]) -> None:
        """The load of these pages, one chain top down, did not arrive: they are in L2 alone again."""
        self.tree.residency.unfilled_l1(pages)
        for page in reversed(pages):
            self.tree.set_l1_end(page.node, page.depth - page.node.start)
        self.device.pool.give_back([page.l1_slot for page in pages])

    def insert(
        self,
        anchor: Page | None,
        keys: Sequence[PageKey],
        first: int,
        slots: list[int],
        own: Node | None,
    ) -> Insertion:
        """Pages computed into ``slots`` enter the tree behind ``anchor``, which is in L1.

        Where the tree has a page in L1 already its slot is kept and ours freed; a page that was in
        L2 alone adopts ours.
        """
        last = first + len(slots)
        spans, node, depth = self.tree.follow(*self._position(anchor, first), keys, last)
        result = Insertion(node, last - depth)
        for span_node, at, run in spans:
            self._adopt(span_node, at, slots[span_node.start + at - first :][:run], result)
        if depth < last:
            fresh = slots[depth - first :]
            result.node = self.tree.append(node, keys[depth:last], fresh, own)
        return result

    def _adopt(self, node: Node, at: int, slots: list[int], result: Insertion) -> None:
        known = max(min(node.l1_end - at, len(slots)), 0)
        if known:
            self.device.pool.give_back(slots[:known])
            theirs = [page.l1_slot for page in node.pages[at : at + known]]
            result.moved.append((node.start + at, theirs))
        if known < len(slots):
            fresh = slots[known:]
            adopting = node.pages[at + known : at + len(slots)]
            self.tree.residency.place_l1(adopting, fresh)
            self.tree.set_l1_end(node, at + len(slots))
        result.new += len(slots) - known

    def insert_fetched(
        self, keys: Sequence[PageKey], first: int, slots: list[int]
    ) -> tuple[int, Node | None]:
        """Pages fetched into L2 ``slots`` enter the tree below ``keys[:first]``.

        Takes all of ``slots``: those of pages that got an L2 copy meanwhile are freed. Returns how
        many pages were new to L2, and the last node; None when the tree no longer reaches them.
        """
        match = self.tree.find(keys, first)
        if match.pages < first:
            self.host.pool.give_back(slots)
            return 0, None
        last = first + len(slots)
        spans, below, depth = self.tree.follow(match.node, match.taken, keys, last)
        new = last - depth
        for node, at, run in spans:
            new += self._adopt_fetched(node, at, run, slots, first)
        if depth < last:
            below = self.tree.append(below, keys[depth:last])
            self._place_l2(below, below.pages, slots[depth - first :])
        return new, below

    def _adopt_fetched(self, node: Node, at: int, run: int, slots: list[int], first: int) -> int:
        pages = node.pages[at : at + run]
        held = [slots[page.depth - first] for page in pages if page.l2_state != ABSENT]
        fresh = [page for page in pages if page.l2_state == ABSENT]
        if held:
            self.host.pool.give_back(held)
        if fresh:
            self._place_l2(node, fresh, [slots[page.depth - first] for page in fresh])
        return len(fresh)

    def _place_l2(self, node: Node, pages: list[Page], slots: list[int]) -> None:
        self.tree.residency.place_l2(pages, slots)
        for page in pages:
            page.offered = self.host.generation  # they came from there
        self.tree.add_l2(node, len(pages))

    def _position(self, anchor: Page | None, depth: int) -> tuple[Node, int]:
        if anchor is None:
            assert depth == 0
            return self.tree.root, 0
        assert anchor.depth == depth - 1
        return anchor.node, depth - anchor.node.start

    def page_at(self, match: Match, depth: int) -> Page:
        """The matched page at ``depth``."""
        for node in reversed(match.path):
            if node.start <= depth:
                return node.pages[depth - node.start]
        raise AssertionError(depth)

    def flush(self) -> None:
        """Forget everything in L1 and L2; nothing may be locked or in flight."""
        assert not len(self.ops) and not self.tree.root.locks and not self.tree.root.l2_locks
        with self.tree.residency.clearing():
            self.host.clear()
            self.device.clear()
        assert not self.tree.root.children
