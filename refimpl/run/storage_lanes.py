"""The lanes to L3: asking, reading, writing, opening, clearing and closing.

Must not know: the device, requests, slots beyond their number. Called by: lanes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from refimpl.config import ConfigError
from refimpl.keys import PageKey
from refimpl.messages import (
    AnyEvent,
    CloseStorage,
    EmptyStorage,
    Fetch,
    Fetched,
    Landed,
    OpenStorage,
    Probe,
    Probed,
    StorageClosed,
    StorageEmptied,
    StorageOpened,
    Store,
    Stored,
)
from refimpl.run.cost import STORAGE_BATCH_PAGES, Cost
from refimpl.run.lane import NEVER, FifoLane, Lane, Site


class ProbeLane(FifoLane[Probe]):
    """Asks for keys. The answer is what the store holds when it is given."""

    def duration_ns(self, job: Probe) -> int:
        """Time of all calls of a probe."""
        assert job.keys, job
        return self.site.cost.probe_ns(len(job.keys))

    def complete(self, job: Probe) -> AnyEvent:
        """The answer; a probe that fails has found nothing."""
        faults = self.site.faults
        if faults.strike("probe_fail"):
            return Probed(job.op, 0)
        found = self.site.store.leading_run(job.keys)
        if found and faults.strike("probe_short"):
            found = faults.part_of(found)
        return Probed(job.op, found)


class StoreLane(FifoLane[Store]):
    """Writes batches of up to 128 pages; a page becomes readable when its batch has ended."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._written = 0  # pages of the first job
        self._batch: list[PageKey] = []
        self._missing: list[PageKey] = []

    def duration_ns(self, job: Store) -> int:
        """Time of a batch: existence is asked first, what is there already isn't sent."""
        assert len(job.keys) == len(job.l2_slots) > 0, job
        self._batch = job.keys[self._written : self._written + STORAGE_BATCH_PAGES]
        self._missing = self.site.store.missing(self._batch)
        cost = self.site.cost
        asked_ns = cost.probe_ns(len(self._batch))
        return asked_ns + (cost.store_batch_ns(len(self._missing)) if self._missing else 0)

    def complete(self, job: Store) -> AnyEvent | None:
        """A batch has ended; one that fails wrote its first pages and is the last of its op."""
        pages, faults = len(self._batch), self.site.faults
        failed, sent = faults.strike("store_fail"), self._missing
        if failed:
            pages = faults.part_of(pages)
            reached = frozenset(self._batch[:pages])
            sent = [key for key in sent if key in reached]
        self.site.store.put(sent)
        self.pages += len(sent)
        self._written += pages
        if not failed and self._written < len(job.keys):
            return None
        written, self._written = self._written, 0
        return Stored(job.op, written)


@dataclass(slots=True, eq=False)
class _OpenFetch:
    op: int
    keys: list[PageKey]
    landed: int = 0
    is_cancelled: bool = False


