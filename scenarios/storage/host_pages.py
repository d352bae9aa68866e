"""Pages of a real host pool with known bytes, for the tests of stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from refimpl.keys import PageKey, page_keys
from refimpl.memory.layout import Geometry
from refimpl.memory.pool import Pool
from refimpl.storage.backend import HostPage, Setting
from refimpl.storage.names import Identity, Namespace, namespace_of

GQA = Geometry(layers=4, kvs=2, heads=4, dim=64, page_size=16)  # 64 KiB a page
MLA = Geometry(layers=4, kvs=1, heads=1, dim=576, page_size=16)
PAGES = 8
KEYS = page_keys(list(range(16 * 200)), 16)


def identity_of(geometry: Geometry, layout: str, **change: Any) -> Identity:
    identity = Identity(
        model="org/Model",
        layout=layout,
        page_size=geometry.page_size,
        layers=geometry.layers,
        kv_heads=geometry.heads,
        head_dim=geometry.dim,
        is_mla=geometry.is_mla,
    )
    return msgspec.structs.replace(identity, **change)


@dataclass
class HostPages:
    """A pool whose first half holds random bytes and whose second half is read into."""

    pool: Pool
    namespace: Namespace
    identity: Identity

    @classmethod
    def of(cls, backend: str, geometry: Geometry, layout: str, **change: Any) -> HostPages:
        """``change``: fields of the identity; ``compat``, as the extra config has it."""
        compat = change.pop("compat", "")
        identity = identity_of(geometry, layout, **change)
        host = cls(
            Pool(geometry, layout, 2 * PAGES),
            namespace_of(backend, identity, compat=compat),
            identity,
        )
        for slot in range(PAGES):
            host.write(slot, slot)
        return host

    @property
    def memory(self) -> tuple[memoryview, ...]:
        whole: memoryview = self.pool.tensor.view(-1).view(torch.uint8).numpy().data
        return (whole,)

    def setting(self, extra: dict[str, Any]) -> Setting:
        return Setting(self.identity, self.namespace, extra, self.memory)

    def write(self, slot: int, seed: int) -> None:
        """Fill a page with bytes that depend on ``seed`` alone."""
        size = self.pool.geometry.page_bytes
        source = torch.Generator().manual_seed(seed)
        data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=source)
        assert self.page(slot).fill(memoryview(data.numpy()))

    def page(self, slot: int) -> HostPage:
        return HostPage(self.pool.pieces(slot), slot)

    def sources(self, count: int = PAGES) -> list[HostPage]:
        return [self.page(slot) for slot in range(count)]

    def targets(self, count: int = PAGES) -> list[HostPage]:
        return [self.page(PAGES + slot) for slot in range(count)]

    def names(self, keys: Sequence[PageKey] = KEYS[:PAGES]) -> list[str]:
        return [self.namespace.name(key) for key in keys]


def payload(page: HostPage) -> bytes:
    return b"".join(page.pieces)


def loose(data: bytes) -> HostPage:
    """A value that lies outside of the pool, as a checksum does."""
    return HostPage((memoryview(bytearray(data)),))
