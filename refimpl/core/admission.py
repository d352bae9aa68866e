"""Letting a request in: what it hits, what is loaded back, whether it fits, its next chunk.

Must not know: decoding, how batches end, L3 reads in flight. Called by: scheduler.
"""

from __future__ import annotations

from refimpl.config import EngineConfig
from refimpl.core.cache import HiCache
from refimpl.core.outbox import Outbox
from refimpl.core.page import Page
from refimpl.core.policy import is_worth_loading, usable_pages
from refimpl.core.request import RUNNING, Request
from refimpl.core.tree import Match
from refimpl.facts import Admitted, LoadedBack, Readmitted, Skipped
from refimpl.keys import PageKey
from refimpl.messages import Load, PageTable, PrefillItem, RunBatch
from refimpl.units import ceil_div


class Batch:
    """A prefill being put together and then in flight."""

    __slots__ = ("computing", "items", "loads", "tables", "tokens")

    def __init__(self) -> None:
        self.items: list[tuple[Request, PrefillItem]] = []
        self.tables: list[PageTable] = []
        self.loads: list[Load] = []
        self.tokens = 0
        self.computing: set[PageKey] = set()  # first key each item computes; asked, not iterated

    def command(self) -> RunBatch:
        """The order to run it."""
        return RunBatch(1, [item for _, item in self.items], self.tables, self.loads)

    def end_loads(self, cache: HiCache, failed: tuple[int, ...]) -> dict[int, Request]:
        """Loaded pages become READY; returns the requests whose prefix did not arrive.

        A failed load voids the requests of the batch that counted on its pages as well.
        """
        void: dict[int, Request] = {}
        for request, _ in self.items:
            request.load_failed |= request.rid in failed
            if request.rid in failed or any(
                _hangs_on(request, other.loading[0]) for other in void.values() if other.loading
            ):
                void[request.rid] = request
        for request, _ in self.items:
            if request.rid not in void:
                cache.tree.residency.filled_l1(request.loading)
                request.loading = []
        for request in reversed(list(void.values())):  # deepest first
            cache.fail_load(request.loading)
            request.loading = []
        return void


