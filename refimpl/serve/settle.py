"""From options to a service, whatever computes the answers.

Called by: start, start_null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from refimpl.config import require
from refimpl.messages import AttachStorage
from refimpl.run.live_loop import WallExecutor
from refimpl.run.options import Options
from refimpl.run.setup import Simulation
from refimpl.serve.bridge import Bridge
from refimpl.serve.dispatch import DataRank, Dispatch
from refimpl.serve.fan_out import FanOut
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
    executors: Sequence[WallExecutor],
    name: str,
    settings: Mapping[str, Any],
) -> Service:
    """A service over ``executors``, one a data-parallel rank; nothing runs yet."""
    options, engine = resolved.options, resolved.engine
    prefetch = engine.cache.prefetch
    storage, attached = Storage(write_policy=options.hicache_write_policy), None
    if engine.storage_backend:
        storage.backend = engine.storage_backend
        storage.extra_config = options.hicache_storage_backend_extra_config
        storage.prefetch_policy = prefetch.policy
        attached = AttachStorage(storage.backend, extra_config=storage.extra_config or "")
    page_bytes = resolved.page_bytes * options.tp_size
    size, ranks = engine.cache.page_size, []
    for number, executor in enumerate(executors):
        told_rank = number if len(executors) > 1 else None
        metrics = Metrics(name, size, page_bytes, executor.moved, told_rank)
        # Ranks take turns in numbering: a rid is given once, and says whose it is.
        rids = count(1 + number, len(executors))
        ranks.append(DataRank(Bridge(engine, executor, metrics, rids), metrics))
    dispatch = Dispatch(ranks, resolved.dispatch, size)
    changes = FanOut([rank.bridge for rank in ranks], attached)
    told = dict(settings) | resolved.effective()
    return Service(served, dispatch, changes, engine, name, told, prefetch, page_bytes, storage)


def with_l1(options: Options, tokens: int) -> Options:
    """The options with that size of L1 where none was said."""
    return (
        options
        if options.max_total_tokens is not None
        else replace(options, max_total_tokens=tokens)
    )
