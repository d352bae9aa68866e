"""``refimpl bench backlog``: what waits beside the engine's thread, on two cores, gets on with its work.

Two figures, each beside its floor in the same run, turn by turn: 500 page writes that were queued while
the engine is idle, beside a loop that writes the same pages and does nothing else (field report L05); and
prefetches while as much is being written all the time, beside prefetches alone (Y02).
Must not know: the terminal. Called by: the command line.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, Final

from refimpl.core.engine import Engine
from refimpl.keys import PageKey, page_keys
from refimpl.memory.layout import Geometry
from refimpl.memory.pool import Pool
from refimpl.messages import Fetch, Fetched, Store, Stored
from refimpl.run.live_loop import LiveLoop
from refimpl.run.live_storage import LiveStorage, OpenStore
from refimpl.run.null_hands import NullExecutor
from refimpl.run.options import Options
from refimpl.run.setup import Simulation
from refimpl.storage.backend import HostPage, Setting
from refimpl.storage.factory import open_backend
from refimpl.storage.names import Identity, namespace_of
from refimpl.workload.request import Workload

_GEOMETRY: Final = Geometry(layers=8, kvs=2, heads=4, dim=128, page_size=16)  # pages of 256 KiB
_QUEUED: Final = 500  # page writes, one an op, as L05 has it
_PAGES: Final = 512  # that are read, and as many that are written
_OP_PAGES: Final = 64  # of a read or a write
_CORES: Final = 2
_MEMORY: Final = Path("/dev/shm")  # a disk would be what is measured


class _Instance:
    """L3 of an instance without work: its pumps, and the loop of its engine, which the caller runs."""

    def __init__(self, folder: Path) -> None:
        identity = Identity(
            model="bench",
            layout="page_first",
            page_size=_GEOMETRY.page_size,
            layers=_GEOMETRY.layers,
            kv_heads=_GEOMETRY.heads,
            head_dim=_GEOMETRY.dim,
        )
        self._pool = Pool(_GEOMETRY, "page_first", 2 * _PAGES)
        words = self._pool.words()
        words[:] = range(len(words))  # pages that were never touched would cost nothing to read
        self._space = namespace_of("file", identity)
        extra = {"file_storage_path": str(folder)}
        setting = Setting(identity, self._space, extra, (words.data.cast("B"),))
        self._backend = open_backend("file", setting)
        idle = Simulation(Options(), Workload("idle", []))
        executor = NullExecutor(idle.lanes()[0])
        self._loop = LiveLoop(Engine(idle.engine), executor, lambda *_: None)
        self._storage = LiveStorage(self._pool, self._open, executor.inbox)
        self._storage.open_now("file", "")
        tokens = range(2 * _PAGES * _GEOMETRY.page_size)
        self.keys = page_keys(list(tokens), _GEOMETRY.page_size)
        self._ops = count(1)
        self._done: set[int] = set()  # ops that have ended

    def _open(self, backend: str, extra_config: str) -> OpenStore:
        del backend, extra_config
        return OpenStore(self._backend, self._space)

    def close(self) -> None:
        """End the pumps; the backend goes with them."""
        self._storage.shut(is_idle=True)

    def clear(self) -> None:
        """Nothing is stored."""
        self._backend.clear()

    def write_freely(self, slots: range) -> None:
        """What a pump does for as many writes, without one."""
        for slot in slots:
            name = self._space.name(self.keys[slot])
            if not self._backend.exists([name])[0]:
                assert self._backend.set([name], [HostPage(self._pool.pieces(slot), slot)]) == [
                    True
                ]

    def queue_writes(self, slots: range, pages_per_op: int) -> set[int]:
        """The ops that were ordered."""
        return {self._write(part) for part in _parts(slots, pages_per_op)}

    def queue_reads(self, slots: range, pages_per_op: int) -> set[int]:
        """Likewise."""
        return {self._read(part) for part in _parts(slots, pages_per_op)}

    def _write(self, slots: range) -> int:
        op = next(self._ops)
        self._storage.submit(Store(op, self._keys(slots), list(slots)))
        return op

    def _read(self, slots: range) -> int:
        op = next(self._ops)
        self._storage.submit(Fetch(op, self._keys(slots), list(slots)))
        return op

    def _keys(self, slots: range) -> list[PageKey]:
        return [self.keys[slot] for slot in slots]

    def wait(self, ops: set[int]) -> None:
        """Be the engine's thread until these are done."""
        while not ops <= self._done:
            events, _ = self._loop.wait()
            self._done |= {each.op for each in events if isinstance(each, Stored | Fetched)}


