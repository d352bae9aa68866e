"""What a storage backend is: a store of named byte strings, asked in batches.

Must not know: trees, slots of a tree, requests, tensors. Called by: every backend, the storage pumps,
the conformance kit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

from refimpl.storage.names import Identity, Namespace

Pieces: TypeAlias = tuple[memoryview, ...]
BATCH_NAMES: Final = 128  # in one call, at most (spec 5.1)


class StorageError(Exception):
    """A store could not do what it was asked; the message is for whoever operates it."""


@dataclass(frozen=True, slots=True)
class HostPage:
    """A value in host memory: contiguous pieces of bytes, which in this order are its payload.

    For a page of KV the order is that of its layout, K before V (spec 3): one piece for MLA and two for
    K and V where a page is contiguous, one a layer and K or V for ``layer_first``. ``slot`` is its page
    number in the host pool; None for anything else, such as a checksum.
    """

    pieces: Pieces
    slot: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the payload."""
        return sum(piece.nbytes for piece in self.pieces)

    def fill(self, value: bytes | memoryview) -> bool:
        """Copy a value into the pieces; False, and nothing is written, for one of another length."""
        if len(value) != self.nbytes:
            return False
        at = 0
        for piece in self.pieces:
            piece[:] = value[at : at + piece.nbytes]
            at += piece.nbytes
        return True


@dataclass(frozen=True, slots=True)
class Setting:
    """What a backend is opened with.

    ``memory`` is the host memory in which every page of KV lies, for backends that register buffers;
    ``extra`` holds the keys of the extra config that belong to the backend. ``host`` is the pool that
    memory belongs to, as an object for classes that ask for one; nothing here looks into it. ``parts``: the
    pages of a rank are stored as so many parts (``tp_lcm_size``), each by a backend of its own over the same
    memory, and ``identity`` is that of one of them.
    """

    identity: Identity
    namespace: Namespace
    extra: Mapping[str, Any] = field(default_factory=dict)
    memory: tuple[memoryview, ...] = ()
    host: object | None = None
    parts: int = 1


class Backend(Protocol):
    """A store. Methods are called from several threads at once, and each with at most ``BATCH_NAMES`` names.

    A method may raise anything: the caller counts it as a failure of the whole call. What is wrong
    with one name is told by its place in the answer. A value is readable under its name when it is
    complete and not before, and it never changes: setting a name that is there keeps what is there.
    """

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Which of ``names`` have a value, [name]."""
        ...

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """Fill ``pages`` with the values of ``names``, [name]: True where the whole page was filled.

        A value of another length than the page is a miss. What a page holds after False is void.
        """
        ...

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """Store ``pages`` under ``names``, [name]: True where the value is there now."""
        ...

    def clear(self) -> int:
        """Delete what belongs to the namespace it was opened with, and nothing else; how many."""
        ...

    def close(self) -> None:
        """Let go of connections, files and threads; what is stored stays."""
        ...


def delete_values(backend: object, names: Sequence[str]) -> list[bool]:
    """Make ``names`` writable again, [name]: True where there is no value now.

    A backend that can offers ``delete(names)`` with this answer; one that can't, does not, and all
    answers are False: there a value that can't be read stays until the store itself drops it.
    """
    delete = getattr(backend, "delete", None)
    if delete is None:
        return [False] * len(names)
    return list(delete(names))
