"""From flags to a service: the model is loaded, pools are made, storage is open, nothing runs yet.

Called by: the command line, scenarios.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from refimpl.config import require
from refimpl.run.hands import geometry_of
from refimpl.run.options import Options
from refimpl.run.real import ModelChoice, executor_of
from refimpl.run.setup import Simulation
from refimpl.serve.bridge import Bridge
from refimpl.serve.service import Service, Storage
from refimpl.workload.request import Workload

L1_TOKENS_DEFAULT = 16_384  # on a CPU, where a share of device memory means nothing


def start_service(options: Options, choice: ModelChoice, served_name: str | None = None) -> Service:
    """Everything but the engine's thread. Raises ConfigError or StorageError for what can't work."""
    require(options.instances == 1, "a server is one instance: leave --instances at 1")
    require(options.tp_size == 1, "--model-path serves one rank: leave --tp-size at 1")
    require(options.trace is None and options.workload is None, "a server's load comes by HTTP")
    if options.max_total_tokens is None:
        options = replace(options, max_total_tokens=L1_TOKENS_DEFAULT)
    require(options.page_size >= 1, f"--page-size {options.page_size} must be at least 1 token")
    model = choice.open(options.seed)
    page_bytes = geometry_of(model.config, options.page_size).page_bytes
    resolved = Simulation(options, Workload("served", []), page_bytes)
    name = served_name or choice.path
    executor = executor_of(resolved, model, name)
    prefetch = resolved.engine.cache.prefetch
    storage = Storage(write_policy=options.hicache_write_policy)
    if resolved.engine.storage_backend:
        storage.backend = resolved.engine.storage_backend
        storage.extra_config = options.hicache_storage_backend_extra_config
        storage.prefetch_policy = prefetch.policy
    settings = asdict(options) | asdict(choice) | resolved.effective()
    bridge = Bridge(resolved.engine, executor)
    return Service(model, bridge, resolved.engine, name, settings, prefetch, storage)
