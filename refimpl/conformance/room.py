"""Host memory with pages in it, for backends that do not ask for tensors.

Must not know: backends, rules. Called by: subject.
"""

from __future__ import annotations

import random
from typing import Final, Protocol

from refimpl.conformance.shapes import Shape
from refimpl.storage.backend import HostPage

_POISON: Final = b"\xa5"


class Room(Protocol):
    """Pages by slot, all in ``memory``; ``host`` is the pool for classes of SGLang's kind."""

    memory: tuple[memoryview, ...]
    host: object | None

    def page(self, slot: int) -> HostPage:
        """A page."""
        ...


class PlainRoom:
    """Bytes that lie as a host pool's would: piece by piece, in each the pages side by side."""

    def __init__(self, shape: Shape, slots: int) -> None:
        self._shape, self._slots = shape, slots
        self.memory: tuple[memoryview, ...] = (memoryview(bytearray(shape.page_bytes * slots)),)
        self.host: object | None = None

    def page(self, slot: int) -> HostPage:
        """See Room."""
        size = self._shape.page_bytes // self._shape.pieces
        starts = ((part * self._slots + slot) * size for part in range(self._shape.pieces))
        return HostPage(tuple(self.memory[0][start : start + size] for start in starts), slot)


def value(nbytes: int) -> HostPage:
    """A value that is no page of a pool, such as a checksum."""
    return HostPage((memoryview(bytearray(nbytes)),))


def write(page: HostPage, text: str) -> bytes:
    """Fill a page with bytes that follow from ``text``; returns them."""
    data = random.Random(text).randbytes(page.nbytes)
    page.fill(data)
    return data


def read(page: HostPage) -> bytes:
    """The payload."""
    return b"".join(page.pieces)


def poison(page: HostPage) -> bytes:
    """Fill a page with what no value holds, so that bytes that were never written show."""
    data = _POISON * page.nbytes
    page.fill(data)
    return data
