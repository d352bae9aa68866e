"""The tree of page runs: who follows whom, which tier holds what, and what is locked.

Keys are chained, so children are found by the key of their first page, the last common key
decides a whole run, and namespaces, whose chains open differently, lie side by side below one root.

A pin on a page protects everything above it: both tiers give up pages leaf end first, so what is
needed by a reader at the end of a run can't go before the end does. ``Node.locks`` sums the pins.
A pin on an L2 copy alone, as a write to L3 needs it, leaves L1 free to go.

Must not know: slots, policies, requests, ops. Called by: cache, tiers, writing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import repeat

from refimpl.core.evict import EvictionQueue, is_l1_leaf, is_l2_leaf
from refimpl.core.page import ABSENT, READY, Node, Page
from refimpl.core.residency import Residency
from refimpl.keys import PageKey


class Match:
    """What the tree holds of a key sequence: ``l1`` pages on the device, the others in L2."""

    __slots__ = ("l1", "node", "pages", "path", "taken")

    def __init__(self, path: list[Node], node: Node, taken: int, pages: int, l1: int) -> None:
        self.path = path  # nodes from the root's child down, the last maybe matched in part
        self.node = node  # the last of them, or the root
        self.taken = taken  # pages matched in it
        self.pages = pages  # pages matched in all
        self.l1 = l1

    @property
    def l2(self) -> int:
        """Matched pages whose only local copy is in L2."""
        return self.pages - self.l1

    def slice(self, first: int, last: int) -> list[Page]:
        """The matched pages of depth ``first`` up to, not including, ``last``."""
        pages: list[Page] = []
        for node in self.path:
            if node.end > first and node.start < last:
                pages.extend(node.pages[max(first - node.start, 0) : last - node.start])
        return pages


class Tree:
    """Nodes and their counters. All that changes a counter is here, so that they can't drift."""

    __slots__ = (
        "_ids",
        "l1_protected",
        "l1_queue",
        "l1_resident",
        "l2_queue",
        "l2_resident",
        "residency",
        "root",
        "tick",
    )

    def __init__(self, l1_queue: EvictionQueue, l2_queue: EvictionQueue) -> None:
        self.l1_queue = l1_queue
        self.l2_queue = l2_queue
        self.tick = 0  # logical time: one step for each admission or insertion
        self._ids = 0
        self.root = Node(0, None, 0, 0)
        self.l1_resident = 0  # pages with an L1 copy
        self.l1_protected = 0  # of them, those in locked nodes
        self.l2_resident = 0  # pages with an L2 copy
        self.residency = Residency()

    # ---- reading ------------------------------------------------------------------------------

    def find(self, keys: Sequence[PageKey], limit: int | None = None) -> Match:
        """Longest prefix of the first ``limit`` keys that the tree holds. Changes nothing."""
        count = len(keys) if limit is None else limit
        node = self.root
        path: list[Node] = []
        done = l1 = taken = 0
        while done < count:
            child = node.children.get(keys[done])
            if child is None:
                break
            node = child
            path.append(node)
            run = node.keys
            taken = length = len(run)
            if taken > count - done:
                taken = count - done
            if run[taken - 1] != keys[done + taken - 1]:
                taken = _common(run, 0, keys, done, taken)
            if l1 == done:
                l1 += taken if taken < node.l1_end else node.l1_end
            done += taken
            if taken < length:
                break
        return Match(path, node, taken, done, l1)

    # ---- shape --------------------------------------------------------------------------------

    def touch(self, match: Match, *, is_hit: bool, priority: int = 0) -> None:
        """Stamp the matched pages as used now; those behind a partial match keep their age."""
        self.tick += 1
        if match.path and match.taken < len(match.node.pages):
            match.node = match.path[-1] = self.split(match.node, match.taken)
        for node in match.path:
            node.touched = self.tick
            if is_hit:
                node.hits += 1
            if priority > node.priority:
                node.priority = priority
        if self.l1_queue.falls and match.path:
            self.l1_queue.offer(match.node)
            self.l2_queue.offer(match.node)

    def split(self, node: Node, at: int) -> Node:
        """Cut ``node`` before its page ``at``. Returns the new upper part; ``node`` is the lower."""
        parent = node.parent
        assert parent is not None and 0 < at < len(node.pages)
        self._ids += 1
        upper = Node(self._ids, parent, node.start, node.touched)
        upper.created, upper.hits, upper.priority = node.created, node.hits, node.priority
        upper.history, upper.stored = node.history, node.stored
        upper.stored_end = min(node.stored_end, at)
        node.stored_end -= upper.stored_end
        upper.pages, node.pages = node.pages[:at], node.pages[at:]
        upper.keys, node.keys = node.keys[:at], node.keys[at:]
        upper.children = {node.keys[0]: node}
        parent.children[upper.keys[0]] = upper
        node.parent = upper
        node.start += at
        for page in upper.pages:
            page.node = upper
        self._share_counters(upper, node, at)
        return upper

    def split_below(self, page: Page) -> bool:
        """Cut the node of ``page`` behind it, so that a pin leaves the rest of its L1 run free.

        False: nothing to cut off.
        """
        at = page.depth + 1 - page.node.start
        if at >= page.node.l1_end:
            return False
        self.split(page.node, at)
        return True

    def _share_counters(self, upper: Node, lower: Node, at: int) -> None:
        upper.l1_end = min(lower.l1_end, at)
        lower.l1_end -= upper.l1_end
        if lower.l2_count == at + len(lower.pages):
            upper.l2_count = at
        elif lower.l2_count:
            upper.l2_count = sum(page.l2_state != ABSENT for page in upper.pages)
        lower.l2_count -= upper.l2_count
        upper.l1_kids = int(lower.l1_end > 0)
        upper.l2_kids = int(_has_l2_below(lower))
        upper.locks, upper.l2_locks = lower.locks, lower.l2_locks
        if lower.locks:
            lower.locks -= sum(page.pins for page in upper.pages)
            if not lower.locks:
                self.l1_protected -= lower.l1_end
        if lower.l2_locks:
            lower.l2_locks -= sum(page.l2_pins for page in upper.pages)
        self._offer(lower)
        self._offer(upper)  # the queues know the lower part alone

    def follow(
        self, node: Node, taken: int, keys: Sequence[PageKey], last: int
    ) -> tuple[list[tuple[Node, int, int]], Node, int]:
        """Walk from behind page ``taken`` of ``node`` along ``keys`` as far as pages exist.

        Returns the runs found as (node, first, count), the node that what is missing hangs on, cut
        there if it goes on otherwise, and the depth reached, at most ``last``.
        """
        spans = []
        depth = node.start + taken
        while depth < last:
            if taken < len(node.pages):
                run = _common(
                    node.keys, taken, keys, depth, min(len(node.keys) - taken, last - depth)
                )
                if run:
                    spans.append((node, taken, run))
                    depth += run
                    taken += run
                    continue
                lower, node = node, self.split(node, taken)
                if spans and spans[-1][0] is lower:  # the run just found went to the upper part
                    spans[-1] = (node, *spans[-1][1:])
            child = node.children.get(keys[depth])
            if child is None:
                break
            node, taken = child, 0
        return spans, node, depth

    def append(
        self,
        node: Node,
        keys: Sequence[PageKey],
        l1_slots: Sequence[int] | None = None,
        own: Node | None = None,
    ) -> Node:
        """New pages with these keys hang on ``node``; returns the node that holds them.

        They are READY in ``l1_slots`` if those are given, else without a copy: then the caller
        fills them before anything else looks. They join ``node`` itself when it is ``own``, the run
        that the same request made before and nobody else has seen, else they become a child.
        """
        depth, count = node.end, len(keys)
        self.tick += 1
        if node is own and node.hits == 1 and not node.children:
            node.touched = self.tick
        else:
            node = self._new_child(node, depth, keys[0])
        depths = range(depth, depth + count)
        node.keys.extend(keys)
        if l1_slots is None:
            node.pages.extend(map(Page, keys, repeat(node), depths))
        else:
            node.pages.extend(map(Page, keys, repeat(node), depths, l1_slots, repeat(READY)))
            self.set_l1_end(node, node.l1_end + count)
            self.residency.appended_l1(node, count)
        if self.l1_queue.needs_history:
            _note_history(node)
        return node

    def _new_child(self, parent: Node, start: int, key: PageKey) -> Node:
        self._ids += 1
        child = Node(self._ids, parent, start, self.tick)
        parent.children[key] = child
        return child

    def cut(self, node: Node, length: int) -> None:
        """Forget the pages of ``node`` from index ``length`` on; none of them holds a copy."""
        assert not node.children and node.l1_end <= length and node.l2_count <= length
        if length:
            del node.pages[length:]
            del node.keys[length:]
            node.stored_end = min(node.stored_end, length)
            return
        parent = node.parent
        assert parent is not None
        del parent.children[node.keys[0]]
        node.parent = None
        node.pages, node.keys = [], []

    # ---- residency ------------------------------------------------------------------------------

    def set_l1_end(self, node: Node, end: int) -> None:
        """The leading ``end`` pages of ``node`` hold an L1 copy now."""
        before = node.l1_end
        node.l1_end = end
        self.l1_resident += end - before
        if node.locks:
            self.l1_protected += end - before
        parent = node.parent
        assert parent is not None
        if not before and end:
            parent.l1_kids += 1
        elif before and not end:
            parent.l1_kids -= 1
            if is_l1_leaf(parent):
                self.l1_queue.offer(parent)
        if not node.queued_l1 and is_l1_leaf(node):
            self.l1_queue.offer(node)

    def add_l2(self, node: Node, change: int) -> None:
        """``change`` more (or fewer) pages of ``node`` hold an L2 copy."""
        had = _has_l2_below(node)
        node.l2_count += change
        self.l2_resident += change
        has = _has_l2_below(node)
        if is_l2_leaf(node):
            self.l2_queue.offer(node)
        while had != has and node.parent is not None:
            node = node.parent
            had = _has_l2_below(node)
            node.l2_kids += 1 if has else -1
            has = _has_l2_below(node)
            if is_l2_leaf(node):
                self.l2_queue.offer(node)

    # ---- locks ----------------------------------------------------------------------------------

    def pin(self, page: Page) -> None:
        """Keep both copies of ``page`` and of everything above it."""
        page.pins += 1
        node: Node | None = page.node
        while node is not None:
            if not node.locks:
                self.l1_protected += node.l1_end
            node.locks += 1
            node = node.parent

    def unpin(self, page: Page) -> None:
        """Release one pin."""
        assert page.pins > 0
        page.pins -= 1
        node: Node | None = page.node
        while node is not None:
            node.locks -= 1
            if not node.locks:
                self.l1_protected -= node.l1_end
                self._offer(node)
            node = node.parent

    def pin_l2(self, page: Page) -> None:
        """Keep the L2 copy of ``page`` and those above it."""
        page.l2_pins += 1
        node: Node | None = page.node
        while node is not None:
            node.l2_locks += 1
            node = node.parent

    def unpin_l2(self, page: Page) -> None:
        """Release one pin on L2 copies."""
        assert page.l2_pins > 0
        page.l2_pins -= 1
        node: Node | None = page.node
        while node is not None:
            node.l2_locks -= 1
            if not node.l2_locks:
                self._offer(node)
            node = node.parent

    def _offer(self, node: Node) -> None:
        if is_l1_leaf(node):
            self.l1_queue.offer(node)
        if is_l2_leaf(node):
            self.l2_queue.offer(node)


def _note_history(node: Node) -> None:
    depth = node.end
    above: Node | None = node
    while above is not None and above.history < depth:
        above.history = depth
        above = above.parent


def _has_l2_below(node: Node) -> bool:
    return node.l2_count > 0 or node.l2_kids > 0


def _common(
    run: Sequence[PageKey], at: int, keys: Sequence[PageKey], start: int, count: int
) -> int:
    """How many of ``run[at:at + count]`` equal ``keys[start:]``; chained keys make it a bisection."""
    if count == 0 or run[at] != keys[start]:
        return 0
    if run[at + count - 1] == keys[start + count - 1]:
        return count
    return (
        bisect_left(
            range(1, count),
            True,
            key=lambda run_length: run[at + run_length] != keys[start + run_length],
        )
        + 1
    )
