"""The two local tiers: slots and how room is made in them.

Both give up pages leaf end first, in the order of their eviction queue. The device tier demotes
what is in L2 and forgets what is in no other place; the host tier forgets pages, or drops copies
whose page stays in L1. Must not know: requests, ops, L3, why room is needed. Called by: cache.
"""

from __future__ import annotations

from refimpl.core.outbox import Outbox
from refimpl.core.page import ABSENT, READY, Node, Page
from refimpl.core.slots import SlotPool
from refimpl.core.tree import Tree
from refimpl.facts import Demoted, Dropped, Evicted, Skipped


class DeviceTier:
    """L1. ``writes_back`` pages are never forgotten here before L2 had a chance."""

    __slots__ = ("_out", "_tree", "pool", "writes_back")

    def __init__(self, tree: Tree, capacity: int | None, out: Outbox, *, writes_back: bool) -> None:
        self._tree = tree
        self._out = out
        self.writes_back = writes_back
        self.pool = SlotPool(capacity)

    @property
    def available(self) -> int:
        """Slots that are free or held by pages nothing has locked."""
        return self.pool.free + self._tree.l1_resident - self._tree.l1_protected

    def evict(self, wanted: int) -> Node | None:
        """Give up pages until ``wanted`` slots are free.

        Returns None when they are, or when nothing else can go; or the next node in order, whose
        last L1 page must be written to L2 first.
        """
        demoted = deleted = 0
        unwritten = None
        while (short := wanted - self.pool.free) > 0:
            node = self._tree.l1_queue.peek()
            if node is None:
                break
            if node.l2_count and node.pages[node.l1_end - 1].l2_state == READY:
                demoted += self._demote(node, short)
            elif self.writes_back or node.children or node.l1_end < len(node.pages):
                unwritten = node
                break
            else:
                run = self._unwritten_run(node, short)
                self._forget_tail(node, run)
                deleted += run
        if demoted:
            self._out.facts.append(Demoted(demoted))
        if deleted:
            self._out.facts.append(Evicted("device", deleted, "capacity"))
        return unwritten

    def _demote(self, node: Node, short: int) -> int:
        end = node.l1_end
        start = max(end - short, 0)
        if node.l2_count < len(node.pages):
            run = end - 1
            while run > start and node.pages[run - 1].l2_state == READY:
                run -= 1
            start = run
        self._release(node, start)
        return end - start

    def _unwritten_run(self, node: Node, short: int) -> int:
        """Pages at the end of the L1 run without an L2 copy, at most ``short``."""
        end = node.l1_end
        if not node.l2_count:
            return short if short < end else end
        run = 1
        while run < min(short, end) and node.pages[end - run - 1].l2_state == ABSENT:
            run += 1
        return run

    def drop_tail(self, node: Node, count: int, cause: str) -> None:
        """Delete the last ``count`` pages of a childless node, which did not get into L2."""
        self._forget_tail(node, count)
        self._out.facts.append(Evicted("device", count, cause))

    def _forget_tail(self, node: Node, count: int) -> None:
        keep = node.l1_end - count
        pages = node.pages[keep:]
        self.pool.give_back([page.l1_slot for page in pages])
        self._tree.residency.leave_l1(pages)
        self._tree.set_l1_end(node, keep)
        self._tree.cut(node, keep)

    def clear(self) -> None:
        """Forget every page; none is locked or in L2."""
        if self._tree.l1_resident:
            self._out.facts.append(Evicted("device", self._tree.l1_resident, "flush"))
        while (node := self._tree.l1_queue.peek()) is not None:
            self._forget_tail(node, node.l1_end)

    def unwritten_tail(self, node: Node, short: int) -> list[Page]:
        """The pages that must be written before ``node`` can give up ``short`` more, top down."""
        return node.pages[node.l1_end - self._unwritten_run(node, short) : node.l1_end]

    def _release(self, node: Node, keep: int) -> None:
        pages = node.pages[keep : node.l1_end]
        self.pool.give_back([page.l1_slot for page in pages])
        self._tree.residency.leave_l1(pages)
        self._tree.set_l1_end(node, keep)


