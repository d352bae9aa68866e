"""Room in a directory of pages: what is there, in which order it goes, how room is made.

The directory may be shared: its cap is about all pages in it, the time a file was last touched is its
recency for every process, and a file that somebody else removed is as good as removed. What others
write is counted when it is used here, and when the directory is read again: at the start, and after
each 1/32 of the cap that was written. So one process keeps the cap exactly and several nearly.
Must not know: namespaces, batches, payloads. Called by: file.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Final

from refimpl.storage.file_options import FileOptions
from refimpl.storage.file_page import pages_in, path_of, remove_leftovers
from refimpl.storage.tally import Tally
from refimpl.units import NS_PER_S, PER_MILLION

_SCANS_PER_CAP: Final = 32
# Going down to the low watermark of a large store at once would hold up the write that asked for it.
_REMOVALS_MAX: Final = 256  # a call, beyond what it needs
_STUCK_NS: Final = 60 * NS_PER_S  # before a file that could not be deleted is tried again


@dataclass(slots=True)
class _Entry:
    nbytes: int
    used_ns: int


class Room:
    """The pages of a directory, least recently used first, and the bytes they take."""

    def __init__(self, options: FileOptions, tally: Tally, clock: Callable[[], int]) -> None:
        self._options = options
        self._tally = tally
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._stuck: dict[str, tuple[_Entry, int]] = {}  # not deletable, and until when that holds
        self._used = 0  # bytes of _entries and _stuck
        self._reserved = 0  # bytes granted to writes under way
        self._unscanned = 0  # bytes written since the directory was read
        self._lock = Lock()  # the fields above; never held over a system call
        self._making_room = Lock()
        self.scan()

    @property
    def used_bytes(self) -> int:
        """Bytes of all pages that are known of."""
        return self._used

    @property
    def pages(self) -> int:
        """How many pages are known of."""
        return len(self._entries) + len(self._stuck)

    # ---- what is there ------------------------------------------------------------------------------

    def scan(self) -> None:
        """Read the directory: what others wrote and removed, and what dead writers left."""
        began_ns = self._clock()
        self._tally.add("leftovers", remove_leftovers(self._options.directory, began_ns))
        found = {
            page.name: _Entry(page.nbytes, page.used_ns)
            for page in pages_in(self._options.directory)
        }
        with self._lock:
            for name, entry in self._entries.items():
                if name in found:
                    found[name].used_ns = max(found[name].used_ns, entry.used_ns)
                elif entry.used_ns >= began_ns:  # written while the directory was being read
                    found[name] = entry
            self._stuck = {name: kept for name, kept in self._stuck.items() if name in found}
            places = {name: place for place, name in enumerate(self._entries)}  # for equal times
            ordered = sorted(found, key=lambda name: (found[name].used_ns, places.get(name, -1)))
            self._entries = OrderedDict(
                (name, found[name]) for name in ordered if name not in self._stuck
            )
            self._used = sum(entry.nbytes for entry in found.values())
            self._unscanned = 0

    def note(self, name: str, nbytes: int, *, reserved: bool = False) -> None:
        """A page was used, or written into bytes that were granted."""
        with self._lock:
            self._forget(name)
            self._entries[name] = _Entry(nbytes, self._clock())
            self._used += nbytes
            if reserved:
                self._reserved -= nbytes
                self._unscanned += nbytes

    def forget(self, name: str) -> None:
        """A page is not there, or no more."""
        with self._lock:
            self._forget(name)

    def _forget(self, name: str) -> None:
        entry = self._entries.pop(name, None) or self._stuck.pop(name, (None, 0))[0]
        if entry is not None:
            self._used -= entry.nbytes

    def saw_lately(self, name: str) -> bool:
        """Was the page there a moment ago? Only where the options allow for relying on that."""
        if not self._options.presence_ns:
            return False
        entry = self._entries.get(name)
        return entry is not None and self._clock() - entry.used_ns < self._options.presence_ns

    def is_expired(self, used_ns: int) -> bool:
        """Has a page that was last used then outlived its time?"""
        ttl_ns = self._options.ttl_ns
        return ttl_ns is not None and used_ns < self._clock() - ttl_ns

    # ---- making room --------------------------------------------------------------------------------

    def grant(self, nbytes: int) -> int:
        """Make room for ``nbytes`` and reserve it: how many bytes may be written."""
        with self._making_room:
            cap = self._options.bytes_max
            if cap is not None and self._unscanned * _SCANS_PER_CAP > cap:
                self.scan()
            self._retry_stuck()
            self._expire()
            lack, surplus = self._lack(nbytes)
            if lack > 0:
                self._evict(lack, surplus)
            with self._lock:
                granted = max(min(nbytes, self._available(nbytes)), 0)
                self._reserved += granted
        return granted

    def give_back(self, nbytes: int) -> None:
        """What was granted and not written."""
        with self._lock:
            self._reserved -= nbytes

    def evict(self, nbytes: int) -> bool:
        """The disk is full before the cap: has anything gone to make room for ``nbytes``?"""
        with self._making_room:
            return self._evict(nbytes, 0) > 0

    def _available(self, nbytes: int) -> int:
        cap, least = self._options.bytes_max, self._options.free_bytes_min
        available = nbytes if cap is None else cap - self._used - self._reserved
        return min(available, self._disk_free() - least - self._reserved) if least else available

    def _disk_free(self) -> int:
        directory = self._options.directory
        try:
            disk = os.statvfs(directory)
        except FileNotFoundError:  # somebody deleted it under a running store
            os.makedirs(directory, exist_ok=True)
            disk = os.statvfs(directory)
        return disk.f_bavail * disk.f_frsize

    def _lack(self, nbytes: int) -> tuple[int, int]:
        """Bytes that must go, and bytes that should go beyond them, to the low watermark."""
        lack = nbytes - self._available(nbytes)
        cap = self._options.bytes_max
        if lack <= 0 or cap is None:
            return lack, 0
        return lack, cap - cap * self._options.eviction_per_million // PER_MILLION

    def _evict(self, lack: int, surplus: int) -> int:
        freed = extra = 0
        for _ in range(len(self._entries)):
            if freed >= lack:
                extra += 1
            if freed >= lack + surplus or extra > _REMOVALS_MAX:
                break
            freed += self._remove_oldest("evicted")
        return freed

    def _expire(self) -> None:
        for _ in range(min(len(self._entries), _REMOVALS_MAX)):
            oldest = next(iter(self._entries.values()), None)
            if oldest is None or not self.is_expired(oldest.used_ns):
                return
            self._remove_oldest("expired")

    def _remove_oldest(self, kind: str) -> int:
        """Bytes freed: none if another process used the page meanwhile, or it can't be deleted."""
        with self._lock:
            if not self._entries:
                return 0
            name, entry = next(iter(self._entries.items()))
            # Taken out first: whoever writes or uses it meanwhile counts it again, so that at worst
            # a file that is gone is counted, never one that is there is not.
            self._forget(name)
        try:
            touched_ns = os.stat(path_of(self._options.directory, name)).st_mtime_ns
            if touched_ns > entry.used_ns:
                self._put_back(name, _Entry(entry.nbytes, touched_ns))
                return 0
        except OSError:
            pass  # gone already, or what follows says what is wrong
        return entry.nbytes if self.remove(name, kind, entry) else 0

    def remove(self, name: str, kind: str, entry: _Entry | None = None) -> bool:
        """Delete a page: is it gone now? ``kind`` is what it is counted as."""
        try:
            os.unlink(path_of(self._options.directory, name))
        except FileNotFoundError:
            self._tally.add("gone_already")
        except OSError as error:
            self._tally.trouble("undeletable", f"{name} can't be deleted: {error.strerror}")
            if entry is not None:
                self._set_aside(name, entry)
            return False
        else:
            self._tally.add(kind)
        if entry is None:
            self.forget(name)
        return True

    def _put_back(self, name: str, entry: _Entry) -> None:
        with self._lock:
            if name not in self._entries:
                self._entries[name] = entry
                self._used += entry.nbytes

    def _set_aside(self, name: str, entry: _Entry) -> None:
        with self._lock:
            if name not in self._entries:
                self._stuck[name] = entry, self._clock() + _STUCK_NS
                self._used += entry.nbytes

    def _retry_stuck(self) -> None:
        with self._lock:
            now_ns = self._clock()
            due = [name for name, (_, until_ns) in self._stuck.items() if until_ns <= now_ns]
            for name in reversed(due):  # so that the first of them is the first of all
                self._entries[name] = self._stuck.pop(name)[0]
                self._entries.move_to_end(name, last=False)
