"""Pages and stores for the tests of storage: page ``n`` of a payload that tells which page it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refimpl.storage.backend import HostPage, Setting
from refimpl.storage.file import FileBackend
from refimpl.storage.names import Identity, Namespace, namespace_of

NBYTES = 1000  # of a page, where nothing else is said
EPOCH_NS = 1_700_000_000_000_000_000


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, now_ns: int = EPOCH_NS) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns

    def pass_seconds(self, seconds: int) -> None:
        self.now_ns += seconds * 1_000_000_000


def identity(model: str = "org/model") -> Identity:
    return Identity(
        model=model, layout="page_first", page_size=64, layers=2, kv_heads=2, head_dim=8
    )


def space(model: str = "org/model") -> Namespace:
    return namespace_of("file", identity(model))


def name(number: int, model: str = "org/model") -> str:
    return space(model).name(hashlib.sha256(str(number).encode()).digest())


def names(*numbers: int) -> list[str]:
    return [name(number) for number in numbers]


def payload(number: int, nbytes: int = NBYTES) -> bytes:
    """Bytes that are no other page's."""
    return hashlib.shake_128(f"page {number}".encode()).digest(nbytes)


def page(value: bytes | bytearray, *cuts: int) -> HostPage:
    """A page in host memory, in pieces cut at ``cuts``."""
    view = memoryview(bytearray(value))
    ends = [*cuts, len(view)]
    return HostPage(tuple(view[a:b] for a, b in zip([0, *ends], ends, strict=False)))


def pages(*numbers: int, nbytes: int = NBYTES) -> list[HostPage]:
    return [page(payload(number, nbytes)) for number in numbers]


def empty(nbytes: int = NBYTES, *cuts: int) -> HostPage:
    """A page to read into, with bytes that no payload begins with by chance."""
    return page(b"\xee" * nbytes, *cuts)


def value(read: HostPage) -> bytes:
    return b"".join(read.pieces)


def read_pages(store: Any, *numbers: int, nbytes: int = NBYTES) -> list[bytes | None]:
    """What the store has of each page; None for a miss."""
    targets = [empty(nbytes) for _ in numbers]
    done = store.get(names(*numbers), targets)
    return [value(each) if hit else None for each, hit in zip(targets, done, strict=True)]


def setting(folder: Path, model: str = "org/model", **extra: Any) -> Setting:
    return Setting(identity(model), space(model), {"file_storage_path": str(folder), **extra})


def open_file(
    folder: Path, clock: Callable[[], int] | None = None, model: str = "org/model", **extra: Any
) -> FileBackend:
    told = setting(folder, model, **extra)
    return FileBackend(told) if clock is None else FileBackend(told, clock)


def file_of(folder: Path, number: int, model: str = "org/model") -> Path:
    return folder / f"{name(number, model)}.bin"


def bytes_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.bin"))
