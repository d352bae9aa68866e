"""Copies between tiers as metrics: how many tokens, how long each took from order to completion.

Must not know: requests, why anything is copied. Called by: metrics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from refimpl.messages import (
    AnyEvent,
    BackedUp,
    BackUp,
    CancelFetch,
    Command,
    Fetch,
    Fetched,
    Store,
    Stored,
)
from refimpl.serve.instruments import Instruments
from refimpl.units import NS_PER_S

# Bytes and busy ns so far, by way: load_back, backup, l3_read, l3_write.
Moved: TypeAlias = Callable[[], dict[str, tuple[int, int]]]
PAGES: Final = (1, 5, 10, 50, 100)  # upper bounds, upstream's (spec 11.2)
GB_PER_S: Final = (0.1, 0.5, 1, 5, 10, 50, 100)
COPY_S: Final = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1, 5)


@dataclass(slots=True)
class _Open:
    """A copy under way."""

    begun: int
    pages: int
    is_cancelled: bool = False


class CopyTimes:
    """Instruments of all copies. ``page_bytes`` is a page of all ranks together."""

    def __init__(self, make: Instruments, page_size: int, page_bytes: int, moved: Moved) -> None:
        self._moved = moved
        self._page_size, self._page_bytes = page_size, page_bytes
        self._open: dict[int, _Open] = {}
        self._loaded_pages = self._load_ns = 0  # of the batch in flight; of all before it
        kv = ("kv",)
        self._backup_tokens = make.counters(
            "sglang:hicache_backup_tokens_total", "tokens L1 -> L2", "pool", kv
        )
        self._backup_bytes = make.counters(
            "sglang:hicache_backup_bytes_total", "bytes L1 -> L2", "pool", kv
        )
        self._backup_s = make.histogram(
            "sglang:hicache_backup_duration_seconds", "a copy L1 -> L2, its queue included", COPY_S
        )
        self._load_tokens = make.counters(
            "sglang:load_back_tokens_total", "tokens L2 -> L1", "pool", kv
        )
        self._load_bytes = make.counters(
            "sglang:load_back_bytes_total", "bytes L2 -> L1", "pool", kv
        )
        self._load_s = make.histogram(
            "sglang:load_back_duration_seconds", "the loads of a batch, L2 -> L1", COPY_S
        )
        self._short = make.counters(
            "hicache:prefetch_short_tokens_total",
            "tokens that a read of L3 was asked for and did not bring",
            "reason",
            ("cancelled", "failed"),
        )
        self._read_pages = make.histogram("sglang:prefetch_pgs", "pages a read of L3", PAGES)
        self._write_pages = make.histogram("sglang:backup_pgs", "pages a write to L3", PAGES)
        self._read_rate = make.histogram(
            "sglang:prefetch_bandwidth", "GB/s of a read of L3, its queue included", GB_PER_S
        )
        self._write_rate = make.histogram(
            "sglang:backup_bandwidth", "GB/s of a write to L3, its queue included", GB_PER_S
        )

    def began(self, command: Command, now: int) -> None:
        """A command was given."""
        match command:
            case BackUp():
                self._open[command.op] = _Open(now, len(command.l1_slots))
            case Fetch() | Store():
                self._open[command.op] = _Open(now, len(command.keys))
            case CancelFetch() if command.op in self._open:
                self._open[command.op].is_cancelled = True
            case _:
                pass

    def ended(self, event: AnyEvent, now: int) -> None:
        """A completion came."""
        match event:
            case BackedUp() if copy := self._open.pop(event.op, None):
                self._backup_tokens["kv"].inc(event.pages * self._page_size)
                self._backup_bytes["kv"].inc(event.pages * self._page_bytes)
                self._backup_s.observe((now - copy.begun) / NS_PER_S)
            case Fetched() if copy := self._open.pop(event.op, None):
                self._read_pages.observe(event.pages)
                self._read_rate.observe(self._gb_per_s(event.pages, now - copy.begun))
                reason = "cancelled" if copy.is_cancelled else "failed"
                self._short[reason].inc((copy.pages - event.pages) * self._page_size)
            case Stored() if copy := self._open.pop(event.op, None):
                self._write_pages.observe(event.pages)
                self._write_rate.observe(self._gb_per_s(event.pages, now - copy.begun))
            case _:
                pass

    def loaded_back(self, pages: int) -> None:
        """Pages were copied L2 -> L1 for the batch that has just ended."""
        self._load_tokens["kv"].inc(pages * self._page_size)
        self._load_bytes["kv"].inc(pages * self._page_bytes)
        _, ns = self._moved()["load_back"]
        if ns > self._load_ns:
            self._load_s.observe((ns - self._load_ns) / NS_PER_S)
            self._load_ns = ns

    def _gb_per_s(self, pages: int, ns: int) -> float:
        return pages * self._page_bytes / max(ns, 1)  # bytes a ns are GB/s
