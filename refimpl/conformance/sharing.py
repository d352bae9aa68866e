"""Rules about sharing: threads, processes, restarts, namespaces.

Called by: kit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from tempfile import TemporaryFile
from threading import Barrier, Thread
from time import monotonic
from typing import IO, Any, Final

from refimpl.conformance.room import poison, read, write
from refimpl.conformance.shapes import MEDIUM, SMALL, STRANGERS, STRANGERS_OF_SGLANG, changed
from refimpl.conformance.subject import Opened, Subject, ViolationError, demand
from refimpl.conformance.values import come_back, store_pages
from refimpl.conformance.verdict import InapplicableError

THREADS: Final = 8
_ROUNDS: Final = 6
_NAMES: Final = 4  # a thread and a round
_SHARED: Final = 4  # names that all threads write, with equal bytes
_SLOTS: Final = 2 * _NAMES  # a thread's own
SECONDS_MAX: Final = 45  # for what should take one; less than the limit of a rule


def threads(subject: Subject) -> str:
    """Several threads at once lose nothing and never see half a page."""
    slots = (THREADS + 1) * _SLOTS
    with subject.opened(MEDIUM, slots) as store:
        faults: list[BaseException] = []
        barrier = Barrier(THREADS, timeout=SECONDS_MAX)
        crowd = [
            Thread(target=_caught, args=(_work, store, barrier, each, faults), daemon=True)
            for each in range(THREADS)
        ]
        for thread in crowd:
            thread.start()
        deadline = monotonic() + SECONDS_MAX
        for thread in crowd:
            thread.join(max(0.0, deadline - monotonic()))
        hung = sum(thread.is_alive() for thread in crowd)
        demand(not hung, f"{hung} of {THREADS} threads got no answer within {SECONDS_MAX} s")
        if faults:
            raise faults[0]
        _all_there(store)
    return f"{THREADS} threads, {THREADS * _ROUNDS * _NAMES} pages of 64 KiB, none lost or torn"


def _caught(
    work: Callable[[Opened, Barrier, int], None],
    store: Opened,
    barrier: Barrier,
    thread: int,
    faults: list[BaseException],
) -> None:
    try:
        work(store, barrier, thread)
    except BaseException as error:
        faults.append(error)
        barrier.abort()


def _work(store: Opened, barrier: Barrier, thread: int) -> None:
    first = thread * _SLOTS
    shared = store.names("shared", _SHARED)
    for round_ in range(_ROUNDS):
        names = store.names(f"thread-{thread}-{round_}", _NAMES)
        barrier.wait()
        contents = store_pages(store, names, range(first, first + _NAMES))
        come_back(store, names, range(first + _NAMES, first + _SLOTS), contents)
        _read_shared(store, shared, range(first + _NAMES, first + _SLOTS))
        store_pages(store, shared, range(first, first + _NAMES))


def _read_shared(store: Opened, names: list[str], slots: range) -> None:
    """While others write them: a miss, or the whole value."""
    pages = store.pages(slots)
    for page in pages:
        poison(page)
    got = store.get(names, pages)
    for at, name in enumerate(names):
        if got[at]:
            found = read(pages[at])
            demand(found == write(pages[at], name), "a page was read while half of it was written")


def _all_there(store: Opened) -> None:
    labels = [f"thread-{each}-{round_}" for each in range(THREADS) for round_ in range(_ROUNDS)]
    names = [name for label in labels for name in store.names(label, _NAMES)]
    lost = sum(store.exists(names[at : at + _NAMES]).count(False) for at in range(0, len(names), 4))
    demand(not lost, f"{lost} of {len(names)} pages that threads stored are gone")


# ---- processes ----------------------------------------------------------------------------------


def processes(subject: Subject) -> str:
    """Two processes on one store see each other's pages, whole."""
    if subject.lifetime != "store":
        raise InapplicableError(
            f"its values live with the {subject.lifetime}: no other process sees them"
        )
    with subject.opened(MEDIUM, slots=2 * _NAMES) as store, TemporaryFile("w+") as said:
        store_pages(store, store.names("parent", _NAMES), range(_NAMES))
        code = _with_another(subject, said, lambda: _meet(store))
        demand(code == 0, f"the other process: {_last_line(said) or f'exit code {code}'}")
        theirs = store.names("child", _NAMES)
        come_back(store, theirs, range(_NAMES, 2 * _NAMES), _contents(store, theirs))
    return "each reads what the other stored, also while both write the same names"


