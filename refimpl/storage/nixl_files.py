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
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from refimpl.config import require
from refimpl.storage.backend import HostPage, Setting, StorageError
from refimpl.storage.extra import text_of
from refimpl.storage.file_page import remove_leftovers, temporary_in
from refimpl.storage.names import require_file_names
from refimpl.storage.objects import HALVES, object_names, objects_expected, value_of

FOLDERS_VARIABLE: Final = "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"
_FOLDER: Final = "/tmp/hicache_storage"
_SPLIT_LAYOUTS: Final = ("page_first", "page_first_direct")
_NO_PAGE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM)


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
        self._misfits: dict[str, int] = {}  # paths read in vain, and the bytes their files had
        require_file_names(setting.namespace, HALVES[0] if self._is_split else "")
        try:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
        except OSError as error:
            raise StorageError(
                f"nixl: a folder can't be used: {error}; set storage_dir or {FOLDERS_VARIABLE}"
            ) from error

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
        return [self.path(each) for each in objects_expected(self._setting, name)]

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
        return temporary_in(os.path.dirname(path))

    def is_there(self, path: str, nbytes: int | None = None) -> bool:
        """Is there a file, of ``nbytes`` if that matters? Those that have their name are complete.

        One that was read in vain for its size does not count: who asks before writing replaces it.
        """
        try:
            found = os.stat(path)
        except OSError:
            self._misfits.pop(path, None)
            return False
        wanted = found.st_size if nbytes is None else nbytes
        is_misfit = nbytes is None and self._misfits.get(path) == found.st_size
        return stat.S_ISREG(found.st_mode) and wanted == found.st_size and not is_misfit

    def open_whole(self, part: Part, *, is_direct: bool) -> int | None:
        """Open the file of a part for reading; None where there is none, or one of another size."""
        try:
            file = _open(part.path, os.O_RDONLY | os.O_NONBLOCK, is_direct=is_direct)
        except OSError as error:
            if error.errno in _NO_PAGE:
                return None
            raise
        found = os.fstat(file)
        if stat.S_ISREG(found.st_mode) and found.st_size == part.nbytes:
            self._misfits.pop(part.path, None)
            return file
        self._misfits[part.path] = found.st_size
        os.close(file)
        return None

    def name(self, unfinished: str, part: Part) -> None:
        """A part is complete: let its file have its name. Raises OSError."""
        os.rename(unfinished, part.path)
        self._misfits.pop(part.path, None)

    def clear(self) -> int:
        """Delete what the namespace owns, and what dead writers left; how many values."""
        values = set()
        for path in self._all():
            value = value_of(path.name) if self._is_split else path.name
            if not self._setting.namespace.owns(value):
                continue
            with suppress(FileNotFoundError):
                path.unlink()
                values.add(value)
        self._remove_leftovers()
        return len(values)

    def delete(self, name: str) -> bool:
        """Remove the files of a value; True where there is none now."""
        names = [name] if not self._is_split else [name + half for half in HALVES]
        gone = [_is_removed(self.path(each)) for each in names]  # all, whatever the first says
        return all(gone)

    def _remove_leftovers(self) -> None:
        for bucket in self._buckets():
            remove_leftovers(str(bucket), time.time_ns())

    def _all(self) -> Iterator[Path]:
        for bucket in self._buckets():
            yield from (Path(entry.path) for entry in os.scandir(bucket) if entry.is_file())

    def _buckets(self) -> Iterator[Path]:
        for folder in self._folders:
            yield from sorted(folder.glob("[0-9a-f][0-9a-f]"))


def storage_folders(setting: Setting, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The folders: of the variable, else of ``storage_dir``; several are separated by commas."""
    said = text_of(setting.extra, "storage_dir", default=_FOLDER)
    text = environ.get(FOLDERS_VARIABLE) or said
    folders = [Path(part.strip()) for part in text.split(",") if part.strip()]
    unique = {folder.resolve() for folder in folders}
    require(
        len(unique) == len(folders) > 0,
        f"nixl: the folders in {text!r} must be one or more, each once ({FOLDERS_VARIABLE})",
    )
    return folders


def _is_removed(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError as error:
        return error.errno == errno.ENOENT
    return True


def open_new(path: str, *, is_direct: bool) -> int:
    """Create a file for writing, in a folder that may be new."""
    try:
        return _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, is_direct=is_direct)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, is_direct=is_direct)


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
