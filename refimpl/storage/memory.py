"""A store in the memory of this process, shared by all who open the same name.

Called by: factory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from refimpl.storage.backend import HostPage, Setting, StorageError
from refimpl.storage.extra import size_bytes


class _Shelf:
    """The values of one store: bytes by name, the least recently used first."""

    def __init__(self) -> None:
        self.values: OrderedDict[str, bytes] = OrderedDict()
        self.nbytes = 0
        self.lock = Lock()


_shelves: dict[str, _Shelf] = {}


class MemoryBackend:
    """``store`` in the extra config names the shelf ("default"); ``max_size`` bounds it, in bytes."""

    def __init__(self, setting: Setting) -> None:
        self._is_closed = False
        self._namespace = setting.namespace
        self._shelf = _shelves.setdefault(str(setting.extra.get("store", "default")), _Shelf())
        told = setting.extra.get("max_size")
        self._bytes_max = None if told is None else size_bytes(setting.extra, "max_size")

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See Backend."""
        self._check_open()
        with self._shelf.lock:
            return [name in self._shelf.values for name in names]

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend."""
        self._check_open()
        return [self._get(name, page) for name, page in zip(names, pages, strict=True)]

    def _get(self, name: str, page: HostPage) -> bool:
        with self._shelf.lock:
            value = self._shelf.values.get(name)
            if value is None or len(value) != page.nbytes:
                return False
            self._shelf.values.move_to_end(name)
        return page.fill(value)

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend."""
        self._check_open()
        return [self._set(name, page) for name, page in zip(names, pages, strict=True)]

    def _set(self, name: str, page: HostPage) -> bool:
        value = b"".join(page.pieces)
        shelf = self._shelf
        with shelf.lock:
            if name in shelf.values:
                shelf.values.move_to_end(name)
                return True
            if self._bytes_max is not None:
                if len(value) > self._bytes_max:
                    return False
                while shelf.nbytes + len(value) > self._bytes_max:
                    shelf.nbytes -= len(shelf.values.popitem(last=False)[1])
            shelf.values[name] = value
            shelf.nbytes += len(value)
            return True

    def delete(self, names: Sequence[str]) -> list[bool]:
        """See backend.delete_values."""
        self._check_open()
        with self._shelf.lock:
            for name in names:
                self._shelf.nbytes -= len(self._shelf.values.pop(name, b""))
        return [True] * len(names)

    def clear(self) -> int:
        """See Backend."""
        self._check_open()
        with self._shelf.lock:
            ours = [name for name in self._shelf.values if self._namespace.owns(name)]
            for name in ours:
                self._shelf.nbytes -= len(self._shelf.values.pop(name))
        return len(ours)

    def close(self) -> None:
        """See Backend."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise StorageError("the store in memory is closed")


def forget(store: str) -> None:
    """Give back the memory of a store that nobody opens again."""
    _shelves.pop(store, None)
