"""Gauges of Prometheus: what a snapshot says, and ratios of what has been counted.

Must not know: HTTP, engines. Called by: loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from refimpl.serve.copy_times import Moved
from refimpl.serve.load import Load, TierLoad
from refimpl.serve.metrics import Metrics
from refimpl.units import NS_PER_S

# Upstream's names (spec 11), each with its help and what it shows.
_OF_A_LOAD: Final[dict[str, tuple[str, Callable[[Load], float]]]] = {
    "num_running_reqs": ("requests with slots in L1", lambda load: load.running),
    "num_queue_reqs": ("requests that wait for slots", lambda load: load.waiting),
    "num_used_tokens": ("of L1, in use by requests and copies", lambda load: load.used_tokens),
    "kv_used_tokens": ("of L1, in use by requests and copies", lambda load: load.used_tokens),
    "kv_evictable_tokens": ("of L1, kept for later requests", lambda load: load.evictable_tokens),
    "kv_available_tokens": (
        "of L1, nobody has them",
        lambda load: load.total_tokens - load.used_tokens - load.evictable_tokens,
    ),
    "max_total_num_tokens": ("room of L1", lambda load: load.total_tokens),
    "token_usage": ("share of L1 in use by requests and copies", lambda load: load.usage),
    "gen_throughput": ("tokens a second that are generated", lambda load: load.generated_per_s),
    "cache_hit_rate": (
        "of the last batch that admitted requests; hicache:hit_rate is since the start",
        lambda load: load.last_hit_rate,
    ),
    "hicache_host_used_tokens": ("of L2, in use or kept", lambda load: load.host_used_tokens),
    "hicache_host_total_tokens": ("room of L2", lambda load: load.host_total_tokens),
}

# What must add up when nothing runs, waits or is copied: free + cached = total, and no pins.
_OF_A_TIER: Final[dict[str, tuple[str, Callable[[TierLoad], float]]]] = {
    "free_tokens": ("nobody has them", lambda tier: tier.free_tokens),
    "cached_tokens": ("kept for later requests or in use by one", lambda tier: tier.cached_tokens),
    "total_tokens": ("room of the tier", lambda tier: tier.total_tokens),
    "pins": ("by requests and copies under way, on pages", lambda tier: tier.pins),
}


class Gauges(Collector):
    """What Prometheus calls at a scrape. ``load`` is the snapshot of this scrape."""

    def __init__(self, metrics: Metrics, load: Load, moved: Moved) -> None:
        self._metrics, self._load, self._moved = metrics, load, moved

    def collect(self) -> Iterator[Metric]:
        """All gauges, and the copies by way."""
        for name, (text, read) in _OF_A_LOAD.items():
            yield self._gauge(f"sglang:{name}", text, {"": read(self._load)})
        yield self._gauge("sglang:page_size", "tokens", {"": self._metrics.page_size})
        pages = self._load.total_tokens // self._metrics.page_size
        yield self._gauge("sglang:num_pages", "of L1", {"": pages})
        yield self._gauge(
            "hicache:write_queue_pages",
            "pages waiting to be written, by the tier they go to",
            {"host": self._load.backup_queue_pages, "storage": self._load.write_queue_pages},
            "tier",
        )
        yield self._gauge("hicache:prefetch_pages", "on their way", {"": self._load.prefetch_pages})
        yield from self._tiers()
        yield from self._ratios()
        yield from self._copies()

    def _tiers(self) -> Iterator[Metric]:
        for name, (text, read) in _OF_A_TIER.items():
            figures = {tier: read(load) for tier, load in self._load.tiers.items()}
            yield self._gauge(f"hicache:tier_{name}", text, figures, "tier")
        yield self._gauge("hicache:ops_in_flight", "copies between tiers", self._load.ops, "kind")

    def _ratios(self) -> Iterator[Metric]:
        """Since the start; counters say the same over any span."""
        metrics = self._metrics
        prompts = max(metrics.prompt_tokens, 1)
        hits = {tier: tokens / prompts for tier, tokens in metrics.hit_tokens.items()}
        yield self._gauge("hicache:hit_rate", "prompt tokens found, since the start", hits, "tier")
        reads = metrics.prefetches
        # A read that was stopped at its deadline is noted as timed out and then as stopped.
        ended = max(reads["completed"] + reads["stopped"] + reads["failed"] + reads["revoked"], 1)
        shares = {"success": reads["completed"] / ended, "timeout": reads["timed_out"] / ended}
        yield self._gauge("hicache:prefetch_ratio", "of reads of L3 that ended", shares, "outcome")

    def _copies(self) -> Iterator[Metric]:
        moved = self._moved()
        rates = {way: amount / ns if ns else 0.0 for way, (amount, ns) in moved.items()}
        yield self._gauge("hicache:bandwidth_gb_per_s", "of the time it was busy", rates, "way")
        for name, at, unit in (("transfer_bytes", 0, 1), ("transfer_busy_seconds", 1, NS_PER_S)):
            family = CounterMetricFamily(
                f"hicache:{name}", "of copies, by way", labels=[*self._metrics.labels, "way"]
            )
            for way, figures in moved.items():
                family.add_metric([*self._metrics.labels.values(), way], figures[at] / unit)
            yield family

    def _gauge(
        self, name: str, text: str, values: Mapping[str, float], label: str = ""
    ) -> GaugeMetricFamily:
        labels = [*self._metrics.labels, *([label] if label else [])]
        family = GaugeMetricFamily(name, text, labels=labels)
        for value, figure in values.items():
            own = [value] if label else []
            family.add_metric([*self._metrics.labels.values(), *own], figure)
        return family
