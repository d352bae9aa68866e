"""From a model and an extra config to a store that is open: whose pages they are, what they are called.

Must not know: pumps, the engine. Called by: whoever serves a model, the server.
"""

from __future__ import annotations

import refimpl.run.dynamic  # noqa: F401  # registers the backend of that name
from refimpl.memory.pool import Pool
from refimpl.model.transformer import Transformer
from refimpl.model.weights import fingerprint
from refimpl.run.extra_config import read_extra_config
from refimpl.run.host_pool_view import HostPoolView
from refimpl.run.live_storage import OpenStore
from refimpl.storage.backend import Setting
from refimpl.storage.extra import text_of
from refimpl.storage.names import Identity, namespace_of
from refimpl.storage.stack import open_storage


def identity_of(
    model: Transformer, host: Pool, name: str = "", tp_rank: int = 0, tp_size: int = 1
) -> Identity:
    """Whose KV lies in ``host``, of one rank; ``name`` is the served model's, its own where empty."""
    geometry = host.geometry
    return Identity(
        model=name or model.config.name,
        weights=fingerprint(model.weights),
        dtype=geometry.dtype,
        layout=host.layout,
        page_size=geometry.page_size,
        layers=geometry.layers,
        kv_heads=model.config.cached_heads,
        head_dim=geometry.dim,
        is_mla=geometry.is_mla,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


class StoreOpener:
    """Opens any backend for the pages of one host pool."""

    def __init__(self, identity: Identity, host: Pool) -> None:
        self.identity = identity
        self._host = host

    def __call__(self, backend: str, extra_config: str) -> OpenStore:
        """Connect. Raises ConfigError for keys that can't be, StorageError when there is no store."""
        extra = read_extra_config(extra_config or None, backend)
        tag = text_of(extra.backend, "extra_backend_tag")
        namespace = namespace_of(backend, self.identity, compat=extra.compat, tag=tag)
        memory: memoryview = self._host.words().data
        view = HostPoolView(self._host)
        setting = Setting(self.identity, namespace, extra.backend, (memory.cast("B"),), view)
        return OpenStore(open_storage(backend, setting), namespace)
