"""Pages as files of one directory, which processes may share.

A page is the file ``<name>.bin``, its bytes and nothing else, so that under ``compat: sglang`` another
engine reads what this one wrote. A file of another size than the page asked for is a miss, and is
replaced when the page is written again: it could never be read. Bounds and their order are the
matter of file_room. A batch of large pages is spread over threads, since copies to and from the page
cache take no lock of Python's; small pages are not, since what they take is Python's own time.
Called by: factory.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from refimpl.storage.backend import HostPage, Setting, StorageError
from refimpl.storage.file_options import file_options
from refimpl.storage.file_page import (
    SUFFIX,
    pages_in,
    path_of,
    read_page,
    remove_leftovers,
    write_page,
)
from refimpl.storage.file_room import Room
from refimpl.storage.names import require_file_names
from refimpl.storage.tally import Tally

_LOG: Final = logging.getLogger(__name__)
_THREADED_BYTES: Final = 1 << 20  # a page; below it a second thread gains nothing, as measured
_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)

Item: TypeAlias = tuple[int, str, HostPage]  # place in the answer, name, page


@dataclass(slots=True)
class _Batch:
    """What came of the pages of one call so far."""

    done: list[bool]
    is_full: bool = False  # the disk refused a page even after eviction: the others need not try
    errors: list[OSError] = field(default_factory=list)


class FileBackend:
    """See FILE_KEYS in file_options for what the extra config may say."""

    def __init__(self, setting: Setting, clock: Callable[[], int] = time.time_ns) -> None:
        self._options = file_options(setting.extra)
        self._namespace = setting.namespace
        self._directory = self._options.directory
        self._clock = clock
        self.tally = Tally(_LOG)
        require_file_names(setting.namespace, SUFFIX)
        try:
            os.makedirs(self._directory, exist_ok=True)
            self._room = Room(self._options, self.tally, clock)
        except OSError as error:
            raise StorageError(
                f"directory {self._directory} can't be used: {error.strerror};"
                " set file_storage_path or SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
            ) from error
        self._misfits: dict[str, int] = {}  # names read in vain, and the bytes their files had
        self._threads = ThreadPoolExecutor(self._options.threads, "hicache-file")
        self._is_closed = False

    @property
    def used_bytes(self) -> int:
        """Bytes of all pages in the directory, as far as this process knows."""
        return self._room.used_bytes

    @property
    def pages(self) -> int:
        """How many pages are in the directory, as far as this process knows."""
        return self._room.pages

    # ---- asking -------------------------------------------------------------------------------------

    def exists(self, names: Sequence[str]) -> list[bool]:
        """See Backend. A page that is asked for counts as used."""
        self._check_open()
        return [self._is_there(name) for name in names]

    def _is_there(self, name: str, nbytes: int | None = None) -> bool:
        """Is there such a page, of ``nbytes`` if that matters? Then it has been used now."""
        misfit = self._misfits.get(name)
        if nbytes is None and misfit is None and self._room.saw_lately(name):
            return True
        path = path_of(self._directory, name)
        try:
            found = os.stat(path)
        except OSError:
            self._room.forget(name)
            self._misfits.pop(name, None)
            return False
        if self._room.is_expired(found.st_mtime_ns):
            self._room.remove(name, "expired")
            return False
        if not stat.S_ISREG(found.st_mode) or nbytes not in (None, found.st_size):
            return False
        if nbytes is None and misfit == found.st_size:
            return False  # else whoever asks before writing would never replace it
        self._misfits.pop(name, None)
        now_ns = self._clock()
        with suppress(OSError):
            os.utime(path, ns=(now_ns, now_ns))
        self._room.note(name, found.st_size)
        return True

    # ---- reading ------------------------------------------------------------------------------------

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend. Raises StorageError when every page that is there fails to be read."""
        self._check_open()
        items = [(at, name, page) for at, (name, page) in enumerate(zip(names, pages, strict=True))]
        batch = _Batch([False] * len(names))
        self._spread(self._get_some, items, batch)
        self._raise_if_all_failed(batch, "read")
        return batch.done

    def _get_some(self, items: Sequence[Item], batch: _Batch) -> None:
        for at, name, page in items:
            try:
                batch.done[at] = self._get(name, page)
            except FileNotFoundError:
                self._room.forget(name)
            except OSError as error:
                batch.errors.append(error)
                self.tally.trouble("read_errors", f"{name} can't be read: {error}")

    def _get(self, name: str, page: HostPage) -> bool:
        path = path_of(self._directory, name)
        if self._options.ttl_ns is not None and self._room.is_expired(os.stat(path).st_mtime_ns):
            self._room.remove(name, "expired")
            return False
        nbytes = page.nbytes
        size = read_page(path, page.pieces, nbytes, self._clock())
        self._room.note(name, size)
        if size == nbytes:
            self._misfits.pop(name, None)
        else:
            self._misfits[name] = size
            self.tally.trouble("wrong_size", f"{name} has {size} bytes, not {nbytes}: a miss")
        return size == nbytes

    # ---- writing ------------------------------------------------------------------------------------

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        """See Backend. Where there is not enough room, the first pages of the call get it.

        Raises StorageError when every page that was tried fails for another reason than a full disk.
        """
        self._check_open()
        batch = _Batch([False] * len(names))
        missing: list[Item] = []
        for at, (name, page) in enumerate(zip(names, pages, strict=True)):
            batch.done[at] = self._is_there(name, page.nbytes)
            if not batch.done[at]:
                missing.append((at, name, page))
        cap = self._options.bytes_max
        # Nothing is evicted for what the whole directory could not hold.
        wanted = missing if cap is None else _leading(missing, cap)
        granted = self._room.grant(sum(page.nbytes for _, _, page in wanted)) if wanted else 0
        fitting = _leading(wanted, granted)
        self.tally.add("refused", len(missing) - len(fitting))
        try:
            self._spread(self._set_some, fitting, batch)
        finally:
            written = sum(page.nbytes for at, _, page in fitting if batch.done[at])
            self._room.give_back(granted - written)
        if self._options.is_synced and fitting:
            self._sync_directory()
        self._raise_if_all_failed(batch, "written")
        return batch.done

    def _set_some(self, items: Sequence[Item], batch: _Batch) -> None:
        for at, name, page in items:
            if batch.is_full:
                self.tally.add("refused")
                continue
            try:
                batch.done[at] = self._set(name, page)
                batch.is_full = not batch.done[at]
            except OSError as error:
                batch.errors.append(error)
                self.tally.trouble("write_errors", f"{name} can't be written: {error}")

    def _set(self, name: str, page: HostPage) -> bool:
        """False: the disk is full, and stays so after eviction."""
        try:
            self._write(name, page)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            self.tally.trouble("no_space", f"the disk of {self._directory} is full before its cap")
            if not self._room.evict(page.nbytes) or not self._write_again(name, page):
                self.tally.add("refused")
                return False
        self._misfits.pop(name, None)
        self._room.note(name, page.nbytes, reserved=True)
        return True

    def _write(self, name: str, page: HostPage) -> None:
        synced, now_ns = self._options.is_synced, self._clock()
        try:
            write_page(self._directory, name, page.pieces, now_ns, is_synced=synced)
        except FileNotFoundError:  # somebody deleted the directory under a running store
            os.makedirs(self._directory, exist_ok=True)
            write_page(self._directory, name, page.pieces, now_ns, is_synced=synced)

    def _write_again(self, name: str, page: HostPage) -> bool:
        try:
            self._write(name, page)
        except OSError as error:
            if error.errno not in _NO_SPACE:
                raise
            return False
        return True

    def _sync_directory(self) -> None:
        handle = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    # ---- letting go ---------------------------------------------------------------------------------

    def delete(self, names: Sequence[str]) -> list[bool]:
        """See backend.delete_values."""
        self._check_open()
        return [self._room.remove(name, "deleted") for name in names]

    def clear(self) -> int:
        """See Backend. Raises StorageError when some could not be deleted, after the others were."""
        self._check_open()
        ours = [page.name for page in pages_in(self._directory) if self._namespace.owns(page.name)]
        stay = [name for name in ours if not self._room.remove(name, "cleared")]
        remove_leftovers(self._directory, self._clock())
        if stay:
            raise StorageError(
                f"{len(stay)} of {len(ours)} pages can't be deleted, {stay[0]} first"
            )
        return len(ours)

    def close(self) -> None:
        """See Backend."""
        self._is_closed = True
        self._threads.shutdown()

    # ---- inside -------------------------------------------------------------------------------------

    def _spread(
        self,
        work: Callable[[Sequence[Item], _Batch], None],
        items: Sequence[Item],
        batch: _Batch,
    ) -> None:
        """Do ``work`` for all items, every n-th in one of n threads, so that the first come first."""
        ways = min(self._options.threads, len(items))
        if ways < 2 or items[0][2].nbytes < _THREADED_BYTES:
            work(items, batch)
            return
        others = [self._threads.submit(work, items[start::ways], batch) for start in range(1, ways)]
        try:
            work(items[::ways], batch)
        finally:
            for other in others:
                other.exception()  # pages belong to the caller again once nobody touches them
        for other in others:
            other.result()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StorageError("the file backend is closed")

    def _raise_if_all_failed(self, batch: _Batch, what: str) -> None:
        if batch.errors and not any(batch.done):
            error = batch.errors[0]
            raise StorageError(f"no page in {self._directory} can be {what}: {error}") from error


def _leading(items: list[Item], nbytes: int) -> list[Item]:
    """The first items that fit into ``nbytes`` together."""
    total = 0
    for index, (_, _, page) in enumerate(items):
        total += page.nbytes
        if total > nbytes:
            return items[:index]
    return items