def _last_line(said: IO[str]) -> str:
    """What it complains about; before that come its logs."""
    said.seek(0)
    return said.read().strip().rpartition("\n")[2]


def be_the_other(subject: Subject) -> None:
    """What the other process does."""
    with subject.opened(MEDIUM, slots=2 * _NAMES) as store:
        theirs = store.names("parent", _NAMES)
        come_back(store, theirs, range(_NAMES, 2 * _NAMES), _contents(store, theirs))
        for _ in range(_ROUNDS):
            _meet(store)
        store_pages(store, store.names("child", _NAMES), range(_NAMES))


def _meet(store: Opened) -> None:
    """Write the names that the other writes, too."""
    shared = store.names("both", _NAMES)
    store_pages(store, shared, range(_NAMES))
    _read_shared(store, shared, range(_NAMES, 2 * _NAMES))


def _contents(store: Opened, names: list[str]) -> list[bytes]:
    """What ``store_pages`` stores under names, wherever it runs."""
    pages = store.pages(range(len(names)))
    return [write(page, name) for name, page in zip(names, pages, strict=True)]


def _with_another(subject: Subject, said: IO[str], meanwhile: Callable[[], None]) -> int:
    """Run the other process, again and again do ``meanwhile`` until it ends; its exit code."""
    deadline = monotonic() + SECONDS_MAX
    process = _other_process(subject, said)
    try:
        while process.poll() is None:
            demand(monotonic() < deadline, f"the other process got no answer in {SECONDS_MAX} s")
            meanwhile()
        return process.returncode
    finally:
        process.kill()
        process.wait()


def _other_process(subject: Subject, said: IO[str]) -> subprocess.Popen[str]:
    task: dict[str, Any] = {
        "backend": subject.backend,
        "extra": dict(subject.extra),
        "lifetime": subject.lifetime,
        "compat": subject.compat,
        "needs_host_pool": subject.needs_host_pool,
        "run": subject.run,
    }
    return subprocess.Popen(
        [sys.executable, "-m", "refimpl.conformance.other_process", json.dumps(task)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        stdout=said,
        stderr=subprocess.STDOUT,
        text=True,
    )


# ---- restarts and namespaces --------------------------------------------------------------------


def restart(subject: Subject) -> str:
    """What was stored is there after closing and opening again."""
    if subject.lifetime == "object":
        raise InapplicableError("its values live with the object: closing it ends them")
    with subject.opened(SMALL, slots=8) as store:
        names = store.names("restart", 4)
        contents = store_pages(store, names, range(4))
    with subject.opened(SMALL, slots=8) as store:
        demand(all(store.exists(names)), "after closing and opening, exists finds less")
        come_back(store, names, range(4, 8), contents)
    return "4 pages were there after closing and opening again"


def namespaces(subject: Subject) -> str:
    """Pages of another model, rank, revision or data type are never found."""
    strangers = STRANGERS_OF_SGLANG if subject.compat else STRANGERS
    # One of two ranks, so that the other's pages are of the same size.
    own = changed(subject.identity(SMALL), {"tp_size": 2, "kv_heads": 2 * SMALL.heads})
    for what, changes in strangers:
        stranger = changed(own, changes)
        with (
            subject.opened(SMALL, slots=4, identity=own) as ours,
            subject.opened(SMALL, slots=4, identity=stranger) as theirs,
        ):
            label = f"space-{what}"
            our_name, their_name = ours.name(label), theirs.name(label)
            content = store_pages(ours, [our_name], range(1))
            if theirs.exists([their_name])[0]:
                raise ViolationError(f"{what} finds pages that are not its own")
            got = theirs.get([their_name], [theirs.room.page(1)])
            demand(got == [False], f"{what} reads pages that are not its own")
            write(theirs.room.page(2), "theirs")
            theirs.set([their_name], [theirs.room.page(2)])
            come_back(ours, [our_name], range(1, 2), content)
    return f"{', '.join(what for what, _ in strangers)}: none finds pages of the first"
