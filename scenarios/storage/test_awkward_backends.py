"""Classes of other people that exit, hang or raise where nobody should: the instance goes on, and ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue

import pytest

pytest.importorskip("torch", reason="real bytes need torch")
pytest.importorskip("numba", reason="io backend kernel needs numba")

from refimpl.core.engine import Engine
from refimpl.memory.pool import Pool
from refimpl.memory.transfer import Mover
from refimpl.messages import AnyEvent, OpenStorage, Probe, Probed, StorageClosed, StorageOpened
from refimpl.model.config import TINY_GQA
from refimpl.run import live_storage
from refimpl.run.live import run_live
from refimpl.run.live_storage import LiveStorage, OpenStore
from refimpl.storage.backend import HostPage
from refimpl.storage.names import Namespace
from refimpl.workload.request import unscripted
from scenarios.bytes.rig import Rig, live_executor
from scenarios.bytes.test_answers import chats
from scenarios.bytes.test_round_trips import GQA

pytestmark = pytest.mark.live

KEYS = [bytes(32)]


class Awkward:
    """A backend whose methods do what a test says."""

    def __init__(self, **methods: Callable[[], object]) -> None:
        self._methods = methods
        self.is_closed = False

    def _do(self, name: str) -> None:
        if name in self._methods:
            self._methods[name]()

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._do("exists")
        return [True] * len(names)

    def get(self, names: Sequence[str], _: Sequence[HostPage]) -> list[bool]:
        self._do("get")
        return [False] * len(names)

    def set(self, names: Sequence[str], _: Sequence[HostPage]) -> list[bool]:
        self._do("set")
        return [True] * len(names)

    def clear(self) -> int:
        return 0

    def close(self) -> None:
        self.is_closed = True
        self._do("close")


def exits() -> None:
    raise SystemExit(7)


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """What hangs in a test waits for this, and is let go at its end."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def inbox() -> SimpleQueue[AnyEvent]:
    return SimpleQueue()


def storage_of(
    inbox: SimpleQueue[AnyEvent], opener: Callable[[], Awkward], *, opens: bool = True
) -> LiveStorage:
    found = LiveStorage(
        Pool(GQA, "page_first", 4), lambda *_: OpenStore(opener(), Namespace()), inbox
    )
    if opens:
        found.open_now("awkward", "")
    return found


@pytest.mark.parametrize("fault", [exits, KeyboardInterrupt, GeneratorExit, MemoryError])
def test_whatever_a_call_raises_it_is_a_failure_of_that_call(
    fault: Callable[[], object], inbox: SimpleQueue[AnyEvent]
) -> None:
    def raises() -> None:
        raised = fault()
        assert isinstance(raised, BaseException)
        raise raised

    storage = storage_of(inbox, lambda: Awkward(exists=raises))
    storage.submit(Probe(1, 1, KEYS))
    assert inbox.get(timeout=20) == Probed(1, 0)
    storage.check()
    storage.shut(is_idle=True)
    assert storage.failures == 1


def test_an_opening_that_exits_is_an_attach_that_failed(inbox: SimpleQueue[AnyEvent]) -> None:
    storage = storage_of(inbox, lambda: exits() or Awkward(), opens=False)
    storage.open(OpenStorage("awkward"))
    assert inbox.get(timeout=20) == StorageOpened("SystemExit: 7")
    storage.shut(is_idle=True)


def test_an_opening_that_hangs_is_given_up_and_closed_when_it_comes_late(
    inbox: SimpleQueue[AnyEvent], released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_storage, "OPEN_S", 0.2)
    closed = threading.Event()
    late = Awkward(close=closed.set)
    storage = storage_of(inbox, lambda: released.wait() and late, opens=False)  # type: ignore[arg-type,return-value]
    storage.open(OpenStorage("awkward"))
    assert inbox.get(timeout=20) == StorageOpened("no answer within 0.2 s")
    storage.shut(is_idle=True)
    released.set()
    assert closed.wait(20)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_close_that_fails_is_a_detach_all_the_same(
    hangs: bool,
    inbox: SimpleQueue[AnyEvent],
    released: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("refimpl.run.live_storage._Attached.close.__defaults__", (0.2,))
    storage = storage_of(inbox, lambda: Awkward(close=released.wait if hangs else exits))
    storage.close()
    assert inbox.get(timeout=20) == StorageClosed()
    storage.shut(is_idle=True)


def test_a_close_that_raises_at_the_end_loses_no_run() -> None:
    executor = live_executor(Rig(storage=""), TINY_GQA)
    backend = Awkward(close=exits)
    executor.storage._opener = lambda *_: OpenStore(backend, Namespace())
    executor.storage.open_now("awkward", "")
    record = run_live(Engine(Rig().config), executor, unscripted(chats()))
    assert {row.finish for row in record.rows.values()} == {"length"}
    assert backend.is_closed


def test_a_batch_that_fails_closes_the_store_and_ends_all_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error comes out, and nothing is said to hang that doesn't."""

    def broken(*_: object) -> None:
        raise RuntimeError("the link is down")

    monkeypatch.setattr(Mover, "load", broken)
    threads = threading.active_count()
    executor = live_executor(Rig(storage=""), TINY_GQA)
    backend = Awkward()
    executor.storage._opener = lambda *_: OpenStore(backend, Namespace())
    executor.storage.open_now("awkward", "")
    with pytest.raises(RuntimeError, match="the link is down"):
        run_live(Engine(Rig().config), executor, unscripted(chats()))
    assert backend.is_closed
    assert threading.active_count() == threads
