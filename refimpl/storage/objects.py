"""The objects a page becomes in stores that keep K and V apart, and where bytes lie in memory.

A page is ``<name>_k`` and ``<name>_v``; a latent (MLA) page is ``<name>_k`` alone, and so is any other
value, such as a checksum. These are upstream's names (spec 5.4).
Must not know: a store. Called by: mooncake, nixl.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from refimpl.storage.backend import Setting

HALVES: Final = ("_k", "_v")


def object_names(name: str, count: int) -> tuple[str, ...]:
    """The objects of a value of ``count`` pieces, in their order."""
    assert 1 <= count <= len(HALVES), f"{name} has {count} pieces"
    return tuple(name + half for half in HALVES[:count])


def value_of(object_name: str) -> str:
    """The name of the value that an object is part of."""
    for half in HALVES:
        if object_name.endswith(half):
            return object_name.removesuffix(half)
    return object_name


def objects_expected(setting: Setting, name: str) -> tuple[str, ...]:
    """The objects that must be there for ``name`` to have a value."""
    count = 2 if setting.namespace.is_page(name) and not setting.identity.is_mla else 1
    return object_names(name, count)


def address_of(piece: memoryview) -> int:
    """Where a writable piece lies in memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))


@dataclass(frozen=True, slots=True)
class Regions:
    """Parts of the address space, as (first, past the last)."""

    bounds: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, memory: Sequence[memoryview]) -> Regions:
        """Where ``memory`` lies."""
        starts = [(address_of(part), part.nbytes) for part in memory if part.nbytes]
        return cls(tuple((start, start + size) for start, size in starts))

    def holds(self, address: int, size: int) -> bool:
        """Does one of the parts hold all of these bytes?"""
        return any(first <= address and address + size <= end for first, end in self.bounds)


class Placed:
    """Pieces as addresses that a client library may read or write.

    Pieces outside of ``regions``, or that can't be written to, stand in one buffer of their own: it
    has what the pieces hold when it is made, and ``give_back`` copies out what has been read into it.
    """

    def __init__(self, pieces: Sequence[memoryview], regions: Regions) -> None:
        self._pieces = pieces
        self.sizes = [piece.nbytes for piece in pieces]
        self.addresses = [0 if piece.readonly else address_of(piece) for piece in pieces]
        self._staged = {
            at: 0
            for at, address in enumerate(self.addresses)
            if not address or not regions.holds(address, self.sizes[at])
        }
        self.staging = bytearray(sum(self.sizes[at] for at in self._staged))
        if self._staged:
            self._stage()

    def _stage(self) -> None:
        start = address_of(memoryview(self.staging)) if self.staging else 0
        offset = 0
        for at in self._staged:
            size = self.sizes[at]
            self._staged[at] = offset
            self.staging[offset : offset + size] = self._pieces[at]
            self.addresses[at] = start + offset
            offset += size

    def give_back(self, at: int) -> None:
        """Let piece ``at`` have what was read for it."""
        offset = self._staged.get(at)
        if offset is not None:
            self._pieces[at][:] = self.staging[offset : offset + self.sizes[at]]