class FetchLane(Lane):
    """Reads a batch of up to 128 pages of each open fetch in turn.

    So a small fetch waits for one batch of each that is open, not for all of a huge one.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._open: dict[int, _OpenFetch] = {}
        self._waiting: deque[_OpenFetch] = deque()
        self._reading: _OpenFetch | None = None
        self._batch: list[PageKey] = []
        self._batch_due = NEVER
        self._stopped: deque[tuple[int, _OpenFetch]] = deque()  # when, ascending

    def submit(self, command: Fetch, now: int) -> None:
        """Take a fetch."""
        assert len(command.keys) == len(command.l2_slots) > 0, command
        fetch = _OpenFetch(command.op, command.keys)
        self._open[command.op] = fetch
        self._waiting.append(fetch)
        if self._reading is None:
            self._start(now)

    def cancel(self, op: int, now: int) -> None:
        """Stop after the batch in progress, or at once when none of this fetch is."""
        fetch = self._open.get(op)
        assert fetch is not None, f"fetch {op} is not open"
        assert not fetch.is_cancelled, f"fetch {op} is cancelled twice"
        fetch.is_cancelled = True
        if fetch is not self._reading:
            self._waiting.remove(fetch)
            self._stopped.append((now, fetch))
            self.due = min(self.due, now)

    def finish(self) -> list[tuple[int, AnyEvent]]:
        """End the batch that is due, and the fetches that were stopped by then."""
        now, done = self.due, []
        while self._stopped and self._stopped[0][0] <= now:
            done.append(self._close(self._stopped.popleft()[1]))
        if self._batch_due == now:
            done.append(self._finish_batch())
            self._start(now)
        self.due = min(self._batch_due, self._stopped[0][0] if self._stopped else NEVER)
        return sorted(done, key=_op_of)

    def _start(self, now: int) -> None:
        self._batch_due = NEVER
        if not self._waiting:
            return
        fetch = self._reading = self._waiting.popleft()
        self._batch = fetch.keys[fetch.landed : fetch.landed + STORAGE_BATCH_PAGES]
        duration_ns = self.site.cost.fetch_batch_ns(len(self._batch))
        self.occupy(now, duration_ns + self.site.faults.delay_ns())
        self._batch_due = self.due
        if self._stopped:
            self.due = min(self.due, self._stopped[0][0])

    def _finish_batch(self) -> tuple[int, AnyEvent]:
        fetch = self._reading
        assert fetch is not None
        self._reading = None
        pages = self._pages_read()
        self.pages += pages
        fetch.landed += pages
        is_last = pages < len(self._batch) or fetch.landed == len(fetch.keys)
        if is_last or fetch.is_cancelled:
            return self._close(fetch)
        self._waiting.append(fetch)
        return fetch.op, Landed(fetch.op, fetch.landed)

    def _pages_read(self) -> int:
        """Leading pages of the batch that came; what follows a gap is of no use."""
        faults, store = self.site.faults, self.site.store
        if faults.strike("fetch_fail"):
            return 0
        pages = len(self._batch)
        if faults.strike("fetch_short"):
            pages = faults.part_of(pages)
        elif faults.strike("slot_less"):
            pages -= 1
        for count, key in enumerate(self._batch[:pages]):
            if not store.get(key) or faults.strike("vanish"):
                return count
        return pages

    def _close(self, fetch: _OpenFetch) -> tuple[int, AnyEvent]:
        del self._open[fetch.op]
        return fetch.op, Fetched(fetch.op, fetch.landed)


class AdminLane(Lane):
    """Opens, clears and closes the backend, one at a time."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._command: OpenStorage | CloseStorage | EmptyStorage | None = None
        self._opened: Cost | None = None  # what opening succeeds with
        self._pages_max: int | None = None  # of the store that is opened then
        self._error = ""

    def submit(self, command: OpenStorage | CloseStorage | EmptyStorage, now: int) -> None:
        """Start opening, clearing or closing; a clear takes as long as a close."""
        assert self._command is None, "the backend is being opened, cleared or closed"
        self._command, self._opened, self._error = command, None, ""
        duration_ns = self.site.cost.close_ns
        if isinstance(command, OpenStorage):
            duration_ns = self._prepare(command)
        self.occupy(now, duration_ns + self.site.faults.delay_ns())

    def _prepare(self, command: OpenStorage) -> int:
        site = self.site
        try:
            if site.capacity is not None:
                self._pages_max = site.capacity(command.backend, command.extra_config)
            self._opened = site.cost.with_storage(command.backend)
        except ConfigError as error:
            self._error = str(error)
            return site.cost.open_ns
        return self._opened.open_ns

    def finish(self) -> list[tuple[int, AnyEvent]]:
        """Opened, cleared or closed, or not: then nothing has changed."""
        command, self._command, self.due = self._command, None, NEVER
        faults = self.site.faults
        if isinstance(command, EmptyStorage):
            self.site.store.clear()
            return [(0, StorageEmptied())]
        if isinstance(command, CloseStorage):
            failed = faults.strike("close_fail")
            return [(0, StorageClosed("injected: the backend did not close" if failed else ""))]
        if not self._error and faults.strike("open_fail"):
            self._error = "injected: the backend did not open"
        if not self._error and self._opened is not None:
            self.site.cost = self._opened
            if self.site.capacity is not None:
                self.site.store.limit(self._pages_max)
        return [(0, StorageOpened(self._error))]


def _op_of(completion: tuple[int, AnyEvent]) -> int:
    return completion[0]
