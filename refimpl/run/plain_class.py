"""A plain class as a storage backend: ``get``, ``exists`` and ``set`` of one value, no base needed.

What such a class looks like stands here alone:

- It is constructed with as many of ``(storage_config, extra)`` as it takes: both, or ``extra`` alone,
  or nothing. ``extra`` is a dict of the keys of the extra config that are the class's own, and
  ``storage_config`` says who this rank is (see HiCacheStorageConfig in sglang_stand_in).
- ``exists(name) -> bool``.
- ``get(name)`` gives the value, anything bytes-like, or None. Another length than asked for is a miss.
- ``set(name, value)`` stores ``bytes``; False says that it did not, True or nothing that it did.
- ``clear(owns)``, optional: delete every value whose name ``owns(name)`` accepts, and say how many.
- ``delete(name)``, optional: False says that the value is still there. ``close()``, optional.

Names are full names: they tell models, ranks and layouts apart. Methods are called from several
threads. An exception counts as a failure of the call, so it costs time and nothing else.
Must not know: SGLang, tensors. Called by: dynamic.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Final

from refimpl.config import require
from refimpl.storage.backend import Backend, HostPage, StorageError
from refimpl.storage.names import Namespace

REQUIRED: Final = ("get", "exists", "set")


def check_methods(cls: type, what: str) -> None:
    """Raise ConfigError unless the class has what a backend needs."""
    lacks = [name for name in REQUIRED if not callable(getattr(cls, name, None))]
    require(not lacks, f"{what} lacks {', '.join(lacks)}: a backend has get, exists and set")


def takes(method: Callable[..., object], *positional: object) -> bool:
    """Whether a callable can be called so. One that does not tell is believed to."""
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return True  # written in C
    try:
        signature.bind(*positional)
    except TypeError:
        return False
    return True


def delete_each(thing: Any, names: Sequence[str]) -> list[bool]:
    """By the class's own delete; all False where it has none."""
    delete = getattr(thing, "delete", None)
    if not callable(delete):
        return [False] * len(names)
    return [delete(name) in (None, True) for name in names]


class PlainBackend(Backend):
    """``thing``, an object of a plain class, called ``what`` in messages."""

    def __init__(self, thing: Any, namespace: Namespace, what: str) -> None:
        self._thing = thing
        self._namespace = namespace
        self._what = what
        clear = getattr(thing, "clear", None)
        # A clear that takes no predicate would delete what belongs to others.
        self.can_clear = callable(clear) and takes(clear, namespace.owns)
        self._is_closed = False

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See Backend."""
        thing = self._open()
        return [bool(thing.exists(name)) for name in names]

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend."""
        thing = self._open()
        return [self._fill(page, thing.get(name)) for name, page in zip(names, pages, strict=True)]

    def _fill(self, page: HostPage, value: Any) -> bool:
        if value is None:
            return False
        try:
            data = memoryview(value).cast("B")
        except TypeError:
            kind = type(value).__name__
            raise StorageError(
                f"get of {self._what} returned a {kind}; it must return bytes-like or None"
            ) from None
        return page.fill(data)

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend."""
        thing = self._open()
        # A copy, because a class may keep what it is given, and host memory is soon another page's.
        return [
            thing.set(name, b"".join(page.pieces)) in (None, True)
            for name, page in zip(names, pages, strict=True)
        ]

    def clear(self) -> int:
        """See Backend. A class without a clear of ours keeps everything: none are deleted."""
        thing = self._open()
        if not self.can_clear:
            return 0
        count = thing.clear(self._namespace.owns)
        return count if type(count) is int else 0

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Make names writable again, where the class can: True where there is no value now."""
        return delete_each(self._open(), names)

    def close(self) -> None:
        """See Backend."""
        if self._is_closed:
            return
        self._is_closed = True
        close = getattr(self._thing, "close", None)
        if callable(close):
            close()

    def _open(self) -> Any:
        if self._is_closed:
            raise StorageError(f"{self._what} is closed")
        return self._thing
