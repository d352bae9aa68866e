"""L3 on the wall clock: a backend and the pumps that read and write it, there while it is attached.

Whatever a backend raises or answers, every command gets its one completion, with what was done: a
fault costs time. Calls go in batches of 128 pages, straight between the store and the host pool.
Must not know: what an engine decides, where an extra config comes from. Called by: live.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from threading import Event as Flag
from threading import Lock, Thread
from time import perf_counter_ns
from typing import Final, TypeAlias

from refimpl.config import ConfigError
from refimpl.keys import PageKey
from refimpl.memory.pool import Pool
from refimpl.memory.transfer import Moved
from refimpl.messages import (
    CancelFetch,
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
from refimpl.run.live_loop import Inbox
from refimpl.run.patience import TooLateError, within
from refimpl.run.pump import JOIN_S, Pump
from refimpl.storage.backend import BATCH_NAMES, Backend, HostPage, StorageError
from refimpl.storage.names import Namespace

OPEN_S: Final = 60  # for a backend to connect at run time, while requests may be held back
EMPTY_S: Final = 60  # for one to delete its pages, likewise
HANGING_S: Final = 1  # for one that has already been waited for
READERS: Final = 2  # so that a small read is not held up by one large one (field report F15)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A backend that is connected, and the names that pages have in it.

    Not ``is_writer``: another rank writes the same pages, so that writing is done without a call.
    """

    backend: Backend
    namespace: Namespace
    is_writer: bool = True


Opener: TypeAlias = Callable[[str, str], OpenStore]  # (backend, extra config)


@dataclass(slots=True)
class _Attached:
    """What is there while a backend is attached."""

    store: OpenStore
    read: Pump = field(default_factory=lambda: Pump("l3_read", READERS))
    write: Pump = field(default_factory=lambda: Pump("l3_write"))

    def close(self, patience_s: float = JOIN_S) -> None:
        """End the pumps, then let the backend go: no call follows the last one under way.

        A pump that hangs in the backend is left there, and the backend with it.
        """
        has_ended = [pump.close(patience_s) for pump in (self.read, self.write)]
        if not all(has_ended):
            _log.error("a storage backend hangs: its threads are left behind, it is not closed")
            return
        try:
            within(patience_s, self.store.backend.close)
        except BaseException as error:
            # It is gone from here all the same; nothing calls it any more.
            _log.error("a storage backend did not close cleanly: %r", error)

    def check(self) -> None:
        """Raise what stopped a pump, if one has stopped."""
        self.read.check()
        self.write.check()


