"""How busy an engine is: one snapshot, taken on its thread between two turns.

Must not know: routes, Prometheus. Called by: loads, load_publisher, gauges.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from refimpl.core.engine import Engine
from refimpl.core.ops import BACK_UP, FETCH, KINDS, STORE, WRITE_BACK
from refimpl.core.slots import SlotPool
from refimpl.serve.dispatch import DataRank
from refimpl.serve.metrics import Metrics
from refimpl.units import NS_PER_US


@dataclass(frozen=True, slots=True)
class TierLoad:
    """Who has the tokens of a tier. When nothing runs, waits or is copied: free + cached = total, no pins."""

    free_tokens: int
    cached_tokens: int  # in the tree, whether somebody uses them or not
    total_tokens: int
    pins: int  # by requests and ops, each on a page that must stay with all before it


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, tokens and pages now; what is counted since the start is in the metrics."""

    running: int
    waiting: int
    waiting_uncached_tokens: int
    used_tokens: int  # of L1, by requests and copies under way
    evictable_tokens: int  # of L1, kept for a later hit
    total_tokens: int
    host_used_tokens: int
    host_total_tokens: int
    generated_per_s: int
    last_hit_rate: float
    computed_tokens: int  # of all prefills so far
    prefill_busy_us: int
    backup_queue_pages: int  # on their way L1 -> L2
    write_queue_pages: int  # on their way L2 -> L3
    prefetch_pages: int  # on their way L3 -> L2
    ops: dict[str, int]  # in flight, by kind
    tiers: dict[str, TierLoad]  # device and host

    @property
    def usage(self) -> float:
        """The share of L1 that can't be had now."""
        return self.used_tokens / max(self.total_tokens, 1)


def ask_load(rank: DataRank) -> Future[Load]:
    """The load of a rank as soon as its thread gets to it. The future fails once that has stopped."""
    bridge, metrics = rank.bridge, rank.metrics
    return bridge.ask(lambda engine: load_of(engine, metrics, bridge.now()))


def load_of(engine: Engine, metrics: Metrics, now: int) -> Load:
    """The load at ``now`` ns of the engine's loop."""
    cache, page = engine.cache, metrics.page_size
    device, host, ops, tree = cache.device.pool, cache.host.pool, cache.ops, cache.tree
    evictable = tree.l1_resident - tree.l1_protected
    return Load(
        running=engine.running,
        waiting=engine.waiting,
        waiting_uncached_tokens=metrics.waiting_uncached_tokens,
        used_tokens=(device.used - evictable) * page,
        evictable_tokens=evictable * page,
        total_tokens=(device.capacity or 0) * page,
        host_used_tokens=host.used * page,
        host_total_tokens=(host.capacity or 0) * page,
        generated_per_s=metrics.generated_per_s(now),
        last_hit_rate=metrics.last_hit_rate,
        computed_tokens=metrics.computed_tokens,
        prefill_busy_us=metrics.prefill_busy_ns // NS_PER_US,
        backup_queue_pages=ops.pages_of(BACK_UP) + ops.pages_of(WRITE_BACK),
        write_queue_pages=ops.pages_of(STORE),
        prefetch_pages=ops.pages_of(FETCH),
        ops={kind: len(list(ops.of_kind(kind))) for kind in KINDS},
        tiers={
            "device": _tier_load(device, tree.l1_resident, tree.root.locks, page),
            "host": _tier_load(host, tree.l2_resident, tree.root.l2_locks, page),
        },
    )


def _tier_load(pool: SlotPool, cached_pages: int, pins: int, page_size: int) -> TierLoad:
    total = pool.capacity or 0
    free = 0 if pool.capacity is None else pool.free
    return TierLoad(free * page_size, cached_pages * page_size, total * page_size, pins)
