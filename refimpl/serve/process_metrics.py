"""The server's own process under Prometheus' usual names: memory, descriptors, threads, garbage.

Ranks that are processes of their own are not in it. Must not know: requests, tiers. Called by: loads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_TASKS: Final = Path("/proc/self/task")


def process_registry() -> CollectorRegistry:
    """``process_*`` and ``python_*``; the former where the system has ``/proc``."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(Threads())
    return registry


class Threads(Collector):
    """Threads of all libraries, not Python's alone."""

    def collect(self) -> Iterator[Metric]:
        """As the system counts them."""
        if _TASKS.is_dir():
            count = len(list(_TASKS.iterdir()))
            yield GaugeMetricFamily("process_threads", "Threads of the process.", value=count)
