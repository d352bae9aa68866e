"""A page as a file: written whole or not at all, read whole or not at all; what a directory holds.

A page is written under a temporary name and renamed, so that its own name never shows half of it.
The temporary name tells who writes, so that what a dead writer left can be told from what is being
written. Must not know: caps, namespaces, batches. Called by: file, file_room, nixl_files.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

from refimpl.storage.backend import Pieces
from refimpl.units import NS_PER_S

SUFFIX: Final = ".bin"
_PIECES_MAX: Final = 1024  # of one system call: IOV_MAX of Linux
_ABANDONED_NS: Final = 3600 * NS_PER_S  # no page takes an hour; for writers on other hosts

_PROCESSES: Final = Path("/proc/self/ns/pid")
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


def host_token(processes: Path = _PROCESSES, boot: Path = _BOOT) -> str:
    """Within whom a process id means one process: not a host name alone, which containers may share."""
    about = [socket.gethostname()]
    with suppress(OSError):
        about.append(str(processes.stat().st_ino))
    with suppress(OSError):
        about.append(boot.read_text())
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:8]


_HOST: Final = host_token()
_ONCE: Final = secrets.token_hex(4)  # this process, even if its id is used again
_numbers = count()
_TEMPORARY: Final = re.compile(r"\.hicache-([0-9a-f]{8})-([0-9]+)-([0-9a-f]{8})-[0-9]+\.tmp")
_PAGE: Final = re.compile(r"(?:.*[^0-9a-f])?[0-9a-f]{64}(?:[^0-9a-f].*)?\.bin", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Found:
    """A file in the directory that is a page, by its name."""

    name: str
    nbytes: int
    used_ns: int


def temporary_in(directory: str) -> str:
    """Where a page is written before it gets its name; no two writers share one."""
    return f"{directory}/.hicache-{_HOST}-{os.getpid()}-{_ONCE}-{next(_numbers)}.tmp"


def write_page(directory: str, name: str, pieces: Pieces, now_ns: int, *, is_synced: bool) -> None:
    """Write ``pieces`` as the file of ``name``, replacing what is there. Raises OSError."""
    temporary = temporary_in(directory)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            _move(os.pwritev, handle, pieces)
            os.utime(handle, ns=(now_ns, now_ns))
            if is_synced:
                os.fsync(handle)
        finally:
            os.close(handle)
        os.rename(temporary, path_of(directory, name))
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def read_page(path: str, pieces: Pieces, nbytes: int, now_ns: int) -> int:
    """Fill ``pieces`` and note the use; how many bytes the file has, and it is read only if that many.

    Raises OSError; FileNotFoundError where there is none.
    """
    # What is no file must not hold up its reader: a pipe would, until somebody writes into it.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, f"{path} is no file")
        size = found.st_size
        if size == nbytes:
            _move(os.preadv, handle, pieces)
            with suppress(OSError):  # somebody else's file: it is read, though not noted
                os.utime(handle, ns=(now_ns, now_ns))
    finally:
        os.close(handle)
    return size


def _move(
    call: Callable[[int, Sequence[memoryview], int], int], handle: int, pieces: Pieces
) -> None:
    """All bytes of ``pieces`` by as few calls as possible: a call may stop anywhere."""
    left, at = list(pieces), 0
    while left:
        moved = call(handle, left[:_PIECES_MAX], at)
        if not moved and any(piece.nbytes for piece in left[:_PIECES_MAX]):
            raise OSError("the file ended before its page did")
        at += moved
        left = _after(left, moved)


def _after(pieces: list[memoryview], moved: int) -> list[memoryview]:
    for index, piece in enumerate(pieces):
        if moved < piece.nbytes:
            return [piece.cast("B")[moved:], *pieces[index + 1 :]]
        moved -= piece.nbytes
    return []


def path_of(directory: str, name: str) -> str:
    """Where the page of ``name`` is."""
    return f"{directory}/{name}{SUFFIX}"


def pages_in(directory: str) -> Iterator[Found]:
    """All pages in the directory, whoever wrote them: a name with a page key in it, ending in .bin."""
    for entry in _entries_in(directory):
        if not _PAGE.fullmatch(entry.name):
            continue
        with suppress(FileNotFoundError):  # somebody else evicts
            if entry.is_file(follow_symlinks=False):
                found = entry.stat(follow_symlinks=False)
                name = entry.name.removesuffix(SUFFIX)
                yield Found(name, found.st_size, found.st_mtime_ns)


def _entries_in(directory: str) -> Iterator[os.DirEntry[str]]:
    """None where somebody has deleted the directory under a running store: the next write makes it."""
    with suppress(FileNotFoundError), os.scandir(directory) as entries:
        yield from entries


def remove_leftovers(directory: str, now_ns: int) -> int:
    """Delete what dead writers were writing; how many."""
    removed = 0
    for entry in _entries_in(directory):
        match = _TEMPORARY.fullmatch(entry.name)
        if not match:
            continue
        with suppress(OSError):  # it was renamed, or somebody else removes it
            host, process, once = match.groups()
            is_old = now_ns - entry.stat().st_mtime_ns > _ABANDONED_NS
            if is_old or (host == _HOST and _is_dead(int(process), once)):
                os.unlink(entry.path)
                removed += 1
    return removed


def _is_dead(process: int, once: str) -> bool:
    if process == os.getpid():
        return once != _ONCE
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False
