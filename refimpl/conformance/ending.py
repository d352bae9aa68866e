"""Rules about endings: clear, close, and what is left behind.

Called by: kit.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Final

from refimpl.conformance.shapes import SMALL, changed
from refimpl.conformance.subject import Opened, Subject, demand
from refimpl.conformance.values import come_back, store_pages
from refimpl.conformance.verdict import InapplicableError

_FILES: Final = Path("/proc/self/fd")  # Linux
_CYCLES: Final = 3
_JOIN_SECONDS: Final = 2  # for threads that are about to end


def clearing(subject: Subject) -> str:
    """clear deletes what its namespace has, and nothing else."""
    stranger = changed(subject.identity(SMALL), {"model": "neighbour"})
    with (
        subject.opened(SMALL, slots=8) as ours,
        subject.opened(SMALL, slots=8, identity=stranger) as theirs,
    ):
        if not getattr(ours.backend, "can_clear", True):
            raise InapplicableError(
                "the class has no clear: values stay until its store drops them"
            )
        ours.backend.clear()  # what other rules left
        names, others = ours.names("clear", 4), theirs.names("clear", 4)
        store_pages(ours, names, range(4))
        contents = store_pages(theirs, others, range(4))
        count = ours.backend.clear()
        left = ours.exists(names).count(True)
        demand(not left, f"{left} of 4 pages are there after clear")
        is_silent = subject.backend == "dynamic" and count == 0  # such a class need not count
        demand(count == 4 or is_silent, f"clear deleted 4 pages and says {count}")
        kept = theirs.exists(others).count(True)
        demand(kept == 4, f"clear deleted {4 - kept} of 4 pages of another model")
        come_back(theirs, others, range(4, 8), contents)
        come_back(ours, names, range(4, 8), store_pages(ours, names, range(4)))
    return "4 pages went, 4 of another model stayed, and storing goes on"


def closing(subject: Subject) -> str:
    """close may be called twice; after it every call fails and says so."""
    store = subject.open(SMALL, slots=2)
    store_pages(store, [store.name("close")], range(1))
    store.backend.close()
    store.backend.close()
    name = [store.name("close")]
    calls: dict[str, Callable[[], object]] = {
        "exists": lambda: store.backend.exists(name),
        "get": lambda: store.backend.get(name, [store.room.page(1)]),
        "set": lambda: store.backend.set(name, [store.room.page(1)]),
    }
    for method, call in calls.items():
        demand(_says_why(call), f"after close, {method} goes on as if nothing had happened")
    return "closing twice is fine, and calls after it fail with a message"


def _says_why(call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception as error:
        return bool(str(error))
    return False


def leftovers(subject: Subject) -> str:
    """Opening, using and closing again and again leaves no thread and no file open.

    The first time does not count: a client library may keep what it needs once for all.
    """
    _cycle(subject, 0)
    threads, files = set(threading.enumerate()), _open_files()
    for each in range(1, _CYCLES + 1):
        _cycle(subject, each)
    more = [thread for thread in threading.enumerate() if thread not in threads]
    deadline = monotonic() + _JOIN_SECONDS
    for thread in more:
        thread.join(max(0, deadline - monotonic()))
    alive = [thread.name for thread in more if thread.is_alive()]
    demand(not alive, f"threads are left after close: {', '.join(alive)}")
    gc.collect()
    left = _open_files() - files
    demand(left < _CYCLES, f"{left} files or sockets are left open after {_CYCLES} times")
    seen = "no thread and no file is left" if _FILES.exists() else "no thread is left"
    return f"{seen} after {_CYCLES} times of opening and closing"


def _cycle(subject: Subject, each: int) -> None:
    with subject.opened(SMALL, slots=4) as store:
        _use(store, f"cycle-{each}")


def _use(store: Opened, label: str) -> None:
    names = store.names(label, 2)
    come_back(store, names, range(2, 4), store_pages(store, names, range(2)))


def _open_files() -> int:
    return len(os.listdir(_FILES)) if _FILES.exists() else 0