class Admission:
    """The gate between the queue and a batch."""

    __slots__ = ("_admissions", "_cache", "_config", "_out", "_page_size")

    def __init__(self, config: EngineConfig, cache: HiCache, out: Outbox) -> None:
        self._config = config
        self._cache = cache
        self._out = out
        self._page_size = config.cache.page_size
        self._admissions = 0

    def try_admit(self, batch: Batch, request: Request, growth_tokens: int) -> str:
        """Put the first chunk of ``request`` into ``batch``, or say why not.

        ``growth_tokens``: what the running requests may still grow by, kept free for them. Returns
        "" when it is in, else "budget", "same_batch" (the page it lacks first is being computed in
        this very batch, so it hits it in the next) or "room".
        """
        match = self._find(request)
        if match.pages < len(request.keys) and request.keys[match.pages] in batch.computing:
            return "same_batch"
        usable = min(match.pages, usable_pages(request.tokens, self._page_size))
        device = min(match.l1, usable)
        load = usable - device
        reason = "load_failed" if request.load_failed else "below_threshold"
        if request.load_failed or not is_worth_loading(load, self._cache.config):
            load = 0
        tokens = self._chunk_tokens(batch, request, (device + load) * self._page_size)
        if not tokens:
            return "budget"
        anchor = self._cache.page_at(match, device + load - 1) if device + load else None
        if not self._reserve(request, device, load, tokens, anchor, growth_tokens):
            if anchor is not None and self._cache.tree.split_below(anchor):
                return self.try_admit(batch, request, growth_tokens)  # what hung on it may go
            return "room"
        if load < usable - device:
            self._skip(request, "load_back", usable - device, reason)
        self._enter(batch, request, match, device, load)
        self._add_item(batch, request, tokens)
        return ""

    def _find(self, request: Request) -> Match:
        full = min(request.tokens // self._page_size, len(request.keys))
        return self._cache.tree.find(request.keys, full if self._config.reuse else 0)

    def _reserve(
        self,
        request: Request,
        device: int,
        load: int,
        tokens: int,
        anchor: Page | None,
        growth_tokens: int,
    ) -> bool:
        """Pin the prefix and make room for the first chunk, if the whole prompt will fit."""
        cache, page_size = self._cache, self._page_size
        if anchor is not None:
            cache.tree.pin(anchor)
        whole = request.tokens
        if growth_tokens:
            reserve = min(request.remaining, self._config.decode_reserve_tokens)
            whole += reserve + growth_tokens
        end = (device + load) * page_size + tokens
        if cache.device.available >= ceil_div(whole, page_size) - device and cache.make_room(
            ceil_div(end, page_size) - device
        ):
            return True
        if anchor is not None:
            cache.tree.unpin(anchor)
        return False

    def _enter(self, batch: Batch, request: Request, match: Match, device: int, load: int) -> None:
        """The request runs from here on: stamp, load, count."""
        cache = self._cache
        self._admissions += 1
        cache.tree.touch(match, is_hit=not request.is_counted, priority=request.priority)
        request.state = RUNNING
        request.admitted_at = self._admissions
        request.epoch += 1
        request.inserted = device + load
        request.computed = (device + load) * self._page_size
        request.anchor = cache.page_at(match, device + load - 1) if device + load else None
        if load:
            request.loading = cache.begin_load(match, load)
            l2_slots = [page.l2_slot for page in request.loading]
            l1_slots = [page.l1_slot for page in request.loading]
            batch.loads.append(Load(request.rid, l2_slots, l1_slots))
            self._out.facts.append(LoadedBack(request.rid, load))
        if request.inserted:
            slots = [page.l1_slot for page in match.slice(0, request.inserted)]
            batch.tables.append(PageTable(request.rid, 0, slots))
        self._count(request, device, load)
        if match.path:
            cache.writer.write_through(match.node)

    def _count(self, request: Request, device: int, load: int) -> None:
        if request.is_counted:
            self._out.facts.append(Readmitted(request.rid, request.tokens, request.computed))
            return
        request.is_counted = True
        page_size = self._page_size
        end, storage, counted = device + load, 0, device
        for first, last in sorted(request.fetched):  # a page that left L2 may have come twice
            storage += max(min(last, end) - max(first, counted), 0)
            counted = max(counted, last)
        self._out.facts.append(
            Admitted(
                request.rid,
                request.prompt.length,
                device * page_size,
                (load - storage) * page_size,
                storage * page_size,
                request.output_tokens,
            )
        )

    def add_chunk(self, batch: Batch, request: Request) -> bool:
        """Put the next chunk of an admitted request into an empty batch. False: no room now."""
        tokens = self._chunk_tokens(batch, request, request.computed)
        owned = request.inserted + len(request.slots)
        short = ceil_div(request.computed + tokens, self._page_size) - owned
        if not self._cache.make_room(short):
            return False
        self._add_item(batch, request, tokens)
        return True

    def _chunk_tokens(self, batch: Batch, request: Request, start: int) -> int:
        """Tokens of the next chunk: to the end, or whole pages of what the budget leaves."""
        left = request.tokens - start
        budget = self._config.chunked_prefill_tokens - batch.tokens
        return left if left <= budget else budget // self._page_size * self._page_size

    def _add_item(self, batch: Batch, request: Request, tokens: int) -> None:
        start, end = request.computed, request.computed + tokens
        owned = request.inserted + len(request.slots)
        fresh = self._cache.device.pool.take(ceil_div(end, self._page_size) - owned)
        if fresh:
            request.slots.extend(fresh)
            batch.tables.append(PageTable(request.rid, owned, fresh))
        first = start // self._page_size
        if self._config.reuse and first < len(request.keys):
            batch.computing.add(request.keys[first])
        item = PrefillItem(request.rid, start, tokens, end == request.tokens)
        batch.items.append((request, item))
        batch.tokens += tokens

    def _skip(self, request: Request, action: str, pages: int, reason: str) -> None:
        self._out.facts.append(Skipped(request.rid, action, pages, reason))


def _hangs_on(request: Request, page: Page) -> bool:
    """Does the cached prefix of ``request`` contain ``page``?"""
    if request.anchor is None or request.anchor.depth < page.depth:
        return False
    node = request.anchor.node
    while node.start > page.depth:
        assert node.parent is not None
        node = node.parent
    return node is page.node