def bench_backlog(repeats: int = 9) -> dict[str, Any]:
    """Times in ms of the median turn, bytes a second in GB, and both ratios."""
    with _two_cores() as cores, tempfile.TemporaryDirectory(dir=_memory()) as folder:
        instance = _Instance(Path(folder))
        try:
            drain = _drain(instance, repeats)
            prefetch = _prefetch(instance, repeats)
        finally:
            instance.close()
    moved = _PAGES * _GEOMETRY.page_bytes
    return {
        "cores": cores,
        "page_bytes": _GEOMETRY.page_bytes,
        "drain_ms": {name: ns / 1e6 for name, ns in drain.items()},
        "prefetch_gb_per_s": {name: moved / ns for name, ns in prefetch.items()},
        "ratios": {
            "drain_to_free_writer": drain["queued"] / drain["free_writer"],
            "prefetch_while_writing_to_alone": prefetch["alone"] / prefetch["while_writing"],
        },
    }


def _drain(instance: _Instance, repeats: int) -> dict[str, float]:
    slots = range(_QUEUED)

    def queued() -> None:
        instance.wait(instance.queue_writes(slots, 1))

    calls = {"queued": queued, "free_writer": lambda: instance.write_freely(slots)}
    return _medians(calls, repeats, before=instance.clear)


def _prefetch(instance: _Instance, repeats: int) -> dict[str, float]:
    """Of the second half of the pages, which are stored; the first are what is written meanwhile."""
    stored, fresh = range(_PAGES, 2 * _PAGES), range(_PAGES)
    writes: set[int] = set()

    def alone() -> None:
        instance.wait(instance.queue_reads(stored, _OP_PAGES))

    def while_writing() -> None:
        writes.update(instance.queue_writes(fresh, _OP_PAGES))
        alone()

    def prepare() -> None:
        instance.wait(writes)
        writes.clear()
        instance.clear()
        instance.write_freely(stored)

    return _medians({"alone": alone, "while_writing": while_writing}, repeats, before=prepare)


def _medians(
    calls: dict[str, Callable[[], None]], repeats: int, before: Callable[[], None]
) -> dict[str, float]:
    """ns of the median turn of each; they take turns, and the first does not count."""
    spent: dict[str, list[int]] = {name: [] for name in calls}
    for _ in range(repeats + 1):
        for name, call in calls.items():
            before()
            begun = perf_counter_ns()
            call()
            spent[name].append(perf_counter_ns() - begun)
    return {name: median(times[1:]) for name, times in spent.items()}


def _parts(slots: range, size: int) -> Iterator[range]:
    for at in range(0, len(slots), size):
        yield slots[at : at + size]


def _memory() -> str | None:
    """A folder in memory with room for all pages twice; None: wherever temporary files go."""
    room = 4 * _PAGES * _GEOMETRY.page_bytes
    has_room = _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= room
    return str(_MEMORY) if has_room else None


@contextmanager
def _two_cores() -> Iterator[int]:
    """This thread and those it starts run on two cores where the system can say so; how many they have."""
    if not hasattr(os, "sched_setaffinity"):
        yield os.cpu_count() or 1
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:_CORES])
    try:
        yield min(len(allowed), _CORES)
    finally:
        os.sched_setaffinity(0, allowed)
