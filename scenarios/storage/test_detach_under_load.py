"""Attach and detach again and again under load: nobody's answer is lost or changed, nothing is left."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest

pytest.importorskip("torch", reason="real bytes need torch")
pytest.importorskip("numba", reason="io backend kernel needs numba")

from refimpl.config import PrefetchConfig
from refimpl.core.engine import Engine
from refimpl.messages import Answer, AttachStorage, DetachStorage
from refimpl.model.config import TINY_GQA
from refimpl.run.live import LiveExecutor, run_live
from refimpl.run.live_storage import OpenStore
from refimpl.storage.backend import HostPage
from refimpl.workload.request import Workload, unscripted
from refimpl.workload.scenario import parse_scenario
from scenarios.bytes.rig import Rig, live_executor, run_bytes, without_cache

pytestmark = pytest.mark.live

# (changes, requests that end before the next is asked for, the load)
LOADS = {
    "queue": (40, 0, "clients=4,rounds=45,request_length=2,output_length=1,rate=0"),
    "refuse": (4, 5, "clients=90,rounds=2,request_length=8,output_length=1,rate=40,think_ms=20"),
}
REFUSED = "error: the engine is draining for a storage change; try again later"


class Watched:
    """A backend that counts what it is asked, and what after it was closed."""

    def __init__(self, inner: OpenStore) -> None:
        self._inner = inner.backend
        self.calls = 0
        self.late = 0
        self.is_closed = False

    def _asked(self) -> None:
        self.calls += 1
        self.late += self.is_closed

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._asked()
        return self._inner.exists(names)

    def get(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        self._asked()
        return self._inner.get(names, pages)

    def set(self, names: Sequence[str], pages: Sequence[HostPage]) -> list[bool]:
        self._asked()
        return self._inner.set(names, pages)

    def clear(self) -> int:
        return self._inner.clear()

    def close(self) -> None:
        self.is_closed = True
        self._inner.close()


class Operator:
    """Attaches and detaches in turn, each some requests after the last was answered."""

    def __init__(self, executor: LiveExecutor, extra_config: str, drain: str) -> None:
        self.answers: list[Answer] = []
        self._changes, self._pause, _ = LOADS[drain]
        self._ended = 0  # requests since the last answer
        self._inbox: SimpleQueue[object] = executor.inbox  # type: ignore[assignment]
        prefetch = PrefetchConfig("wait_complete", threshold_tokens=4)
        self._attach = AttachStorage("file", None, None, drain, extra_config, prefetch)
        self._detach = DetachStorage(drain)
        self.ask()

    def ask(self) -> None:
        if len(self.answers) < self._changes:
            self._inbox.put(self._detach if len(self.answers) % 2 else self._attach)

    def answered(self, answer: Answer) -> None:
        self.answers.append(answer)
        self._ended = 0
        if not self._pause:
            self.ask()

    def progress(self, ended: int) -> None:
        self._ended += ended
        if self._pause and self._ended == self._pause:
            self.ask()


def chats(drain: str) -> Workload:
    return unscripted(parse_scenario(f"multi_turn:{LOADS[drain][-1]},vocab=256", 5, 4))


def watched_opener(
    opener: Callable[[str, str], OpenStore], seen: list[Watched]
) -> Callable[[str, str], OpenStore]:
    def opened(backend: str, extra_config: str) -> OpenStore:
        found = opener(backend, extra_config)
        seen.append(Watched(found))
        return OpenStore(seen[-1], found.namespace)

    return opened


@pytest.mark.parametrize("drain", LOADS)
def test_rounds_under_load_lose_and_change_nothing(drain: str, tmp_path: Path) -> None:
    """With ``queue`` all are served; with ``refuse`` those that come meanwhile are refused, and told so."""
    rig = Rig(storage="", l1_pages=60, l2_pages=70)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    executor = live_executor(rig, TINY_GQA)
    stores: list[Watched] = []
    executor.storage._opener = watched_opener(executor.storage._opener, stores)
    extra = json.dumps({"file_storage_path": str(tmp_path)})
    operator, workload = Operator(executor, extra, drain), chats(drain)
    record = run_live(Engine(rig.config), executor, workload, operator.progress, operator.answered)

    changes = LOADS[drain][0]
    assert [answer.ok for answer in operator.answers] == [True] * changes, operator.answers
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == files
    assert len(stores) == changes // 2
    assert all(store.is_closed and not store.late for store in stores)
    assert sum(store.calls for store in stores)
    finishes = {rid: row.finish for rid, row in record.rows.items()}
    assert len(finishes) == len(workload.requests)
    served = [rid for rid, finish in finishes.items() if finish == "length"]
    plain = run_bytes(without_cache(rig), TINY_GQA, chats(drain)).outputs
    assert {rid: executor.outputs[rid] for rid in served} == {rid: plain[rid] for rid in served}
    refused = set(finishes.values()) - {"length"}
    assert refused <= (set() if drain == "queue" else {REFUSED}), refused