class HostTier:
    """L2. ``generation`` is the attach generation of L3, 0 while there is none."""

    __slots__ = ("_out", "_tree", "generation", "pool")

    def __init__(self, tree: Tree, capacity: int | None, out: Outbox) -> None:
        self._tree = tree
        self._out = out
        self.pool = SlotPool(capacity)
        self.generation = 0

    def make_room(self, wanted: int) -> int:
        """Give up copies until ``wanted`` slots are free; returns how many of those are."""
        deleted = dropped = unstored = 0
        while (short := wanted - self.pool.free) > 0:
            node = self._tree.l2_queue.peek()
            if node is None:
                break
            first, last, is_gone = self._last_run(node, short)
            if self.generation:
                unstored += self._unstored(node, first, last)
            self._release(node, first, last, is_gone=is_gone)
            if is_gone:
                deleted += last - first
            else:
                dropped += last - first
        self._tell(deleted, dropped, "capacity")
        if unstored:
            self._out.facts.append(Skipped(0, "store", unstored, "left_l2_first"))
        return min(wanted, self.pool.free)

    def _unstored(self, node: Node, first: int, last: int) -> int:
        """Pages of a run that the L3 which is attached was never offered."""
        if node.stored == self.generation and last <= node.stored_end:
            return 0
        return sum([page.offered != self.generation for page in node.pages[first:last]])

    def clear(self) -> None:
        """Give up every copy; none is locked."""
        deleted = dropped = 0
        while (node := self._tree.l2_queue.peek()) is not None:
            first, last, is_gone = self._last_run(node, len(node.pages))
            self._release(node, first, last, is_gone=is_gone)
            if is_gone:
                deleted += last - first
            else:
                dropped += last - first
        self._tell(deleted, dropped, "flush")

    def _tell(self, deleted: int, dropped: int, cause: str) -> None:
        """Copies are gone: ``deleted`` pages from the tree, ``dropped`` from L2 alone."""
        if deleted:
            self._out.facts.append(Evicted("host", deleted, cause))
        if dropped:
            self._out.facts.append(Dropped(dropped))

    def _last_run(self, node: Node, short: int) -> tuple[int, int, bool]:
        """Up to ``short`` copies at the leaf end as (first, last, is_gone).

        They are all in L1 too, or all in L2 alone, in which case they go from the tree.
        """
        pages = node.pages
        last = len(pages)
        while pages[last - 1].l2_state == ABSENT:
            last -= 1
        is_gone = last > node.l1_end
        floor = node.l1_end if is_gone else 0
        if node.l2_count == len(pages):  # no page without a copy in between
            return max(floor, last - short), last, is_gone
        first = last - 1
        while first > floor and last - first < short and pages[first - 1].l2_state == READY:
            first -= 1
        return first, last, is_gone

    def _release(self, node: Node, first: int, last: int, *, is_gone: bool) -> None:
        pages = node.pages[first:last]
        assert pages[0].l2_state == pages[-1].l2_state == READY
        self.pool.give_back([page.l2_slot for page in pages])
        self._tree.residency.leave_l2(pages)
        self._tree.add_l2(node, first - last)
        if is_gone:
            self._tree.cut(node, first)

    def drop_below(self, node: Node) -> None:
        """Delete all that hangs below the L1 run of ``node``; it lies in L2 alone, unlocked."""
        gone = self._forget_below(node, node.l1_end)
        if gone:
            self._out.facts.append(Evicted("host", gone, "host_pressure"))

    def _forget_below(self, node: Node, first: int) -> int:
        gone = sum(self._forget_below(child, 0) for child in list(node.children.values()))
        last = len(node.pages)
        if first < last:
            self._release(node, first, last, is_gone=True)
        return gone + last - first
