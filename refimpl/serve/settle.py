"""From options to a service, whatever computes the answers.

Called by: start, start_null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from refimpl.config import require
from refimpl.run.live_loop import WallExecutor
from refimpl.run.options import Options
from refimpl.run.setup import Simulation
from refimpl.serve.bridge import Bridge
from refimpl.serve.metrics import Metrics
from refimpl.serve.service import Served, Service, Storage
from refimpl.workload.request import Workload


def check_server(options: Options) -> None:
    """Raise ConfigError for flags that have no meaning where a load comes from outside."""
    require(options.instances == 1, "a server is one instance: leave --instances at 1")
    require(options.trace is None and options.workload is None, "a server's load comes by HTTP")
    require(not options.cache_only, "a server has an engine: leave out --cache-only")
    require(options.page_size >= 1, f"--page-size {options.page_size} must be at least 1 token")


def simulation_of(options: Options, page_bytes: int | None = None) -> Simulation:
    """The checked configuration, with no load of its own."""
    return Simulation(options, Workload("served", []), page_bytes)


def service_of(
    resolved: Simulation,
    served: Served,
    executor: WallExecutor,
    name: str,
    settings: Mapping[str, Any],
) -> Service:
    """A service over ``executor``; nothing runs yet."""
    options, engine = resolved.options, resolved.engine
    prefetch = engine.cache.prefetch
    storage = Storage(write_policy=options.hicache_write_policy)
    if engine.storage_backend:
        storage.backend = engine.storage_backend
        storage.extra_config = options.hicache_storage_backend_extra_config
        storage.prefetch_policy = prefetch.policy
    page_bytes = resolved.page_bytes * options.tp_size
    metrics = Metrics(name, engine.cache.page_size, page_bytes, executor.moved)
    bridge = Bridge(engine, executor, metrics)
    told = dict(settings) | resolved.effective()
    return Service(served, bridge, engine, name, told, prefetch, metrics, page_bytes, storage)


def with_l1(options: Options, tokens: int) -> Options:
    """The options with that size of L1 where none was said."""
    return (
        options
        if options.max_total_tokens is not None
        else replace(options, max_total_tokens=tokens)
    )