class LiveStorage:
    """L3 of one instance; completions go into ``inbox``."""

    def __init__(self, host: Pool, opener: Opener, inbox: Inbox) -> None:
        self.moved = {"l3_read": Moved(), "l3_write": Moved()}
        self.failures = 0  # calls that raised or answered nonsense
        self._host = host
        self._opener = opener
        self._inbox = inbox
        self._attached: _Attached | None = None
        self._change: Thread | None = None
        self._fetches: dict[int, Flag] = {}  # those under way, each with its sign to stop
        self._told: set[str] = set()  # kinds of failures that were logged
        self._counting = Lock()  # what the pumps count, which are several

    # ---- attach and detach ----------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        """There is a store."""
        return self._attached is not None

    @property
    def namespace(self) -> Namespace | None:
        """The names of pages in the store; None: there is none."""
        attached = self._attached  # which may be let go meanwhile
        return None if attached is None else attached.store.namespace

    def open_now(self, backend: str, extra_config: str) -> None:
        """Attach before the engine starts. Raises ConfigError or StorageError."""
        self._attached = _Attached(self._opener(backend, extra_config))

    def open(self, command: OpenStorage) -> None:
        """Attach on a thread of its own, since connecting may take its time."""
        self._in_background(lambda: self._open(command))

    def close(self) -> None:
        """Detach likewise; what is stored stays."""
        self._in_background(self._close)

    def empty(self) -> None:
        """Delete the pages of the namespace, on the thread that writes, so after all that was written."""
        attached = self._attached
        assert attached is not None, "nothing is attached that could be cleared"
        attached.write.put(lambda: self._empty(attached.store))

    def shut(self, *, is_idle: bool) -> None:
        """The end of the instance: all threads end, and what is under way is finished.

        Not ``is_idle``: a store has had its time to answer and is not waited for again.
        """
        if self._change is not None:
            self._change.join(JOIN_S + OPEN_S)
        if self._attached is not None:
            attached, self._attached = self._attached, None
            attached.close(JOIN_S if is_idle else HANGING_S)
            attached.check()

    def check(self) -> None:
        """Raise what stopped a pump, if one has stopped."""
        attached = self._attached  # which may be let go meanwhile
        if attached is not None:
            attached.check()

    def _in_background(self, change: Callable[[], None]) -> None:
        self._change = Thread(target=change, name="l3_change", daemon=True)
        self._change.start()

    def _open(self, command: OpenStorage) -> None:
        error = ""
        try:
            store = within(
                OPEN_S,
                lambda: self._opener(command.backend, command.extra_config),
                late=lambda store: store.backend.close(),
            )
            self._attached = _Attached(store)
        except (ConfigError, StorageError, TooLateError) as fault:
            error = str(fault)
        except BaseException as fault:  # a class of the user's may raise anything
            _log.error("storage backend %s can't be opened: %r", command.backend, fault)
            error = f"{type(fault).__name__}: {fault}"
        self._inbox.put(StorageOpened(error))

    def _close(self) -> None:
        attached, self._attached = self._attached, None
        assert attached is not None, "closed twice"
        attached.close()
        self._inbox.put(StorageClosed())

    def _empty(self, store: OpenStore) -> None:
        error = ""
        try:
            if store.is_writer:
                deleted = within(EMPTY_S, store.backend.clear)
                _log.info("storage cleared: %d values deleted", deleted)
        except BaseException as fault:  # a class of the user's may raise anything
            _log.error("a store can't be cleared: %r", fault)
            error = f"{type(fault).__name__}: {fault}"
        self._inbox.put(StorageEmptied(error))

    # ---- commands -------------------------------------------------------------------------------

    def submit(self, command: Probe | Fetch | CancelFetch | Store) -> None:
        """Start a command."""
        attached = self._attached
        assert attached is not None, f"nothing is attached that could carry out {command}"
        match command:
            case Probe():
                attached.read.put(lambda: self._probe(attached.store, command))
            case Fetch():
                self._fetches[command.op] = Flag()
                attached.read.put(lambda: self._fetch(attached.store, command))
            case CancelFetch():
                if stop := self._fetches.get(command.op):  # else it ended a moment ago
                    stop.set()
            case Store():
                attached.write.put(lambda: self._store(attached.store, command))

    def _probe(self, store: OpenStore, command: Probe) -> None:
        found = 0
        for batch in _batches(len(command.keys)):
            keys = command.keys[batch]
            run = _leading(self._exists(store, keys))
            found += run
            if run < len(keys):
                break
        self._inbox.put(Probed(command.op, found))

    def _fetch(self, store: OpenStore, command: Fetch) -> None:
        landed, total, stop = 0, len(command.keys), self._fetches[command.op]
        for batch in _batches(total):
            if stop.is_set():
                break
            keys, slots = command.keys[batch], command.l2_slots[batch]
            done = _leading(self._get(store, keys, slots))
            landed += done
            if done < len(keys) or landed == total:
                break
            self._inbox.put(Landed(command.op, landed))
        del self._fetches[command.op]
        self._inbox.put(Fetched(command.op, landed))

    def _store(self, store: OpenStore, command: Store) -> None:
        stored = 0
        for batch in _batches(len(command.keys)):
            keys, slots = command.keys[batch], command.l2_slots[batch]
            done = _leading(self._set(store, keys, slots))
            stored += done
            if done < len(keys):
                break
        self._inbox.put(Stored(command.op, stored))

    # ---- calls ----------------------------------------------------------------------------------

    def _exists(self, store: OpenStore, keys: Sequence[PageKey]) -> list[bool]:
        names = [store.namespace.name(key) for key in keys]
        return self._answer("exists", len(names), lambda: store.backend.exists(names))

    def _get(self, store: OpenStore, keys: Sequence[PageKey], slots: Sequence[int]) -> list[bool]:
        names, pages = [store.namespace.name(key) for key in keys], self._pages(slots)
        begun = perf_counter_ns()
        found = self._answer("get", len(names), lambda: store.backend.get(names, pages))
        self._note("l3_read", sum(found), begun)
        return found

    def _set(self, store: OpenStore, keys: Sequence[PageKey], slots: Sequence[int]) -> list[bool]:
        """Write what is not there yet, [key]: which are there now."""
        if not store.is_writer:
            return [True] * len(keys)
        there = self._exists(store, keys)
        missing = [at for at, is_there in enumerate(there) if not is_there]
        if not missing:
            return there
        names = [store.namespace.name(keys[at]) for at in missing]
        pages = self._pages([slots[at] for at in missing])
        begun = perf_counter_ns()
        written = self._answer("set", len(names), lambda: store.backend.set(names, pages))
        self._note("l3_write", sum(written), begun)
        for at, is_written in zip(missing, written, strict=True):
            there[at] = is_written
        return there

    def _answer(self, kind: str, count: int, call: Callable[[], list[bool]]) -> list[bool]:
        """What a backend says, or that nothing is there when it fails or says something else."""
        try:
            said = [bool(each) for each in call()]
            if len(said) == count:
                return said
            raise StorageError(f"{len(said)} answers to {count} names")
        except BaseException as error:  # whatever a class of the user's raises
            what = f"{kind}: {type(error).__name__}"
            with self._counting:
                self.failures += 1
                is_new = what not in self._told
                self._told.add(what)
            if is_new:
                _log.warning("a store fails to %s: %s; further ones are counted", kind, error)
            return [False] * count

    def _pages(self, slots: Sequence[int]) -> list[HostPage]:
        return [HostPage(self._host.pieces(slot), slot) for slot in slots]

    def _note(self, way: str, pages: int, begun: int) -> None:
        with self._counting:
            self.moved[way].bytes += pages * self._host.geometry.page_bytes
            self.moved[way].ns += perf_counter_ns() - begun


def _batches(count: int) -> Iterator[slice]:
    for at in range(0, count, BATCH_NAMES):
        yield slice(at, at + BATCH_NAMES)


def _leading(flags: Sequence[bool]) -> int:
    return sum(takewhile(bool, flags))
