"""The one unit: a page with its two local copies, and a node, a run of pages with children.

A copy is ABSENT, FILLING (an op is writing it) or READY. Only READY copies are read.

    ABSENT  -> FILLING  a slot was taken for a copy in
    FILLING -> READY    the op is done
    FILLING -> ABSENT   the op failed or was cancelled before this page; the slot is freed
    READY   -> ABSENT   evicted, nothing locked at or below the node; the slot is freed

L3 presence is no field: it is never mirrored, only asked for. ``offered`` suppresses repeated
writes and is never read as presence.
Must not know: policies, time, who asks. Called by: everything in core.
"""

from __future__ import annotations

from typing import Final

from refimpl.keys import PageKey

ABSENT: Final = 0
FILLING: Final = 1
READY: Final = 2


class Page:
    """``page_size`` tokens of KV under one key. A slot means something only with its state."""

    __slots__ = (
        "depth",
        "key",
        "l1_slot",
        "l1_state",
        "l2_pins",
        "l2_slot",
        "l2_state",
        "node",
        "offered",
        "pins",
    )

    def __init__(
        self, key: PageKey, node: Node, depth: int, l1_slot: int = 0, l1_state: int = ABSENT
    ) -> None:
        self.key = key
        self.node = node  # the node that holds it now; splits move pages between nodes
        self.depth = depth  # pages before it in its sequence
        self.l1_slot = l1_slot
        self.l1_state = l1_state
        self.l2_slot = self.l2_state = self.pins = self.l2_pins = 0
        self.offered = 0  # attach generation in which it was given to L3; 0: in none


class Node:
    """A run of pages that are hit, split and evicted together.

    Inside a node the pages with an L1 copy come first, ``l1_end`` of them, since L1 is
    prefix-closed; every page after them is READY in L2. So a match needs no look at the pages.
    """

    __slots__ = (
        "children",
        "copy_failed",
        "created",
        "history",
        "hits",
        "id",
        "keys",
        "l1_end",
        "l1_kids",
        "l2_count",
        "l2_kids",
        "l2_locks",
        "locks",
        "pages",
        "parent",
        "priority",
        "queued_l1",
        "queued_l2",
        "start",
        "stored",
        "stored_end",
        "touched",
    )

    def __init__(self, node_id: int, parent: Node | None, start: int, tick: int) -> None:
        self.id = node_id
        self.parent = parent
        self.start = start  # depth of the first page
        self.pages: list[Page] = []
        self.keys: list[PageKey] = []  # of the pages, apart from them so that a match compares fast
        self.children: dict[PageKey, Node] = {}  # by the key of their first page
        self.l1_end = 0  # leading pages with an L1 copy, READY or FILLING
        self.l2_count = 0  # pages with an L2 copy, READY or FILLING
        self.l1_kids = 0  # children with an L1 copy
        self.l2_kids = 0  # children with an L2 copy in them or below
        self.locks = 0  # pins on pages here and below: both copies stay
        self.l2_locks = 0  # pins on L2 copies here and below: L1 may go
        self.hits = 1
        self.touched = self.created = tick
        self.priority = 0
        self.history = 0  # deepest the branch has ever been, in pages (tlru)
        self.stored = 0  # the attach generation of which ``stored_end`` speaks
        self.stored_end = 0  # leading pages that were offered to L3 in it
        self.queued_l1 = self.queued_l2 = False  # has an entry in that tier's eviction queue
        self.copy_failed = False  # its leaf end had to leave L1, and nothing of it arrived in L2

    @property
    def end(self) -> int:
        """Depth just behind the last page."""
        return self.start + len(self.pages)

    def __lt__(self, other: Node) -> bool:
        return self.id < other.id
