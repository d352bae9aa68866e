"""Work in flight. An op owns pages, which survive any split, and has one end.

Quotas are read off the table, never counted beside it, so no exit path can forget them.
Must not know: what an op is good for, time. Called by: cache, writing, prefetch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from refimpl.core.page import READY, Page
from refimpl.core.tree import Tree

BACK_UP: Final = "back_up"  # L1 -> L2 because policy says so
WRITE_BACK: Final = "write_back"  # L1 -> L2 because the page must leave L1
STORE: Final = "store"
FETCH: Final = "fetch"
KINDS: Final = (BACK_UP, WRITE_BACK, STORE, FETCH)


class Op:
    """One copy in flight; ``anchor`` is the pinned page that keeps all it reads."""

    __slots__ = ("anchor", "id", "keeps_l1", "kind", "pages", "rid")

    def __init__(self, op_id: int, kind: str, rid: int, pages: list[Page], anchor: Page | None):
        self.id = op_id
        self.kind = kind
        self.rid = rid  # the request it began for; 0 for none
        self.pages = pages
        self.anchor = anchor
        # A read from L3 needs its parents in some tier, a write to L3 reads L2: neither needs L1.
        self.keeps_l1 = not (
            kind in (STORE, FETCH) and anchor is not None and anchor.l2_state == READY
        )


class OpTable:
    """All open ops. Opening pins the anchor, finishing unpins it; nothing else does.

    A write to L3 pins L2 copies alone: a slow store must not keep L1 full.
    """

    __slots__ = ("_ids", "_ops", "_tree")

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._ids = 0
        self._ops: dict[int, Op] = {}

    def next_id(self) -> int:
        """Id for the op about to be opened; ids only grow."""
        self._ids += 1
        return self._ids

    def open(self, op: Op) -> None:
        """Enter an op and pin its anchor."""
        assert op.id not in self._ops
        self._ops[op.id] = op
        if op.anchor is not None and not op.keeps_l1:
            self._tree.pin_l2(op.anchor)
        elif op.anchor is not None:
            self._tree.pin(op.anchor)

    def get(self, op_id: int) -> Op:
        """The open op of that id."""
        return self._ops[op_id]

    def finish(self, op: Op) -> None:
        """The one way an op ends."""
        del self._ops[op.id]
        if op.anchor is not None and not op.keeps_l1:
            self._tree.unpin_l2(op.anchor)
        elif op.anchor is not None:
            self._tree.unpin(op.anchor)

    def all(self) -> list[Op]:
        """Open ops, oldest first."""
        return list(self._ops.values())

    def of_kind(self, kind: str) -> Iterator[Op]:
        """Open ops of one kind, oldest first."""
        return (op for op in self._ops.values() if op.kind == kind)

    def pages_of(self, kind: str) -> int:
        """Pages that open ops of one kind own."""
        return sum(len(op.pages) for op in self._ops.values() if op.kind == kind)

    def __len__(self) -> int:
        return len(self._ops)
