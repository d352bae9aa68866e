"""The hands of one rank over pools of the configured sizes, and L3 open where there is one.

Must not know: engines, the terminal. Called by: rank_setup, the server.
"""

from __future__ import annotations

from refimpl.config import EngineConfig, Transfer
from refimpl.memory.layout import Geometry
from refimpl.memory.pool import Pool, check_host_memory
from refimpl.memory.transfer import Mover
from refimpl.model.catalog import Model
from refimpl.model.shard import ALONE, Shard
from refimpl.run.hands import TorchHands, geometry_of
from refimpl.run.live import LiveExecutor
from refimpl.run.live_loop import Inbox
from refimpl.run.setup import Simulation
from refimpl.run.storage_setup import StoreOpener, identity_of


def executor_of(
    simulation: Simulation,
    model: Model,
    name: str = "",
    shard: Shard = ALONE,
    inbox: Inbox | None = None,
) -> LiveExecutor:
    """One rank: hands over its pools, and its part of L3.

    ``name`` is the served model's, its own where empty. Raises ConfigError or StorageError.
    """
    hands = _hands(simulation.engine, simulation.transfer, model, shard)
    host = hands.mover.host
    identity = identity_of(hands.model, host, name, shard.rank, shard.size)
    executor = LiveExecutor(hands, StoreOpener(identity, host), inbox)
    if simulation.engine.storage_backend:
        extra = simulation.options.hicache_storage_backend_extra_config or ""
        executor.storage.open_now(simulation.engine.storage_backend, extra)
    return executor


def _hands(engine: EngineConfig, transfer: Transfer, model: Model, shard: Shard) -> TorchHands:
    cache = engine.cache
    geometry = geometry_of(model.config, cache.page_size, shard.size)
    assert cache.l1_pages is not None
    l2_pages = max(cache.l2_pages or 0, 1)
    check_pools(engine, model, geometry)  # of both, before either is made
    device = Pool(geometry, "layer_first", cache.l1_pages, model.transformer.device)
    host = Pool(geometry, transfer.layout, l2_pages)
    mover = Mover(device, host, transfer.io_backend)
    return TorchHands(model.transformer, mover, model.tokenizer.stop_ids)


def check_pools(engine: EngineConfig, model: Model, geometry: Geometry, ranks: int = 1) -> None:
    """Raise ConfigError unless the host has room for the pools of so many ranks."""
    cache = engine.cache
    l1_pages = (cache.l1_pages or 0) if model.transformer.device.type == "cpu" else 0
    on_host = l1_pages + max(cache.l2_pages or 0, 1)
    check_host_memory(on_host * geometry.page_bytes, geometry, ranks)
