"""The one place where the state of a copy changes, and where somebody may watch it.

Nothing else writes ``l1_state``, ``l2_state`` or a page's slots; ``scenarios/test_tidy.py`` holds that, so
a watcher can't miss a change. It is told and never asked: what is decided does not depend on it, and
without one a change costs one comparison a run of pages.
Must not know: counters, pools of slots, who watches and what for. Called by: tree, tiers, cache, writing,
admission, prefetch, scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Protocol

from refimpl.core.page import ABSENT, FILLING, READY, Node, Page
from refimpl.core.request import Request

DEVICE: Final = "device"
HOST: Final = "host"


class Watcher(Protocol):
    """Somebody who wants to know which pages are READY in which tier, "device" or "host"."""

    def naming(self, request: Request, first: int, last: int) -> None:
        """Pages ``first`` up to ``last`` of ``request`` are about to enter the tree."""

    def came(self, tier: str, pages: Sequence[Page]) -> None:
        """These pages, top down, are READY in ``tier`` now; they have their places in the tree."""

    def went(self, tier: str, pages: Sequence[Page]) -> None:
        """These pages are no longer in ``tier``."""

    def cleared(self) -> None:
        """No page is in any tier; of these ``went`` does not tell."""


class Residency:
    """Changes copies and tells the ``watcher``, if there is one."""

    __slots__ = ("watcher",)

    def __init__(self) -> None:
        self.watcher: Watcher | None = None

    # ---- L1 -------------------------------------------------------------------------------------

    def appended_l1(self, node: Node, count: int) -> None:
        """The last ``count`` pages of ``node`` were made READY in L1."""
        if self.watcher is not None:
            self.watcher.came(DEVICE, node.pages[-count:])

    def place_l1(self, pages: Sequence[Page], slots: Sequence[int]) -> None:
        """ABSENT -> READY: what was computed into these slots."""
        for page, slot in zip(pages, slots, strict=True):
            page.l1_slot = slot
            page.l1_state = READY
        if self.watcher is not None:
            self.watcher.came(DEVICE, pages)

    def fill_l1(self, pages: Sequence[Page], slots: Sequence[int]) -> None:
        """ABSENT -> FILLING: a load into these slots begins."""
        for page, slot in zip(pages, slots, strict=True):
            assert page.l1_state == ABSENT and page.l2_state == READY
            page.l1_slot = slot
            page.l1_state = FILLING

    def filled_l1(self, pages: Sequence[Page]) -> None:
        """FILLING -> READY: the load is done."""
        for page in pages:
            page.l1_state = READY
        if self.watcher is not None and pages:
            self.watcher.came(DEVICE, pages)

    def unfilled_l1(self, pages: Sequence[Page]) -> None:
        """FILLING -> ABSENT: the load has failed."""
        for page in pages:
            assert page.l1_state == FILLING
            page.l1_state = ABSENT

    def leave_l1(self, pages: Sequence[Page]) -> None:
        """READY -> ABSENT."""
        for page in pages:
            page.l1_state = ABSENT
        if self.watcher is not None:
            self.watcher.went(DEVICE, pages)

    # ---- L2 -------------------------------------------------------------------------------------

    def place_l2(self, pages: Sequence[Page], slots: Sequence[int]) -> None:
        """ABSENT -> READY: what was fetched into these slots."""
        for page, slot in zip(pages, slots, strict=True):
            page.l2_slot = slot
            page.l2_state = READY
        if self.watcher is not None and pages:
            self.watcher.came(HOST, pages)

    def fill_l2(self, pages: Sequence[Page], slots: Sequence[int]) -> None:
        """ABSENT -> FILLING: a backup into these slots begins."""
        for page, slot in zip(pages, slots, strict=True):
            page.l2_slot = slot
            page.l2_state = FILLING

    def filled_l2(self, pages: Sequence[Page]) -> None:
        """FILLING -> READY: the backup is done."""
        for page in pages:
            page.l2_state = READY
        if self.watcher is not None and pages:
            self.watcher.came(HOST, pages)

    def unfilled_l2(self, pages: Sequence[Page]) -> None:
        """FILLING -> ABSENT: the backup did not arrive."""
        for page in pages:
            page.l2_state = ABSENT

    def leave_l2(self, pages: Sequence[Page]) -> None:
        """READY -> ABSENT."""
        for page in pages:
            page.l2_state = ABSENT
        if self.watcher is not None:
            self.watcher.went(HOST, pages)

    # ---- both -----------------------------------------------------------------------------------

    def naming(self, request: Request, first: int, last: int) -> None:
        """Pages ``first`` up to ``last`` of ``request`` are about to enter the tree."""
        if self.watcher is not None:
            self.watcher.naming(request, first, last)

    @contextmanager
    def clearing(self) -> Iterator[None]:
        """Whatever leaves inside is all there is: it is told of as one."""
        watcher, self.watcher = self.watcher, None
        yield
        self.watcher = watcher
        if watcher is not None:
            watcher.cleared()
