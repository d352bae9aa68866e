"""Where NIXL keeps which bytes: one file an object, in upstream's folders (spec 5.4).

``<folder>/<bucket>/<object>``: the folder, of those configured, and the bucket follow from a hash of
the object's name. A page that lies in one piece for K and one for V is two objects, ``<name>_k`` and
``<name>_v``; in other layouts a page is the object ``<name>``, its pieces one after the other.
A file appears under its name when it is complete: it is written under another and renamed.
Must not know: NIXL. Called by: nixl.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Final

from refimpl.config import require
from refimpl.storage.backend import HostPage, Setting
from refimpl.storage.objects import HALVES, is_page, object_names, value_of

FOLDERS_VARIABLE: Final = "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"
_FOLDER: Final = "/tmp/hicache_storage"
_SPLIT_LAYOUTS: Final = ("page_first", "page_first_direct")
_UNFINISHED: Final = ".tmp"


@dataclass(frozen=True, slots=True)
class Part:
    """An object: its file, and the pieces of memory that are its bytes, in order."""

    owner: int  # position of the value it is part of
    path: str
    pieces: tuple[memoryview, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return sum(piece.nbytes for piece in self.pieces)


class NixlFiles:
    """The files of one namespace in ``folders``."""

    def __init__(self, setting: Setting, folders: Sequence[Path]) -> None:
        self._setting = setting
        self._folders = folders
        self._is_split = setting.identity.layout in _SPLIT_LAYOUTS
        self._serial = count()
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)

    def path(self, object_name: str) -> str:
        """Where an object is, or would be."""
        digest = blake2b(object_name.encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "big")
        folder = self._folders[(number >> 16) % len(self._folders)]
        return f"{folder}/{number & 0xFF:02x}/{object_name}"

    def expected(self, name: str) -> list[str]:
        """The files that must be there for ``name`` to have a value."""
        if not self._is_split:
            return [self.path(name)]
        two = is_page(self._setting.namespace, name) and not self._setting.identity.is_mla
        return [self.path(each) for each in object_names(name, 2 if two else 1)]

    def parts(self, owner: int, name: str, page: HostPage) -> list[Part]:
        """The objects of a value."""
        if not self._is_split:
            return [Part(owner, self.path(name), page.pieces)]
        names = object_names(name, len(page.pieces))
        return [
            Part(owner, self.path(each), (piece,))
            for each, piece in zip(names, page.pieces, strict=True)
        ]

    def unfinished(self, path: str) -> str:
        """Where a file is written before it gets its name; no two writers share one."""
        folder, _, name = path.rpartition("/")
        return f"{folder}/.{name}.{os.getpid()}-{next(self._serial)}{_UNFINISHED}"

    def clear(self) -> int:
        """Delete what the namespace owns, and what was left unfinished of it; how many values."""
        values = set()
        for path in self._all():
            is_left_over = path.name.endswith(_UNFINISHED)
            name = path.name[1:].rsplit(".", 2)[0] if is_left_over else path.name
            value = value_of(name) if self._is_split else name
            if not self._setting.namespace.owns(value):
                continue
            with suppress(FileNotFoundError):
                path.unlink()
                values.add(name if is_left_over else value)
        return len(values)

    def delete(self, name: str) -> bool:
        """Remove the files of a value; True where there is none now."""
        names = [name] if not self._is_split else [name + half for half in HALVES]
        for path in map(self.path, names):
            with suppress(FileNotFoundError):
                os.unlink(path)
        return True

    def _all(self) -> Iterator[Path]:
        for folder in self._folders:
            for bucket in sorted(folder.glob("[0-9a-f][0-9a-f]")):
                yield from (Path(entry.path) for entry in os.scandir(bucket) if entry.is_file())


def storage_folders(setting: Setting, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The folders: of the variable, else of ``storage_dir``; several are separated by commas."""
    text = environ.get(FOLDERS_VARIABLE) or str(setting.extra.get("storage_dir") or _FOLDER)
    folders = [Path(part.strip()) for part in text.split(",") if part.strip()]
    unique = {folder.resolve() for folder in folders}
    require(
        len(unique) == len(folders) > 0,
        f"nixl: the folders in {text!r} must be one or more, each once ({FOLDERS_VARIABLE})",
    )
    return folders


def is_there(path: str) -> bool:
    """Is there a file? Those that have their name are complete."""
    return os.path.exists(path)


def open_new(path: str, *, is_direct: bool) -> int:
    """Create a file for writing, in a folder that may be new."""
    try:
        return _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, is_direct=is_direct)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, is_direct=is_direct)


def open_whole(path: str, size: int, *, is_direct: bool) -> int | None:
    """Open a file of this very size for reading; None for any other, or none."""
    try:
        file = _open(path, os.O_RDONLY, is_direct=is_direct)
    except FileNotFoundError:
        return None
    if os.fstat(file).st_size == size:
        return file
    os.close(file)
    return None


def _open(path: str, flags: int, *, is_direct: bool) -> int:
    """With direct I/O where the file system has it."""
    if is_direct:
        try:
            return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            with suppress(FileNotFoundError):
                if flags & os.O_EXCL:
                    os.unlink(path)
    return os.open(path, flags | os.O_CLOEXEC, 0o644)


def close_all(files: Iterable[int]) -> None:
    """Close file descriptors."""
    for file in files:
        os.close(file)
