"""The rules of mission M2 and M3 as functions of numbers: when to write, load, fetch, and stop.

Must not know: trees, slots, requests. Called by: cache, writing, prefetch, scheduler.
"""

from __future__ import annotations

from refimpl.config import CacheConfig, PrefetchConfig


def write_hits(config: CacheConfig) -> int | None:
    """Hits from which a page is written to the next tier; None: only when it is evicted."""
    match config.write_policy:
        case "write_through":
            return 1
        case "write_through_selective":
            return config.selective_hits
        case _:
            return None


def usable_pages(prompt_tokens: int, page_size: int) -> int:
    """Pages of a prompt that may hit: one token is always left to compute."""
    return (prompt_tokens - 1) // page_size


def is_worth_loading(pages: int, config: CacheConfig) -> bool:
    """True when a host run of that many pages is loaded back rather than recomputed."""
    return pages > 0 and pages * config.page_size >= config.load_back_threshold_tokens


def prefetch_pages_min(config: CacheConfig) -> int:
    """Fewest pages that are worth an L3 read: the threshold in whole pages, at least one."""
    return max(-(-config.prefetch.threshold_tokens // config.page_size), 1)


def prefetch_timeout_ns(config: PrefetchConfig, tokens: int) -> int:
    """min(max, base + per_ki_token * tokens / 1024), rounded down to a nanosecond (mission M3)."""
    timeout = config.timeout_base_ns + config.timeout_per_ki_token_ns * tokens // 1024
    return min(config.timeout_max_ns, timeout)
