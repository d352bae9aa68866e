"""From a model and an extra config to a store that is open: whose pages they are, what they are called.

Must not know: pumps, the engine. Called by: whoever serves a model, the server.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec

import refimpl.run.dynamic  # noqa: F401  # registers the backend of that name
from refimpl.config import require
from refimpl.memory.pool import Pool
from refimpl.model.transformer import Transformer
from refimpl.model.weights import fingerprint
from refimpl.run.extra_config import ExtraConfig, read_extra_config
from refimpl.run.host_pool_view import HostPoolView
from refimpl.run.live_storage import OpenStore
from refimpl.storage.backend import Setting
from refimpl.storage.extra import text_of
from refimpl.storage.names import Identity, Namespace, namespace_of
from refimpl.storage.split_heads import Part, SplitHeads, heads_of
from refimpl.storage.stack import open_storage

_log = logging.getLogger(__name__)


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
    """Opens any backend for the pages of one rank's host pool.

    Of a latent cache, which is the same on all ranks, rank 0 alone writes.
    """

    def __init__(self, identity: Identity, host: Pool) -> None:
        self.identity = identity
        self._host = host

    def __call__(self, backend: str, extra_config: str) -> OpenStore:
        """Connect. Raises ConfigError for keys that can't be, StorageError when there is no store."""
        extra = read_extra_config(extra_config or None, backend)
        identity, lcm = self.identity, extra.tp_lcm_size
        is_writer = not identity.is_mla or identity.tp_rank == 0
        if lcm is not None:
            require(
                lcm >= 1 and lcm % identity.tp_size == 0,
                f"tp_lcm_size must be divisible by tp_size: {lcm} is not by {identity.tp_size}",
            )
        if lcm in (None, identity.tp_size) or identity.is_mla:
            setting = self._setting(backend, extra, identity)
            return OpenStore(open_storage(backend, setting), setting.namespace, is_writer)
        assert lcm is not None
        if self._host.layout != "page_head":
            _log.warning(
                "tp_lcm_size has no effect with --hicache-mem-layout %s: page_head shares pages"
                " between instances of different TP",
                self._host.layout,
            )
            setting = self._setting(backend, extra, identity)
            return OpenStore(open_storage(backend, setting), setting.namespace)
        return OpenStore(self._split(backend, extra, lcm), Namespace())

    def _split(self, backend: str, extra: ExtraConfig, lcm: int) -> SplitHeads:
        """A store for each rank of TP ``lcm`` whose heads are on this one."""
        rank, size, total = self.identity.tp_rank, self.identity.tp_size, self.identity.kv_heads
        ours, _ = heads_of(total, rank, size)
        count = lcm // size
        parts: list[Part] = []
        try:
            for virtual in range(rank * count, (rank + 1) * count):
                first, last = heads_of(total, virtual, lcm)
                named = msgspec.structs.replace(self.identity, tp_rank=virtual, tp_size=lcm)
                setting = replace(self._setting(backend, extra, named), parts=count)
                store = open_storage(backend, setting)
                parts.append(Part(store, setting.namespace, first - ours, last - ours))
        except BaseException:
            for part in parts:
                part.backend.close()
            raise
        return SplitHeads(parts, self._host.geometry.heads)

    def _setting(self, backend: str, extra: ExtraConfig, identity: Identity) -> Setting:
        tag = text_of(extra.backend, "extra_backend_tag")
        namespace = namespace_of(backend, identity, compat=extra.compat, tag=tag)
        memory: memoryview = self._host.words().data
        view = HostPoolView(self._host)
        return Setting(identity, namespace, extra.backend, (memory.cast("B"),), view)
