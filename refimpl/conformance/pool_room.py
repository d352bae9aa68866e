"""The same memory as a real host pool, for classes written for SGLang's interface.

Called by: subject, which loads it only for such classes, because it brings torch.
"""

from __future__ import annotations

from refimpl.conformance.shapes import Shape
from refimpl.memory.layout import Geometry
from refimpl.memory.pool import Pool
from refimpl.run.host_pool_view import HostPoolView
from refimpl.storage.backend import HostPage


class PoolRoom:
    """See Room."""

    def __init__(self, shape: Shape, slots: int) -> None:
        geometry = Geometry(shape.layers, shape.kvs, shape.heads, shape.dim, shape.page_size)
        self._pool = Pool(geometry, shape.layout, slots)
        self.memory: tuple[memoryview, ...] = (self._pool.words().data.cast("B"),)
        self.host: object | None = HostPoolView(self._pool)

    def page(self, slot: int) -> HostPage:
        """See Room."""
        return HostPage(self._pool.pieces(slot), slot)
