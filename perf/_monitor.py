"""Whether the load generator itself keeps up: how late its event loop is, and how busy its CPU.

A figure taken by a client that is late says how busy the client was.
Must not know: requests. Called by: _player; _director adds up what it says.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic_ns, process_time_ns
from typing import Final

import gevent

CPU_PERCENT_MAX: Final = 90
_TICK_S: Final = 0.01
_TICK_NS: Final = 10_000_000
_CPU_WINDOW_NS: Final = 1_000_000_000
_SHARE: Final = 100  # one in so many sends, or of the time, may be late

Health = dict[str, int]


class Monitor:
    """Watches one process from ``start`` to ``stop``."""

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = limit_ns
        self._health: Health = dict.fromkeys(
            ("sent", "late", "lag_max_ns", "watched_ns", "stalled_ns", "stall_max_ns"), 0
        )
        self._health["cpu_percent_max"] = 0
        self._greenlet: gevent.Greenlet | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._greenlet = gevent.spawn(self._watch)

    def stop(self) -> Health:
        """What was seen, in a form that ``total`` adds up."""
        if self._greenlet is not None:
            self._greenlet.kill()
        return self._health

    def sent(self, lag_ns: int) -> None:
        """A request was sent ``lag_ns`` after it was due."""
        health = self._health
        health["sent"] += 1
        health["late"] += lag_ns > self._limit_ns
        health["lag_max_ns"] = max(health["lag_max_ns"], lag_ns)

    def _watch(self) -> None:
        window, used = monotonic_ns(), process_time_ns()
        while True:
            before = monotonic_ns()
            gevent.sleep(_TICK_S)
            now = monotonic_ns()
            self._ticked(now - before)
            if now - window >= _CPU_WINDOW_NS:
                busy = process_time_ns()
                percent = (busy - used) * 100 // (now - window)
                self._health["cpu_percent_max"] = max(self._health["cpu_percent_max"], percent)
                window, used = now, busy

    def _ticked(self, took_ns: int) -> None:
        health = self._health
        stalled = max(took_ns - _TICK_NS, 0)
        health["watched_ns"] += took_ns
        health["stall_max_ns"] = max(health["stall_max_ns"], stalled)
        if stalled > self._limit_ns:
            health["stalled_ns"] += stalled


def total(parts: list[Mapping[str, int]]) -> Health:
    """The health of all processes together: sums, and the worst of what is a maximum."""
    names = list(Monitor(0).stop())
    return {
        name: (max if "_max" in name else sum)([part[name] for part in parts] or [0])
        for name in names
    }


def complaints(health: Mapping[str, int], limit_ns: int) -> list[str]:
    """Why the run is not valid; empty when the generator kept up."""
    limit = f"{limit_ns // 1_000_000} ms"
    found = []
    if health["late"] * _SHARE > health["sent"]:
        found.append(
            f"{health['late']} of {health['sent']} requests were sent more than {limit} after they"
            f" were due, the latest by {health['lag_max_ns'] // 1_000_000} ms"
        )
    if health["stalled_ns"] * _SHARE > health["watched_ns"]:
        found.append(
            f"the event loop stood still for more than {limit} at a time, at most"
            f" {health['stall_max_ns'] // 1_000_000} ms, {health['stalled_ns'] // 1_000_000} ms in all"
        )
    return found
