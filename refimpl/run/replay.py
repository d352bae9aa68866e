"""Cache-only replay: requests one after another at the level of HiCache, copies complete at once.

No engine, no timing, no output: a request takes slots for its new full pages only, and a prompt
that is an exact multiple of the page touches its last page without counting it as a hit. With L1
alone and LRU this is a page-granular LRU, leaf touched first, so every figure has an independent
oracle. Must not know: time, hardware. Called by: setup (``--cache-only``), tests.
"""

from __future__ import annotations

from collections.abc import Iterable

from refimpl.config import CacheConfig
from refimpl.core.cache import HiCache
from refimpl.core.outbox import Outbox
from refimpl.core.policy import is_worth_loading, prefetch_pages_min, usable_pages
from refimpl.core.tree import Match
from refimpl.facts import Admitted, Inserted, LoadedBack, Prefetch, Skipped
from refimpl.keys import PageKey, namespace_seed
from refimpl.messages import BackUp, Step, Store
from refimpl.run.store import SharedStore
from refimpl.workload.request import RequestSpec


class CacheReplay:
    """A cache that requests pass through, and the L3 behind it, if it has one."""

    def __init__(self, config: CacheConfig, storage: SharedStore | None = None) -> None:
        self._page_size = config.page_size
        self._out = Outbox()
        self._storage = storage
        self.cache = HiCache(config, self._out)
        self.cache.host.generation = int(storage is not None)

    def steps(self, requests: Iterable[RequestSpec]) -> Iterable[Step]:
        """Pass the requests through; one step each."""
        for spec in requests:
            self._pass(spec)
            self._complete()
            yield self._out.drain()

    def _pass(self, spec: RequestSpec) -> None:
        cache, page_size = self.cache, self._page_size
        seed = namespace_seed(spec.extra_key, spec.cache_salt, spec.lora_id)
        keys = spec.prompt.page_keys(page_size, seed)
        match = cache.tree.find(keys)
        usable = usable_pages(spec.prompt.length, page_size)
        in_l2 = match.pages
        if self._storage is not None and match.pages < usable:
            match = self._fetch(spec.rid, keys, match, usable)
        device = min(match.l1, usable)
        load = min(match.pages, usable) - device
        if not is_worth_loading(load, cache.config):
            if load:
                self._out.facts.append(Skipped(spec.rid, "load_back", load, "below_threshold"))
            load = 0
        storage = max(device + load - max(in_l2, device), 0)
        cache.tree.touch(match, is_hit=True, priority=spec.priority)
        # A full match touches its last page too, and brings it back with the others.
        self._bring_in(spec, keys, match, match.l2 if load else 0)
        self._out.facts.append(
            Admitted(
                spec.rid,
                spec.prompt.length,
                device * page_size,
                (load - storage) * page_size,
                storage * page_size,
                0,
            )
        )
        if match.path:
            cache.writer.write_through(match.node)

    def _fetch(self, rid: int, keys: list[PageKey], match: Match, usable: int) -> Match:
        """L3 -> L2 of the leading run that L3 holds, as far as L2 has room."""
        storage, cache = self._storage, self.cache
        assert storage is not None
        first = match.pages
        last = first + storage.leading_run(keys[first:usable])
        least = prefetch_pages_min(cache.config)
        if last - first < least:
            return match
        anchor = cache.page_at(match, first - 1) if first else None
        if anchor is not None:
            cache.tree.pin(anchor)
        room = cache.host.make_room(last - first)
        if room >= least:
            self._out.facts.append(Prefetch(rid, "started", room))
            cache.insert_fetched(keys, first, cache.host.pool.take(room))
            self._out.facts.append(Prefetch(rid, "completed", room))
        if anchor is not None:
            cache.tree.unpin(anchor)
        return cache.tree.find(keys)

    def _bring_in(self, spec: RequestSpec, keys: list[PageKey], match: Match, load: int) -> None:
        """Load ``load`` pages from L2, then insert the rest, as far as L1 has room."""
        cache = self.cache
        deepest = match.node.pages[match.taken - 1] if match.pages else None
        if deepest is not None:
            cache.tree.pin(deepest)
        wanted = min(len(keys) - match.l1, cache.device.available)
        while not cache.make_room(wanted):
            if not self._complete():
                wanted = cache.device.pool.free
        load = min(load, wanted)
        anchor = deepest
        if match.l1 + load < match.pages:
            anchor = cache.page_at(match, match.l1 + load - 1) if match.l1 + load else None
        if load:
            cache.tree.residency.filled_l1(cache.begin_load(match, load))
            self._out.facts.append(LoadedBack(spec.rid, load))
        if wanted > load:
            slots = cache.device.pool.take(wanted - load)
            result = cache.insert(anchor, keys, match.l1 + load, slots, None)
            self._out.facts.append(Inserted(spec.rid, result.new))
            cache.writer.write_through(result.node, result.new)
        if deepest is not None:
            cache.tree.unpin(deepest)

    def _complete(self) -> bool:
        """Carry out every copy that was ordered; True if there was one."""
        did = False
        while self._out.commands:
            commands, self._out.commands = self._out.commands, []
            for command in commands:
                did = True
                if isinstance(command, BackUp):
                    self.cache.writer.backed_up(command.op, len(command.l1_slots))
                elif isinstance(command, Store) and self._storage is not None:
                    self._storage.put(self._storage.missing(command.keys))
                    self.cache.writer.stored(command.op, len(command.keys))
        return did
